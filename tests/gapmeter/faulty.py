"""A server on a real socket that does to each request what its number says: the null server's faults, one each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gapmeter.servers.null.server import Connection, Schedule, Server


class Faulty(Server):
    """Request k (by the number that its id ends with) meets fault k, and so on round the list.

    ``lasting``: how many of a request's attempts meet it; those after them are answered well.
    """

    def __init__(self, faults: Sequence[str], models: Sequence[str], schedule: Schedule, lasting: int = 100) -> None:
        super().__init__(schedule)
        self._faults, self._models, self._lasting = faults, models, lasting

    def begin(self, connection: Connection, body: dict[str, Any], path: bytes, request_id: str, now: int) -> None:
        if path == b"/v1/models":
            connection.answer(b"200 OK", json.dumps({"data": [{"id": name} for name in self._models]}).encode())
            return
        number, _, attempt = request_id.rpartition("-")[2].partition(".")
        fault = self._faults[int(number) % len(self._faults)] if int(attempt or 0) < self._lasting else "none"
        super().begin(connection, body | {"fault": fault}, path, request_id, now)


@contextlib.contextmanager
def faulty(
    faults: Sequence[str] = ("none",), models: Sequence[str] = ("null",), schedule: Schedule | None = None,
    lasting: int = 100,
) -> Iterator[str]:  # fmt: skip
    """Its address, for as long as the block lasts."""
    sock = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    server = Faulty(faults, models, schedule or Schedule(first_ns=5_000_000, gap_ns=1_000_000), lasting)

    def serve() -> None:
        loop.run_until_complete(server.listen(sock))
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
