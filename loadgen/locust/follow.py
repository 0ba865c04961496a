"""What a page that stands beside a run knows of it: read from the run's folder, by whoever is not the issuer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hdrh.histogram import HdrHistogram

from gapmeter.loadgen.locust.figures import Row, live_rows, result_rows
from gapmeter.loadgen.locust.totals import METRICS, Totals
from gapmeter.records import Outcome, RunFolder
from gapmeter.records.follow import ReportFollower
from gapmeter.records.histograms import new_histogram
from gapmeter.records.request import RequestRecord
from gapmeter.records.tail import RecordTail

Tell = Callable[[float | None, str], None]  # E2E in ms, None for a failure; of which class the failure was


class Followed:
    """One run. ``look`` tells of each request that has ended since the last one.

    Of a run whose workers are elsewhere it reads what their histograms have gained since the last report.
    """

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell = RunFolder(folder), tell
        self._tails: dict[Path, RecordTail] = {}
        self._tally = Totals(self._ended)
        self._reports: _Reports | None = None
        self.rows: list[Row] = live_rows(self._tally.histograms)
        self.in_flight = 0
        self.over = False

    def look(self) -> None:
        """Read on. Cheap when nothing has happened."""
        if self.over:
            return
        if (self._folder.requests / "master.json").exists():
            self._reports = self._reports or _Reports(self._folder.requests / "workers.json", self._tell)
            self._reports.look()
            self.in_flight, histograms = self._reports.in_flight, self._reports.histograms
        else:
            self._read_records()
            self.in_flight, histograms = self._tally.issued - self._tally.finished, self._tally.histograms
        summary = _read(self._folder.summary)
        self.over = summary is not None
        self.rows = result_rows(summary) if summary is not None else live_rows(histograms)

    def _read_records(self) -> None:
        for path in self._folder.record_files(self._folder.requests):
            self._tally.take(self._tails.setdefault(path, RecordTail(path)).poll())

    def _ended(self, record: RequestRecord, e2e_ns: int | None) -> None:
        why = "no whole answer" if record.outcome is Outcome.OK else record.outcome.name.lower()
        self._tell(None if e2e_ns is None else e2e_ns / 1e6, why)


class _Reports:
    """Workers' histograms, as their master adds them up; each new count in that of E2E is a request that ended."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self._follower, self._tell = ReportFollower(path, 0), tell
        self._known: dict[int, int] = {}
        self._failed = 0
        self.histograms: Mapping[str, HdrHistogram] = {name: new_histogram() for name in METRICS}

    @property
    def in_flight(self) -> int:
        return self._follower.in_flight

    def look(self) -> None:
        self._follower.poll()
        if not self._follower.histograms:
            return
        self.histograms, failed = self._follower.histograms, self._follower.failed.total()
        counts = _counts(self.histograms["e2e"])
        for value, count in counts.items():
            for _ in range(count - self._known.get(value, 0)):
                self._tell(value / 1e6, "")
        for _ in range(failed - self._failed):
            self._tell(None, "failed")
        self._known, self._failed = counts, failed


def _counts(histogram: HdrHistogram) -> dict[int, int]:
    return {item.value_iterated_to: item.count_added_in_this_iter_step for item in histogram.get_recorded_iterator()}


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file that is replaced in one step; None while it is not there."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value
