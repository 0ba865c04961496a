"""The runs of a sweep's points, read from their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.numbers import DASH, significant
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import measured_requests
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.stats.quantiles import Floats
from gapmeter.analysis.sweep.level import block_rates
from gapmeter.records import RunFolder
from gapmeter.report import bridge


@dataclass(frozen=True, slots=True)
class PointRun:
    """One run of a point. ``summary`` is None where there is none, and ``reason`` says why."""

    folder: Path
    summary: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    result: RunResult | None = None
    typed_manifest: Manifest | None = None
    reason: str = ""

    @property
    def valid(self) -> bool:
        return self.summary is not None and self.summary["verdict"] != "INVALID"


@dataclass(frozen=True, slots=True)
class Frames:
    """What several runs of one point measured, one after the other; rows of requests that count only.

    ``first``, ``last`` and ``gaps`` are ledgers to the first token, to the last, and of token gaps; ``steps`` those of
    the engine while requests were measured; ``rates``: output tokens a second in blocks of time, None where unknown.
    """

    measured: pd.DataFrame
    first: pd.DataFrame
    last: pd.DataFrame
    gaps: pd.DataFrame
    steps: pd.DataFrame
    rates: Floats | None


def read_runs(point: Path) -> list[PointRun]:
    """The runs in a point's folder, in the order of their repeats."""
    return [_read_run(path) for path in sorted(point.glob("r*"), key=lambda path: int(path.name[1:] or 0))]


def _read_run(path: Path) -> PointRun:
    folder = RunFolder(path)
    failed = path / "failed.json"
    if failed.exists():
        return PointRun(path, reason=str(json.loads(failed.read_text())["reason"]))
    try:
        return PointRun(path, bridge.read_run(path), folder.read_manifest(), RunResult.read(path), Manifest.read(path))
    except (OSError, ValueError):
        return PointRun(path, reason="it was interrupted before it was analysed")


def read_frames(runs: list[PointRun]) -> Frames:
    """The frames of these runs (which have summaries), put one after the other."""
    parts = [_frames(run) for run in runs]
    rates = [part.rates for part in parts if part.rates is not None]
    return Frames(
        _joined([part.measured for part in parts]), _joined([part.first for part in parts]),
        _joined([part.last for part in parts]), _joined([part.gaps for part in parts]),
        _joined([part.steps for part in parts]),
        np.concatenate(rates) if rates and len(rates) == len(parts) else None,
    )  # fmt: skip


def _frames(run: PointRun) -> Frames:
    requests = pd.read_parquet(run.folder / "requests.parquet")
    measured = measured_requests(requests)
    refused = bool(run.summary and run.summary["ledger"]["refused"])
    ledger = pd.DataFrame() if refused else _frame(run.folder / "ledger.parquet")
    gaps = pd.DataFrame() if refused else _frame(run.folder / "gaps.parquet")
    if len(gaps):
        gaps = gaps[gaps["request_id"].isin(measured["request_id"])].sort_values("end_ns", kind="stable")
    steps = _frame(run.folder / "steps.parquet")
    if len(steps) and len(measured):
        since, until = measured["due_ns"].min(), measured["last_token_ns"].max()
        steps = steps[(steps["schedule_ns"] >= since) & (steps["schedule_ns"] <= until)]
    return Frames(
        measured, fig.ledgers_of(ledger, measured, "first_token"), fig.ledgers_of(ledger, measured, "last_token"),
        gaps, steps, block_rates(requests),
    )  # fmt: skip


def tokens_per_s(point: Mapping[str, Any]) -> float | None:
    """Output tokens a second that a point (as in summary.json) settled at; over all its time where that is unknown."""
    told = point["throughput"] or {}
    found = told.get("steady_tokens_per_s") or told.get("output_tokens_per_s")
    return None if found is None else float(found)


def written_tokens(point: Mapping[str, Any]) -> str:
    """The same for people, with half the width of its 95 % interval: ``867 ± 12``."""
    found, ends = tokens_per_s(point), (point["throughput"] or {}).get("steady_ci")
    if found is None or not ends:
        return DASH if found is None else significant(found)
    half = (ends[1] - ends[0]) / 2
    decimals = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 0
    return f"{found:,.{min(decimals, 2)}f} ± {half:,.{min(decimals, 2)}f}"


def batch(steps: pd.DataFrame) -> dict[str, Any]:
    """Mean requests in a step and waiting beside it, weighted by the forwards' time where that was stamped."""
    steps = steps[steps["requests"].fillna(0) > 0] if len(steps) else steps
    if not len(steps):
        return {"running": None, "waiting": None, "steps": 0}
    weights = np.ones(len(steps))
    if {"forward_start_ns", "forward_end_ns"} <= set(steps.columns):
        lasted = (steps["forward_end_ns"] - steps["forward_start_ns"]).to_numpy(np.float64, na_value=np.nan)
        if np.nansum(lasted) > 0:
            weights = np.nan_to_num(lasted)
    mean = {name: float(np.average(steps[column].to_numpy(np.float64), weights=weights))
            for name, column in (("running", "requests"), ("waiting", "waiting"))}  # fmt: skip
    return mean | {"steps": len(steps)}


def _frame(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    kept = [part for part in parts if len(part)]
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()
