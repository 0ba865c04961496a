"""The engine process's probe: what a real engine's probe would record, from stamps of its own."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

from gapmeter_probe.records import Outcome, Span, StepFlag
from gapmeter_probe.writer import RecordWriter

from gapmeter.servers.simulated.pause import now
from gapmeter.servers.simulated.scheduler import Emission, Request, StepPlan


class _Known(NamedTuple):
    ref: int
    prompt: int


class ProbeListener:
    """Writes the engine loop's stages to a record file."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._begun: dict[tuple[int, int], int] = {}
        self._loop_ns = 0
        self._requests: dict[int, _Known] = {}
        self._made: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def name(self, request: Request, engine_id: str) -> None:
        """A request is about to arrive under this id."""
        ref = self._writer.request(engine_id)
        self._requests[request.key] = _Known(ref, request.prompt_tokens)
        self._made[request.key] = 0

    def begin(self, stage: Span, ref: int) -> None:
        """Stamp a stage's start."""
        if stage is Span.LOOP:
            self._loop_ns = now()
        else:
            self._begun[stage, ref] = now()

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        """Stamp a stage's end and write it."""
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
            self._cached.setdefault(entry.key, entry.cached)
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
            self._made[emission.key] += emission.tokens
            if emission.finished:
                self._leave(emission.key, Outcome.OK, at)

    def aborted(self, key: int) -> None:
        """Write the counts of a request that was cancelled."""
        self._leave(key, Outcome.ABORTED, now())

    def _leave(self, key: int, outcome: Outcome, at_ns: int) -> None:
        known = self._requests.pop(key)
        self._writer.counts(outcome, known.ref, known.prompt, self._made.pop(key), self._cached.pop(key, 0), at_ns)
