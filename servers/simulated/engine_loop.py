"""The engine loop: look at the input queue, schedule, execute, update, put out; the same in real and in virtual time.

Three things go on at once, as in vLLM: the engine's own thread (look, schedule, update), the worker (inputs, forward,
sampling, one step after the other), and the threads that take messages in and send them out. With asynchronous
scheduling the engine's thread schedules one step ahead of the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from gapmeter_probe.records import Span

from gapmeter.servers.simulated.scheduler import Emission, Key, Request, Scheduler, StepPlan
from gapmeter.servers.simulated.settings import Durations

Action = Callable[[int], None]
_Work = tuple[tuple[Span, int], ...]  # the worker's stages of a step, with how long each is meant to take


class Timeline(Protocol):
    """Real or virtual time, in ns."""

    def now(self) -> int:
        """The time."""

    def at(self, due_ns: int, action: Action) -> None:
        """Call ``action(t)`` at ``due_ns``; ``t`` is what the next duration counts from.

        That is ``due_ns``, so that lateness does not add up, or the time itself when it came noticeably late.
        """


class Listener:
    """Hears what the engine does while it does it. ``ref`` is a request's key, or a step's sequence number."""

    def begin(self, stage: Span, ref: Key) -> None:
        """A stage starts now."""

    def end(self, stage: Span, ref: Key, meant_ns: int) -> None:
        """A stage ends now; it was meant to take ``meant_ns``."""

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        """A step was decided; ``asynchronous`` when an earlier one is still in flight."""

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        """A step's tokens have left the scheduler."""

    def aborted(self, key: Key) -> None:
        """A request was forgotten before it was complete."""


class EngineLoop:
    """Runs ``scheduler`` on ``timeline``. ``deliver(seq, emissions)`` is called when an output leaves the engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        durations: Durations,
        timeline: Timeline,
        listeners: Sequence[Listener],
        deliver: Callable[[int, tuple[Emission, ...]], None],
    ) -> None:
        self._scheduler, self._durations, self._times = scheduler, durations, durations.times
        self._timeline, self._listeners, self._deliver = timeline, listeners, deliver
        self._depth = 2 if scheduler.limits.asynchronous else 1
        self._inbox: deque[Request] = deque()
        self._aborts: list[Key] = []
        self._outside: set[Key] = set()  # requests that the scheduler does not know yet
        self._flying: deque[StepPlan] = deque()  # dispatched, not yet updated
        self._undone: deque[tuple[StepPlan, _Work]] = deque()  # dispatched, not yet started by the worker
        self._worked: deque[StepPlan] = deque()  # done by the worker, not yet looked at
        self._iteration: list[int] = []  # steps that this iteration of the loop touches
        self._idle = True
        self._waiting = False  # the engine's thread waits for the worker
        self._working = False
        self._input_free = self._output_free = 0

    def receive(self, request: Request) -> None:
        """A message with a request arrives now."""
        start = max(self._timeline.now(), self._input_free)
        meant = self._durations.draw("handoff", self._times.handoff_ns)
        self._begin(Span.CORE_RECEIVE, request.key)
        self._outside.add(request.key)

        def queued(t: int) -> None:
            self._end(Span.CORE_RECEIVE, request.key, meant)
            self._inbox.append(request)
            if self._idle:
                self._wake(t)

        self._input_free = start + meant
        self._later(start + meant, self._times.handoff_ns, queued)

    def abort(self, key: Key) -> None:
        """A message arrives that nobody waits for ``key`` any more."""
        self._aborts.append(key)
        if self._idle:
            self._wake(self._timeline.now())

    def _begin(self, stage: Span, ref: Key) -> None:
        for listener in self._listeners:
            listener.begin(stage, ref)

    def _end(self, stage: Span, ref: Key, meant_ns: int) -> None:
        for listener in self._listeners:
            listener.end(stage, ref, meant_ns)

    def _later(self, due: int, meant: int, action: Action) -> None:
        """Call ``action`` at ``due``; at once where what it ends takes no time."""
        if meant:
            self._timeline.at(due, action)
        else:
            action(due)

    # -- the engine's thread

    def _wake(self, t: int) -> None:
        """A message ends the wait for one, and an iteration begins."""
        self._idle = False
        self._begin(Span.LOOP, 0)
        self._look(t)

    def _look(self, t: int) -> None:
        """Take in what has arrived, then schedule, or wait for the worker, or for messages."""
        while self._inbox:
            request = self._inbox.popleft()
            self._begin(Span.CORE_ADD, request.key)
            self._scheduler.add(request)
            self._outside.discard(request.key)
            self._end(Span.CORE_ADD, request.key, 0)
        self._drop_aborted()
        if len(self._scheduler) and len(self._flying) < self._depth:
            self._schedule(t)
        elif self._flying:
            self._await_worker(t)
        else:
            self._idle = True

    def _drop_aborted(self) -> None:
        """Forget aborted requests. Those not yet taken in are kept for later."""
        kept = []
        for key in self._aborts:
            if self._scheduler.abort(key):
                for listener in self._listeners:
                    listener.aborted(key)
            elif key in self._outside:
                kept.append(key)
        self._aborts = kept

    def _schedule(self, t: int) -> None:
        meant = self._durations.draw("schedule", self._times.schedule_ns)
        seq = self._scheduler.next_seq
        self._begin(Span.SCHEDULE, seq)
        plan = self._scheduler.schedule()
        for listener in self._listeners:
            listener.planned(plan, bool(self._flying))
        self._iteration.append(seq)
        draw, times = self._durations.draw, self._times
        work: _Work = ()
        if not plan.empty:
            work = (
                (Span.INPUT_PREP, draw("input_prep", times.input_prep_ns)),
                (Span.FORWARD, draw("forward", times.forward(plan))),
                (Span.SAMPLING, draw("sampling", times.sampling_ns)),
            )

        def scheduled(t: int) -> None:
            self._end(Span.SCHEDULE, seq, meant)
            self._dispatch(t, plan, work)

        self._later(t + meant, meant, scheduled)

    def _dispatch(self, t: int, plan: StepPlan, work: _Work) -> None:
        if not plan.empty:
            self._flying.append(plan)
            self._undone.append((plan, work))
            self._begin(Span.EXECUTE, plan.seq)
            if not self._working:
                self._work(t)
            if len(self._flying) < self._depth:
                self._next_iteration(t)
                return
        if self._flying:
            self._await_worker(t)
        else:
            self._next_iteration(t)

    def _next_iteration(self, t: int) -> None:
        for seq in self._iteration:
            self._end(Span.LOOP, seq, 0)
        self._iteration.clear()
        self._begin(Span.LOOP, 0)
        # By way of the timeline, so that a run of iterations that take no time is no recursion.
        self._timeline.at(t, self._look)

    def _await_worker(self, t: int) -> None:
        if self._worked:
            self._update(t)
        else:
            self._waiting = True

    def _update(self, t: int) -> None:
        plan = self._worked.popleft()
        self._flying.popleft()
        meant = self._durations.draw("update", self._times.update_ns)
        self._end(Span.EXECUTE, plan.seq, 0)
        self._drop_aborted()
        self._begin(Span.UPDATE, plan.seq)
        emissions = self._scheduler.update(plan)
        if plan.seq not in self._iteration:
            self._iteration.append(plan.seq)

        def updated(t: int) -> None:
            for listener in self._listeners:
                listener.emitted(plan.seq, emissions)
            self._end(Span.UPDATE, plan.seq, meant)
            if emissions:
                self._put_out(t, plan.seq, emissions)
            self._next_iteration(t)

        self._later(t + meant, meant, updated)

    # -- the worker

    def _work(self, t: int) -> None:
        self._working = True
        plan, stages = self._undone.popleft()
        self._begin(Span.WORKER, plan.seq)
        self._work_on(t, plan, stages, 0)

    def _work_on(self, t: int, plan: StepPlan, stages: _Work, number: int) -> None:
        if number < len(stages):
            stage, meant = stages[number]
            self._begin(stage, plan.seq)

            def over(t: int) -> None:
                self._end(stage, plan.seq, meant)
                self._work_on(t, plan, stages, number + 1)

            self._later(t + meant, meant, over)
            return
        self._end(Span.WORKER, plan.seq, sum(meant for _, meant in stages))
        self._worked.append(plan)
        self._working = False
        if self._undone:
            self._work(t)
        if self._waiting:
            self._waiting = False
            self._update(t)

    # -- the sending thread

    def _put_out(self, t: int, seq: int, emissions: tuple[Emission, ...]) -> None:
        self._begin(Span.OUTPUT_PUT, seq)
        meant = self._durations.draw("output", self._times.output_ns)
        start = max(t, self._output_free)
        self._output_free = start + meant
        self._end(Span.OUTPUT_PUT, seq, 0)
        self._begin(Span.OUTPUT_SEND, seq)

        def sent(_: int) -> None:
            self._deliver(seq, emissions)
            self._end(Span.OUTPUT_SEND, seq, meant)

        self._later(start + meant, self._times.output_ns, sent)
