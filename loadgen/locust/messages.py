"""What a master and its workers tell each other beside Locust's own messages: one type of message, a word in each.

Nothing here is secret or authenticated, as in Locust itself: a master belongs on loopback or a private network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import gevent.event

TYPE = "gapmeter"
VERSION = 1
PIECE_BYTES = 1 << 19
_AGAIN_S = 3.0

Send = Callable[[dict[str, Any]], None]


class NotWhole(RuntimeError):
    """A file did not arrive, or arrived as another."""


def describe_file(path: Path) -> dict[str, Any]:
    """A file's size and SHA-256."""
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def piece(path: Path, offset: int) -> dict[str, Any]:
    """The answer to a ``Pull``: some of a file, from ``offset``."""
    with path.open("rb") as file:
        file.seek(offset)
        return {"word": "piece", "offset": offset, "data": file.read(PIECE_BYTES)}


class Pull:
    """Takes a file over from the other side, piece by piece. A piece that does not come is asked for again."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._piece = gevent.event.AsyncResult()

    def arrived(self, message: dict[str, Any]) -> None:
        self._piece.set(message)

    def into(self, path: Path, told: dict[str, Any], alive: Callable[[], bool]) -> None:
        """Raises NotWhole when the other side is not ``alive`` any more, or the file is not what was ``told`` of it."""
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            while file.tell() < told["size"]:
                file.write(self._ask(file.tell(), alive))
        if describe_file(part) != {name: told[name] for name in ("size", "sha256")}:
            raise NotWhole(f"{path.name} did not arrive as it was sent")
        part.rename(path)

    def _ask(self, offset: int, alive: Callable[[], bool]) -> bytes:
        while alive():
            self._piece = gevent.event.AsyncResult()
            self._send({"word": "pull", "offset": offset})
            try:
                message = self._piece.get(timeout=_AGAIN_S)
            except gevent.Timeout:
                continue
            if message["offset"] == offset:
                return bytes(message["data"])
        raise NotWhole("the other side is gone")
