"""The API process's side of the engine process: starts it, sends it requests, hands out what it answers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

from gapmeter.servers.api.engine import Deliver, EngineDead, EngineStats, GenerationRequest, Output, QueueFull
from gapmeter.servers.api.stamps import now
from gapmeter.servers.transformers.channel import BUFFER_BYTES, Frames, encode
from gapmeter.servers.transformers.options import EngineOptions

_LEAVE_S = 5.0


class TransformersEngine:
    """An Engine in a process of its own. ``max_queue`` requests may wait beside the ``max_batch`` that run."""

    def __init__(self, options: EngineOptions, max_queue: int) -> None:
        self._options = options
        self._most = options.max_batch + max_queue
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._waiting: dict[str, Deliver] = {}
        self._stats = EngineStats()
        self._ready: asyncio.Future[None] | None = None
        self._dead: asyncio.Future[str] | None = None
        self._why = ""
        self._stopping = False
        self.settings: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the process and wait until it has loaded the model. Raises EngineDead."""
        loop = asyncio.get_running_loop()
        self._ready, self._dead = loop.create_future(), loop.create_future()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        ours.setblocking(False)
        self._socket, self._frames = ours, Frames(ours)
        with theirs:
            self._process = self._spawn(theirs.fileno())
        loop.add_reader(ours, self._readable)
        await self._ready

    async def wait_dead(self) -> str:
        """The reason why the engine process ended, once it has."""
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    async def stop(self) -> None:
        """Ask the process to leave by closing the socket; kill it if it does not."""
        self._stopping = True
        self._close()
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Write the request into the socket that is the engine's input queue. Raises QueueFull or EngineDead."""
        if self._socket is None:
            raise EngineDead(self._why or "the engine is not running")
        if len(self._waiting) >= self._most:
            raise QueueFull(
                f"{self._most} requests are running or waiting, as many as this server takes; try again later"
            )
        self._waiting[request.engine_id] = deliver
        self._send(
            encode(
                "add", request.engine_id, list(request.prompt_ids), request.max_tokens, request.min_tokens,
                request.ignore_eos, request.temperature, request.seed, now(),
            )
        )  # fmt: skip

    def cancel(self, engine_id: str) -> None:
        """Tell the engine that nobody wants the rest."""
        if self._waiting.pop(engine_id, None) and self._socket is not None:
            self._send(encode("cancel", engine_id))

    def stats(self) -> EngineStats:
        """As of the engine's last message; nothing runs when nothing is asked of it."""
        if self._waiting:
            return self._stats
        last = self._stats
        return EngineStats(0, 0, last.kv_blocks, last.kv_blocks_free, last.steps, last.preemptions)

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "gapmeter.servers.transformers.engine", str(fd), self._options.to_json()]
        return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)

    # -- the socket

    def _send(self, frame: bytes) -> None:
        """At once where the socket takes it, so that a stamp after the call tells the truth."""
        assert self._socket is not None
        if not self._unsent:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except ConnectionError:
                return  # the reader learns of it, too, and says so to everyone
        if frame:
            if not self._unsent:
                asyncio.get_running_loop().add_writer(self._socket, self._writable)
            self._unsent += frame

    def _writable(self) -> None:
        assert self._socket is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except ConnectionError:
            self._unsent.clear()
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)

    def _readable(self) -> None:
        messages = self._frames.read()
        received = now()  # not before the read: a message may be sent while it begins
        for message in messages:
            if message[0] == "outputs":
                self._outputs(received, message[1], message[2])
            elif message[0] == "ready":
                self.settings = message[1]
                self._stats = EngineStats(kv_blocks=message[1]["cache"]["num_blocks"])
                if self._ready and not self._ready.done():
                    self._ready.set_result(None)
            elif message[0] == "failed":
                self._why = message[1]
        if self._frames.closed:
            self._ended()

    def _outputs(
        self, received: int, entries: list[tuple[str, list[int], str | None, int | None, str]], stats: Any
    ) -> None:
        started = now()
        self._stats = EngineStats(*stats)
        for engine_id, ids, reason, cached, error in entries:
            deliver = self._waiting.pop(engine_id, None) if reason else self._waiting.get(engine_id)
            if deliver:
                deliver(Output(ids, received, reason, cached, error, started))

    def _ended(self) -> None:
        """The other side is gone: everyone who waits hears why."""
        self._close()
        assert self._process is not None
        if self._stopping:
            return
        try:
            code = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._why = self._why or f"the engine process ended with {_ending(code)}"
        received = now()
        for deliver in list(self._waiting.values()):
            deliver(Output((), received, "error", None, self._why))
        self._waiting.clear()
        if self._ready and not self._ready.done():
            self._ready.set_exception(EngineDead(self._why))
        if self._dead and not self._dead.done():
            self._dead.set_result(self._why)

    def _close(self) -> None:
        if self._socket is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def environment_threads() -> int:
    """Threads for torch: OMP_NUM_THREADS, else the cores that this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) > 0 else len(os.sched_getaffinity(0))
