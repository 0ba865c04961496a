"""What the engine's loop records at every step: what was scheduled, what came of it, and when all of that was.

``Steps`` of ``_native.c`` does the same, where that was built: this is what runs at each step however busy the server
is, right behind a forward that has taken the processor's caches for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gapmeter_probe import codes
from gapmeter_probe.appender import Stamps, span
from gapmeter_probe.records import EntryFlag, StepFlag
from gapmeter_probe.writer import RecordWriter

SEQ = "gapmeter_seq"  # the attribute that carries a step's number
# Where calls leave their times: start and end; of an encoding, the identity of what was encoded, too.
LOOK, STEP, PUT, ENCODE, EXECUTED = 0, 2, 4, 6, 9  # the last is the step that was executed last
_LEFT_OVER = 4096  # engine outputs that were never sent; forgotten beyond this many
_MOST_SPANS = 32  # of an iteration; there are more only where vLLM runs without its loop
_AHEAD, _EMPTY, _PREEMPTED = int(StepFlag.ASYNC), int(StepFlag.EMPTY), int(EntryFlag.PREEMPTED)

Entry = tuple[int, int, int, int, int]


class Steps:
    """The engine's thread calls all but ``sent``, which the sending thread does.

    ``requests``: engine id -> (ref, prompt tokens); ``departed``: refs of requests freed since the last update;
    ``evicted``: ids of requests that are not yet where they were before their eviction; ``evictions``: refs evicted by
    the call of schedule() in progress; ``prompt_entry(id, tokens, before, new)`` gives the entry of one that computes
    prompt tokens, or again those of before its eviction. Nothing is recorded before ``writer`` is set; ``blocks`` has
    the KV cache's ``num_free_blocks``, and ``woken_ns`` is when a message ended the engine's idleness.
    """

    def __init__(
        self, requests: dict[str, tuple[int, int]], departed: dict[str, int], evicted: set[str], evictions: list[int],
        prompt_entry: Callable[[str, int, int, bool], Entry], stamps: Stamps,
    ) -> None:  # fmt: skip
        self.writer: RecordWriter | None = None
        self.scheduler: Any = None
        self.blocks: Any = None
        self.woken_ns = 0
        self._requests, self._departed, self._evicted, self._evictions = requests, departed, evicted, evictions
        self._prompt_entry, self._stamps = prompt_entry, stamps
        self._seq = self._updated = self._looped_ns = 0
        self._putting = False  # this iteration made outputs
        self._loop_steps: dict[int, None] = {}
        self._spans: list[int] = []  # of this iteration, written at its end
        self._leaving: dict[int, tuple[int, int]] = {}  # id of engine outputs -> their step, and when they were ready

    def scheduled(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Scheduler.schedule has returned."""
        if not self.writer:
            return
        self._seq += 1
        seq = self._seq
        setattr(result, SEQ, seq)
        self._loop_steps[seq] = None
        flags = (0 if result.total_num_scheduled_tokens else _EMPTY) | (_AHEAD if seq - 1 > self._updated else 0)
        scheduler = self.scheduler
        self.writer.step(
            flags, seq, self._entries(result),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ())),
            free_blocks=self.blocks.num_free_blocks,
            schedule_ns=start,
        )  # fmt: skip
        self._keep(codes.SCHEDULE, seq, start, end)

    def _keep(self, code: int, seq: int, start: int, end: int) -> None:
        if len(self._spans) == 8 * _MOST_SPANS and self.writer:
            self.writer.spans(self._spans)
            self._spans.clear()
            self._loop_steps.clear()
        self._spans += span(code, seq, start, end)

    def _entries(self, output: Any) -> list[Entry]:
        tokens, requests, evicted = output.num_scheduled_tokens, self._requests, self._evicted
        entries: list[Entry] = [(ref, 0, 0, 0, _PREEMPTED) for ref in self._evictions]
        self._evictions.clear()
        for new in output.scheduled_new_reqs:
            entries.append(self._prompt_entry(new.req_id, tokens[new.req_id], new.num_computed_tokens, True))
        running = output.scheduled_cached_reqs
        for engine_id, before in zip(running.req_ids, running.num_computed_tokens, strict=True):
            ref, prompt = requests[engine_id]
            if before >= prompt and engine_id not in evicted:
                entries.append((ref, tokens[engine_id], before, 0, 0))
            else:
                entries.append(self._prompt_entry(engine_id, tokens[engine_id], before, False))
        return entries

    def updated(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Scheduler.update_from_output has returned: its outputs are ready to be sent."""
        writer, seq = self.writer, getattr(args[1], SEQ, 0)
        if not writer or not seq:
            return
        self._updated, self._putting = seq, bool(result)
        self._loop_steps[seq] = None
        if len(self._leaving) > _LEFT_OVER:
            self._leaving.clear()
        emitted = []
        for outputs in result.values():
            self._leaving[id(outputs)] = seq, end
            for output in outputs.outputs:
                if output.new_token_ids:
                    known = self._requests.get(output.request_id)
                    ref = known[0] if known else self._departed[output.request_id]
                    emitted.append((ref, len(output.new_token_ids)))
        self._departed.clear()
        writer.emit(seq, end, emitted)
        self._keep(codes.UPDATE, seq, start, end)

    def looped(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """An iteration is over. It started where the last one ended, or when the first message ended the idleness."""
        stamps, spans = self._stamps, self._spans
        if self.writer:
            if self._putting:
                self._keep(codes.OUTPUT_PUT, self._updated, stamps[STEP + 1], stamps[PUT])
            begun = self._looped_ns or self.woken_ns or stamps[LOOK + 1]
            for seq in self._loop_steps:
                spans += span(codes.LOOP, seq, begun, end)
            self.writer.spans(spans)
        spans.clear()
        self._loop_steps.clear()
        self.woken_ns, self._putting = 0, False
        self._looped_ns = end if self.scheduler.running or args[0].has_work() else 0

    def sent(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """A message was sent, right after it was encoded."""
        stamps = self._stamps
        seq, ready = self._leaving.pop(stamps[ENCODE + 2], (0, 0))
        if self.writer and seq:
            self.writer.span(codes.OUTPUT_SEND, seq, stamps[ENCODE], end, 0, ready)
