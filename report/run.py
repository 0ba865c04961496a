"""What the report is made of: a run's folder, read once into frames and plain dictionaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gapmeter.analysis.provenance import Provenance
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column
from gapmeter.records import RunFolder
from gapmeter.report import bridge


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Frames have the columns that docs/exports.md lists; without a probe some are empty."""

    folder: RunFolder
    summary: dict[str, Any]
    manifest: dict[str, Any]
    requests: pd.DataFrame
    ledger: pd.DataFrame
    steps: pd.DataFrame
    timeline: pd.DataFrame

    @property
    def provenance(self) -> Provenance:
        """What every picture and table of this run says of itself."""
        return bridge.provenance(self.summary)

    @property
    def device(self) -> str:
        """What computed the forwards: GPU or CPU."""
        return str(self.manifest.get("device", "GPU"))

    @property
    def stamp(self) -> str | None:
        """What is written across every picture: INVALID, or nothing."""
        return self.provenance.stamp

    @property
    def origin_ns(self) -> int:
        """The earliest due time: second 0 of every time axis."""
        return int(self.requests["due_ns"].min()) if len(self.requests) else 0

    def of_event(self, event: str) -> pd.DataFrame:
        """The ledgers to one event (first_token or last_token), a row a request."""
        return self.ledger[self.ledger["event"] == event] if len(self.ledger) else self.ledger


def read_run(folder: RunFolder) -> Run:
    """Read what the report needs.

    Raises FileNotFoundError when the folder has not been analysed, ValueError when its JSON is broken.
    """
    requests = _frame(folder.path / "requests.parquet")
    return Run(
        folder=folder,
        summary=bridge.read_run(folder.path),
        manifest=folder.read_manifest(),
        requests=requests,
        ledger=_frame(folder.path / "ledger.parquet"),
        steps=_frame(folder.path / "steps.parquet"),
        timeline=_frame(folder.path / "timeline.parquet"),
    )


def _frame(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


def stage_columns(ledger: pd.DataFrame) -> dict[str, str]:
    """Stage name to column, in the order of the timeline, the residual last."""
    names = [*(stage.name for stage in STAGES), UNEXPLAINED]
    return {name: column(name) for name in names if column(name) in ledger.columns}
