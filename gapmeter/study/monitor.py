"""A capacity trial while it runs: which requests count by now, what they say, whether that is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gapmeter.analysis.capacity.counts import count_all
from gapmeter.analysis.capacity.trial import Enough
from gapmeter.analysis.results.manifest import Slo
from gapmeter.analysis.tables import request_row
from gapmeter.records import Outcome
from gapmeter.records.request import FINISHED, RequestRecord


class TrialMonitor:
    """Asked some four times a second; judges only where ``looks`` says so: after so many requests that count.

    Those count that were due after the warm-up (``warmup_ns`` from the first due time) and before the oldest request
    that is still in flight: what is left out is left out by its time, never for being slow. An overloaded server's
    queue shows at once, since its answers come in the order of its queue. What is in flight when enough is known came
    later than what counts, and is given up. The last of ``looks`` is the trial's end, which is not judged here.
    ``ended``: the number of the look that ended it, from 1; ``from_ns``: those due from then on count.
    """

    def __init__(self, slos: Sequence[Slo], looks: Sequence[int], rate: float, warmup_ns: int, enough: Enough) -> None:
        self._slos, self._looks, self._rate, self._warmup_ns = slos, looks, rate, warmup_ns
        self._enough, self._next = enough, 0
        self.ended = len(looks)
        self.from_ns = 0
        self._read = 0
        self._due_ns: dict[int, int] = {}  # by request: when its first attempt was due
        self._in_flight: set[int] = set()
        self._done: dict[int, RequestRecord] = {}
        self._start_ns: int | None = None

    def is_enough(self, seen: Sequence[tuple[int, RequestRecord]]) -> bool:
        """A ``StopWhen``."""
        self._take(seen)
        if self._next >= len(self._looks) - 1 or self._start_ns is None:
            return False
        until_ns = min((self._due_ns[index] for index in self._in_flight), default=2**63)
        counted = [record for record in self._done.values() if self.from_ns <= record.due_ns < until_ns]
        if len(counted) < self._looks[self._next]:
            return False
        counted.sort(key=lambda record: record.due_ns)
        while self._next < len(self._looks) - 1 and self._looks[self._next] <= len(counted):
            at, self._next = self._next, self._next + 1
        table = pd.DataFrame([request_row(record, timeout_ns=0) for record in counted[: self._looks[at]]])
        if not self._enough(at, count_all(self._slos, table, self._rate)):
            return False
        self.ended = at + 1
        return True

    def _take(self, seen: Sequence[tuple[int, RequestRecord]]) -> None:
        for code, record in seen[self._read :]:
            if self._start_ns is None:
                self._start_ns = record.due_ns
                self.from_ns = record.due_ns + self._warmup_ns
            if record.outcome is Outcome.ABANDONED:  # never asked
                continue
            index, due_ns = record.index, self._due_ns.setdefault(record.index, record.due_ns)
            if code == FINISHED:
                self._in_flight.discard(index)
                self._done[index] = record if record.due_ns == due_ns else replace(record, due_ns=due_ns)
            else:
                self._in_flight.add(index)
                self._done.pop(index, None)  # asked again
        self._read = len(seen)
