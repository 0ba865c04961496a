"""Does each SLO hold? PASS, FAIL or INCONCLUSIVE, by exact tests that count correlated requests once.

"p99 <= limit" says that at most 1 % of requests take longer: a question with one side. Failed requests exceed every
limit. An answer is at least 95 % sure (by ``share`` sometimes less), and says how sure, and by what (``basis``), the
first of these that decides:

- ``interval``: the 95 % interval of the percentile lies below the limit, or above it; one side of it is 97.5 % sure.
  A sample too small for an upper end can still prove a FAIL. Where ``share`` does not, so does the interval of the
  share of failures, if it lies above what the percentile leaves out.
- ``bound``: the interval has no upper end, and the largest value bounds the percentile below the limit: no value beyond
  it among n_eff has the chance q^n_eff (95 % sure of a p99 with 299).
- ``far``: no request exceeded the limit, and few or none a part of it (stats.exact, which says what that assumes).
- ``share``: so many requests exceeded the limit that it is missed however they hang together (Markov's inequality: a
  fifth of them for a p99); of a hundred requests or more always where more than half of them did, from p90 on, and
  where all did.
- ``outage``: the server failed from a moment on, or for a time, and more requests exceeded the limit than may.

What none of these decides is INCONCLUSIVE. The same tests then say which way it leans, where the likelier side is 80 %
sure or more: what an interval would need is read from its binomial, the others are as sure as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools
from gapmeter.analysis.judge.lateness import AnyLateness, ReportedLateness, moves_ns, shortens, upper_bound
from gapmeter.analysis.requests.figures import at_most_ms, finite_ms
from gapmeter.analysis.requests.metrics import MetricSeries, ended_by_us, resent_once, succeeded, window_s
from gapmeter.analysis.results.distribution import KnownPercentile, Needs, Percentile
from gapmeter.analysis.results.latency import Anatomy, explained_by
from gapmeter.analysis.results.requests import Outage
from gapmeter.analysis.results.run import (
    FAIL,
    INCONCLUSIVE,
    INVALID,
    PASS,
    Basis,
    FarBelow,
    Leaning,
    SloAnswer,
    Verdict,
)
from gapmeter.analysis.stats.estimate import CONFIDENCE, MOST_SURE, TAIL, Estimate
from gapmeter.analysis.stats.exact import (
    chance_far_from,
    chance_of_so_few,
    chance_of_so_few_in_bursts,
    chance_of_so_large_a_share,
    chance_of_so_many,
    growth_to_decide,
    share_at_most,
)
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series, bursts_in, share_of
from gapmeter.scenarios.slo import Slo

_FEW = 0.1 + 1e-9  # a share of requests; half of them beyond a limit is many times as much
_ENOUGH = 100  # requests; in fewer, half of them may well be one burst
_LEANS = 0.8  # sure, or more
_MOST_LEANING = 0.94  # an interval asks for 97.5 %, but what is open is not said to be as sure as an answer
EXIT_CODES: Mapping[Verdict, int] = {PASS: 0, FAIL: 99, INCONCLUSIVE: 98, INVALID: 98}


def judge(
    slos: Sequence[Slo], requests: pd.DataFrame, anatomies: Mapping[str, Anatomy], seconds: float | None = None,
    lateness: AnyLateness = ReportedLateness(), outage: Outage | None = None, series: MetricSeries | None = None,
) -> tuple[SloAnswer, ...]:  # fmt: skip
    """Every SLO's answer, in the order given; INVALID for a metric that never occurred, or that lateness may decide.

    ``requests`` as from ``measured_requests``; ``anatomies`` by metric. ``seconds``: how long they were asked for; None
    for one run, which tells by itself. ``series``: the requests'. Raises ValueError for a metric that does not exist.
    """
    each_s = (window_s(requests) if seconds is None else seconds) / max(len(requests), 1)
    series = series or MetricSeries(requests)
    answers = []
    for slo in slos:
        if slo.metric == "errors":
            answer = _judge_errors(slo, requests, each_s)
        else:
            anatomy = anatomies.get(explained_by(slo.metric))
            answer = _judge_latency(slo, series, len(requests), anatomy, each_s, lateness)
        answers.append(_with_outage(answer, outage, slo))
    return tuple(answers)


def _with_outage(answer: SloAnswer, outage: Outage | None, slo: Slo) -> SloAnswer:
    """A limit that this run did not keep, since the server failed for a time, is missed, and not undecided."""
    if outage is None or not (answer.status == INCONCLUSIVE or answer.unjudged):
        return answer
    beyond = outage.requests if answer.unjudged else answer.beyond or 0  # the former no lateness has added to
    if answer.count and slo.allows(beyond / answer.count):
        return answer
    decided = {"status": FAIL, "basis": "outage", "outage": outage, "needs": None, "late": None, "leaning": None}
    return answer.model_copy(update=decided)


def overall(answers: Sequence[SloAnswer], invalid_reasons: Sequence[str]) -> Verdict:
    """One word for the run: what is not valid first, then what failed, then what is undecided."""
    states = {answer.status for answer in answers}
    if invalid_reasons or INVALID in states:
        return INVALID
    return FAIL if FAIL in states else INCONCLUSIVE if INCONCLUSIVE in states else PASS


def _judge_latency(
    slo: Slo, series: MetricSeries, requests: int, anatomy: Anatomy | None, each_s: float, lateness: AnyLateness
) -> SloAnswer:
    if slo.limit_ns is None or slo.percentile is None:
        raise ValueError(f"{slo.text}: a limit of a latency has a percentile and a time")
    values = series(slo.metric, failures=True)
    limit, percentile = float(slo.limit_ns), float(slo.percentile)
    n_eff, estimate = values.n_eff(percentile), values.percentile(percentile)
    over, over_half = _beyond(values, limit)
    found, late_ns = _in_spite_of(lateness, slo.metric, values, percentile, limit)
    growth = None
    if found.status == INCONCLUSIVE:
        growth = growth_to_decide(over, values.count, n_eff, slo.allowed, values.plain(percentile))
    missing = values.more_values(percentile) if values.count else 0
    value = estimate.value if estimate.supported else None
    infinite = math.inf in (value, estimate.low)
    at_most = at_most_ms(values, percentile) if not estimate.supported else None
    refused_ns = lateness.refused_ns(slo.metric, percentile)
    if not infinite and refused_ns is not None:
        late_ns = late_ns or refused_ns
        ci_ms = (finite_ms(estimate.low), finite_ms(estimate.high)) if estimate.supported else None
        known = Percentile(ci_ms=ci_ms, at_most=at_most)
        at_most = None if shortens(slo.metric, percentile) else upper_bound(known)
    ends = value, estimate.low, estimate.high
    shown_ms, low_ms, high_ms = map(finite_ms, ends if late_ns is None else (None, None, None))
    return SloAnswer(
        text=slo.text,
        metric=slo.metric,
        percentile=percentile,
        status=found.status,
        sure=found.sure,
        basis=found.basis,
        limit=limit / 1e6,
        value=shown_ms,
        low=low_ms,
        high=high_ms,
        sample=finite_ms(estimate.value),
        at_most=at_most,
        highest=_highest_known(values, percentile) if not estimate.supported else None,
        infinite=infinite,
        beyond=over,
        count=values.count,
        n_eff=n_eff,
        confidence=CONFIDENCE,
        estimable_with=_more(1 + missing / values.count, requests, each_s) if missing else None,
        needs=_more(growth, requests, each_s),
        stage=anatomy.stage if anatomy else None,
        owner=anatomy.owner if anatomy else None,
        beyond_half=over_half if found.far else None,
        far=found.far,
        late=finite_ms(late_ns),
        may_be_late=lateness.may_be_ns(slo.metric, percentile) / 1e6 or None,
        leaning=found.leaning if refused_ns is None else None,
    )


def _in_spite_of(
    lateness: AnyLateness, metric: str, values: Series, percentile: float, limit: float
) -> tuple[Decided, float | None]:
    """The answer; where lateness may have decided it, INVALID, and by how much, ns."""
    found = decide(values, percentile, limit)
    for move in moves_ns(lateness, metric, percentile, holds={PASS: True, FAIL: False}.get(found.status)):
        if decide(values, percentile, max(limit + move, 1.0)).status != found.status:
            return Decided(INVALID), abs(move)
    return found, None


def _highest_known(values: Series, below: float) -> KnownPercentile | None:
    """The highest of the percentiles always reported that lies below and whose interval has two finite ends."""
    for percentile in sorted((p for p in PERCENTILES if p < below), reverse=True):
        found = values.percentile(percentile)
        if found.supported and math.isfinite(found.known[2]):
            value, low, high = (ns / 1e6 for ns in found.known)
            return KnownPercentile(percentile=percentile, value_ms=value, ci_ms=(low, high))
    return None


def _judge_errors(slo: Slo, requests: pd.DataFrame, each_s: float) -> SloAnswer:
    """The share of requests that the server failed, with Clopper-Pearson bounds; those in bursts count as correlated.

    Met only if it is also met with every request counted as failed that was sent a second time: see ``resent_once``.
    """
    if slo.limit_share is None:
        raise ValueError(f"{slo.text}: a limit of errors is a share")
    requests = requests[~ended_by_us(requests)]
    failed = ~succeeded(requests)
    count, hits, limit = len(failed), int(failed.sum()), float(slo.limit_share)
    estimate, bursts = _share_of_failed(failed)
    n_eff = estimate.n_eff or 0.0
    decided = _decide_share(failed, limit)
    undecided = decided.status == INCONCLUSIVE
    growth = growth_to_decide(hits, count, n_eff, limit, bursts=bursts, bound=False) if undecided else None
    resent = ~failed & resent_once(requests)
    in_doubt = decided.status == PASS and _decide_share(failed | resent, limit).status != PASS
    if in_doubt:  # the server may have read these and dropped them; a longer run would not tell either
        decided = Decided(INCONCLUSIVE)
    return SloAnswer(
        text=slo.text,
        metric="errors",
        percentile=None,
        status=decided.status,
        sure=decided.sure,
        basis=decided.basis,
        limit=limit,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        sample=estimate.value,
        infinite=False,
        beyond=hits,
        count=count,
        n_eff=n_eff,
        confidence=CONFIDENCE,
        estimable_with=None,
        needs=_more(growth, count, each_s),
        stage=None,
        owner=None,
        resent=int(resent.sum()) if in_doubt else None,
        leaning=decided.leaning,
    )


def _decide_share(failed: Bools, limit: float) -> Decided:
    if not len(failed) or limit >= 1:
        return Decided(PASS if len(failed) else INVALID)
    (estimate, bursts), hits, count = _share_of_failed(failed), int(failed.sum()), len(failed)
    if found := _by_interval(estimate, limit) or _by_share(hits, count, limit, count):
        return found
    n_eff = estimate.n_eff or 0.0
    met = max(chance_of_so_few(hits, count, n_eff, limit), chance_of_so_few_in_bursts(hits, count, bursts, limit))
    return Decided(INCONCLUSIVE, leaning=_leaning((met, "interval"), _chance_if_met(hits, count, n_eff, limit)))


def _share_of_failed(failed: Bools) -> tuple[Estimate, float]:
    """With the upper end that the bursts leave, in which failures came, and how many those were."""
    estimate = share_of(failed)
    bursts = bursts_in(failed, estimate.n_eff or 1.0)
    high = max(estimate.high or 0.0, share_at_most(float(failed.sum()), len(failed), bursts))
    return replace(estimate, high=high), bursts


@dataclass(frozen=True, slots=True)
class Decided:
    """An answer, how sure it is, and by what. ``far``: what of the limit was not reached, where that decided.

    ``leaning``: what an undecided one probably is.
    """

    status: Verdict
    sure: float | None = None
    basis: Basis | None = None
    far: FarBelow | None = None
    leaning: Leaning | None = None


def decide(values: Series, percentile: float, limit: float) -> Decided:
    """Whether a percentile of values lies below a limit, in their unit; INVALID without any."""
    if not values.count:
        return Decided(INVALID)
    allowed, n_eff = 1 - percentile / 100, values.n_eff(percentile)
    over, over_half = _beyond(values, limit)
    found = _by_interval(values.percentile(percentile), limit)
    requests = int(values.clusters[0].max()) + 1 if values.clusters else values.count
    found = found or _by_share(over, values.count, allowed, requests) or _by_failures(values, allowed)
    if found is not None:
        return found
    bound = values.at_most(percentile)
    if bound is not None and bound.value <= limit and bound.confidence >= CONFIDENCE:
        return Decided(PASS, bound.confidence, "bound")
    far = chance_far_from(float(values.ordered[-1]) / limit, over_half, values.count, n_eff, allowed)
    if far is not None and far[0] <= 1 - CONFIDENCE:
        return Decided(PASS, min(1 - far[0], MOST_SURE), "far", FarBelow(part=far[1], beyond=far[2]))
    broken: list[Chance] = [(chance_of_so_few(over, values.count, n_eff, allowed), "interval" if over else "bound")]
    broken += [(1 - bound.confidence, "bound")] if bound is not None and bound.value <= limit else []
    broken += [(far[0], "far")] if far is not None else []
    return Decided(INCONCLUSIVE, leaning=_leaning(min(broken), _chance_if_met(over, values.count, n_eff, allowed)))


Chance = tuple[float, Basis]  # of what was found, and the test that says so


def _chance_if_met(over: int, count: int, n_eff: float, allowed: float) -> Chance:
    """Of so many beyond a limit, if no more were than may: by the binomial or by Markov's inequality."""
    binomial: Chance = chance_of_so_many(over, count, n_eff, allowed), "interval"
    markov: Chance = chance_of_so_large_a_share(over, count, allowed), "share"
    return min(binomial, markov)


def _leaning(if_missed: Chance, if_met: Chance) -> Leaning | None:
    """To the side whose opposite is the less likely; None where that is more likely than one in five."""
    status: Literal["PASS", "FAIL"] = PASS if if_missed <= if_met else FAIL
    chance, basis = min(if_missed, if_met)
    return Leaning(status=status, sure=min(1 - chance, _MOST_LEANING), basis=basis) if chance <= 1 - _LEANS else None


def _beyond(values: Series, limit: float) -> tuple[int, int]:
    """How many values exceed a limit, and its half."""
    over, over_half = values.count - np.searchsorted(values.ordered, [limit, limit / 2], side="right")
    return int(over), int(over_half)


def _by_interval(estimate: Estimate, limit: float) -> Decided | None:
    """Where an interval lies. An end that does not exist proves nothing."""
    if estimate.high is not None and estimate.high <= limit:
        return Decided(PASS, 1 - TAIL, "interval")
    return Decided(FAIL, 1 - TAIL, "interval") if estimate.low is not None and estimate.low > limit else None


def _by_failures(values: Series, allowed: float) -> Decided | None:
    """FAIL where surely more requests failed than may: told as for errors, however alike the answers are."""
    failed = np.isinf(values.values)
    if values.clusters or not failed.any():  # of pooled gaps, those that never came are not in the order of time
        return None
    return Decided(FAIL, 1 - TAIL, "interval") if (share_of(failed).low or 0.0) > allowed else None


def _by_share(over: int, count: int, allowed: float, requests: int) -> Decided | None:
    """FAIL where so many values are beyond a limit that it does not matter how alike neighbors are."""
    chance, enough = chance_of_so_large_a_share(over, count, allowed), requests >= _ENOUGH
    if chance <= 1 - CONFIDENCE or (enough and 2 * over > count and allowed <= _FEW):
        return Decided(FAIL, min(1 - chance, MOST_SURE), "share")
    if enough and over == count:  # for a median, too, though it says of this run alone how sure that is
        return Decided(FAIL, None, "share")
    return None


def _more(growth: float | None, requests: int, each_s: float) -> Needs | None:
    """How many more requests, and minutes at the rate at which they were due, a sample that much larger takes."""
    if growth is None:
        return None
    more = max(1, math.ceil((growth - 1) * requests))
    return Needs(requests=more, minutes=more * each_s / 60 if each_s else None)
