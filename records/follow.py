"""A run while it goes on: counts, rates and percentiles so far, from its record files or its workers' reports."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram

from gapmeter.records import Outcome
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.records.stream import outcome_of, parse_answer
from gapmeter.records.tail import RecordTail

RATE_WINDOW_NS = 5_000_000_000
_REPORTS_WINDOW_NS = 10_000_000_000  # workers report every three seconds
_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has ended, in ms from when it was due; None for what never came. ``gaps_ms``: between tokens."""

    due_ns: int
    outcome: Outcome
    ttft_ms: float | None
    e2e_ms: float | None
    gaps_ms: tuple[float, ...]


class RecordFollower:
    """Follows the generators' record files: rates of the last five seconds, percentiles of the last thousand requests.

    ``whole``: read answers to their last token, for gaps and E2E, instead of the first one.
    """

    def __init__(self, paths: Iterable[Path], t0_ns: int, *, whole: bool = False) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._t0, self._whole = t0_ns, whole
        self._sent: deque[int] = deque()
        self._ended: deque[int] = deque()
        self.recent: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT * (16 if name == "itl" else 1)) for name in ("ttft", "itl", "e2e", "lag")
        }
        self.failed: Counter[str] = Counter()
        self.issued = self.done = 0

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def poll(self) -> list[Answered]:
        """Read what has been written since the last call; the requests that have ended in it."""
        return [
            answered for tail in self._tails for code, record in tail.poll() for answered in self._take(code, record)
        ]

    def sent_per_s(self, now_ns: int) -> float:
        """Requests sent a second, over the last five."""
        return self._rate(self._sent, now_ns)

    def done_per_s(self, now_ns: int) -> float:
        """Requests ended a second, over the last five."""
        return self._rate(self._ended, now_ns)

    def percentile(self, name: str, percentile: float) -> float | None:
        """Of the last requests' ttft, e2e, lag (ms) or of their gaps (itl); None when there are none yet."""
        values = sorted(self.recent[name])
        return values[min(len(values) - 1, int(len(values) * percentile / 100))] if values else None

    def _take(self, code: int, record: RequestRecord) -> Iterator[Answered]:
        if code == ISSUED:
            self.issued += 1
            self._sent.append(record.sent_ns or record.due_ns)
            return
        if record.outcome is Outcome.ABANDONED:  # never issued
            return
        self.done += 1
        self._ended.append(record.end_ns)
        answer = parse_answer(record, first_token_only=not self._whole)
        outcome = outcome_of(record, answer)
        if outcome is not Outcome.OK:
            self.failed[outcome.name.lower()] += 1
            yield Answered(record.due_ns, outcome, None, None, ())
            return
        connecting_ns = record.connect_end_ns - record.connect_start_ns
        self.recent["lag"].append((record.sent_ns - record.due_ns - connecting_ns) / 1e6)
        waits_ms = (np.unique(answer.token_ns) - record.due_ns) / 1e6  # tokens that came together are one arrival
        ttft_ms, e2e_ms, gaps_ms = float(waits_ms[0]), float(waits_ms[-1]), tuple(np.diff(waits_ms).tolist())
        self.recent["ttft"].append(ttft_ms)
        if self._whole:
            self.recent["e2e"].append(e2e_ms)
            self.recent["itl"].extend(gaps_ms)
        yield Answered(record.due_ns, outcome, ttft_ms, e2e_ms, gaps_ms)

    def _rate(self, stamps: deque[int], now_ns: int) -> float:
        """Stamps a second over the last five seconds, or since the start; older ones are dropped."""
        since_ns = max(now_ns - RATE_WINDOW_NS, self._t0)
        while stamps and stamps[0] < since_ns:
            stamps.popleft()
        return len(stamps) / max((now_ns - since_ns) / 1e9, 1e-9)


class ReportFollower:
    """Follows what the master of a run on several machines keeps: its workers' counts, their histograms added up.

    Their record files come at the end. Everything is as of each worker's last report.
    """

    def __init__(self, report: Path, t0_ns: int) -> None:
        self._report = report
        self._counts: deque[tuple[int, int, int]] = deque([(t0_ns, 0, 0)])  # when, issued, done
        self.histograms: dict[str, HdrHistogram] = {}  # ns
        self.issued = self.done = 0
        self.failed: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def poll(self) -> list[Answered]:
        """Read the last report; single requests are not in it."""
        try:
            report = json.loads(self._report.read_text())  # replaced in one step, so never half of one
        except FileNotFoundError:
            return []
        workers = report["workers"]
        self.issued, self.done = (sum(worker[key] for worker in workers) for key in ("issued", "finished"))
        self.failed = Counter({"failed": sum(worker["failed"] for worker in workers)})
        self.histograms = {name: HdrHistogram.decode(text) for name, text in report["histograms"].items()}
        now_ns = time.monotonic_ns()
        self._counts.append((now_ns, self.issued, self.done))
        while len(self._counts) > 2 and self._counts[0][0] < now_ns - _REPORTS_WINDOW_NS:
            self._counts.popleft()
        return []

    def sent_per_s(self, now_ns: int) -> float:
        """Between the oldest and the newest report of the last ten seconds."""
        return self._rate(1, now_ns)

    def done_per_s(self, now_ns: int) -> float:
        """As ``sent_per_s``."""
        return self._rate(2, now_ns)

    def percentile(self, name: str, percentile: float) -> float | None:
        """In ms, over all answers so far; None for what workers do not report."""
        histogram = self.histograms.get(name)
        if histogram is None or not histogram.get_total_count():
            return None
        return float(histogram.get_value_at_percentile(percentile)) / 1e6

    def _rate(self, place: int, now_ns: int) -> float:
        first, last = self._counts[0], self._counts[-1]
        return float(last[place] - first[place]) / max((now_ns - first[0]) / 1e9, 1e-9)


Follower = RecordFollower | ReportFollower


def phase(now_ns: int, t0_ns: int, warmup_ns: int, end_ns: int) -> str:
    """warm-up, load, or drain; ``end_ns``: when the last request is due after ``t0_ns``, 0 where that is not known."""
    if now_ns - t0_ns < warmup_ns:
        return "warm-up"
    return "drain" if end_ns and now_ns > t0_ns + end_ns else "load"
