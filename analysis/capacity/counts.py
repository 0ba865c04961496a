"""From the requests of a trial to what its promises were judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Ints
from gapmeter.analysis.capacity.evidence import chance_if_stable, worth, worth_of_clusters, worth_of_slow
from gapmeter.analysis.capacity.trial import Count, Promise
from gapmeter.analysis.requests.metrics import (
    good_requests,
    limits_of,
    pooled_gaps,
    request_values_ns,
    stamps_ns,
    succeeded,
)
from gapmeter.analysis.results.manifest import Slo
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.series import share_of


def promises_of(slos: Sequence[Slo]) -> tuple[Promise, ...]:
    """The SLOs of a manifest as shares: a p99 lets 1 % of values exceed its limit."""
    return tuple(
        Promise(
            slo.text, slo.metric, slo.limit_share if slo.limit_share is not None else 1 - (slo.percentile or 0) / 100
        )
        for slo in slos
    )


def count_all(slos: Sequence[Slo], requests: pd.DataFrame, rate: float) -> tuple[Count, ...]:
    """One count an SLO; ``requests`` as from ``measured_requests``, asked for at ``rate`` per second.

    A failed request exceeds every limit.
    """
    return tuple(_count(slo, requests, rate) for slo in slos)


def count_values(values: Floats, due_ns: Floats, limit_ns: float, percentile: float, rate: float) -> Count:
    """What latencies from due times on, ns, say about a limit; in the order of their due times, infinite: never."""
    if not len(values):
        return Count(0.0, 0, 0.0)
    over, n_eff = float((values > limit_ns).sum()), worth(values, percentile)
    return Count(
        over, len(values), n_eff, float((values > limit_ns / 2).sum()),
        chance_if_stable(values, due_ns, limit_ns, rate),
        min(n_eff, worth_of_slow(values, limit_ns)) if over else None,
    )  # fmt: skip


def count_good(slos: Sequence[Slo], requests: pd.DataFrame) -> tuple[int, float]:
    """How many requests kept every limit themselves, and how many independent ones all of them are worth."""
    if not len(requests):
        return 0, 0.0
    good = good_requests(requests, limits_of(slos))
    return int(good.sum()), share_of(good).n_eff or 0.0


def _count(slo: Slo, requests: pd.DataFrame, rate: float) -> Count:
    failed = ~succeeded(requests)
    if slo.metric == "errors":
        return _count_errors(failed)
    limit, percentile = float(slo.limit_ns or 0), slo.percentile or 0.0
    if slo.metric == "itl":
        return _count_gaps(*pooled_gaps(requests, ~failed, failures=True), limit)
    values = np.where(failed, np.inf, request_values_ns(requests, slo.metric))
    known = ~np.isnan(values)
    if slo.metric == "tpot":
        return Count(float((values[known] > limit).sum()), int(known.sum()), worth(values[known], percentile))
    count = count_values(values[known], stamps_ns(requests, "due_ns")[known].astype(float), limit, percentile, rate)
    return replace(count, stable=1.0) if failed.any() else count  # who refuses requests completes fewer of them


def _count_gaps(gaps_ns: Floats, clusters: Sequence[Ints], limit_ns: float) -> Count:
    if not len(gaps_ns):
        return Count(0.0, 0, 0.0)
    over, half = ((gaps_ns > limit).sum() for limit in (limit_ns, limit_ns / 2))
    return Count(float(over), len(gaps_ns), worth_of_clusters(gaps_ns, clusters), float(half))


def _count_errors(failed: Bools) -> Count:
    if not len(failed):
        return Count(0.0, 0, 0.0)
    return Count(float(failed.sum()), len(failed), share_of(failed).n_eff or 0.0)
