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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.tail import Anatomy
from gapmeter.analysis.numbers import DASH, duration, share
from gapmeter.analysis.numbers import count as count_text
from gapmeter.analysis.requests.metrics import METRICS, metric_series, succeeded, window_s
from gapmeter.analysis.stats.estimate import TAIL, Estimate
from gapmeter.analysis.stats.exact import chance_far_below, growth_to_decide
from gapmeter.analysis.stats.series import Series, share_of

PASS, FAIL, INCONCLUSIVE, INVALID = "PASS", "FAIL", "INCONCLUSIVE", "INVALID"
EXIT_CODES = {PASS: 0, FAIL: 99, INCONCLUSIVE: 98, INVALID: 98}


@dataclass(frozen=True, slots=True)
class SloResult:
    """One SLO's answer. ``limit``, ``value``, ``low`` and ``high`` are ns, or a share where ``metric`` is errors.

    ``value`` is None where the percentile is not supported; infinite where answers that never came reach it. ``low``
    and ``high`` are None where the sample does not reach. ``status`` INVALID: the metric never occurred. ``stage`` and
    ``owner`` name what explains the slow requests, where a ledger says so. ``more_requests`` and ``more_minutes`` say
    what would settle an INCONCLUSIVE, None when nothing reasonable would. ``estimable_requests`` and
    ``estimable_minutes`` are how much more gives the interval both its ends, None where it has them.
    """

    text: str
    metric: str
    percentile: float | None
    limit: float
    status: str
    value: float | None
    low: float | None
    high: float | None
    count: int
    n_eff: float
    more_requests: int | None
    more_minutes: float | None
    stage: str | None
    owner: str | None
    sentence: str
    estimable_requests: int | None = None
    estimable_minutes: float | None = None


def judge(
    slos: Sequence[Mapping[str, Any]], requests: pd.DataFrame, anatomies: Mapping[str, Anatomy | None],
    seconds: float | None = None,
) -> list[SloResult]:  # fmt: skip
    """Every SLO's answer, in the order given.

    An SLO is a mapping with ``metric``, ``percentile``, ``limit_ns`` or ``limit_share``, and ``text``; ``requests`` as
    from ``measured_requests``; ``anatomies`` by metric. ``seconds``: how long they were asked for; None for one run,
    which tells by itself. Raises ValueError for a metric that does not exist.
    """
    each_s = (window_s(requests) if seconds is None else seconds) / max(len(requests), 1)
    return [_judge_one(slo, requests, anatomies.get(str(slo["metric"])), each_s) for slo in slos]


def overall(results: Sequence[SloResult], invalid_reasons: Sequence[str]) -> str:
    """One word for the run: what is not valid first, then what failed, then what is undecided."""
    states = {result.status for result in results}
    if invalid_reasons or INVALID in states:
        return INVALID
    return next((state for state in (FAIL, INCONCLUSIVE) if state in states), PASS)


def _judge_one(slo: Mapping[str, Any], requests: pd.DataFrame, anatomy: Anatomy | None, each_s: float) -> SloResult:
    if slo["metric"] == "errors":
        return _judge_errors(slo, requests, each_s)
    if slo["metric"] not in METRICS:
        raise ValueError(f"{slo['text']}: {slo['metric']!r} is not a metric; known are {', '.join(METRICS)} and errors")
    values = metric_series(requests, slo["metric"], failures=True)
    return _judge_latency(slo, values, len(requests), anatomy, each_s)


def _judge_latency(
    slo: Mapping[str, Any], values: Series, requests: int, anatomy: Anatomy | None, each_s: float
) -> SloResult:
    limit, percentile = float(slo["limit_ns"]), float(slo["percentile"])
    found = values.percentile(percentile)
    status = _status(found, limit) if values.count else INVALID
    over = values.count - int(np.searchsorted(values.ordered, limit, side="right"))
    more, minutes = None, None
    beyond_half = values.count - int(np.searchsorted(values.ordered, limit / 2, side="right"))
    is_far = status == INCONCLUSIVE and not over and _is_far_below(beyond_half, values, percentile)
    if is_far:
        status = PASS
    if status == INCONCLUSIVE:
        growth = growth_to_decide(
            over, values.count, values.n_eff(percentile), 1 - percentile / 100, values.plain(percentile)
        )
        more, minutes = _more(growth, requests, each_s)
    value = found.value if found.supported else None
    missing = values.more_values(percentile) if values.count else 0
    whole = _more(1 + missing / values.count, requests, each_s) if missing else (None, None)
    sentence = _latency_sentence(slo, status, values, found, whole if more is None and not is_far else None)
    if status != INVALID:
        sentence += _outcome(status, more, minutes, f"the limit of {_time(limit)}")
    if is_far:
        sentence += f", which no request exceeded, and {count_text(beyond_half) if beyond_half else 'none'} its half"
    return SloResult(
        str(slo["text"]), str(slo["metric"]), percentile, limit, status, value, found.low, found.high, values.count,
        values.n_eff(percentile), more, minutes, anatomy.stage if anatomy else None, anatomy.owner if anatomy else None,
        sentence, *whole,
    )  # fmt: skip


def _is_far_below(beyond_half: int, values: Series, percentile: float) -> bool:
    """Whether a limit that nothing exceeds is far enough for less evidence to do."""
    allowed = 1 - percentile / 100
    return chance_far_below(beyond_half, values.count, values.n_eff(percentile), allowed) <= TAIL / 4


def _judge_errors(slo: Mapping[str, Any], requests: pd.DataFrame, each_s: float) -> SloResult:
    """The share of issued requests that failed, with Clopper-Pearson bounds; failures in a row count as correlated."""
    failed = ~succeeded(requests)
    count, hits, limit = len(failed), int(failed.sum()), float(slo["limit_share"])
    found = share_of(failed)
    (low, high), n_eff = found.ends, found.n_eff or 0.0
    status = INVALID if not count else PASS if limit >= 1 else _status(found, limit)
    more, minutes = None, None
    if status == INCONCLUSIVE:
        more, minutes = _more(growth_to_decide(hits, count, n_eff, limit), count, each_s)
    sentence = f"{count_text(hits)} of {count_text(count)} requests failed"
    sentence += f" ({share(found.value)}, 95 % interval {share(low)} .. {share(high)})" if count else ""
    sentence += _outcome(status, more, minutes, f"the limit of {share(limit)}")
    return SloResult(
        str(slo["text"]), "errors", None, limit, status, found.value, low, high, count, n_eff, more, minutes, None,
        None, sentence,
    )  # fmt: skip


def _status(found: Estimate, limit: float) -> str:
    """Where an interval lies. An end that does not exist proves nothing."""
    if found.high is not None and found.high <= limit:
        return PASS
    return FAIL if found.low is not None and found.low > limit else INCONCLUSIVE


def _more(growth: float | None, requests: int, each_s: float) -> tuple[int | None, float | None]:
    """How many more requests, and minutes at the rate at which they were due, a sample that much larger takes."""
    if growth is None:
        return None, None
    more = max(1, math.ceil((growth - 1) * requests))
    return more, more * each_s / 60 if each_s else None


def _latency_sentence(
    slo: Mapping[str, Any], status: str, values: Series, found: Estimate, whole: tuple[int | None, float | None] | None
) -> str:
    """``whole``: what gives the interval both ends; None where what decides is said after it, and is what counts."""
    percentile = float(slo["percentile"])
    n_eff = values.n_eff(percentile)
    name = f"p{percentile:g} {str(slo['metric']).upper()}"
    if status == INVALID:
        return f"{name} never occurred: no request had one"
    worth = count_text(n_eff) if n_eff >= 1 else "less than one"
    size = f"n = {count_text(values.count)}, worth {worth} independent"
    if found.supported and found.low == math.inf:
        return f"{name} never: more requests failed than it may leave out ({size})"
    if found.supported:
        value, low, high = (_time(ns) for ns in (found.value, *found.ends))
        return f"{name} {value}, 95 % interval {low} .. {high} ({size})"
    size += f"; {_longer(*whole)}" if whole else ""
    if found.low is not None:
        return f"{name} above {_time(found.low)}, no upper end from this sample ({size})"
    return f"{name} not estimable ({size})"


def _longer(requests: int | None, minutes: float | None) -> str:
    """The run length from which the interval would have both ends."""
    span = f", about {minutes:.0f} min," if minutes and minutes >= 1 else ""
    return f"estimable with {count_text(requests)} more requests{span} like these"


def _outcome(status: str, more: int | None, minutes: float | None, limit: str) -> str:
    if status == PASS:
        return f": within {limit}"
    if status == FAIL:
        return f": beyond {limit}"
    if status == INVALID:
        return ": no request was measured"
    if more is None:
        return f": too close to {limit} for any sample of reasonable size to decide"
    span = f" (about {minutes:.0f} min)" if minutes and minutes >= 1 else ""
    return f": undecided against {limit}; needs about {count_text(more)} more requests{span}"


def _time(ns: float | None) -> str:
    if ns is None:
        return DASH
    return "never (failed requests)" if math.isinf(ns) else duration(ns / 1e6)
