"""What may be claimed of a comparison: faster, slower, or no difference found; and which stage accounts for it.

The family of tests is every metric's mean and percentiles that both sides support, over all comparisons that are told
together. Their p-values are corrected by Holm's (1979) step-down method, so that with a probability of at least 95 %
none of these is claimed to differ that does not. A claim must also exceed the load tester's own floor. That one side
failed more requests is told by an interval of its own, beside this family.

Against a baseline (``judge_regression``): have runs become slower by more than is allowed? Judged are the percentiles
that the scenario's SLOs name, and both answers need evidence. One has *regressed* when the 95 % interval of its growth
lies beyond the limit (with several, Holm's correction of the one-sided p-values, at 2.5 %), and the difference beyond
the load tester's own floor. It is *within* the limit when the interval lies below it, and reaches no request that
failed. Else it is *undecided*: that fails nothing, and says what would decide it. Where a sample cannot support a
percentile, the mean is judged beside it: it may prove a regression, but is never within. Runs that failed a larger
share of their requests are never within: beyond chance they regressed, whatever the latency of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gapmeter.analysis.compare.differences import Differences
from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.results.comparison import (
    FAILS_LESS,
    FAILS_MORE,
    FASTER,
    MIXED,
    NOT_COMPARABLE,
    NOTHING,
    SLOWER,
    UNKNOWN,
    Change,
    ClaimedFigure,
    Comparison,
    DifferenceFigure,
    FailedShares,
    FigureName,
    PairComparison,
    Word,
)
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.regression import (
    MOST_RUNS,
    NOT_ESTIMABLE,
    REGRESSED,
    UNDECIDED,
    WITHIN,
    FailedRow,
    Regression,
    RegressionRow,
    RegressionStatus,
)
from gapmeter.analysis.stages import owner_of, owner_words
from gapmeter.analysis.stats.estimate import CONFIDENCE, MOST_LOG, TAIL, Difference, Spread, holm
from gapmeter.scenarios.slo import LATENCIES

FAMILY: tuple[float, ...] = (50.0, 90.0, 99.0)
_ROUNDING_NS = 1.0  # stamps are whole nanoseconds: percentiles of equal values may differ by less
LEAST_CAUSE = 0.1  # of the difference: work that changed by less is no cause of it
# Waits whose length others decide: they follow from what somebody's work takes, and are never its first cause.
WAITS = frozenset(
    {"retry", "accept_wait", "core_wait", "engine_wait", "queue", "other_step", "interference", "preempted"}
)


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of the family. ``percentile``: None for the mean.

    ``p_adjusted`` is Holm's; ``least_ns`` the smallest difference that would have been found with 80 % probability;
    ``floor_ns`` the load tester's own error, 0 where it is unmeasured.
    """

    metric: str
    percentile: float | None
    difference: Difference
    p_adjusted: float | None
    confirmed: bool
    least_ns: float | None
    floor_ns: float

    @property
    def figure(self) -> FigureName:
        return FigureName(metric=self.metric, percentile=self.percentile)


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The answer for one comparison: for each metric, and in all. ``family`` is the number of tests.

    ``telling``: the claim that says it best, an SLO's where one was confirmed; where nothing was, the figure that a
    difference would have been found in.
    """

    word: Word
    telling: Claim | None
    metrics: Mapping[str, Word]
    claims: tuple[Claim, ...]
    family: int


def judge(
    found: Sequence[Differences], floors: Mapping[str, tuple[float, float]], slos: Sequence[tuple[str, float]] = ()
) -> list[PairVerdict]:
    """A verdict for each comparison.

    ``floors[metric]``: the load tester's error at p50 and p99, ns. ``slos``: metric and percentile of each SLO, which
    join the family and are told first.
    """
    members = {(metric, p) for metric in LATENCIES for p in (*FAMILY, None)} | set(slos)
    family = {
        (number, metric, p): difference
        for number, each in enumerate(found)
        for metric, own in each.metrics.items()
        for p, difference in own.items()
        if (metric, p) in members
    }
    tested = {key: difference.p for key, difference in family.items() if difference.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    claims: list[list[Claim]] = [[] for _ in found]
    for key, difference in family.items():
        number, metric, p = key
        claims[number].append(_claim(metric, p, difference, adjusted.get(key), len(tested), floors))
    return [_verdict(own, slos, len(tested), each.failed) for own, each in zip(claims, found, strict=True)]


def _with_failures(word: Word, claims: Sequence[Claim], failed: FailedShares) -> Word:
    """A side that drops requests and answers the rest sooner is not faster, nor is one slower that only drops more.

    What failed moves every percentile of all requests, but not the means, which are of answers.
    """
    if failed.more is None:
        return word
    slower = [claim for claim in claims if _counts(claim) and (claim.difference.value or 0.0) > 0]
    if failed.more == "a":
        return MIXED if slower else FAILS_LESS
    return SLOWER if any(claim.percentile is None for claim in slower) else FAILS_MORE


def _claim(
    metric: str, p: float | None, difference: Difference, adjusted: float | None, family: int,
    floors: Mapping[str, tuple[float, float]],
) -> Claim:  # fmt: skip
    floor = floors.get(metric, (0.0, 0.0))[0 if p is not None and p <= 50 else 1]
    if adjusted is None or difference.value is None:
        return Claim(metric, p, difference, None, False, None, floor)
    confirmed = bool(adjusted <= 1 - CONFIDENCE and abs(difference.value) > max(floor, _ROUNDING_NS))
    least = max(difference.least(_strictest(family)), floor)
    return Claim(metric, p, difference, float(adjusted), confirmed, least, floor)


def _strictest(tests: int) -> float:
    """The confidence that Holm's correction asks of the first of so many tests."""
    return 1 - (1 - CONFIDENCE) / tests


def _verdict(
    claims: Sequence[Claim], slos: Sequence[tuple[str, float]], family: int, failed: FailedShares
) -> PairVerdict:
    metrics = {metric: _word([c for c in claims if c.metric == metric]) for metric in LATENCIES}
    confirmed = [c for c in claims if _counts(c)]
    estimable = [c for c in claims if c.least_ns is not None and c.difference.a and not c.difference.failed]
    telling: Claim | None
    if confirmed:
        telling = min(
            confirmed,
            key=lambda c: (
                bool(c.difference.failed), (c.metric, c.percentile) not in slos, c.percentile is None, -_size(c)
            ),
        )  # fmt: skip
    else:
        of_slos = [c for c in estimable if (c.metric, c.percentile) in slos]
        telling = next(iter(of_slos or [c for c in estimable if c.metric == "e2e"] or estimable), None)
    return PairVerdict(_with_failures(_word(claims), claims, failed), telling, metrics, tuple(claims), family)


def _size(claim: Claim) -> float:
    """How far beyond chance, in half widths of the interval."""
    half = claim.difference.half_width(CONFIDENCE)
    return abs(claim.difference.value or 0.0) / half if half else 0.0


def _counts(claim: Claim) -> bool:
    """That A's percentile reaches requests that failed makes B no faster: what A failed is told beside it."""
    return claim.confirmed and "a" not in claim.difference.failed


def _word(claims: Sequence[Claim]) -> Word:
    if not any(c.difference.supported for c in claims):
        return UNKNOWN
    signs = {(c.difference.value or 0.0) > 0 for c in claims if _counts(c)}
    if len(signs) == 2:
        return MIXED
    return (SLOWER if True in signs else FASTER) if signs else NOTHING


def what_changed(found: Differences, verdict: PairVerdict, device: str) -> Change | None:
    """The stage that accounts for the difference, of TTFT or E2E, whichever's claim is surer; None without a ledger.

    ``device`` is what computed the forwards, in a word.
    """
    if not found.ledgers:
        return None
    confirmed = [c for c in verdict.claims if c.confirmed and not c.difference.failed]
    surest = max(confirmed, key=lambda c: (c.metric in LEDGER_OF, _size(c)), default=None)
    metric = "ttft" if surest is not None and surest.metric == "ttft" and "first_token" in found.ledgers else "e2e"
    event = LEDGER_OF[metric]
    ledger = found.ledgers[event]
    total = ledger.total
    if surest is not None and (surest.difference.value or 0.0) * (total.value or 0.0) < 0:
        return Change(metric=metric, event=event, claim=surest.figure, unexplained="opposite")
    if surest is None or not total.estimate.excludes(0.0):
        return Change(metric=metric, event=event, unexplained="no claim" if surest is None else "uncertain")
    whole = total.value or 0.0
    shares = {name: (d.value or 0.0) / whole for name, d in ledger.stages.items()}
    stage = max(shares, key=lambda name: shares[name])
    beyond = {name for name, d in ledger.stages.items() if d.estimate.excludes(0.0)}
    work = [name for name in shares if name not in WAITS and shares[name] >= LEAST_CAUSE and name in beyond]
    part = ledger.shares[stage]
    cause = max(work, key=lambda name: shares[name], default=None)
    return Change(
        metric=metric,
        event=event,
        stage=stage,
        owner=owner_words(owner_of(stage), device),
        share=shares[stage],
        share_ci=part.known[1:] if part else None,
        cause=cause,
        cause_owner=owner_words(owner_of(cause), device) if cause else None,
    )


_WORST_FIRST: tuple[RegressionStatus, ...] = (REGRESSED, UNDECIDED, NOT_ESTIMABLE, WITHIN)


def judge_regression(
    result: Comparison, slos: Sequence[tuple[str, float]], limit: float, baseline: str, folder: str
) -> Regression:
    """Whether B regressed, from a comparison in ``folder``. ``slos``: metric and percentile."""
    if not result.comparable:
        return Regression(baseline=baseline, folder=folder, limit=limit, rows=(), status=NOT_COMPARABLE)
    return judge_pair(result.comparisons[0], slos, limit, baseline, folder)


def judge_pair(
    pair: PairComparison, slos: Sequence[tuple[str, float]], limit: float, baseline: str, folder: str
) -> Regression:
    """Whether B regressed, from a pair that may be compared."""
    named: list[tuple[str, float | None, ClaimedFigure]] = [
        (m, p, pair.metrics[m].percentiles[percentile_key(p)]) for m, p in dict.fromkeys(slos)
    ]
    lacking = dict.fromkeys(m for m, _, figure in named if figure.difference_ms is None and figure.late_ms is None)
    named += [(m, None, pair.metrics[m].mean) for m in lacking]
    growths = [_growth(figure, limit, pair.runs) for _, _, figure in named]
    p_values = {i: growth.p for i, growth in enumerate(growths) if growth is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())).tolist(), strict=True))
    rows = []
    for i, ((metric, percentile, figure), growth) in enumerate(zip(named, growths, strict=True)):
        status = _status(figure, growth, adjusted.get(i), limit)
        if percentile is None and status != REGRESSED:
            continue
        undecided = growth if status == UNDECIDED and not figure.failed else None
        row = RegressionRow(
            **{name: getattr(figure, name) for name in DifferenceFigure.model_fields},
            name=f"mean {metric}" if percentile is None else f"{metric} p{percentile:g}",
            metric=metric,
            status=status,
            p_adjusted=adjusted.get(i),
            least=growth.least(len(p_values)) if growth else None,
            runs_needed=undecided.runs_needed(len(p_values)) if undecided else None,
            floor_ms=figure.floor_ms if undecided and undecided.is_below_floor else None,
        )
        rows.append(row)
    a_share, b_share, more = pair.errors.a_share, pair.errors.b_share, pair.errors.more
    status_of_failed = REGRESSED if more == "b" else UNDECIDED if b_share > a_share else WITHIN
    failed = FailedRow(**dict(pair.errors), status=status_of_failed)
    found = {failed.status, *(row.status for row in rows)}
    worst = next(status for status in _WORST_FIRST if status in found)
    return Regression(
        baseline=baseline, folder=folder, limit=limit, rows=tuple(rows), status=worst, failed=failed, runs=pair.runs
    )


@dataclass(frozen=True, slots=True)
class _Growth:
    """A growth with its error, on the logarithm of B / A; ``floor``: the load tester's own error, a share of A.

    ``runs`` of each side.
    """

    value: float
    limit: float
    floor: float
    spread: Spread
    runs: tuple[int, int]

    @property
    def beyond(self) -> float:
        """How far its logarithm lies beyond the limit's."""
        return math.log1p(self.value) - math.log1p(self.limit)

    @property
    def is_below_floor(self) -> bool:
        """Whether it is beyond the limit, but no regression however sure it were."""
        return self.limit < self.value <= self.floor

    @property
    def p(self) -> float:
        """One-sided: how likely so large a growth is where the true one is the limit."""
        p = self.spread.p(self.beyond) / 2
        return p if self.beyond > 0 else 1 - p

    def least(self, tests: int) -> float:
        """The smallest growth that is called a regression in 80 of 100 cases, by the strictest of so many tests.

        Beyond the limit it must be sure, beyond the floor the growth that is measured must be.
        """
        bounds = (self.limit, _strictest(tests)), (self.floor, 0.0)
        return max((1 + bound) * math.exp(min(self.spread.least(sure), MOST_LOG)) - 1 for bound, sure in bounds)

    def runs_needed(self, tests: int) -> int | None:
        """How many runs a side, more than now, decide it in 80 of 100 cases; None for one run a side, or too many.

        By the runs alone: an error of s sqrt(2 / k), s as it is now, with degrees of freedom that grow as 2 (k - 1)
        does. To be within the limit takes the interval alone, to have regressed the strictest of so many ``tests``.
        """
        if self.runs == (1, 1) or self.is_below_floor:
            return None
        confidence, above_floor = CONFIDENCE, math.inf
        if self.beyond > 0:
            confidence, above_floor = _strictest(tests), math.log1p(self.value) - math.log1p(self.floor)
        a_run = self.spread.error / math.sqrt(sum(1 / count for count in self.runs))
        for count in range(min(self.runs) + 1, MOST_RUNS + 1):
            df = self.spread.df * 2 * (count - 1) / (sum(self.runs) - 2)
            spread = Spread(a_run * math.sqrt(2 / count), df)
            if abs(self.beyond) >= spread.least(confidence) and above_floor >= spread.least(0.0):
                return count
        return None


def _growth(figure: ClaimedFigure, limit: float, runs: tuple[int, int]) -> _Growth | None:
    """None where a figure has none."""
    if figure.relative is None or figure.growth_error is None or figure.growth_df is None or not figure.a_ms:
        return None
    floor = (figure.floor_ms or 0.0) / figure.a_ms
    return _Growth(figure.relative, limit, floor, Spread(figure.growth_error, figure.growth_df), runs)


def _status(figure: ClaimedFigure, growth: _Growth | None, p: float | None, limit: float) -> RegressionStatus:
    if growth is None or p is None or figure.relative_ci is None or figure.difference_ms is None:
        return NOT_ESTIMABLE
    if figure.relative_ci[1] <= limit:  # which is no bound where requests that B failed are in the interval
        return UNDECIDED if "b" in (figure.failed or "") else WITHIN
    if "a" in (figure.failed or ""):  # of which A took at least so much: that B took longer is not proven
        return UNDECIDED
    return REGRESSED if p <= TAIL and figure.difference_ms > (figure.floor_ms or 0.0) else UNDECIDED
