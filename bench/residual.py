"""What the ledgers leave open on real engines: short requests that never queue, and queueing near saturation.

One server with four places is loaded twice. The rates come from the machine: with one user alone, the time of a request
sets the light rate (constant arrivals, far enough apart that no two requests meet); with eight users, the throughput
sets the other (Poisson arrivals at 0.85 of it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench.engine import Engine, Setting, running

REQUESTS = 220
MAX_BATCH = 4
_LIGHT_BUSY = 0.6  # share of the time in which the one request is under way
_NEAR_SATURATION = 0.85
_FOUR = Setting(max_batch=MAX_BATCH)
_SHORT = ('workload.prompt_tokens={"uniform":[16,64]}', 'workload.output_tokens={"uniform":[24,40]}')


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the ledger must stay below: ``unit`` is ``share`` (of E2E or TTFT) or ``ms``."""

    event: str
    which: str
    unit: str
    limit: float


def targets(engine: str, load: str) -> tuple[Target, ...]:
    """The limits at p99 for an engine and a load."""
    strict = 0.01 if engine == "transformers" else 0.02 if load == "queueing" else 0.03
    return (
        Target("last_token", "unexplained", "share", 0.001),
        Target("last_token", "strict", "share", strict),
        Target("first_token", "strict", "ms", 0.5 if engine == "transformers" else 1.0),
    )


def measure(name: str, folder: Path, setting: Setting = _FOUR) -> dict[str, Any]:
    """Both loads on one server. Raises UserError or ServerFailed when it cannot be had."""
    with running(name, folder, setting) as engine:
        alone_ms, throughput = _paces(engine, folder)
        loads = {
            "light": ("load.arrivals=constant", f"load.rate={_LIGHT_BUSY * 1e3 / alone_ms:.2f}"),
            "queueing": ("load.arrivals=poisson", f"load.rate={_NEAR_SATURATION * throughput:.2f}"),
        }
        rows = {load: _row(engine, folder, name, load, how) for load, how in loads.items()}
        return {"engine": name, "version": engine.version, "max_batch": setting.max_batch, "loads": rows}


def _paces(engine: Engine, folder: Path) -> tuple[float, float]:
    """How long a request takes alone (median, ms), and requests per second with eight users."""
    closed = (*_SHORT, "load.arrivals=closed", "load.rate=null", "load.duration=null", "load.warmup=auto")
    alone = engine.load(folder, [*closed, "load.concurrency=1", "load.requests=12"]).folder
    crowd = engine.load(folder, [*closed, "load.concurrency=8", "load.requests=60"]).result.to_json()
    return _median_ms(alone, "last_token"), float(crowd["throughput"]["requests_per_s"])


def _median_ms(run: Path, event: str) -> float:
    """Plain median from due to the event over the requests that succeeded, to describe the load."""
    requests = pd.read_parquet(run / "requests.parquet")
    good = requests[requests["outcome"] == "ok"]
    return float((good[f"{event}_ns"] - good["due_ns"]).median()) / 1e6


def _row(engine: Engine, folder: Path, name: str, load: str, how: tuple[str, ...]) -> dict[str, Any]:
    fixed = ("load.duration=null", f"load.requests={REQUESTS}", "load.warmup=3s")
    run = engine.load(folder, [*_SHORT, *how, *fixed])
    summary = run.result.to_json()
    return {
        "run": str(run.folder),
        "rate": summary["load"]["requested_rate"],
        "requests": summary["counts"]["succeeded"],
        "refused": summary["ledger"]["refused"],
        "e2e_p50_ms": _median_ms(run.folder, "last_token"),
        "ttft_p50_ms": _median_ms(run.folder, "first_token"),
        "residual": summary["residual"],
        "targets": [_judged(target, summary["residual"]) for target in targets(name, load)],
    }


def _judged(target: Target, residual: Mapping[str, Any]) -> dict[str, Any]:
    value = residual[target.event][target.which][f"p99_{target.unit}"]
    return {
        "event": target.event, "which": target.which, "unit": target.unit, "p99": value, "limit": target.limit,
        "met": value < target.limit,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown rows of several engines' results."""
    lines = [
        (
            "| engine, load | requests | E2E p50, ms | to the "
            "| unexplained p50, p99, worst | strict p50, p99 | ms | unstamped p50, p99 | ms |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for load, row in result["loads"].items():
            for event in ("last_token", "first_token"):
                lines.append(_line(f"{result['engine']} {result['version']}, {load}", row, event))
    return lines


def _line(name: str, row: Mapping[str, Any], event: str) -> str:
    left = row["residual"][event]
    two = (
        f"| {part['p50_share']:.2%} / {part['p99_share']:.2%} | {part['p50_ms']:.2f} / {part['p99_ms']:.2f} "
        for part in (left["strict"], left["unstamped"])
    )
    open_ = left["unexplained"]
    return (
        f"| {name} | {row['requests']} | {row['e2e_p50_ms']:.0f} | {event.replace('_', ' ')} "
        f"| {open_['p50_share']:.3%} / {open_['p99_share']:.3%} / {open_['max_share']:.3%} "
        f"{''.join(two)}|"
    )
