"""The engine's own process: ``python -m gapmeter.servers.simulated.engine FD SETTINGS``, started by the API process."""

from __future__ import annotations

import gc
import json
import resource
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from time import monotonic_ns as now
from typing import Any

from gapmeter_probe.records import Outcome, Span, StepFlag
from gapmeter_probe.writer import RecordWriter, open_probe

from gapmeter.servers.engine_client import Channel, Message
from gapmeter.servers.simulated.engine_loop import EngineLoop, Listener
from gapmeter.servers.simulated.options import Faults
from gapmeter.servers.simulated.realtime import RealTimeline, go_first
from gapmeter.servers.simulated.scheduler import Emission, Limits, Request, Scheduler, StepPlan
from gapmeter.servers.simulated.stage_times import Durations, StageTimes
from gapmeter.servers.simulated.truth import TruthListener, open_truth

_LINE_NS = 10_000  # what formatting a line of truth takes at most, on average


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the process is told. Generated tokens are drawn from ``words`` (ids that are each a piece of text)."""

    limits: Limits
    times: StageTimes
    faults: Faults
    busy: bool
    words: tuple[int, ...]

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSettings:
        """The inverse of ``to_json``."""
        value = json.loads(text)
        return cls(
            limits=Limits(**value["limits"]),
            times=StageTimes(**value["times"]),
            faults=Faults(**value["faults"]),
            busy=value["busy"],
            words=tuple(value["words"]),
        )

    def record(self) -> dict[str, Any]:
        """The probe's settings record, with the names that vLLM's has."""
        limits = self.limits
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
            "times": asdict(self.times),
            "busy": self.busy,
        }


@dataclass(slots=True)
class _Answer:
    """A request in the engine. ``first_word`` chooses its tokens, so that the same question gets the same answer."""

    engine_id: str
    first_word: int
    made: int = 0
    cached: int | None = None


class SimulatedEngine(Listener):
    """Puts scheduler, loop, clock, records and truth together, and answers the API process."""

    def __init__(self, channel: Channel, settings: EngineSettings) -> None:
        # Its waits are sleeps, so it takes little of a core; but what it takes it must have on time.
        real_time = not settings.busy and go_first()
        self._channel, self._settings = channel, settings
        self._writer = open_probe("core", {"server": "simulated", "versions": {"python": sys.version.split()[0]}})
        if self._writer:
            self._writer.json({**settings.record(), "real_time": real_time})
        self._truth = open_truth("core")
        self._recorders: list[ProbeListener | TruthListener] = []
        if self._truth:
            self._recorders.append(TruthListener(self._truth))
        if self._writer:
            self._recorders.append(ProbeListener(self._writer))
        self._timeline = RealTimeline(channel, self._take, self._idle, busy=settings.busy)
        self._scheduler = Scheduler(settings.limits)
        self._loop = EngineLoop(
            self._scheduler, Durations(settings.times), self._timeline, [self, *self._recorders], self._deliver
        )
        self._answers: dict[int, _Answer] = {}
        self._keys: dict[str, int] = {}
        self._steps = self._preemptions = self._received = 0
        self._sent_stats = self._stats()

    def run(self) -> None:
        """Serve until the API process is gone."""
        faults = self._settings.faults
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
            if engine_id in self._keys:
                self._loop.abort(self._keys[engine_id])
            return
        prompt_tokens, output_tokens, hashes, first_word = rest
        self._received = key = self._received + 1
        self._answers[key] = _Answer(engine_id, first_word)
        self._keys[engine_id] = key
        request = Request(key, prompt_tokens, output_tokens, hashes)
        for recorder in self._recorders:
            recorder.name(request, engine_id)
        if key == self._settings.faults.stall_at:
            time.sleep(self._settings.faults.stall_s)
        self._loop.receive(request)

    def _deliver(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        words, entries = self._settings.words, []
        for key, tokens, finished in emissions:
            answer = self._answers.get(key)
            if answer is None:  # cancelled meanwhile
                continue
            ids = [words[(answer.first_word + answer.made + i) % len(words)] for i in range(tokens)]
            answer.made += tokens
            if finished:
                self._forget(key)
            entries.append((answer.engine_id, ids, "length" if finished else None, answer.cached, ""))
        self._send_outputs(entries)

    def _send_outputs(self, entries: list[tuple[str, list[int], str | None, int | None, str]]) -> None:
        self._sent_stats = self._stats()
        self._channel.send("outputs", entries, self._sent_stats)

    def _stats(self) -> tuple[int, ...]:
        running, waiting, free = self._scheduler.counts
        return running, waiting, self._settings.limits.kv_blocks, free, self._steps, self._preemptions

    def _forget(self, key: int) -> None:
        del self._keys[self._answers.pop(key).engine_id]

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        self._steps += 1
        self._preemptions += len(plan.preempted)
        for entry in plan.entries:
            answer = self._answers.get(entry.key)
            if answer is not None and answer.cached is None:
                answer.cached = entry.cached

    def aborted(self, key: int) -> None:
        self._forget(key)


@dataclass(slots=True)
class _Recorded:
    """A request in the probe's file."""

    ref: int
    prompt: int
    made: int = 0
    cached: int | None = None


class ProbeListener(Listener):
    """Writes what a real engine's probe would record, from stamps of its own."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._begun: dict[tuple[int, int], int] = {}
        self._loop_ns = 0
        self._requests: dict[int, _Recorded] = {}

    def name(self, request: Request, engine_id: str) -> None:
        """A request is about to arrive under this id."""
        self._requests[request.key] = _Recorded(self._writer.request(engine_id), request.prompt_tokens)

    def begin(self, stage: Span, ref: int) -> None:
        if stage is Span.LOOP:
            self._loop_ns = now()
        else:
            self._begun[stage, ref] = now()

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        end = now()
        if stage is Span.LOOP:
            self._writer.span(stage, ref, self._loop_ns, end)
            return
        start = self._begun.pop((stage, ref))
        self._writer.span(stage, self._requests[ref].ref if stage < Span.LOOP else ref, start, end)

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        """Write the step and its evictions."""
        at = now()
        requests = self._requests
        for key in plan.preempted:
            self._writer.span(Span.PREEMPT, requests[key].ref, at, at)
        for entry in plan.entries:
            if requests[entry.key].cached is None:
                requests[entry.key].cached = entry.cached
        self._writer.step(
            (StepFlag.ASYNC if asynchronous else 0) | (StepFlag.EMPTY if plan.empty else 0),
            plan.seq,
            [(requests[e.key].ref, e.tokens, e.before, e.cached, e.flags) for e in plan.entries],
            running=plan.running,
            waiting=plan.waiting,
            free_blocks=plan.free_blocks,
            schedule_ns=self._begun[Span.SCHEDULE, plan.seq],
            cpu_ns=time.thread_time_ns(),
            switches=resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw,
        )

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        """Write the step's tokens, and the counts of those that are complete."""
        at = now()
        self._writer.emit(seq, at, [(self._requests[e.key].ref, e.tokens) for e in emissions])
        for emission in emissions:
            self._requests[emission.key].made += emission.tokens
            if emission.finished:
                self._leave(emission.key, Outcome.OK, at)

    def aborted(self, key: int) -> None:
        self._leave(key, Outcome.ABORTED, now())

    def _leave(self, key: int, outcome: Outcome, at_ns: int) -> None:
        request = self._requests.pop(key)
        self._writer.counts(outcome, request.ref, request.prompt, request.made, request.cached or 0, at_ns)


def main(arguments: list[str]) -> int:
    """Serve on the socket whose number is the first argument, with the settings (JSON) of the second."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API server decides; its end is ours
    engine = SimulatedEngine(Channel(socket.socket(fileno=int(arguments[0]))), EngineSettings.from_json(arguments[1]))
    gc.collect()
    gc.freeze()
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
