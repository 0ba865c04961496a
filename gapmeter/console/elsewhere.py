"""Progress of a run whose workers are elsewhere, from what their master keeps: counts, and histograms added up."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from pathlib import Path

from hdrh.histogram import HdrHistogram

_WINDOW_NS = 10_000_000_000  # workers report every three seconds


class WorkersFollower:
    """What ``Watch`` asks of a follower. Everything is as of each worker's last report."""

    def __init__(self, report: Path, t0_ns: int) -> None:
        self._report = report
        self._seen: deque[tuple[int, int, int]] = deque([(t0_ns, 0, 0)])  # when, issued, done
        self._histograms: dict[str, HdrHistogram] = {}
        self.issued = self.done = 0
        self.failed: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def poll(self) -> None:
        """Read the last report, if there is a new one."""
        try:
            told = json.loads(self._report.read_text())
        except FileNotFoundError:
            return
        workers = told["workers"]
        self.issued, self.done = (sum(worker[key] for worker in workers) for key in ("issued", "finished"))
        self.failed = Counter({"failed": sum(worker["failed"] for worker in workers)})
        self._histograms = {name: HdrHistogram.decode(text) for name, text in told["histograms"].items()}
        now = time.monotonic_ns()
        self._seen.append((now, self.issued, self.done))
        while len(self._seen) > 2 and self._seen[0][0] < now - _WINDOW_NS:
            self._seen.popleft()

    def sent_per_s(self, now_ns: int) -> float:
        """Between the oldest and the newest report of the last ten seconds."""
        return self._rate(1, now_ns)

    def done_per_s(self, now_ns: int) -> float:
        """As ``sent_per_s``."""
        return self._rate(2, now_ns)

    def percentile(self, metric: str, percentile: float) -> float | None:
        """In ms, over all answers so far; None for what workers do not report."""
        histogram = self._histograms.get(metric)
        if histogram is None or not histogram.get_total_count():
            return None
        return float(histogram.get_value_at_percentile(percentile)) / 1e6

    def _rate(self, place: int, now_ns: int) -> float:
        first, last = self._seen[0], self._seen[-1]
        return (last[place] - first[place]) / max((now_ns - first[0]) / 1e9, 1e-9)
