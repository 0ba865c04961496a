"""What a generator process has seen so far: counts, and histograms that a master adds up without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from hdrh.histogram import HdrHistogram

from gapmeter.records import Outcome
from gapmeter.records.histograms import new_histogram
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.records.stream import outcome_of, parse_answer

METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Report:
    """Totals as a worker sends them. They are cumulative: a report that is lost costs nothing, the next holds it all.

    Each has a higher ``sequence`` than those before it. ``histograms``: encoded, by metric.
    """

    sequence: int = 0
    issued: int = 0
    finished: int = 0
    failed: int = 0
    histograms: dict[str, str] = field(default_factory=dict)


class Totals:
    """One generator process's, over everything so far."""

    def __init__(self, ended: Callable[[RequestRecord, int | None], None] | None = None) -> None:
        """``ended`` is told each request that ended: its record, and its E2E in ns, None where it failed."""
        self.issued = self.finished = self.failed = self._reports = 0
        self.histograms = {name: new_histogram() for name in METRICS}
        self._ended = ended

    def take(self, records: Iterable[tuple[int, RequestRecord]]) -> None:
        """Count records as a ``RecordTail`` gives them."""
        for code, record in records:
            if code == ISSUED:
                self.issued += 1
            elif record.outcome is not Outcome.ABANDONED:  # never issued
                self._finished(record)

    def report(self) -> Report:
        self._reports += 1
        encoded = {name: histogram.encode().decode() for name, histogram in self.histograms.items()}
        return Report(self._reports, self.issued, self.finished, self.failed, encoded)

    def _finished(self, record: RequestRecord) -> None:
        self.finished += 1
        answer = parse_answer(record)
        good = outcome_of(record, answer) is Outcome.OK
        if self._ended is not None:
            self._ended(record, int(answer.token_ns[-1]) - record.due_ns if good else None)
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


def merged(name: str, reports: Iterable[Report]) -> HdrHistogram:
    """One metric over all workers, in ns: histograms are added, percentiles never."""
    total = new_histogram()
    for report in reports:
        if name in report.histograms:
            total.decode_and_add(report.histograms[name])
    return total
