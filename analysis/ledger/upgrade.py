"""What a faster device could bring: for how much of what requests waited it computed, and the most that is to be had.

The upgrade question, per request: every *own forward* (prefill, decode, and the share of it that others' prompts took)
is made to take no time.

- upper end: the forwards give way to the host work that they hid (``hidden_host_ns``: it has to be done, and nothing
  covers it any more); every queue stays as it was, and so does the time that the device waited for its host;
- lower end: queues and steps of others are gone too (queue, other_step, preempted, engine_wait), as if every request
  met an idle engine.

The truth lies between: queues shrink when steps do, but not to nothing while the host's part of a step remains. Both
are percentiles of per-request values, not differences of percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ranked
from gapmeter.analysis.ledger.critical_path import union
from gapmeter.analysis.ledger.tail import FEWEST, FEWEST_SLOW, stage_parts, stages_in, typical
from gapmeter.analysis.ledger.trace import engines_of
from gapmeter.analysis.requests.figures import LEDGER_OF, finite_ms
from gapmeter.analysis.results.distribution import MainPercentiles, percentile_key
from gapmeter.analysis.results.latency import Compute, ComputeBand, ComputeShares, PartShare, Upgrade, UpgradeBracket
from gapmeter.analysis.stages import BY_NAME, UNEXPLAINED, column
from gapmeter.analysis.stats.bootstrap import drawn_means, stretches, with_draws
from gapmeter.analysis.stats.series import Series

FORWARD = ("prefill", "decode", "interference")
QUEUES = ("queue", "other_step", "preempted", "engine_wait")
_PERCENTILES = (99.0, 95.0, 90.0, 50.0)
_PARTS = ("compute", "launch_gap", "host", "queue", "network", "load_tester", "unexplained")  # of ComputeBand
_PART_OF_OWNER = {"capacity": "queue", "network": "network", "load tester": "load_tester"}
_PART_OF_STAGE = {"prefill": "compute", "decode": "compute", "launch_gap": "launch_gap", UNEXPLAINED: UNEXPLAINED}


def describe_upgrade(
    ledgers: Mapping[str, pd.DataFrame], device: str, refused_ns: Callable[[str, float], float | None]
) -> Upgrade:
    """For TTFT and E2E; ``device`` is what computed the forwards, ``refused_ns`` which percentiles the run refuses."""

    def known(metric: str) -> UpgradeBracket | None:
        return bracket(ledgers[metric], [p for p in _PERCENTILES if refused_ns(metric, p) is None])

    return Upgrade(device=device, ttft=known("ttft"), e2e=known("e2e"))


def bracket(ledgers: pd.DataFrame, percentiles: Sequence[float] = _PERCENTILES) -> UpgradeBracket | None:
    """What is waited now and what an infinitely fast device leaves, from one event's ledgers in the order of due times.

    ``percentile``: the highest of ``percentiles`` (of p99, p95, p90 and p50) that all three support. None when the run
    has no forward to take out, or too few requests for a median.
    """
    forwards = [column(name) for name in ("prefill", "decode") if column(name) in ledgers]
    if not forwards or not len(ledgers) or ledgers[forwards].isna().any(axis=None):
        return None
    waits = (ledgers["total_ns"].to_numpy(np.float64), *without_forward_ns(ledgers))
    estimates = [{p: series.percentile(p) for p in percentiles} for series in map(Series, waits)]
    shown = next((p for p in percentiles if all(each[p].supported for each in estimates)), None)
    if shown is None:
        return None
    known = [{f"{percentile_key(p)}_ms": finite_ms(e.value) for p, e in of.items() if e.supported} for of in estimates]
    now, lower, upper = (MainPercentiles(**dict.fromkeys(MainPercentiles.model_fields) | each) for each in known)
    return UpgradeBracket(now=now, lower=lower, upper=upper, percentile=shown)


def without_forward_ns(ledgers: pd.DataFrame) -> tuple[Floats, Floats]:
    """Lower and upper end of every request's wait on an infinitely fast GPU. Unmeasured stages count as remainder.

    Hidden work cannot exceed the forward that hid it.
    """

    def total(stages: tuple[str, ...]) -> Floats:
        there = [column(name) for name in stages if column(name) in ledgers]
        return np.asarray(ledgers[there].fillna(0.0).sum(axis=1), dtype=np.float64)

    forward = total(FORWARD)
    hidden = np.minimum(np.nan_to_num(ledgers["hidden_host_ns"].to_numpy(np.float64)), forward)
    upper = ledgers["total_ns"].to_numpy(np.float64) - forward + hidden
    return np.maximum(upper - total(QUEUES), 0.0), upper


def describe_compute(
    ledgers: Mapping[str, pd.DataFrame], steps: pd.DataFrame | None, device: str, engine_steps: Sequence[int] = ()
) -> Compute:
    """Of what requests waited, for how much did the device compute for them? Typical, the slowest 1 %, and all.

    ``ledgers``: rows in the order in which requests were due; TTFT's and E2E's are looked at. Shares are of the band's
    summed waits, with a 95 % interval (stats.bootstrap). ``engine_steps``: each engine's last step, in the numbering of
    ``steps``.
    """
    shares = {m: _shares(ledgers[m]) for m in LEDGER_OF if m in ledgers and len(ledgers[m]) >= FEWEST}
    if not shares:
        return Compute()
    engines = len(engine_steps) if len(engine_steps) > 1 else None
    return Compute(device=device, busy_share=_busy_share(steps, engine_steps), engines=engines, **shares)


def _shares(rows: pd.DataFrame) -> ComputeShares:
    names = stages_in(rows)
    stages = stage_parts(rows, names)
    part_of = [_PART_OF_STAGE.get(n) or _PART_OF_OWNER.get(BY_NAME[n].owner, "host") for n in names]
    sums = np.stack([stages[:, [own == part for own in part_of]].sum(axis=1) for part in _PARTS], axis=1)
    total = sums.sum(axis=1)
    ranked, n, stretch = Ranked(total), len(rows), stretches(total)

    def band(member: Bools) -> ComputeBand:
        means = sums[member].mean(axis=0)
        whole = max(float(means.sum()), 1.0)
        drawn = drawn_means(sums[member], stretch, member)
        drawn /= np.maximum(drawn.sum(axis=1, keepdims=True), 1.0)
        parts: dict[str, PartShare | None] = dict.fromkeys(_PARTS)
        for at, part in enumerate(_PARTS):
            if part in part_of:
                share = float(means[at]) / whole
                ends = with_draws(share, drawn[:, at]).ends
                parts[part] = PartShare(ms=float(means[at]) / 1e6, share=share, share_ci=ends)
        return ComputeBand(count=int(member.sum()), total_ms=whole / 1e6, **parts)

    slowest = ~ranked.below(n - max(FEWEST_SLOW, math.ceil(n / 100)))
    return ComputeShares(typical=band(typical(ranked)), slow=band(slowest), all=band(np.ones(n, dtype=np.bool_)))


def _busy_share(steps: pd.DataFrame | None, engine_steps: Sequence[int]) -> float | None:
    """Of the time from the first forward to the last, the part in which an engine was at one; of several their mean."""
    if steps is None or "forward_start_ns" not in steps:
        return None
    forwards = steps[steps["forward_start_ns"] > 0].dropna(subset="forward_end_ns")
    if len(forwards) < 2:
        return None
    start, end = (forwards[f"forward_{side}_ns"].to_numpy(np.int64) for side in ("start", "end"))
    engine, busy_ns = engines_of(forwards["step"].to_numpy(), engine_steps), 0
    for one in range(engines := max(len(engine_steps), 1)):
        begun, ended = union(start[engine == one], end[engine == one])
        busy_ns += int((ended - begun).sum())
    return busy_ns / engines / int(end.max() - start.min())
