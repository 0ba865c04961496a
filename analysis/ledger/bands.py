"""Stages as means over the real requests of a band, so that they add up: typical, slow ones, and the whole range.

Bands are cut by rank of what a request waited in all. The slow ones reach from a percentile up; one that would hold
fewer than seven requests is not told of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.tail import FEWEST, FEWEST_SLOW, TYPICAL, slow_count
from gapmeter.analysis.results.latency import (
    Band,
    Bands,
    Compute,
    ComputeBand,
    ComputeShares,
    PartShare,
    SlowBands,
    SpreadBand,
)
from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column
from gapmeter.analysis.stats.bootstrap import drawn_means, stretches, with_draws
from gapmeter.analysis.stats.estimate import Bools, Floats

SLOW: tuple[float, ...] = (90.0, 98.5, 99.0, 99.9)  # the fields of SlowBands
SPREAD: tuple[float, ...] = (0, 25, 50, 75, 90, 95, 99, 99.9, 100)
COMPUTE = ("prefill", "decode")
_PARTS = ("compute", "launch_gap", "host", "queue", "network", "load_tester", "unexplained")
_OWNERS = {"framework": "host", "API server": "host", "capacity": "queue", "network": "network",
           "load tester": "load_tester"}  # fmt: skip


def describe_bands(ledgers: Mapping[str, pd.DataFrame]) -> dict[str, Bands]:
    """Per metric (ttft, e2e, itl): bands in ms by stage. ``ledgers``: rows with ``total_ns`` and a column a stage.

    A metric with fewer than 28 rows is left out; a slow band is None where too few requests lie above its percentile.
    """
    return {metric: _bands(rows) for metric, rows in ledgers.items() if len(rows) >= FEWEST}


def _bands(rows: pd.DataFrame) -> Bands:
    names, parts = stage_parts(rows)
    order, n = np.argsort(rows["total_ns"].to_numpy(np.float64), kind="stable"), len(rows)

    def slow(percentile: float) -> Band | None:
        found = parts[order[math.floor(percentile * n / 100) :]]
        return _band(names, found) if len(found) >= FEWEST_SLOW else None

    spread = []
    for low, high in itertools.pairwise(SPREAD):
        inside = parts[order[round(low * n / 100) : round(high * n / 100)]]
        if len(inside):
            spread.append(SpreadBand(**dict(_band(names, inside)), from_percentile=low, to_percentile=high))
    return Bands(
        count=n,
        typical=_band(names, parts[order[int(TYPICAL[0] * n) : math.ceil(TYPICAL[1] * n)]]),
        slow=SlowBands(
            p90=slow(90.0), p985=_band(names, parts[order[-slow_count(n) :]]), p99=slow(99.0), p999=slow(99.9)
        ),
        spread=tuple(spread),
    )


def stage_parts(rows: pd.DataFrame) -> tuple[list[str], Floats]:
    """Names of the measured stages with the remainder last, and their times in ns, shape (rows, stages).

    A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    """
    names = [s.name for s in STAGES if column(s.name) in rows and rows[column(s.name)].notna().any()]
    names.append(UNEXPLAINED)
    return names, np.nan_to_num(rows[[column(name) for name in names]].to_numpy(np.float64, na_value=0.0))


def _band(names: Sequence[str], parts: Floats) -> Band:
    means = parts.mean(axis=0) / 1e6
    return Band(count=len(parts), total_ms=float(means.sum()), stages_ms=dict(zip(names, means.tolist(), strict=True)))


def part_of(stage: str) -> str:
    """The coarse part that a stage belongs to where the question is whether the device computes."""
    if stage in COMPUTE:
        return "compute"
    if stage in ("launch_gap", UNEXPLAINED):
        return stage
    return _OWNERS.get(BY_NAME[stage].owner, "host")


def describe_compute(ledgers: Mapping[str, pd.DataFrame], steps: pd.DataFrame | None, device: str) -> Compute:
    """Of what requests waited, for how much did the device compute for them? Typical, the slowest 1 %, and all.

    ``ledgers``: rows in the order in which requests were due. Shares are of the band's summed waits, with a 95 %
    interval (stats.bootstrap). ``busy_share``: of the time from the first forward to the last, the part
    within one.
    """
    found = {metric: _shares(rows) for metric, rows in ledgers.items() if len(rows) >= FEWEST}
    if not found:
        return Compute()
    return Compute(device=device, busy_share=_busy_share(steps), ttft=found.get("ttft"), e2e=found.get("e2e"))


def _shares(rows: pd.DataFrame) -> ComputeShares:
    names, parts = stage_parts(rows)
    sums = np.stack([parts[:, [part_of(n) == p for n in names]].sum(axis=1) for p in _PARTS], axis=1)
    known = {part_of(name) for name in names}
    total = sums.sum(axis=1)
    rank = np.argsort(np.argsort(total, kind="stable"), kind="stable")
    n, stretch = len(rows), stretches(total)
    slowest = max(FEWEST_SLOW, math.ceil(n / 100))

    def band(member: Bools) -> ComputeBand:
        means = sums[member].mean(axis=0)
        whole = max(float(means.sum()), 1.0)
        drawn = drawn_means(sums, member, stretch)

        def part(name: str) -> PartShare | None:
            if name not in known:
                return None
            at = _PARTS.index(name)
            share = float(means[at]) / whole
            found = with_draws(share, None if drawn is None else drawn[:, at] / np.maximum(drawn.sum(axis=1), 1.0))
            return PartShare(ms=float(means[at]) / 1e6, share=share, share_ci=found.ends)

        return ComputeBand(
            count=int(member.sum()), total_ms=whole / 1e6, compute=part("compute"), launch_gap=part("launch_gap"),
            host=part("host"), queue=part("queue"), network=part("network"), load_tester=part("load_tester"),
            unexplained=part("unexplained"),
        )  # fmt: skip

    return ComputeShares(
        typical=band((rank >= int(TYPICAL[0] * n)) & (rank < math.ceil(TYPICAL[1] * n))),
        slow=band(rank >= n - slowest),
        all=band(np.ones(n, dtype=np.bool_)),
    )


def _busy_share(steps: pd.DataFrame | None) -> float | None:
    if steps is None or not len(steps) or "forward_start_ns" not in steps:
        return None
    known = steps.dropna(subset=["forward_start_ns", "forward_end_ns"])
    known = known[known["forward_start_ns"] > 0]
    start, end = known["forward_start_ns"].to_numpy(np.float64), known["forward_end_ns"].to_numpy(np.float64)
    return float((end - start).sum() / (end.max() - start.min())) if len(known) > 1 else None
