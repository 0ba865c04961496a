"""What the ledgers leave open on real engines: short requests that never queue, and queueing near saturation.

One server with four places is loaded twice. The rates come from the machine: with one user alone, the time of a request
sets the light rate (constant arrivals, far enough apart that no two requests meet); with eight users, the throughput
sets the other (Poisson arrivals at 0.85 of it).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from bench.engine import Engine, Setting, running

REQUESTS = 220
_LIGHT_BUSY = 0.6  # share of the time in which the one request is under way
_NEAR_SATURATION = 0.85
_SHORT = ('workload.prompt_tokens={"uniform":[16,64]}', 'workload.output_tokens={"uniform":[24,40]}')


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Both loads on one server. Raises UserError or ServerFailed when it cannot be had."""
    with running(name, folder, Setting(max_batch=4)) as engine:
        alone_ms, throughput = _paces(engine, folder)
        loads = {
            "light": ("load.arrivals=constant", f"load.rate={_LIGHT_BUSY * 1e3 / alone_ms:.2f}"),
            "queueing": ("load.arrivals=poisson", f"load.rate={_NEAR_SATURATION * throughput:.2f}"),
        }
        rows = {load: _row(engine, folder, how) for load, how in loads.items()}
        return {"engine": name, "version": engine.version, "loads": rows}


def _paces(engine: Engine, folder: Path) -> tuple[float, float]:
    """How long a request takes alone (median, ms), and requests per second with eight users."""
    closed = (*_SHORT, "load.arrivals=closed", "load.rate=null", "load.duration=null", "load.warmup=auto")
    alone = engine.load(folder, [*closed, "load.concurrency=1", "load.requests=12"]).folder
    crowd = engine.load(folder, [*closed, "load.concurrency=8", "load.requests=60"]).result.to_json()
    return _median_ms(alone), float(crowd["throughput"]["requests_per_s"])


def _median_ms(run: Path) -> float:
    """Plain median from due to the last token over the requests that succeeded, to describe the load."""
    requests = pd.read_parquet(run / "requests.parquet")
    good = requests[requests["outcome"] == "ok"]
    return float((good["last_token_ns"] - good["due_ns"]).median()) / 1e6


def _row(engine: Engine, folder: Path, how: tuple[str, ...]) -> dict[str, Any]:
    fixed = ("load.duration=null", f"load.requests={REQUESTS}", "load.warmup=3s")
    run = engine.load(folder, [*_SHORT, *how, *fixed])
    summary = run.result.to_json()
    return {
        "run": str(run.folder),
        "rate": summary["load"]["requested_rate"],
        "requests": summary["counts"]["succeeded"],
        "refused": summary["ledger"]["refused"],
        "e2e_p50_ms": _median_ms(run.folder),
        "residual": summary["residual"],
    }


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
