"""Stages as means over the real requests of a band, so that they add up: typical, slow ones, and the whole range.

Bands are cut by rank of what a request waited in all. The slow ones reach from a percentile up; one that would hold
fewer than seven requests is not told of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.tail import FEWEST, FEWEST_SLOW, TYPICAL, slow_count
from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column
from gapmeter.analysis.stats.bootstrap import Bools, drawn_means, stretches, with_draws
from gapmeter.analysis.stats.estimate import Floats

SLOW: tuple[float, ...] = (90.0, 98.5, 99.0, 99.9)
SPREAD: tuple[float, ...] = (0, 25, 50, 75, 90, 95, 99, 99.9, 100)
COMPUTE = ("prefill", "decode")
_PARTS = ("compute", "launch_gap", "host", "queue", "network", "load_tester", "unexplained")
_OWNERS = {"framework": "host", "API server": "host", "capacity": "queue", "network": "network",
           "load tester": "load_tester"}  # fmt: skip


def describe_bands(ledgers: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Per metric (ttft, e2e, itl): bands in ms by stage. ``ledgers``: rows with ``total_ns`` and a column a stage.

    A metric with fewer than 28 rows is left out. ``slow`` has a key a percentile, null where too few requests lie
    above it.
    """
    return {metric: _bands(rows) for metric, rows in ledgers.items() if len(rows) >= FEWEST}


def slow_key(percentile: float) -> str:
    return f"p{percentile:g}".replace(".", "")


def _bands(rows: pd.DataFrame) -> dict[str, Any]:
    names, parts = stage_parts(rows)
    order, n = np.argsort(rows["total_ns"].to_numpy(np.float64), kind="stable"), len(rows)

    def cut(low: float, high: float) -> Floats:
        return parts[order[math.floor(low * n / 100) : math.ceil(high * n / 100)]]

    spread = [
        {"from": low, "to": high} | _means(names, parts[order[round(low * n / 100) : round(high * n / 100)]])
        for low, high in itertools.pairwise(SPREAD)
        if round(high * n / 100) > round(low * n / 100)
    ]
    slow = {slow_key(p): _means(names, found) if len(found := cut(p, 100)) >= FEWEST_SLOW else None for p in SLOW}
    slow[slow_key(98.5)] = _means(names, parts[order[-slow_count(n) :]])
    typical = _means(names, parts[order[int(TYPICAL[0] * n) : math.ceil(TYPICAL[1] * n)]])
    return {"count": n, "typical": typical, "slow": slow, "spread": spread}


def stage_parts(rows: pd.DataFrame) -> tuple[list[str], Floats]:
    """Names of the measured stages with the remainder last, and their times in ns, shape (rows, stages).

    A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    """
    names = [s.name for s in STAGES if column(s.name) in rows and rows[column(s.name)].notna().any()]
    names.append(UNEXPLAINED)
    return names, np.nan_to_num(rows[[column(name) for name in names]].to_numpy(np.float64, na_value=0.0))


def _means(names: Sequence[str], parts: Floats) -> dict[str, Any]:
    means = parts.mean(axis=0) / 1e6
    return {
        "count": len(parts),
        "total_ms": float(means.sum()),
        "stages_ms": dict(zip(names, means.tolist(), strict=True)),
    }


def part_of(stage: str) -> str:
    """The coarse part that a stage belongs to where the question is whether the device computes."""
    if stage in COMPUTE:
        return "compute"
    if stage in ("launch_gap", UNEXPLAINED):
        return stage
    return _OWNERS.get(BY_NAME[stage].owner, "host")


def describe_compute(ledgers: Mapping[str, pd.DataFrame], steps: pd.DataFrame | None, device: str) -> dict[str, Any]:
    """Of what requests waited, for how much did the device compute for them? Typical, the slowest 1 %, and all.

    ``ledgers``: rows in the order in which requests were due. Shares are of the band's summed waits, with a 95 %
    interval (stats.bootstrap). ``busy_share``: of the time from the first forward to the last, the part
    within one.
    """
    found = {metric: _compute(rows, metric, device) for metric, rows in ledgers.items() if len(rows) >= FEWEST}
    return {"device": device, "busy_share": _busy_share(steps)} | found if found else {}


def _compute(rows: pd.DataFrame, metric: str, device: str) -> dict[str, Any]:
    names, parts = stage_parts(rows)
    sums = np.stack([parts[:, [part_of(n) == p for n in names]].sum(axis=1) for p in _PARTS], axis=1)
    known = {part_of(name) for name in names}
    total = sums.sum(axis=1)
    rank = np.argsort(np.argsort(total, kind="stable"), kind="stable")
    n = len(rows)
    slowest = max(FEWEST_SLOW, math.ceil(n / 100))
    stretch = stretches(total)
    bands: dict[str, Bools] = {
        "typical": (rank >= int(TYPICAL[0] * n)) & (rank < math.ceil(TYPICAL[1] * n)),
        "slow": rank >= n - slowest,
        "all": np.ones(n, dtype=np.bool_),
    }
    out: dict[str, Any] = {name: _shares(sums, member, stretch, known) for name, member in bands.items()}
    return out | {"sentence": _sentence(out["slow"], metric, device, exact=slowest == math.ceil(n / 100))}


def _shares(sums: Floats, member: Bools, stretch: Any, known: set[str]) -> dict[str, Any]:
    means = sums[member].mean(axis=0)
    whole = max(float(means.sum()), 1.0)
    drawn = drawn_means(sums, member, stretch)
    out: dict[str, Any] = {"count": int(member.sum()), "total_ms": whole / 1e6}
    for i, part in enumerate(_PARTS):
        if part not in known:
            out[part] = None
            continue
        shares = None if drawn is None else drawn[:, i] / np.maximum(drawn.sum(axis=1), 1.0)
        found = with_draws(float(means[i]) / whole, shares)
        out[part] = {"ms": float(means[i]) / 1e6, "share": found.value, "share_ci": list(found.ends)}
    return out


def _busy_share(steps: pd.DataFrame | None) -> float | None:
    if steps is None or not len(steps) or "forward_start_ns" not in steps:
        return None
    known = steps.dropna(subset=["forward_start_ns", "forward_end_ns"])
    known = known[known["forward_start_ns"] > 0]
    start, end = known["forward_start_ns"].to_numpy(np.float64), known["forward_end_ns"].to_numpy(np.float64)
    return float((end - start).sum() / (end.max() - start.min())) if len(known) > 1 else None


def _sentence(slow: Mapping[str, Any], metric: str, device: str, *, exact: bool) -> str | None:
    if slow["compute"] is None:
        return None
    who = "the slowest 1 %" if exact else f"the slowest {slow['count']}"
    event = {"ttft": "their first token", "e2e": "their last token", "itl": "a token"}[metric]
    low, high = slow["compute"]["share_ci"]
    ends = f" ({100 * low:.0f} to {100 * high:.0f} %)" if low is not None else ""
    share = 100 * slow["compute"]["share"]
    return f"of what {who} waited for {event}, the {device} computed for them during {share:.0f} %{ends}"
