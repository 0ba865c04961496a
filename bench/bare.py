"""The least that an asyncio client can do with a stream: stamp and keep what is read. Prints µs of CPU a read."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from typing import cast

import uvloop


class Bare(asyncio.Protocol):
    """Knows nothing of HTTP but how a chunked answer ends."""

    def __init__(self, ended: asyncio.Semaphore) -> None:
        self.stamps: list[int] = []
        self._kept: list[bytes] = []
        self._ended = ended
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.stamps.append(time.monotonic_ns())
        self._kept.append(data)
        if data.endswith(b"\n0\r\n\r\n"):
            self.transport.close()
            self._ended.release()


async def read(port: int, streams: int, tokens: int) -> float:
    """CPU µs a read, from the first request to the end of the last answer."""
    body = json.dumps({"model": "null", "messages": [], "stream": True, "max_tokens": tokens}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: null\r\nContent-Length: %d\r\n\r\n" % len(body)
    ended = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(lambda: Bare(ended), "127.0.0.1", port))[1] for _ in range(streams)]
    gc.disable()
    before = time.process_time_ns()
    for reader in readers:
        reader.transport.write(head + body)
        await asyncio.sleep(0.5 / streams)
    for _ in readers:
        await ended.acquire()
    return (time.process_time_ns() - before) / sum(len(reader.stamps) for reader in readers) / 1e3


def main(arguments: list[str]) -> int:
    port, core, streams, tokens = map(int, arguments)
    os.sched_setaffinity(0, {core})
    print(uvloop.run(read(port, streams, tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
