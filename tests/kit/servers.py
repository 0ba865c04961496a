"""Servers that misbehave as told: the null server in the test's loop, in a thread or a process, and played bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapmeter.servers.null.server import Connection, Schedule, chunk
from tests.kit.command import ROOT
from tests.kit.faults import Misbehaving
from tests.kit.streams import sse

Timed = Sequence[tuple[int, dict[str, Any] | str]]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PING = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key in a folder."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def serving(self) -> ssl.SSLContext:
        """What a server speaks TLS with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self.key)
        return context


class Faulty(Misbehaving):
    """``fault_of`` gives the fault of a request whose body asks for none: by the number of its id, and the attempt's.

    From the request ``dies_at`` on it is a proxy whose server has died.
    """

    def __init__(
        self, schedule: Schedule, fault_of: Callable[[int, int], str], models: Sequence[str] = ("null",),
        dies_at: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(schedule)
        self._fault_of, self._models, self._dies_at = fault_of, models, dies_at

    def begin(self, connection: Connection, body: dict[str, Any], path: bytes, request_id: str, now: int) -> None:
        if len(self.requests) >= self._dies_at:
            connection.answer(b"502 Bad Gateway", b"")
            return
        if path == b"/v1/models":
            connection.answer(b"200 OK", json.dumps({"data": [{"id": name} for name in self._models]}).encode())
            return
        number, _, attempt = request_id.rpartition("-")[2].partition(".")
        fault = self._fault_of(int(number), int(attempt or 0))
        super().begin(connection, {"fault": fault} | body, path, request_id, now)


@contextlib.asynccontextmanager
async def null_server(
    *faults: str, first_ms: float = 1, gap_ms: float = 1, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Misbehaving, str]]:
    """In the test's own loop: the server and its address.

    Of several faults attempt k of every request meets fault k; those after the last meet the last.
    """
    schedule = Schedule(first_ns=int(first_ms * 1e6), gap_ns=int(gap_ms * 1e6))
    sock = socket.create_server(("127.0.0.1", 0))
    if len(faults) > 1:
        server: Misbehaving = Faulty(schedule, lambda _, attempt: faults[min(attempt, len(faults) - 1)])
    else:
        server = Misbehaving(schedule, *faults, tls=tls)
    await server.listen(sock)
    try:
        yield server, f"{'https' if tls else 'http'}://localhost:{sock.getsockname()[1]}"
    finally:
        await server.close()


@contextlib.contextmanager
def faulty(
    faults: Sequence[str] = ("none",), models: Sequence[str] = ("null",), schedule: Schedule | None = None,
    lasting: int = 100, dies_at: float = math.inf, port: int = 0,
) -> Iterator[str]:  # fmt: skip
    """In a thread: its address. Request k meets fault k, and so on round the list.

    ``lasting``: how many of a request's attempts meet it; those after them are answered well. ``dies_at``: as Faulty.
    """
    sock = socket.create_server(("127.0.0.1", port))
    loop = asyncio.new_event_loop()
    server = Faulty(
        schedule or Schedule(first_ns=5_000_000, gap_ns=1_000_000),
        lambda number, attempt: faults[number % len(faults)] if attempt < lasting else "none",
        models, dies_at,
    )  # fmt: skip

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


@contextlib.contextmanager
def _taking(serve: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A port at which ``serve`` is called with each connection, in a thread of its own; all are closed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def take() -> None:
            with contextlib.suppress(OSError):  # the listener is closed at the end
                while True:
                    connection, _ = listener.accept()
                    if tls is not None:
                        try:
                            connection = tls.wrap_socket(connection, server_side=True)
                        except OSError:  # it does not trust us
                            continue
                    connections.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=take, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def answering(
    *pieces: bytes, every_s: float = 0.0, endless: bool = False, heard: list[bytes] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:  # fmt: skip
    """A server that gives the same bytes to whoever connects, and nothing more; its address.

    ``every_s`` between the pieces; ``endless``: the last one again and again; ``heard`` gets each request.
    """

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who asked has left
            said = connection.recv(65536)
            if heard is not None:
                heard.append(said)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(every_s)
            while endless:
                connection.sendall(pieces[-1])
                time.sleep(every_s)

    with _taking(answer, tls) as port:
        yield f"{'https' if tls else 'http'}://localhost:{port}"


@contextlib.contextmanager
def passing_on(url: str) -> Iterator[str]:
    """A proxy in this process, before the local server at ``url``; its address."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side has left
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def both_ways(here: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),  # the server has ended
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as there,
        ):
            back = threading.Thread(target=pass_on, args=(there, here), daemon=True)
            back.start()
            pass_on(here, there)
            back.join()

    with _taking(both_ways) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def null_process(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """As users start it: the process and its port."""
    command = [sys.executable, "-P", "-m", "gapmeter.servers.null", "--with-parent", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address at which ``serve`` is called for every connection."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def player(answers: Mapping[str, Timed]) -> AsyncIterator[str]:
    """Plays given answers: each event leaves at its own time after the request's last byte; its address.

    A request names its answer in the body: ``"answer": NAME``; times are in ms. An event "ping" is a comment. One
    event a write, so that each can be read by itself.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                asked = json.loads(await reader.readexactly(int(length[1])))
                await _play(writer, answers[asked["answer"]])

    async with listening(serve) as url:
        yield url


async def _play(writer: asyncio.StreamWriter, timed: Timed) -> None:
    now = asyncio.get_running_loop().time
    begun = now()
    writer.write(_HEAD)
    for at_ms, event in timed:
        await asyncio.sleep(begun + at_ms / 1e3 - now())
        writer.write(chunk(_PING if event == "ping" else sse(event)[0]))
    writer.write(b"0\r\n\r\n")
