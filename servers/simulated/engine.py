"""The engine's own process: ``python -m gapmeter.servers.simulated.engine FD SETTINGS``, started by the API process."""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic_ns as now
from typing import Any

from gapmeter_probe.writer import open_probe

from gapmeter.servers.engine_client import Channel, Message
from gapmeter.servers.simulated.engine_loop import EngineLoop, Listener
from gapmeter.servers.simulated.realtime import RealTimeline, go_first
from gapmeter.servers.simulated.recorders import ProbeRecorder, TruthRecorder, open_truth
from gapmeter.servers.simulated.scheduler import Emission, Request, Scheduler, StepPlan
from gapmeter.servers.simulated.settings import Durations, ServerOptions, parse_options

_LINE_NS = 10_000  # what formatting a line of truth takes at most, on average


@dataclass(slots=True)
class _Answer:
    """A request in the engine. ``first_word`` chooses its tokens, so that the same question gets the same answer."""

    first_word: int
    made: int = 0
    cached: int | None = None


class SimulatedEngine(Listener):
    """Puts scheduler, loop, clock, records and truth together, and answers the API process.

    Generated tokens are drawn from ``words`` (ids that are each a piece of text).
    """

    def __init__(self, channel: Channel, options: ServerOptions, words: Sequence[int]) -> None:
        # Its waits are sleeps, so it takes little of a core; but what it takes it must have on time.
        real_time = not options.busy and go_first()
        self._channel, self._options, self._words = channel, options, words
        self._writer = open_probe("core", {"server": "simulated", "versions": {"python": sys.version.split()[0]}})
        self._truth = open_truth("core")
        listeners: list[Listener] = [self]
        if self._truth:
            listeners.append(TruthRecorder(self._truth))
        self._probe: ProbeRecorder | None = None
        if self._writer:
            self._writer.json({**_settings_record(options), "real_time": real_time})
            self._probe = ProbeRecorder(self._writer)
            listeners.append(self._probe)
        self._timeline = RealTimeline(channel, self._take, self._idle, busy=options.busy)
        self._scheduler = Scheduler(options.limits)
        self._loop = EngineLoop(self._scheduler, Durations(options.times), self._timeline, listeners, self._deliver)
        self._answers: dict[str, _Answer] = {}  # by engine id, which is a request's key
        self._steps = self._preemptions = self._received = 0
        self._sent_stats = self._stats()

    def run(self) -> None:
        """Serve until the API process is gone."""
        faults = self._options.faults
        if not faults.never_ready:
            ready_ns = now() + round(faults.start_s * 1e9)
            self._timeline.at(ready_ns, lambda _: self._channel.send("ready", self._stats()))
        self._timeline.run()
        if self._writer:
            self._writer.close()
        if self._truth:
            self._truth.note("clock", worst_lateness_ns=self._timeline.worst_lateness_ns)
            self._truth.close()

    def _idle(self, left_ns: int) -> None:
        if left_ns:
            if self._truth:
                self._truth.write(left_ns // _LINE_NS)
            return
        if self._stats() != self._sent_stats:
            self._send_outputs([])
        if self._truth:
            self._truth.flush()

    def _take(self, message: Message) -> None:
        name, engine_id, *rest = message
        if name == "cancel":
            if engine_id in self._answers:
                self._loop.abort(engine_id)
            return
        prompt_tokens, output_tokens, hashes, first_word = rest
        self._received += 1
        self._answers[engine_id] = _Answer(first_word)
        request = Request(engine_id, prompt_tokens, output_tokens, hashes)
        if self._probe:
            self._probe.name(request)
        if self._received == self._options.faults.stall_at:
            time.sleep(self._options.faults.stall_s)
        self._loop.receive(request)

    def _deliver(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        words, entries = self._words, []
        for key, tokens, finished in emissions:
            answer = self._answers.get(key)
            if answer is None:  # cancelled meanwhile
                continue
            ids = [words[(answer.first_word + answer.made + i) % len(words)] for i in range(tokens)]
            answer.made += tokens
            if finished:
                del self._answers[key]
            entries.append((key, ids, "length" if finished else None, answer.cached, ""))
        self._send_outputs(entries)

    def _send_outputs(self, entries: list[tuple[str, list[int], str | None, int | None, str]]) -> None:
        self._sent_stats = self._stats()
        self._channel.send("outputs", entries, self._sent_stats)

    def _stats(self) -> tuple[int, ...]:
        running, waiting, free = self._scheduler.counts
        return running, waiting, self._options.limits.kv_blocks, free, self._steps, self._preemptions

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        self._steps += 1
        self._preemptions += len(plan.preempted)
        for entry in plan.entries:
            answer = self._answers.get(entry.key)
            if answer is not None and answer.cached is None:
                answer.cached = entry.cached

    def aborted(self, key: str) -> None:
        del self._answers[key]


def _settings_record(options: ServerOptions) -> dict[str, Any]:
    """The probe's settings record, with the names that vLLM's has."""
    limits = options.limits
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
        "times": asdict(options.times),
        "busy": options.busy,
    }


def main(arguments: list[str]) -> int:
    """Serve on the socket whose number comes first; the second argument (JSON) has the server's flags and words."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API server decides; its end is ours
    flags, words = json.loads(arguments[1])
    engine = SimulatedEngine(Channel(socket.socket(fileno=int(arguments[0]))), parse_options(flags), words)
    gc.collect()
    gc.freeze()
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
