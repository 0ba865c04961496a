"""``python -m gapmeter.servers.null --port 0 --gap-ms 10``: prints its port, then serves until it is ended."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from gapmeter.records import RecordWriter
from gapmeter.records.process import allow_many_files, libc, stop_collecting
from gapmeter.servers.null.server import Schedule, Server

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Entry point; SIGTERM and SIGINT end it with its log closed."""
    options = _parse(arguments)
    if options.with_parent:
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    allow_many_files()
    sock = socket.create_server((options.host, options.port))
    port = sock.getsockname()[1]
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    records = None
    if options.log is not None:
        records = RecordWriter(options.log / f"null-{port}.gap", {"role": "engine", "engine": "null"})
    schedule = Schedule(
        first_ns=round(options.first_ms * 1e6), gap_ns=round(options.gap_ms * 1e6),
        most_tokens=options.most_tokens, places=options.places,
    )  # fmt: skip
    try:
        uvloop.run(_serve(Server(schedule, records), sock))
    finally:
        if records is not None:
            records.close()
    return 0


async def _serve(server: Server, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ended.set)
    await server.listen(sock)
    stop_collecting()
    print(sock.getsockname()[1], flush=True)
    await ended.wait()
    await server.close()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gapmeter.servers.null", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--first-ms", type=float, default=50.0, help="from the request to its first token")
    parser.add_argument("--gap-ms", type=float, default=10.0, help="from one token to the next")
    parser.add_argument("--most-tokens", type=int, default=4096, help="no answer is longer")
    parser.add_argument("--places", type=int, default=0, help="answers under way at once, others wait; 0: any number")
    parser.add_argument("--log", type=Path, help="folder for the log of what left when")
    parser.add_argument("--core", type=int, help="the one that it runs on")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started this one ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
