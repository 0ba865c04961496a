"""How often is a steady queue called unsteady, and an overloaded one steady? Each method by itself, by simulation.

Runs of 1,000 requests of an M/M/1 queue, TTFT being the time in the system and TPOT a constant. Above load 1 the queue
starts empty and grows: there the slope should object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from bench.queues import lindley, requests_to_settle
from gapmeter.analysis.judge import steady
from gapmeter.analysis.judge.steady import level_changes, queue_slope

COUNT = 1_000
LOADS = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3)
_SERVICE_NS = 50e6


def measure(replications: int, seed: int) -> dict[str, Any]:
    """By load: the share of runs in which each method objects."""
    rows = []
    for load in LOADS:
        rng = np.random.default_rng([seed, 7, round(100 * load)])
        found = [_objections(_run(rng, load)) for _ in range(replications)]
        rows.append({"load": load, **{key: float(np.mean([f[key] for f in found])) for key in found[0]}})
    return {"count": COUNT, "replications": replications, "rows": rows}


def _run(rng: np.random.Generator, load: float) -> pd.DataFrame:
    """A run's requests; below load 1 of a queue that has settled, else from an empty one."""
    ahead = requests_to_settle(load) if load < 1 else 0
    gaps, services = rng.exponential(1 / load, (1, ahead + COUNT)), rng.exponential(1.0, (1, ahead + COUNT))
    sojourns = (lindley(gaps, services) + services)[0, ahead:]
    due = (np.cumsum(gaps[0])[ahead:] * _SERVICE_NS).astype(np.int64)
    first = due + (sojourns * _SERVICE_NS).astype(np.int64)
    return pd.DataFrame(
        {
            "due_ns": due, "first_token_ns": first, "last_token_ns": first + 10_000_000, "end_ns": first + 10_000_000,
            "output_tokens": 2, "outcome": "ok", "measured": True, "superseded": False,
        }
    )  # fmt: skip


def _objections(requests: pd.DataFrame) -> dict[str, bool]:
    """MSER-5 leaves something out or gives up; PELT sees a change; the queue provably grows."""
    slope = queue_slope(requests)
    return {
        "mser5": steady.detect_warmup(requests).state != "steady",
        "pelt": any(change.certain for change in level_changes(requests)),
        "queue_slope": slope is not None and slope.grows,
    }


def table(figures: Mapping[str, Any]) -> list[str]:
    runs = f"{figures['replications']:,} runs of {figures['count']:,} requests"
    said = f"Share of {runs}, M/M/1, in which each method objects to a steady state. Below load 1 there is one."
    lines = [said, "", "| load | MSER-5 cuts or gives up | PELT sees a change | the queue grows |", "|---|---|---|---|"]
    cells = [[f"{row[key]:.1%}" for key in ("mser5", "pelt", "queue_slope")] for row in figures["rows"]]
    return lines + [f"| {row['load']:g} | {' | '.join(c)} |" for row, c in zip(figures["rows"], cells, strict=True)]
