"""A server that plays given answers: each event leaves at its own time after the request's last byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gapmeter.servers.null.server import chunk
from tests.records.test_stream import sse

Timed = Sequence[tuple[int, dict[str, Any] | str]]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PING = b": still here\n\n"


@contextlib.asynccontextmanager
async def player(answers: Mapping[str, Timed]) -> AsyncIterator[str]:
    """Its address. A request names its answer in the body: ``"answer": NAME``; times are in ms.

    An event "ping" is a comment. One event a write, so that each can be read by itself.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                assert length is not None
                asked = json.loads(await reader.readexactly(int(length[1])))
                await _play(writer, answers[asked["answer"]])

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _play(writer: asyncio.StreamWriter, timed: Timed) -> None:
    now = asyncio.get_running_loop().time
    begun = now()
    writer.write(_HEAD)
    for at_ms, event in timed:
        await asyncio.sleep(begun + at_ms / 1e3 - now())
        writer.write(chunk(_PING if event == "ping" else sse(event)[0]))
    writer.write(b"0\r\n\r\n")
