"""What a first run of chat-p99 tells: is its p99 there with both ends, is every SLO decided, is there a cost?

The scenario as it is shipped, again and again on each engine, in turn, so that both meet the machine alike. What each
says of its p99 is compared with the p99 of all of an engine's runs of one call together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.client import neighbor
from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.machine.instrument import NotMeasured
from gapmeter.options import Options
from gapmeter.scenarios.read import load_scenario
from gapmeter.study.study import run_scenario

SCENARIO = "chat-p99"
_METRIC, _PERCENTILE = "ttft", 99.0
_SOON_S = 150.0
_BURST_S = 0.05


def measure(
    engines: Sequence[str], repeats: int, folder: Path, earlier: Mapping[str, Any] | None = None, *, busy: bool = False
) -> dict[str, Any]:
    """So many runs an engine, after those of ``earlier``. ``busy``: beside a program that works half of the time.

    Raises UserError or ServerFailed when one cannot be had, NotMeasured when the earlier ones are of another load.
    """
    digest = load_scenario(SCENARIO).digest()
    if earlier and earlier["digest"] != digest:
        raise NotMeasured(f"the runs to add to are of {SCENARIO} as it was: leave out --add to replace them")
    with neighbor(os.sched_getaffinity(0), _BURST_S) if busy else contextlib.nullcontext():
        folders = [
            run_scenario(SCENARIO, [f"server.engine={engine}"], Options(folder, quiet=True)).folder
            for _ in range(repeats)
            for engine in engines
        ]
    rows = [{**row, "busy": busy} for row in rows_of(folders)]
    return {"scenario": SCENARIO, "digest": digest, "rows": [*(earlier["rows"] if earlier else ()), *rows]}


def rows_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What each run's folder says, and the p99 of all runs of its engine together."""
    rows = [_row(folder) for folder in folders]
    tables = [measured_requests(pd.read_parquet(folder / "requests.parquet")) for folder in folders]
    values_ns = [metric_series(table, _METRIC).values for table in tables]
    for engine in {row["engine"] for row in rows}:
        own = [number for number, row in enumerate(rows) if row["engine"] == engine]
        together = np.concatenate([values_ns[number] for number in own])
        for number in own:
            rows[number]["pooled_p99_ms"] = float(np.percentile(together, _PERCENTILE)) / 1e6
    return rows


def _row(folder: Path) -> dict[str, Any]:
    result, manifest = RunResult.read(folder), Manifest.read(folder)
    percentile = result.metrics[_METRIC].percentiles[_PERCENTILE]
    return {
        "engine": manifest.asked.server.engine,
        "verdict": result.verdict,
        "requests": result.counts.measured,
        "seconds": result.load.window_s,
        "n_eff": result.metrics[_METRIC].n_eff,
        "p99_ms": percentile.value_ms,
        "ci_ms": percentile.ci_ms,
        "at_most_ms": percentile.at_most.ms if percentile.at_most else None,
        "undecided": [slo.text for slo in result.slo if slo.status not in ("PASS", "FAIL")],
        "cost": result.cost.per_request_usd is not None,
        "lag_p99_ms": result.trust.lag_p99_ms,
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """A row an engine and kind of machine."""
    columns = (
        "engine", "machine", "runs", "p99 with both ends", "95 % interval",
        f"of them within {_SOON_S:g} s", "a bound alone", "all runs' p99 within it, or its bound",
        "all SLOs decided", "a cost", "p99, ms", "±, %", "load, s",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    told = (
        "all runs' p99: of those of one call together, where it is known; "
        f"busy: beside a program that works and sleeps for {_BURST_S * 1e3:g} ms in turn"
    )
    return [*lines, *_rows(found["rows"]), "", f"`{found['scenario']}`; ranges from run to run; {told}."]


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for engine, busy in dict.fromkeys((row["engine"], row["busy"]) for row in rows):
        own = [row for row in rows if (row["engine"], row["busy"]) == (engine, busy)]
        whole = [row for row in own if row["p99_ms"] is not None]
        low, high = share_bounds(len(whole), len(own))
        halves = [50 * (row["ci_ms"][1] - row["ci_ms"][0]) / row["p99_ms"] for row in whole]
        held = [_holds(row) for row in own if "pooled_p99_ms" in row and (row["ci_ms"] or row["at_most_ms"])]
        yield (
            f"| {engine} | {'busy' if busy else 'quiet'} | {len(own)} | {len(whole)} | {low:.0%} to {high:.0%} "
            f"| {sum(row['seconds'] <= _SOON_S for row in whole)} "
            f"| {sum(not row['ci_ms'] and row['at_most_ms'] is not None for row in own)} "
            f"| {sum(held)} of {len(held)} "
            f"| {sum(not row['undecided'] for row in own)} | {sum(row['cost'] for row in own)} "
            f"| {_range([row['p99_ms'] for row in whole])} | {_range(halves)} "
            f"| {_range([row['seconds'] for row in own])} |"
        )


def _holds(row: Mapping[str, Any]) -> bool:
    low, high = row["ci_ms"] or (0.0, row["at_most_ms"])
    return bool(low <= row["pooled_p99_ms"] <= high)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "–"
