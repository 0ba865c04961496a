"""An engine in a process of its own, as the API process sees it; and the socket pair between the two.

A message is a name and plain values, marshalled, in a frame that begins with its length. Both ends are the same
interpreter, one started by the other, so marshal (the fastest and plainest) is safe.

| to the engine | from the engine |
| --- | --- |
| ``add``, engine id, what this engine needs of a request | ``ready``, stats: it can serve |
| ``cancel``, engine id | ``outputs``, entries (engine id, new ids, finish reason, cached tokens, error), stats |
| | ``failed``, why it is about to end |
"""

from __future__ import annotations

import asyncio
import marshal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 4 << 20
_LEAVE_S = 5.0

Message = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``temperature`` 0 is greedy; ``seed`` None lets the engine draw one."""

    engine_id: str
    client_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Output:
    """What one engine message brought for one request.

    ``ids`` are the new tokens only (none is allowed, when ``finish_reason`` is set). ``received_ns`` is when this
    process had the message, before it looked at it; ``started_ns`` when it began with the outputs that came together in
    it. ``finish_reason`` is "length", "stop" or "error" in the last one. ``cached`` counts the prompt's tokens that the
    prefix cache spared (None: unknown).
    """

    ids: Sequence[int]
    received_ns: int
    started_ns: int
    finish_reason: str | None
    cached: int | None
    error: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state as of its last message; counters count since its start; None is unknown."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    steps: int = 0
    preemptions: int | None = None


class QueueFull(RuntimeError):
    """The engine holds as many requests as it may."""


class EngineDead(RuntimeError):
    """The engine has ended; the message says why."""


Deliver = Callable[[Output], None]


class Channel:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.socket = sock
        self.closed = False  # the other side is gone
        self.unsent = bytearray()
        self._unparsed = bytearray()

    def send(self, *message: Any) -> None:
        """Send without waiting: at once, so that a stamp after the call tells the truth, or by a later ``flush``."""
        self.unsent += _frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as there is room. What the other side can no longer get is dropped."""
        try:
            del self.unsent[: self.socket.send(self.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.unsent.clear()  # that it is gone is noticed where messages are received

    def send_and_wait(self, *message: Any) -> None:
        """Send all of it, however long the other side takes to read. Raises ConnectionError when it is gone."""
        self.socket.sendall(_frame(message))

    def receive(self) -> Iterator[Message]:
        """The messages that are there now, read before this returns; ``closed`` is set once the other side is gone."""
        while not self.closed:
            try:
                data = self.socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.closed = not data
            self._unparsed += data
            if len(data) < _READ_BYTES:
                break
        return self._parse()

    def _parse(self) -> Iterator[Message]:
        data, at = self._unparsed, 0
        try:
            while len(data) - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                message = marshal.loads(memoryview(data)[at + _LENGTH.size : end])
                at = end
                yield message
        finally:  # also where whoever takes them fails at one: none comes twice
            if at:
                del data[:at]


def _frame(message: Message) -> bytes:
    body = marshal.dumps(message)
    return _LENGTH.pack(len(body)) + body


class EngineClient:
    """Starts ``python -m MODULE FD SETTINGS`` and hands it at most ``most_requests`` requests at a time.

    ``encode`` gives what this engine needs of a request, beyond its id. All methods are called on the event loop, and
    ``deliver`` is called back there, in order.
    """

    def __init__(
        self, module: str, settings: str, most_requests: int, encode: Callable[[GenerationRequest], Message]
    ) -> None:
        self._module, self._settings, self._most, self._encode = module, settings, most_requests, encode
        self._deliveries: dict[str, Deliver] = {}
        self._stats = EngineStats()
        self._why = ""
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ready: asyncio.Future[None]  # both from the start on
        self._dead: asyncio.Future[str]

    async def start(self) -> None:
        """Start the process and wait until it can serve. Raises EngineDead when that will not happen."""
        loop = asyncio.get_running_loop()
        self._ready, self._dead = loop.create_future(), loop.create_future()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            self._process = self._spawn(theirs.fileno())
        loop.add_reader(ours, self._readable)
        await self._ready

    async def wait_dead(self) -> str:
        """Return, with the reason, if the process ends by itself; never after a ``stop``."""
        return await asyncio.shield(self._dead)

    async def stop(self) -> None:
        """Close the socket and ask the process to leave; kill it if it does not. Requests get no more outputs."""
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
        if self._channel is None:
            raise EngineDead(self._why or "the engine is not running")
        if len(self._deliveries) >= self._most:
            raise QueueFull(
                f"{self._most} requests are running or waiting, as many as this server takes; try again later"
            )
        self._deliveries[request.engine_id] = deliver
        self._send("add", request.engine_id, *self._encode(request))

    def cancel(self, engine_id: str) -> None:
        """Nobody wants the rest: nothing more is delivered for it. An unknown or finished id is fine."""
        if self._deliveries.pop(engine_id, None):
            self._send("cancel", engine_id)

    def stats(self) -> EngineStats:
        """As of the engine's last message; nothing runs when nothing is asked of it."""
        return self._stats if self._deliveries else replace(self._stats, running=0, waiting=0)

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", self._module, str(fd), self._settings]
        return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)

    def _send(self, *message: Any) -> None:
        if self._channel is not None:
            self._channel.send(*message)
            if self._channel.unsent:
                asyncio.get_running_loop().add_writer(self._channel.socket, self._writable)

    def _writable(self) -> None:
        if self._channel is not None:
            self._channel.flush()
            if not self._channel.unsent:
                asyncio.get_running_loop().remove_writer(self._channel.socket)

    def _readable(self) -> None:
        channel = self._channel
        if channel is None:
            return
        messages = channel.receive()
        received_ns = monotonic_ns()  # not before the read: a message may be sent while it begins
        for message in messages:
            if message[0] == "outputs":
                self._deliver(received_ns, message[1], message[2])
            elif message[0] == "ready":
                self._stats = EngineStats(*message[1])
                if not self._ready.done():
                    self._ready.set_result(None)
            elif message[0] == "failed":
                self._why = message[1]
        if channel.closed:
            self._ended()

    def _deliver(
        self,
        received_ns: int,
        entries: Sequence[tuple[str, Sequence[int], str | None, int | None, str]],
        stats: tuple[int | None, ...],
    ) -> None:
        started_ns = monotonic_ns()
        self._stats = EngineStats(*stats)  # type: ignore[arg-type]  # only the last may be None
        for engine_id, ids, reason, cached, error in entries:
            deliver = self._deliveries.pop(engine_id, None) if reason else self._deliveries.get(engine_id)
            if deliver:  # else it was cancelled while this was on its way
                deliver(Output(ids, received_ns, started_ns, reason, cached, error))

    def _ended(self) -> None:
        """The other side is gone: everyone who waits learns why."""
        self._close()
        if self._stopping:
            return
        assert self._process is not None
        try:
            code = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._why = self._why or f"the engine process ended with {ending}"
        at_ns = monotonic_ns()
        for deliver in list(self._deliveries.values()):
            deliver(Output((), at_ns, at_ns, "error", None, self._why))
        self._deliveries.clear()
        if not self._ready.done():
            self._ready.set_exception(EngineDead(self._why))
        if not self._dead.done():
            self._dead.set_result(self._why)

    def _close(self) -> None:
        if self._channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.socket)
            loop.remove_writer(self._channel.socket)
            self._channel.socket.close()
            self._channel = None
