"""Does each SLO hold? PASS, FAIL or INCONCLUSIVE, by exact tests that count correlated requests once.

"p99 <= limit" says that at most 1 % of requests take longer. The exceedances found are tested against that share with
the exact binomial, n_eff in place of n, each side at 97.5 %; which is the same as asking whether the 95 % interval
of the percentile lies below the limit (PASS), above it (FAIL), or on both sides (INCONCLUSIVE). One side is enough: a
sample too small for an upper end can still prove a FAIL. Failed requests exceed every limit.

Where no request exceeds the limit, and few or none its half, less is needed (stats.exact): that way has a
quarter of a side's 2.5 %, on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import METRICS, metric_series, succeeded, window_s
from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.latency import Anatomy
from gapmeter.analysis.results.manifest import Slo
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, SloAnswer, Verdict
from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL, Estimate
from gapmeter.analysis.stats.exact import chance_far_below, growth_to_decide
from gapmeter.analysis.stats.series import share_of

EXIT_CODES: Mapping[Verdict, int] = {PASS: 0, FAIL: 99, INCONCLUSIVE: 98, INVALID: 98}


def judge(
    slos: Sequence[Slo], requests: pd.DataFrame, anatomies: Mapping[str, Anatomy], seconds: float | None = None
) -> tuple[SloAnswer, ...]:
    """Every SLO's answer, in the order given; INVALID for a metric that never occurred.

    ``requests`` as from ``measured_requests``; ``anatomies`` by metric. ``seconds``: how long they were asked for; None
    for one run, which tells by itself. Raises ValueError for a metric that does not exist.
    """
    each_s = (window_s(requests) if seconds is None else seconds) / max(len(requests), 1)
    return tuple(
        _judge_errors(slo, requests, each_s)
        if slo.metric == "errors"
        else _judge_latency(slo, requests, anatomies.get(slo.metric), each_s)
        for slo in slos
    )


def overall(answers: Sequence[SloAnswer], invalid_reasons: Sequence[str]) -> Verdict:
    """One word for the run: what is not valid first, then what failed, then what is undecided."""
    states = {answer.status for answer in answers}
    if invalid_reasons or INVALID in states:
        return INVALID
    return FAIL if FAIL in states else INCONCLUSIVE if INCONCLUSIVE in states else PASS


def never_occurred(answer: SloAnswer) -> str:
    """Why an SLO has no answer."""
    if answer.metric == "errors":
        return "0 of 0 requests failed: no request was measured"
    return f"p{answer.percentile:g} {answer.metric.upper()} never occurred: no request had one"


def _judge_latency(slo: Slo, requests: pd.DataFrame, anatomy: Anatomy | None, each_s: float) -> SloAnswer:
    if slo.metric not in METRICS:
        raise ValueError(f"{slo.text}: {slo.metric!r} is not a metric; known are {', '.join(METRICS)} and errors")
    if slo.limit_ns is None or slo.percentile is None:
        raise ValueError(f"{slo.text}: a limit of a latency has a percentile and a time")
    values = metric_series(requests, slo.metric, failures=True)
    limit, percentile = float(slo.limit_ns), float(slo.percentile)
    allowed, n_eff = 1 - percentile / 100, values.n_eff(percentile)
    over, beyond_half = values.count - np.searchsorted(values.ordered, [limit, limit / 2], side="right")
    estimate = values.percentile(percentile)
    status = _status(estimate, limit) if values.count else INVALID
    is_far, growth = False, None
    if status == INCONCLUSIVE:
        # A limit that nothing exceeds may be far enough for less evidence to do.
        is_far = not over and chance_far_below(int(beyond_half), values.count, n_eff, allowed) <= TAIL / 4
        if not is_far:
            growth = growth_to_decide(int(over), values.count, n_eff, allowed, values.plain(percentile))
    missing = values.more_values(percentile) if values.count else 0
    value = estimate.value if estimate.supported else None
    return SloAnswer(
        text=slo.text,
        metric=slo.metric,
        percentile=percentile,
        status=PASS if is_far else status,
        limit=limit / 1e6,
        value=None if value is None else value / 1e6,
        low=None if estimate.low is None else estimate.low / 1e6,
        high=None if estimate.high is None else estimate.high / 1e6,
        infinite=math.inf in (value, estimate.low),
        count=values.count,
        n_eff=n_eff,
        confidence=CONFIDENCE,
        estimable_with=_more(1 + missing / values.count, len(requests), each_s) if missing else None,
        needs=_more(growth, len(requests), each_s),
        stage=anatomy.stage if anatomy else None,
        owner=anatomy.owner if anatomy else None,
        beyond_half=int(beyond_half) if is_far else None,
    )


def _judge_errors(slo: Slo, requests: pd.DataFrame, each_s: float) -> SloAnswer:
    """The share of issued requests that failed, with Clopper-Pearson bounds; failures in a row count as correlated."""
    if slo.limit_share is None:
        raise ValueError(f"{slo.text}: a limit of errors is a share")
    failed = ~succeeded(requests)
    count, hits, limit = len(failed), int(failed.sum()), float(slo.limit_share)
    estimate = share_of(failed)
    n_eff = estimate.n_eff or 0.0
    status = INVALID if not count else PASS if limit >= 1 else _status(estimate, limit)
    growth = growth_to_decide(hits, count, n_eff, limit) if status == INCONCLUSIVE else None
    return SloAnswer(
        text=slo.text,
        metric="errors",
        percentile=None,
        status=status,
        limit=limit,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        infinite=False,
        count=count,
        n_eff=n_eff,
        confidence=CONFIDENCE,
        estimable_with=None,
        needs=_more(growth, count, each_s),
        stage=None,
        owner=None,
    )


def _status(estimate: Estimate, limit: float) -> Verdict:
    """Where an interval lies. An end that does not exist proves nothing."""
    if estimate.high is not None and estimate.high <= limit:
        return PASS
    return FAIL if estimate.low is not None and estimate.low > limit else INCONCLUSIVE


def _more(growth: float | None, requests: int, each_s: float) -> Needs | None:
    """How many more requests, and minutes at the rate at which they were due, a sample that much larger takes."""
    if growth is None:
        return None
    more = max(1, math.ceil((growth - 1) * requests))
    return Needs(requests=more, minutes=more * each_s / 60 if each_s else None)
