"""What is known of each step of a trace's engines: arrays with an element a step."""

from __future__ import annotations

import functools
from functools import cached_property

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, distinct, places
from gapmeter.analysis.ledger.device_time import launch_waits
from gapmeter.analysis.ledger.trace import FIRST_PROCESS_CODE, FIRST_STEP_CODE, MISSING, Trace, filled
from gapmeter.records import Span
from gapmeter.records.reader import Table

WORKED = (Span.INPUT_PREP, Span.FORWARD, Span.SAMPLING, Span.DEVICE_STEP)  # of a step, who computes it is at these


class Steps:
    """The steps of all engines by number, ``seqs``; a step's place among these is its position.

    Every array has an element a step, in this order, and times are ns or MISSING. ``spans``: by what they time, their
    starts and ends. ``calls``: the same of calls that return before the executor's answer, to their return.
    ``computing``: forwards without what they waited for their launch. ``device_width``: how far what a device stamped
    may be off.
    """

    def __init__(self, trace: Trace) -> None:
        self.seqs = distinct(trace.steps["seq"].astype(np.int64))
        last = np.searchsorted(self.seqs, trace.engine_steps, side="right").tolist() or [len(self.seqs)]
        self.engines = list(zip([0, *last[:-1]], last, strict=True))  # each one's positions, from .. to
        codes = trace.step_spans["code"].astype(np.int16)
        self.stamped = frozenset(distinct(codes).tolist())
        self.spans, self.calls = dict[int, tuple[Ints, Ints]](), dict[int, tuple[Ints, Ints]]()
        for code in (code for code in Span if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE):
            rows = trace.step_spans[codes == code]
            self.spans[code] = self._joined(rows, rows["end"])
            if code in (Span.EXECUTE, Span.SAMPLE_CALL):
                self.calls[code] = self._joined(rows, np.minimum(rows["end"], rows["start"] + rows["n"]))
        stays = trace.step_spans[codes == Span.DEVICE_STEP]
        at = self.position(stays["step"])
        self.device_width = np.zeros(len(self.seqs), np.int64)
        np.maximum.at(self.device_width, at[at != MISSING], stays["n"][at != MISSING])
        waited, waits_ns = launch_waits(trace)
        at = self.position(waited)
        start, end = self.spans[Span.FORWARD]
        start = start.copy()
        start[at[at != MISSING]] += waits_ns[at != MISSING].astype(np.int64)
        self.computing = start, end

    def position(self, seq: Ints) -> Ints:
        """Of steps by their number, or MISSING."""
        return places(self.seqs, seq)

    def computed_ns(self, seq: Ints) -> Ints:
        """How long each step's forward lasted, without what it waited for its launch."""
        start, end = self.computing
        return (end - start)[np.searchsorted(self.seqs, seq)]

    def engine_of(self, position: Ints) -> Ints:
        """The place of each step's engine."""
        return np.searchsorted([begin for begin, _ in self.engines], position, side="right") - 1

    def first_of(self, place: int, times: Ints, at: Ints) -> Ints:
        """For each moment, an engine's first step whose time is then or later; behind its last where none is.

        ``times``: ``over``, or another that is in order within an engine.
        """
        begin, end = self.engines[place]
        return np.asarray(begin + np.searchsorted(times[begin:end], at))

    def first_beside(self, position: Ints, times: Ints, at: Ints) -> Ints:
        """``first_of`` for each moment in the engine of its own step; MISSING where it has none."""
        found = np.full(len(position), MISSING)
        for place, (begin, end) in enumerate(self.engines):
            mine = (position >= begin) & (position < end)
            found[mine] = self.first_of(place, times, at[mine])
        return found

    # What every block of events asks of the steps.

    @cached_property
    def made(self) -> Ints:
        """When each one's tokens were there.

        A device has them with their copy; of a step that it did not tell the times of, only the engine's update is
        known to come after.
        """
        spans = self.spans
        on_device = filled(spans[Span.DEVICE_COPY][1], spans[Span.DEVICE_SAMPLING][1])
        made = np.maximum(filled(on_device, spans[Span.FORWARD][1]), spans[Span.SAMPLING][1])
        made = np.where(self.untimed, np.maximum(made, spans[Span.UPDATE][0]), made)
        return filled(made, spans[Span.WORKER][1])

    @cached_property
    def untimed(self) -> Bools:
        """Which were put on a device that did not tell when it computed them."""
        launched, began = (self.spans[code][0] for code in (Span.HOST_LAUNCH, Span.FORWARD))
        return np.asarray((launched != MISSING) & (began == MISSING))

    @cached_property
    def over(self) -> Ints:
        """By when each and all before it of its engine had ended."""
        return self._so_far(self._ends)

    @cached_property
    def forwards_over(self) -> Ints:
        """By when the forwards of each and of all before it of its engine had ended."""
        return self._so_far(filled(self.spans[Span.FORWARD][1], self._ends))

    @cached_property
    def worked(self) -> Ints:
        """By when a worker, and its device, were done with each and all before it of its engine."""
        return self._so_far(functools.reduce(np.maximum, [self.spans[code][1] for code in WORKED]))

    @cached_property
    def begun(self) -> Ints:
        """When each or the first after it of its engine began to be scheduled."""
        return self._from_then_on(self.spans[Span.SCHEDULE][0])

    @cached_property
    def untouched(self) -> Ints:
        """Until when nothing of each, nor of any after it of its engine, had begun."""
        return functools.reduce(np.minimum, [self._from_then_on(start) for start, _ in self.spans.values()])

    @cached_property
    def _ends(self) -> Ints:
        return functools.reduce(np.maximum, [end for _, end in self.spans.values()])

    def _joined(self, rows: Table, ends: Ints) -> tuple[Ints, Ints]:
        """Start and end of each step's spans of one kind; several of one step are one."""
        if not len(rows):
            none = np.broadcast_to(np.int64(MISSING), len(self.seqs))
            return none, none
        at = self.position(rows["step"])
        known = at != MISSING
        start = np.full(len(self.seqs), np.iinfo(np.int64).max)
        end = np.full(len(self.seqs), MISSING)
        np.minimum.at(start, at[known], rows["start"][known])
        np.maximum.at(end, at[known], ends[known])
        start[end == MISSING] = MISSING
        return start, end

    def _so_far(self, ends: Ints) -> Ints:
        return np.concatenate([np.maximum.accumulate(ends[begin:end]) for begin, end in self.engines])

    def _from_then_on(self, starts: Ints) -> Ints:
        starts = filled(starts, np.iinfo(np.int64).max)
        return np.concatenate([np.minimum.accumulate(starts[begin:end][::-1])[::-1] for begin, end in self.engines])
