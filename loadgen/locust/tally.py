"""What a worker tells while it runs: counts, and cumulative histograms that the master adds up without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram

from gapmeter.records import Outcome
from gapmeter.records.histograms import new_histogram
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.records.stream import outcome_of, parse_answer

METRICS = ("ttft", "itl", "tpot", "e2e")


class Tally:
    """One worker's, over everything so far. A report that is lost costs nothing: the next one holds it all."""

    def __init__(self, told: Callable[[RequestRecord, int | None], None] | None = None) -> None:
        """``told`` of each request that ended: its record, and its E2E in ns, None where it failed."""
        self.issued = self.finished = self.failed = self.sequence = 0
        self.histograms = {name: new_histogram() for name in METRICS}
        self._told = told

    def take(self, records: Iterable[tuple[int, RequestRecord]]) -> None:
        """Count records as a ``RecordTail`` gives them."""
        for code, record in records:
            if code == ISSUED:
                self.issued += 1
            else:
                self._finished(record)

    def report(self) -> dict[str, Any]:
        """A message's payload; each has a higher ``sequence`` than those before."""
        self.sequence += 1
        encoded = {name: histogram.encode() for name, histogram in self.histograms.items()}
        counts = {"issued": self.issued, "finished": self.finished, "failed": self.failed}
        return {"sequence": self.sequence, **counts, "histograms": encoded}

    def _finished(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.ABANDONED:  # never issued
            return
        self.finished += 1
        answer = parse_answer(record)
        good = outcome_of(record, answer) is Outcome.OK
        if self._told is not None:
            self._told(record, int(answer.token_ns[-1]) - record.due_ns if good else None)
        if not good:
            self.failed += 1
            return
        first, last = int(answer.token_ns[0]), int(answer.token_ns[-1])
        self.histograms["ttft"].record_value(first - record.due_ns)
        self.histograms["e2e"].record_value(last - record.due_ns)
        if answer.output_tokens and answer.output_tokens > 1 and last > first:
            self.histograms["tpot"].record_value((last - first) // (answer.output_tokens - 1))
        for gap in np.diff(np.unique(answer.chunk_ns)).tolist():
            self.histograms["itl"].record_value(gap)


class Reports:
    """The newest report of each worker; an older one that comes later is not taken."""

    def __init__(self) -> None:
        self._newest: dict[int, dict[str, Any]] = {}

    def take(self, worker: int, report: dict[str, Any]) -> None:
        if report["sequence"] > self._newest.get(worker, {"sequence": 0})["sequence"]:
            self._newest[worker] = report

    def of(self, worker: int) -> dict[str, Any]:
        return self._newest.get(worker, {"sequence": 0, "issued": 0, "finished": 0, "failed": 0, "histograms": {}})

    def merged(self, name: str) -> HdrHistogram:
        """One metric over all workers, in ns: histograms are added, percentiles never."""
        total = new_histogram()
        for report in self._newest.values():
            total.decode_and_add(report["histograms"][name])
        return total
