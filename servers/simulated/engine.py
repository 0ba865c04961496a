"""The API server's side of the simulated engine: starts its process, hands requests over, gets outputs back."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import socket
import subprocess
import sys
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gapmeter.servers.api.engine import Deliver, EngineDead, EngineStats, GenerationRequest, Output, QueueFull
from gapmeter.servers.simulated.faults import Faults
from gapmeter.servers.simulated.options import import_path
from gapmeter.servers.simulated.process import ABORT, ADD, OUTPUTS
from gapmeter.servers.simulated.realtime import Channel
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.times import StageTimes
from gapmeter.servers.simulated.truth import TruthFile

_START_S = 10.0
_END_S = 2.0


@dataclass(slots=True)
class _Asked:
    """A request that the engine has. ``first`` chooses its tokens, so that the same question gets the same answer."""

    engine_id: str
    deliver: Deliver
    first: int
    made: int = 0


class SimulatedEngine:
    """Implements servers.api.engine.Engine. Tokens are drawn from ``words`` (token ids that are whole pieces of text).

    At most ``max_queue`` requests beyond those that can run are held; more raise QueueFull.
    """

    def __init__(
        self,
        limits: Limits,
        times: StageTimes,
        words: Sequence[int],
        *,
        faults: Faults | None = None,
        busy: bool = False,
        max_queue: int = 4096,
        truth: TruthFile | None = None,
    ) -> None:
        self._limits, self._words, self._truth = limits, words, truth
        self._faults = faults or Faults()
        self._most = limits.max_sequences + max_queue
        self._told = {
            "limits": asdict(limits),
            "times": asdict(times),
            "faults": asdict(self._faults),
            "busy": busy,
        }
        self._asked: dict[int, _Asked] = {}
        self._keys: dict[str, int] = {}
        self._last_key = 0
        self._stats = EngineStats(kv_blocks=limits.kv_blocks, kv_blocks_free=limits.kv_blocks)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._dead: asyncio.Future[str] | None = None
        self._ready: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Start the engine's process and wait for its first message. Raises EngineDead when there is none."""
        loop = asyncio.get_running_loop()
        self._dead, self._ready = loop.create_future(), loop.create_future()
        self._process, end = _spawn(self._told)
        self._channel = Channel(end)
        loop.add_reader(end, self._readable)
        await asyncio.sleep(self._faults.start_s)
        if self._faults.never_ready:
            await loop.create_future()
        await asyncio.wait((self._dead, self._ready), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self.stop()
            raise EngineDead("its process did not start, or ended at once")

    async def wait_dead(self) -> str:
        """Return with the reason if the engine's process ends by itself."""
        assert self._dead is not None, "start first"
        return await asyncio.shield(self._dead)

    async def stop(self) -> None:
        """Close the connection, which ends the engine's process, and collect it."""
        if self._channel is None or self._process is None:
            return
        asyncio.get_running_loop().remove_reader(self._channel.socket)
        self._channel.socket.close()
        self._channel = None
        try:
            await asyncio.to_thread(self._process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Hand a request over. Raises QueueFull or EngineDead."""
        if self._channel is None:
            raise EngineDead("the engine has been stopped" if self._dead is None else "the engine's process has ended")
        if len(self._asked) >= self._most:
            raise QueueFull(f"the engine holds {len(self._asked)} requests and takes no more")
        self._last_key += 1
        key = self._last_key
        first = zlib.crc32(array("q", request.prompt_ids).tobytes()) + (request.seed or 0)
        self._asked[key] = _Asked(request.engine_id, deliver, first)
        self._keys[request.engine_id] = key
        if self._truth:
            self._truth.note("request", of=request.client_id, engine_id=request.engine_id, at_ns=time.monotonic_ns())
        hashes = prefix_hashes(request.prompt_ids, self._limits.block_tokens) if self._limits.prefix_caching else ()
        self._send((ADD, key, request.engine_id, len(request.prompt_ids), request.max_tokens, hashes))

    def cancel(self, engine_id: str) -> None:
        """Nobody wants the rest."""
        key = self._keys.pop(engine_id, None)
        if key is not None:
            del self._asked[key]
            self._send((ABORT, key))

    def stats(self) -> EngineStats:
        """The engine's state as of its last output."""
        return self._stats

    def _send(self, message: Any) -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send(marshal.dumps(message))
        if channel.backlog:
            asyncio.get_running_loop().add_writer(channel.socket, self._writable)

    def _writable(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.flush()
            if not channel.backlog:
                asyncio.get_running_loop().remove_writer(channel.socket)

    def _readable(self) -> None:
        """Take all messages that are there; each is stamped once it is here and before it is looked at."""
        while self._channel is not None:
            try:
                message = self._channel.receive()
            except EOFError:
                self._ended()
                return
            received = time.monotonic_ns()  # not before the call: a message may be sent while it begins
            if message is None:
                return
            kind, *rest = marshal.loads(message)
            if kind == OUTPUTS:
                self._take(received, *rest)
            elif self._ready is not None and not self._ready.done():
                self._ready.set_result("")

    def _take(
        self, received: int, state: tuple[int, int, int, int, int], tokens: list[tuple[int, int, bool, int]]
    ) -> None:
        started = time.monotonic_ns()
        steps, preemptions, running, waiting, free = state
        self._stats = EngineStats(running, waiting, self._limits.kv_blocks, free, steps, preemptions)
        for key, count, finished, cached in tokens:
            asked = self._asked.get(key)
            if asked is None:  # cancelled while this was on its way
                continue
            ids = [self._words[(asked.first + asked.made + i) % len(self._words)] for i in range(count)]
            asked.made += count
            if finished:
                del self._asked[key]
                del self._keys[asked.engine_id]
            asked.deliver(Output(ids, received, "length" if finished else None, cached, "", started))

    def _ended(self) -> None:
        assert self._channel is not None
        assert self._process is not None
        assert self._dead is not None
        asyncio.get_running_loop().remove_reader(self._channel.socket)
        self._channel.socket.close()
        self._channel = None
        code = self._process.wait()
        reason = f"the engine's process ended with exit code {code}"
        self._dead.set_result(reason)
        for asked in list(self._asked.values()):
            asked.deliver(Output((), time.monotonic_ns(), "error", error=reason))
        self._asked.clear()
        self._keys.clear()


def _spawn(told: dict[str, object]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The engine's process, and our end of the socket that it has inherited."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [
            sys.executable,
            "-P",
            "-m",
            "gapmeter.servers.simulated.process",
            str(theirs.fileno()),
            json.dumps(told),
        ]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        return subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment), ours


def prefix_hashes(ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """A name for each full block's content; equal names mean equal tokens from the first on."""
    names: list[int] = []
    name = 0
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        name = hash((name, *ids[start : start + block_tokens]))
        names.append(name)
    return tuple(names)
