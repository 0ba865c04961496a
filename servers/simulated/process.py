"""The engine's own process: ``python -m gapmeter.servers.simulated.process FD SETTINGS``, started by engine.py.

It speaks over an inherited socket: requests and aborts in, outputs out. It ends when the other side does.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from typing import Any

from gapmeter_probe.records import Span
from gapmeter_probe.writer import open_probe

from gapmeter.servers.simulated.faults import Faults
from gapmeter.servers.simulated.loop import EngineLoop
from gapmeter.servers.simulated.pause import go_first
from gapmeter.servers.simulated.realtime import Channel, RealTimeline
from gapmeter.servers.simulated.records import ProbeListener
from gapmeter.servers.simulated.scheduler import Emission, Limits, Request, Scheduler, StepPlan
from gapmeter.servers.simulated.times import Durations, StageTimes
from gapmeter.servers.simulated.truth import TruthListener, open_truth

_LINE_NS = 10_000  # what formatting a line of truth takes at most, on average

READY, OUTPUTS = 0, 1  # the first element of a message to the API server
ADD, ABORT = 0, 1  # and of one from it


class EngineProcess:
    """Puts scheduler, loop, clock, records and truth together, and speaks with the API server."""

    def __init__(self, channel: Channel, limits: Limits, times: StageTimes, faults: Faults, *, busy: bool) -> None:
        # Its waits are sleeps, so it takes little of a core; but what it takes it must have on time.
        first = not busy and go_first()
        describe = {"server": "simulated", "versions": {"python": sys.version.split()[0]}}
        self._writer = open_probe("core", describe)
        if self._writer:
            self._writer.json({**_settings(limits, times), "busy": busy, "real_time": first})
        self._truth = open_truth("core")
        self._hears: list[ProbeListener | TruthListener] = []
        if self._truth:
            self._hears.append(TruthListener(self._truth))
        if self._writer:
            self._hears.append(ProbeListener(self._writer))
        self._channel, self._faults = channel, faults
        self._timeline = RealTimeline(channel, self._heard, self._idle, busy=busy)
        self._scheduler = Scheduler(limits)
        self._loop = EngineLoop(self._scheduler, Durations(times), self._timeline, self, self._deliver)
        self._cached: dict[int, int] = {}
        self._steps = self._preemptions = self._received = 0
        self._told = self._state()

    def run(self) -> None:
        """Serve until the API server is gone."""
        self._channel.send(marshal.dumps((READY, os.getpid())))
        self._timeline.run()
        if self._writer:
            self._writer.close()
        if self._truth:
            self._truth.note("clock", worst_lateness_ns=self._timeline.latest_ns)
            self._truth.close()

    def _idle(self, left_ns: int) -> None:
        if left_ns:
            if self._truth:
                self._truth.write(left_ns // _LINE_NS)
            return
        if self._state() != self._told:
            self._tell([])
        if self._truth:
            self._truth.flush()

    def _heard(self, message: bytes) -> None:
        kind, key, *rest = marshal.loads(message)
        if kind == ABORT:
            self._loop.abort(key)
            return
        engine_id, prompt, output, hashes = rest
        request = Request(key, prompt, output, hashes)
        for listener in self._hears:
            listener.name(request, engine_id)
        self._received += 1
        if self._faults.stalls(self._received):
            time.sleep(self._faults.stall_s)
        self._loop.receive(request)

    def _deliver(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        tokens = [(e.key, e.tokens, e.finished, self._cached.get(e.key, 0)) for e in emissions]
        for emission in emissions:
            if emission.finished:
                self._cached.pop(emission.key, None)
        self._tell(tokens)

    def _tell(self, tokens: list[tuple[int, int, bool, int]]) -> None:
        """One message: the engine's state, and (key, tokens, finished, cached) for each request with an output."""
        self._told = self._state()
        self._channel.send(marshal.dumps((OUTPUTS, self._told, tokens)))

    def _state(self) -> tuple[int, ...]:
        return self._steps, self._preemptions, *self._scheduler.counts

    # -- what the loop does, to all who listen

    def begin(self, stage: Span, ref: int) -> None:
        for listener in self._hears:
            listener.begin(stage, ref)

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        for listener in self._hears:
            listener.end(stage, ref, meant_ns)

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        self._steps += 1
        self._preemptions += len(plan.preempted)
        for entry in plan.entries:
            self._cached.setdefault(entry.key, entry.cached)
        for listener in self._hears:
            listener.planned(plan, asynchronous)

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        for listener in self._hears:
            listener.emitted(seq, emissions)

    def aborted(self, key: int) -> None:
        self._cached.pop(key, None)
        for listener in self._hears:
            listener.aborted(key)


def _settings(limits: Limits, times: StageTimes) -> dict[str, Any]:
    """The settings record, with the names that vLLM's has."""
    return {
        "type": "settings",
        "scheduler": {
            "max_num_seqs": limits.max_sequences,
            "max_num_batched_tokens": limits.token_budget,
            "policy": "fcfs",
            "enable_chunked_prefill": limits.chunked_prefill,
            "async_scheduling": limits.asynchronous,
            "long_prefill_token_threshold": limits.chunk_tokens,
        },
        "cache": {
            "block_size": limits.block_tokens,
            "num_blocks": limits.kv_blocks,
            "enable_prefix_caching": limits.prefix_caching,
        },
        "times": asdict(times),
    }


def main(arguments: list[str]) -> int:
    """Serve on the socket whose number is the first argument, with the settings (JSON) of the second."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API server decides; its end is ours
    fd, told = int(arguments[0]), json.loads(arguments[1])
    channel = Channel(socket.socket(fileno=fd))
    limits, times, faults = Limits(**told["limits"]), StageTimes(**told["times"]), Faults(**told["faults"])
    process = EngineProcess(channel, limits, times, faults, busy=told["busy"])
    gc.collect()
    gc.freeze()
    process.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
