"""An analysed run: its folder, read once into types and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.requests.metrics import final, issued
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.run_figures import RunTables
from gapmeter.analysis.tables import table_in
from gapmeter.records import RunFolder


@dataclass(frozen=True)
class ReportedRun:
    """Frames have the columns that docs/exports.md lists; without a probe some are empty.

    ``tables`` are what figures are made of.
    """

    folder: RunFolder
    result: RunResult
    manifest: Manifest
    requests: pd.DataFrame
    ledger: pd.DataFrame
    steps: pd.DataFrame
    timeline: pd.DataFrame
    tables: RunTables

    @classmethod
    def read(
        cls, folder: RunFolder, tables: RunTables | None = None, *, timeline_columns: Sequence[str] | None = None
    ) -> ReportedRun:
        """Raises FileNotFoundError when the folder has not been analysed, NotReadable when its JSON is not ours.

        ``tables``: where analysis has made them. ``timeline_columns``: those that are needed of it, all if None: it has
        a thousand rows a request.
        """
        requests = tables.requests if tables is not None else table_in(folder.path, "requests")
        ledger, steps = (table_in(folder.path, name) for name in ("ledger", "steps"))
        texts = ["request_id", "stage", "kind"]  # of which there are few different ones
        timeline = table_in(folder.path, "timeline", columns=timeline_columns, read_dictionary=texts)
        result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
        tables = tables or RunTables(requests, ledger)
        return cls(folder, result, manifest, requests, ledger, steps, timeline, tables)

    @property
    def origin_ns(self) -> int:
        """The earliest due time: second 0 of every time axis."""
        return self.tables.origin_ns

    @property
    def issued(self) -> int:
        """How many requests were asked, whatever attempts each took."""
        return int(issued(final(self.requests)).sum())

    @property
    def engine_of_step(self) -> Ints:
        """Each step's engine, from 0: steps are counted on from one engine to the next, which begins earlier."""
        at = self.steps["schedule_ns"].to_numpy()
        return np.cumsum(np.diff(at, prepend=at[:1]) < 0)

    def of_event(self, event: str) -> pd.DataFrame:
        """The ledgers to one event (first_token or last_token), a row a request."""
        return self.ledger[self.ledger["event"] == event] if len(self.ledger) else self.ledger


def whole(value: Any) -> int | None:
    """A cell of a column of whole numbers, of which some are unknown."""
    return None if pd.isna(value) else int(value)
