"""The upgrade question: what is the most that an infinitely fast GPU could bring, from the ledgers of this run?

Per request, with every *own forward* (prefill, decode, and the shares of it that others' prompts and late kernel
launches took) made to take no time:

- upper end: the forwards give way to the host work and launch gaps that they hid (``hidden_host_ns``: it has to be
  done, and nothing covers it any more); every queue stays as it was;
- lower end: queues and steps of others are gone too (queue, other_step, preempted, engine_wait), as if every request
  met an idle engine.

The truth lies between: queues shrink when steps do, but not to nothing while the host's part of a step remains. Both
are percentiles of per-request values, not differences of percentiles.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.figures import EVENTS, ledgers_of, plain_percentile
from gapmeter.analysis.results.distribution import MainPercentiles
from gapmeter.analysis.results.latency import Upgrade, UpgradeBracket
from gapmeter.analysis.stages import column
from gapmeter.analysis.stats.estimate import Estimate, Floats
from gapmeter.analysis.stats.series import Series

FORWARD = ("prefill", "decode", "interference", "launch_gap")
QUEUES = ("queue", "other_step", "preempted", "engine_wait")
_PERCENTILES = (99.0, 95.0, 90.0, 50.0)


def without_forward_ns(ledgers: pd.DataFrame) -> tuple[Floats, Floats]:
    """Lower and upper end of every request's wait on an infinitely fast GPU. Unmeasured stages count as remainder.

    Hidden work cannot exceed the forward that hid it.
    """
    total = ledgers["total_ns"].to_numpy(np.float64)
    forward = _sum(ledgers, FORWARD)
    hidden = np.minimum(np.nan_to_num(ledgers["hidden_host_ns"].to_numpy(np.float64)), forward)
    upper = total - forward + hidden
    return np.maximum(upper - _sum(ledgers, QUEUES), 0.0), upper


def describe_upgrade(ledger: pd.DataFrame | None, measured: pd.DataFrame, device: str) -> Upgrade:
    """For TTFT and E2E; ``device`` is what computed the forwards."""
    ttft, e2e = (bracket(ledgers_of(ledger, measured, event)) for event in EVENTS)
    return Upgrade(device=device, ttft=ttft, e2e=e2e)


def bracket(ledgers: pd.DataFrame) -> UpgradeBracket | None:
    """What is waited now and what an infinitely fast device leaves, from one event's ledgers in the order of due times.

    ``percentile``: the highest of p99, p95, p90 and p50 that all three support. None when the run has no forward to
    take out, or too few requests for a median.
    """
    measured = [column(name) for name in ("prefill", "decode") if column(name) in ledgers]
    if not measured or not len(ledgers) or ledgers[measured].isna().any(axis=None):
        return None
    lower_ns, upper_ns = without_forward_ns(ledgers)
    ends = [_estimates(values) for values in (ledgers["total_ns"].to_numpy(np.float64), lower_ns, upper_ns)]
    shown = next((p for p in _PERCENTILES if all(end[p].supported for end in ends)), None)
    if shown is None:
        return None
    now, lower, upper = (_described(end) for end in ends)
    return UpgradeBracket(now=now, lower=lower, upper=upper, percentile=shown)


def _described(estimates: Mapping[float, Estimate]) -> MainPercentiles:
    p50, p90, p95, p99 = (
        plain_percentile(found.value) if found.supported else None for _, found in sorted(estimates.items())
    )
    return MainPercentiles(p50_ms=p50, p90_ms=p90, p95_ms=p95, p99_ms=p99)


def _estimates(values: Floats) -> dict[float, Estimate]:
    series = Series(values)
    return {percentile: series.percentile(percentile) for percentile in _PERCENTILES}


def _sum(ledgers: pd.DataFrame, stages: tuple[str, ...]) -> Floats:
    there = [column(name) for name in stages if column(name) in ledgers]
    return np.asarray(ledgers[there].fillna(0.0).sum(axis=1), dtype=np.float64)
