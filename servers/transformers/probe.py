"""What the engine process stamps: Transformers' own functions, wrapped by name, and the two ends of its loop.

All handlers run on the generation thread. A step is numbered when it is scheduled; with asynchronous batching the one
before it is still to be updated, so updates take the oldest number that is open. From the engine's first step on there
is always one, also while it sleeps.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapmeter_probe import codes
from gapmeter_probe.appender import span
from gapmeter_probe.device import COPIED, FORWARD, FORWARD_END, SAMPLED, DeviceClock, open_device
from gapmeter_probe.hooks import Hook, Probe, now
from gapmeter_probe.records import EntryFlag, Outcome, StepFlag

_CB = "transformers.generation.continuous_batching."
_API = f"{_CB}continuous_api:ContinuousBatchProcessor."
_RUNNER = f"{_CB}model_runner:ModelRunner."
_SCHEDULERS = tuple(f"{_CB}scheduler:{name}.schedule_batch" for name in ("FIFOScheduler", "PrefillFirstScheduler"))
_SAMPLING = (f"{_CB}cb_logits_processors:ContinuousBatchingLogitsProcessorList.__call__", f"{_RUNNER}_sample")
_COPYING = tuple(
    f"{_CB}input_outputs:{name}.retrieve_device_outputs"
    for name in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs")
)

_PROMPT, _LAST = int(EntryFlag.PROMPT), int(EntryFlag.LAST_CHUNK)
_RESUMED, _PREEMPTED = int(EntryFlag.RESUMED), int(EntryFlag.PREEMPTED)
_OUTCOMES = {"length": Outcome.OK, "stop": Outcome.OK, "error": Outcome.CUT}


@dataclass(slots=True)
class _Request:
    """A request: its ref and prompt, and the state of its life in the scheduler."""

    ref: int
    prompt: int
    arrived_ns: int
    cached: int = 0
    added: bool = False
    seen: bool = False
    evicted: bool = False


@dataclass(slots=True)
class _Step:
    """A step from its scheduling to its update."""

    seq: int
    schedule_ns: int
    schedule_end_ns: int = 0
    flags: int = 0
    running: int = 0
    waiting: int = 0
    padded: int = 0
    put_ns: int = 0
    entries: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    emitted: list[tuple[int, int]] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)


def _guarded(*stages: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A method that the server itself calls: where it fails these stages are unmeasured, and the server goes on."""

    def wrap(work: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(work)
        def guarded(probe: EngineProbe, *args: Any) -> None:
            try:
                work(probe, *args)
            except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
                probe.failed(f"{__name__}:{work.__qualname__}", stages, error)

        return guarded

    return wrap


class EngineProbe(Probe):
    """Records of the process that schedules and computes. Does nothing until ``begin``."""

    role = "core"

    def __init__(self) -> None:
        super().__init__()
        self._device: DeviceClock | None = None
        self._compute: Any = None  # the device's streams: the model's, and the one that tokens go to the host on
        self._copies: Any = None
        self._capturing: Callable[[], bool] = bool
        self._requests: dict[str, _Request] = {}
        self._evictions: list[int] = []
        self._open: deque[_Step | None] = deque()  # scheduled, not yet updated; None: before anything was recorded
        self._step: _Step | None = None  # scheduled in this iteration
        self._forward_ns = self._sampling_ns = self._update_ns = self._put_ns = 0
        self._loop_ns = self._woken_ns = self._looked_ns = self._schedule_ns = 0
        self.steps = 0
        self.free_blocks = 0  # of the KV cache, as of the last time the engine told the API server
        self.preemptions: int | None = None  # unknown while nobody asked for records

    def make_hooks(self) -> list[Hook]:
        steps = ("queue", "scheduling", "prefill", "decode")
        return [
            self.before(f"{_API}prepare_next_batch", ("scheduling",), self._looped),
            self.after(f"{_CB}scheduler:Scheduler.add_waiting_request", ("engine_wait", "queue"), self._added),
            self.after(_SCHEDULERS, steps, self._scheduled, every=True),
            self.around(f"{_RUNNER}compute_batch", (*steps, "input_prep"), self._computing),
            self.before(_SAMPLING[0], (), self._sampling),
            self.before(_SAMPLING[1], ("sampling",), self._sampling),
            self.after(_COPYING, (), self._copying, every=True),
            self.around(f"{_API}update_batch", ("scheduling",), self._updating),
        ]

    @_guarded("prefill", "decode", "input_prep", "sampling")
    def begin(self, describe: dict[str, Any], settings: dict[str, Any], processor: Any, device: Any) -> None:
        """Open the file: from now on everything is recorded. ``processor`` is the manager's batch processor."""
        self.open(describe)
        if self.writer is None:
            return
        self.preemptions = 0
        self.writer.json({"type": "settings", **settings})
        clock = open_device(self.writer, str(device), graphs=any(settings.get("graphs", ())))
        if clock:
            import torch

            self._compute = processor.inputs_and_outputs.compute_stream
            self._copies = getattr(processor.inputs_and_outputs, "d2h_stream", None)
            self._capturing = torch.cuda.is_current_stream_capturing
        self._device = clock  # not before its streams are known

    def close(self, *_: Any) -> None:
        self._finish()
        super().close()

    @_guarded()
    def _finish(self) -> None:
        if self._device:
            self._device.finish()

    # -- requests

    def idling(self) -> None:
        """The loop has nothing to do and goes to sleep."""
        self._loop_ns = 0

    def woken(self, at_ns: int) -> None:
        """It woke: at ``at_ns`` because of a message, or 0 to look around."""
        self._woken_ns = at_ns

    def looking(self) -> None:
        """The loop takes its messages from the socket."""
        self._looked_ns = now()

    @_guarded("handoff", "engine_wait")
    def arrived(self, engine_id: str, prompt: int, sent_ns: int) -> None:
        """A request was taken from the socket.

        If the loop slept, it was received when the loop woke; else it has lain in the loop's queue since it was sent.
        """
        if self.writer is None:
            return
        # What was sent after the loop began to look may still be read by that look.
        request = _Request(self.writer.request(engine_id), prompt, max(self._looked_ns, sent_ns))
        self._requests[engine_id] = request
        woken = self._woken_ns
        if woken:
            request.arrived_ns = now()
            self.writer.span(codes.CORE_RECEIVE, request.ref, max(woken, sent_ns), request.arrived_ns)
        else:
            self.writer.span(codes.CORE_RECEIVE, request.ref, sent_ns, sent_ns)

    @_guarded()
    def cancelled(self, engine_id: str, sent: int) -> None:
        """A request that nobody wants any more was taken off the engine."""
        request = self._requests.pop(engine_id, None)
        if request and self.writer:
            self.writer.counts(Outcome.ABORTED, request.ref, request.prompt, sent, request.cached, now())

    def cached(self, engine_id: str) -> int | None:
        """Prompt tokens that the prefix cache spared a request; None while nobody asked for records."""
        request = self._requests.get(engine_id)
        return request.cached if request else None

    def _added(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Into the scheduler's queue: for the first time, or again because it was evicted."""
        request = self._requests.get(args[1].request_id)
        if request is None or self.writer is None:
            return
        if not request.added:
            request.added = True
            self.writer.span(codes.CORE_ADD, request.ref, request.arrived_ns, end)
            return
        request.evicted, request.seen = True, False
        self.preemptions = (self.preemptions or 0) + 1
        self._evictions.append(request.ref)
        self.writer.span(codes.PREEMPT, request.ref, start, start)

    # -- a step

    def _looped(self, *_: Any) -> None:
        self._loop_ns = self._loop_ns or now()

    def _scheduled(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Called once a step, and again when requests had to be evicted first."""
        scheduler, batch = args[0], result[0]
        if self.writer is None:  # asynchronous, its update comes with the next step, which may be recorded
            if batch:
                self._open.append(None)
            return
        self._schedule_ns = self._schedule_ns or start
        if batch is None:
            return
        step, self._schedule_ns = _Step(self.steps + 1, self._schedule_ns), 0
        if not batch:
            return
        self.steps = step.seq
        step.schedule_end_ns = end
        step.flags = int(StepFlag.ASYNC) if self._open else 0
        step.running, step.waiting = len(scheduler.active_requests), len(scheduler.waiting_requests)
        step.entries = [(ref, 0, 0, 0, _PREEMPTED) for ref in self._evictions]
        self._evictions.clear()
        step.entries += [self._entry(item) for item in batch]
        self._step = step
        self._open.append(step)
        if self._device:
            self._device.begin(step.seq, self._compute)

    def _entry(self, item: Any) -> tuple[int, int, int, int, int]:
        """What a request does in a step: (ref, tokens, computed before, cached, flags).

        What it has computed when it is scheduled for the first time (or again), it has from the prefix cache.
        """
        state = item.state
        before = state.position_offset
        request = self._requests.get(state.request_id)
        if request is None:
            return 0, item.query_length, before, 0, 0
        if before >= request.prompt and not request.evicted:
            return request.ref, item.query_length, before, 0, 0
        flags = _PROMPT | (_RESUMED if request.evicted else 0)
        cached = 0
        if not request.seen:
            request.seen = True
            cached = before
            if not request.evicted:  # else it had computed that itself before
                request.cached = before
        if item.has_new_token:
            flags |= _LAST
            request.evicted = False
        return request.ref, item.query_length, before, cached, flags

    def _computing(self, runner: Any, *_: Any) -> Callable[[], None]:
        self._sampling_ns = 0
        self._forward_ns = now()
        if self._step and self._device:
            self._device.mark(FORWARD, self._compute)
        return functools.partial(self._computed, runner)

    def _sampling(self, *_: Any) -> None:
        """Called twice where logits are processed first, and while a graph is captured, which takes no events."""
        if self._sampling_ns:
            return
        self._sampling_ns = now()
        if self._device and not self._capturing():
            self._device.mark(FORWARD_END, self._compute)

    def _computed(self, runner: Any) -> None:
        end = now()
        step, writer = self._step, self.writer
        if step is None or writer is None:
            return
        self._step = None
        forward, sampling = self._forward_ns, self._sampling_ns or end
        if self._device:  # of a graph that is replayed this ends the forward too: it holds the sampling
            self._device.mark(SAMPLED, self._compute)
        inputs = runner.inputs_and_outputs
        graph = int(runner.use_cuda_graph_decode if inputs.use_block_table else runner.use_cuda_graph_varlen)
        step.padded = inputs.num_q_tokens if runner.pad_inputs and hasattr(inputs, "num_q_tokens") else 0
        seq, scheduled = step.seq, step.schedule_end_ns
        step.spans = [
            *span(codes.SCHEDULE, seq, step.schedule_ns, scheduled),
            *span(codes.INPUT_PREP, seq, scheduled, forward, step.padded | graph << 31),
            *span(codes.HOST_LAUNCH if self._device else codes.FORWARD, seq, forward, sampling),
        ]
        if sampling < end:
            step.spans += span(codes.SAMPLING, seq, sampling, end)

    def _copying(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Asynchronous: the copy of the tokens has been put on its stream. Synchronous: the host has waited for it."""
        if self._device and self._copies is not None:
            self._device.mark(COPIED, self._copies)

    # -- the way out

    def _updating(self, *_: Any) -> Callable[[], None]:
        self._update_ns = now()
        self._put_ns = 0
        return self._updated

    @_guarded("output", "decode")
    def emitting(self, start_ns: int, emitted: Sequence[tuple[str, int]]) -> None:
        """The step's outputs are about to be sent."""
        if self.writer is None or not self._open or (step := self._open[0]) is None:
            return
        self._put_ns = step.put_ns = start_ns
        requests = self._requests
        step.emitted = [(requests[name].ref, count) for name, count in emitted if count and name in requests]

    @_guarded("output")
    def emitted(self, start_ns: int, over: Sequence[tuple[str, str, int]]) -> None:
        """They are sent. ``over``: the requests that ended with them, why, and with how many tokens."""
        end = now()
        writer = self.writer
        if writer is None:
            return
        if self._open and (step := self._open[0]) is not None:
            step.spans += span(codes.OUTPUT_PUT, step.seq, start_ns, end)
        for name, reason, tokens in over:
            request = self._requests.pop(name, None)
            if request:
                writer.counts(_OUTCOMES[reason], request.ref, request.prompt, tokens, request.cached, end)

    def _updated(self) -> None:
        """An iteration is over; the next one starts where it ends, unless the loop sleeps in between."""
        step = self._open.popleft() if self._open else None
        if self.writer is None:
            return
        over = now()
        for other in self._open:
            if other is not None:
                other.spans += span(codes.LOOP, other.seq, self._loop_ns, over)
        if step is not None:
            step.spans += span(codes.UPDATE, step.seq, self._update_ns, self._put_ns or over)
            step.spans += span(codes.LOOP, step.seq, self._loop_ns, over)
            self._write(step)
        self._loop_ns = over
        self._woken_ns = 0

    def _write(self, step: _Step) -> None:
        """All that is recorded of a step, at once and at its end: see ``gapmeter_probe.appender.span``."""
        writer = self.writer
        assert writer is not None
        writer.step(
            step.flags, step.seq, step.entries, running=step.running, waiting=step.waiting,
            free_blocks=self.free_blocks, schedule_ns=step.schedule_ns, padded=step.padded,
        )  # fmt: skip
        if step.put_ns:
            writer.emit(step.seq, step.put_ns, step.emitted)
        writer.spans(step.spans)
