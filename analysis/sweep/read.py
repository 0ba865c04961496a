"""The runs of a sweep's points, read from their folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.requests.figures import block_rates, ledgers_by_metric
from gapmeter.analysis.requests.metrics import measured_requests, stamps_ns
from gapmeter.analysis.results import Manifest, NotReadable, RunResult
from gapmeter.analysis.results.run import INVALID
from gapmeter.analysis.results.sweep import FailedRun
from gapmeter.analysis.stats.series import LONGEST_PAUSE_NS
from gapmeter.analysis.tables import read_table, table_in


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run of a point that has no figures. ``exit_code``: what it ended with by itself, None where it did not."""

    folder: Path
    reason: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a point that has."""

    folder: Path
    result: RunResult
    manifest: Manifest

    @property
    def valid(self) -> bool:
        return self.result.verdict != INVALID


@dataclass(frozen=True, slots=True)
class Frames:
    """What several runs of one point measured, one after the other; rows of requests that count only.

    ``measured``: with ``later_ns``, which is to be added to a run's stamps so that it follows the one before.
    ``ledgers`` by metric (ttft, e2e, itl), in the order of time; ``steps`` those of the engine while requests were
    measured; ``rates``: output tokens a second in blocks of time, None where unknown.
    """

    measured: pd.DataFrame
    ledgers: Mapping[str, pd.DataFrame]
    steps: pd.DataFrame
    rates: Floats | None


def read_runs(point: Path) -> list[MeasuredRun | LostRun]:
    """The runs in a point's folder, in the order of their repeats."""
    runs: list[MeasuredRun | LostRun] = []
    folders = [path for path in point.glob("r*") if path.name[1:].isdecimal()]
    for path in sorted(folders, key=lambda path: int(path.name[1:])):
        try:
            if (path / FailedRun.FILE).exists():
                failed = FailedRun.read(path)
                runs.append(LostRun(path, failed.reason, failed.exit_code))
                continue
            runs.append(MeasuredRun(path, RunResult.read(path), Manifest.read(path)))
        except NotReadable as error:
            runs.append(LostRun(path, str(error)))
        except OSError:
            runs.append(LostRun(path, "it was interrupted before it was analysed"))
    return runs


def read_frames(runs: list[MeasuredRun]) -> Frames:
    """The frames of these runs, put one after the other."""
    parts = [_frames(run) for run in runs]
    rates = [part.rates for part in parts if part.rates is not None]
    return Frames(
        _joined(list(_in_turn([part.measured for part in parts]))),
        {metric: _joined([part.ledgers[metric] for part in parts]) for metric in parts[0].ledgers},
        _joined([part.steps for part in parts]),
        np.concatenate(rates) if rates and len(rates) == len(parts) else None,
    )


def _in_turn(runs: Sequence[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Each with ``later_ns``: 0, but where it begins before the former has ended, on a clock that began at 0 again."""
    ended = 0
    for measured in runs:
        later = 0
        if len(measured):
            begun = int(measured["due_ns"].min())
            later = 0 if begun >= ended else ended - begun + LONGEST_PAUSE_NS
            ended = later + max(begun, int(stamps_ns(measured, "end_ns").max()))
        yield measured.assign(later_ns=later)


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True) if filled else tables[0]


def _frames(run: MeasuredRun) -> Frames:
    requests = read_table(run.folder / "requests.parquet")
    measured = measured_requests(requests)
    names = () if run.result.ledger.refused else ("ledger", "gaps")
    tables = {name: table_in(run.folder, name) for name in names}
    ledgers = {"itl": pd.DataFrame()} | ledgers_by_metric(tables.get("ledger"), tables.get("gaps"), measured)
    if len(ledgers["itl"]):
        ledgers["itl"] = ledgers["itl"].sort_values("end_ns", kind="stable")
    steps = table_in(run.folder, "steps")
    if len(steps) and len(measured):
        since, until = measured["due_ns"].min(), measured["last_token_ns"].max()
        steps = steps[(steps["schedule_ns"] >= since) & (steps["schedule_ns"] <= until)]
    return Frames(measured, ledgers, steps, block_rates(requests))
