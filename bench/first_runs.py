"""What a first run tells: chat-p99 as it ships, run again and again, each time on a server of its own.

A percentile's bounds are held against the one of all runs together, which has many times the requests of any.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import measured_requests
from gapmeter.analysis.results import RunResult
from gapmeter.options import Options
from gapmeter.study.study import run_scenario

SCENARIO = "chat-p99"
_METRICS = ("ttft", "itl")  # of its SLOs
_PERCENTILE = 99.0


def measure(engine: str, folder: Path, runs: int) -> dict[str, Any]:
    """So many runs, one after the other. Raises UserError or ServerFailed when the engine cannot be had."""
    folders, busy = [], []
    for _ in range(runs):
        busy.append(os.getloadavg()[0])
        folders.append(run_scenario(SCENARIO, [f"server.engine={engine}"], Options(folder, quiet=True)).folder)
    return figures(engine, folders, busy)


def figures(engine: str, folders: Sequence[Path], load_averages: Sequence[float]) -> dict[str, Any]:
    """Of run folders of one engine, with the machine's load average before each."""
    results = [RunResult.read(folder) for folder in folders]
    rows = [
        {"load_average": load, "verdict": result.verdict, "cost": result.cost.status}
        | {metric: _bounds(result, metric) for metric in _METRICS}
        for result, load in zip(results, load_averages, strict=True)
    ]
    return {"engine": engine, "runs": rows, "pooled_p99_ms": {metric: _pooled(folders, metric) for metric in _METRICS}}


def _bounds(result: RunResult, metric: str) -> dict[str, Any]:
    p99 = result.metrics[metric].at(_PERCENTILE)
    low, high = p99.ci_ms or (None, None)
    return {
        "sample_ms": p99.value_ms, "low_ms": low, "high_ms": high,
        "at_most_ms": p99.at_most.ms if p99.at_most else None, "sure": p99.at_most.confidence if p99.at_most else None,
    }  # fmt: skip


def _pooled(folders: Sequence[Path], metric: str) -> float:
    return float(np.percentile(np.concatenate([_values_ms(folder, metric) for folder in folders]), _PERCENTILE))


def _values_ms(run: Path, metric: str) -> Any:
    requests = measured_requests(pd.read_parquet(run / "requests.parquet"))
    good = requests[requests["outcome"] == "ok"]
    if metric == "ttft":
        return ((good["first_token_ns"] - good["due_ns"]) / 1e6).to_numpy(float)
    gaps = pd.read_parquet(run / "gaps.parquet", columns=["request_id", "gap_ns"])
    return (gaps["gap_ns"][gaps["request_id"].isin(good["request_id"])] / 1e6).to_numpy(float)


def table(engines: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each engine and percentile."""
    lines = [
        (
            "| engine, p99 of | runs | load average before | both ends | a bound, or both | a cost | of all runs, ms "
            "| low ends above that | high ends below | bounds below | middle of the values, their spread, ms |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(engine, metric) for engine in engines for metric in _METRICS]


def _line(told: dict[str, Any], metric: str) -> str:
    runs, pooled = told["runs"], told["pooled_p99_ms"][metric]
    rows = [run[metric] for run in runs]
    both = [row for row in rows if row["low_ms"] is not None and row["high_ms"] is not None]
    bounds = [row["at_most_ms"] for row in rows if row["at_most_ms"] is not None]
    loads, values = [run["load_average"] for run in runs], sorted(row["sample_ms"] for row in both) or [math.nan]
    costs = sum(run["cost"] != "none" for run in runs)
    return (
        f"| {told['engine']}, {metric} | {len(runs)} | {min(loads):.1f} to {max(loads):.1f} | {len(both)} "
        f"| {sum(row in both or row['at_most_ms'] is not None for row in rows)} | {costs} | {pooled:.1f} "
        f"| {sum(row['low_ms'] > pooled for row in both)} of {len(both)} "
        f"| {sum(row['high_ms'] < pooled for row in both)} of {len(both)} "
        f"| {sum(bound < pooled for bound in bounds)} of {len(bounds)} "
        f"| {statistics.median(values):.1f} ({values[0]:.1f} .. {values[-1]:.1f}) |"
    )
