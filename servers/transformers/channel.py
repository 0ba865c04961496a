"""The way between the API process and the engine process: a socket pair, and frames of a length and a marshalled tuple.

Both ends are the same interpreter, started by each other, so marshal (the fastest and plainest) is safe.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
BUFFER_BYTES = 4 << 20


def encode(*message: Any) -> bytes:
    """One frame. A message is a name and plain values (numbers, text, lists, tuples, dicts)."""
    body = marshal.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes complete frames out of what a socket holds, without waiting for more."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._held = bytearray()
        self.closed = False

    def read(self) -> Iterator[tuple[Any, ...]]:
        """The messages that are there now; ``closed`` is set once the other side is gone."""
        while not self.closed:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
            self._held += data
            if len(data) < _READ_BYTES:
                break
        return self._parse()

    def _parse(self) -> Iterator[tuple[Any, ...]]:
        held, at = self._held, 0
        while len(held) - at >= 4:
            end = at + 4 + _LENGTH.unpack_from(held, at)[0]
            if end > len(held):
                break
            yield marshal.loads(memoryview(held)[at + 4 : end])
            at = end
        if at:
            del self._held[:at]
