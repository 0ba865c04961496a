"""From the requests of a trial to what its promises were judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import quantiles
from analysis.capacity.evidence import worth
from analysis.capacity.trial import Count, Promise
from analysis.metrics import Bools, good_requests, limits_of, metric_sample, request_values_ns, succeeded

Slo = Mapping[str, Any]


def promises_of(slos: Sequence[Slo]) -> tuple[Promise, ...]:
    """The SLOs of a manifest as shares: a p99 lets 1 % of values exceed its limit."""
    return tuple(
        Promise(
            str(slo["text"]),
            str(slo["metric"]),
            float(slo["limit_share"]) if slo["metric"] == "errors" else 1 - float(slo["percentile"]) / 100,
        )
        for slo in slos
    )


def count_all(slos: Sequence[Slo], requests: pd.DataFrame) -> tuple[Count, ...]:
    """One count an SLO; ``requests`` as from ``measured_requests``. A failed request exceeds every limit."""
    return tuple(_count(slo, requests) for slo in slos)


def count_good(slos: Sequence[Slo], requests: pd.DataFrame) -> tuple[int, float]:
    """How many requests kept every limit themselves, and how many independent ones all of them are worth."""
    if not len(requests):
        return 0, 0.0
    good = good_requests(requests, limits_of(slos))
    return int(good.sum()), len(good) / quantiles.autocorrelation_time(good.astype(np.float64))


def _count(slo: Slo, requests: pd.DataFrame) -> Count:
    failed = ~succeeded(requests)
    if slo["metric"] == "errors":
        return _count_errors(failed)
    limit, percentile = float(slo["limit_ns"]), float(slo["percentile"])
    if slo["metric"] == "itl":
        gaps = metric_sample(requests, "itl", failures=True)
        over = gaps.count - int(np.searchsorted(gaps.ordered, limit, side="right"))
        return Count(float(over), gaps.count, gaps.n_eff(percentile))
    values = np.where(failed, np.inf, request_values_ns(requests, str(slo["metric"])))
    values = values[~np.isnan(values)]
    return Count(float((values > limit).sum()), len(values), worth(values, percentile))


def _count_errors(failed: Bools) -> Count:
    if not len(failed):
        return Count(0.0, 0, 0.0)
    return Count(
        float(failed.sum()), len(failed), len(failed) / quantiles.autocorrelation_time(failed.astype(np.float64))
    )
