"""Differences between two sides, each of one run or several, with intervals that hold for correlated requests.

A difference is B minus A. Its standard error has two parts. *Within* runs: the stationary block bootstrap of
stats.bootstrap, every run drawn by itself; where both sides issued the same planned requests in an open
loop, a pair of runs is drawn together, request i of one with request i of the other, so that what the plan did to both
cancels out. *Between* runs: where a side has several, the variance of the runs' own estimates about their side's mean,
s^2 (1/k_A + 1/k_B).

Each gives an interval, difference +- t * error, and the wider one counts; so does the larger p-value. With several runs
a side none is narrower than Student's t-test of the runs' own values, which holds however much runs differ (as Hartung
and Knapp 2001 in meta-analysis, Statistics in Medicine 20, with Roever, Knapp and Friede's 2015 guard against runs that
agree by luck). Degrees of freedom: within, the number of blocks less one (Welch's where sides are not paired, so that a
short side is not taken for a long one), and no more than twice the number of
independent values beyond the percentile (the spacing around a quantile is known from those alone); between runs, k_A +
k_B - 2. Relative differences are those of logarithms, so that A's own error is in them.

*Means* need no rank, so they tell where a sample is too small, or its values too alike, for a percentile. Beside these
two errors there is a third, of all requests of a side in due order: stats.series.spread_of_mean, which sees what lasts
longer than the blocks that are drawn. Nothing sees what lasts as long as the run: with one run a side, no mean is told
of fewer than twelve independent requests (n / tau). Without that rule, identical runs of 12 to 1,000 requests of M/M/1
queues at loads up to 0.95 differed at the 0.3 % level in up to 61 % of pairs; with it in at most 1.2 %.

A request that failed is no request less: it waited longer than any success. A percentile whose rank is a request that
failed counts it as what it was given, its time-out, and is "at least so much". Every other percentile counts it as the
longest success (a time-out of minutes would reach percentiles far below it, through their weights and resamples). A
mean is that of successes, which bounds that of all from below: so B may be proven slower by it, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.compare.aligned import MEAN, AlignedSides, Figures, align
from gapmeter.analysis.compare.sides import RunColumns
from gapmeter.analysis.judge.lateness import ReportedLateness
from gapmeter.analysis.judge.words import late_words
from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.results.comparison import FailedShares
from gapmeter.analysis.stages import STAGE_NAMES
from gapmeter.analysis.stats import bootstrap
from gapmeter.analysis.stats.dependence import autocorrelation_time
from gapmeter.analysis.stats.estimate import Difference, Estimate, Spread
from gapmeter.analysis.stats.series import Series, share_of, spread_of_mean
from gapmeter.scenarios.slo import LATENCIES

RESAMPLES = 1000
_LEAST_WORTH = 12.0  # of one run, for a mean


@dataclass(frozen=True, slots=True, eq=False)
class LedgerDifference:
    """Of the ledgers to one event: ``stages`` are differences of means, which add up to ``total``.

    ``shares``: a stage's share of that, None where the total may be 0. ``percentiles[stage][percentile]``: of every
    stage that is not 0 throughout, where the samples support it. ``unmeasured``: stages that not every run measured;
    their time is in ``unexplained``.
    """

    total: Difference
    stages: Mapping[str, Difference]
    shares: Mapping[str, Estimate | None]
    percentiles: Mapping[str, Mapping[float, Difference]]
    unmeasured: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Everything that was compared: ``metrics[metric][percentile]``, None for the mean, and ``ledgers`` by event.

    ``failed``: the share of each side's requests that did. ``counts`` are the requests of each side, ``block`` the mean
    length of the blocks.
    """

    paired: bool
    why_not_paired: str
    counts: tuple[int, int]
    runs: tuple[int, int]
    failed: FailedShares
    block: float
    resamples: int
    metrics: Mapping[str, Mapping[float | None, Difference]]
    ledgers: Mapping[str, LedgerDifference]


def compare_sides(
    side_a: Sequence[RunColumns], side_b: Sequence[RunColumns], percentiles: Mapping[str, Sequence[float]],
    stage_percentiles: Sequence[float] = (), lateness: ReportedLateness = ReportedLateness(),
    *, resamples: int = RESAMPLES,
) -> Differences:  # fmt: skip
    """Compare two sides. Deterministic; swapped sides give swapped signs.

    ``percentiles``: of each metric, which. ``lateness``: of both sides; what it refuses is not told.
    """
    a, b, why = align(side_a, side_b)
    pair = AlignedSides(a, b, paired=not why, percentiles=percentiles, stage_percentiles=stage_percentiles)
    judge = _Judge(pair, resamples)
    metrics: dict[str, dict[float | None, Difference]] = {
        m: {
            **{p: _refused(lateness, m, p) or judge.percentile(m, i) for i, p in enumerate(percentiles[m])},
            None: _refused(lateness, m, None) or judge.mean_of(m),
        }
        for m in LATENCIES
    }
    return Differences(
        paired=not why,
        why_not_paired=why,
        counts=(sum(run.count for run in a), sum(run.count for run in b)),
        runs=(len(a), len(b)),
        failed=_failed(side_a, side_b),
        block=pair.block,
        resamples=resamples,
        metrics=metrics,
        ledgers={event: judge.ledger(metric, event) for metric, event in LEDGER_OF.items() if event in pair.known},
    )


def _refused(lateness: ReportedLateness, metric: str, percentile: float | None) -> Difference | None:
    late = lateness.refused_ns(metric, percentile)
    return None if late is None else Difference(None, None, why=why_refused(late), late=late)


def why_refused(late: float) -> str:
    """In words, how much may be lateness; ``late`` in ns."""
    return f"refused: {late_words(late / 1e6, 'a side')}"


class _Judge:
    """Turns resamples into intervals."""

    def __init__(self, pair: AlignedSides, resamples: int) -> None:
        self._pair = pair
        self._measured, self._drawn = pair.as_it_is(), pair.drawn(resamples)
        self._of_each_run: list[list[Figures]] = pair.of_each_run() if max(map(len, pair.sides)) > 1 else [[], []]
        self._blocks = [sum(run.count for run in side) / pair.block for side in pair.sides]

    def percentile(self, metric: str, part: int) -> Difference:
        """One percentile of one metric; no interval where a sample is too small."""
        percentile = self._pair.percentiles[metric][part]
        series = self._pair.series[metric]
        found = [side.percentile(percentile) for side in series]
        if short := [each for each in found if not each.supported]:
            return Difference(*self._ends(metric, part), why=min(short, key=lambda each: each.n_eff or 0.0).why)
        if all(each.value == math.inf for each in found):
            return Difference(None, None, why="on both sides it is a request that failed", failed="ab")
        failed = [n for n, each in zip("ab", found, strict=True) if math.inf in each.known]
        return replace(self._difference(metric, part, _beyond(series, percentile)), failed="".join(failed))

    def mean_of(self, metric: str) -> Difference:
        """A metric's mean; where a side's requests failed, only if it proves B slower."""
        series = self._pair.series[metric]
        failed = "".join(n for n, side in zip("ab", series, strict=True) if np.isinf(side.values).any())
        found = self.mean(MEAN, part := LATENCIES.index(metric))
        if found.spreads and max(map(len, self._pair.sides)) == 1:
            errors = self._pair.errors_in_mean(MEAN, part)
            worth, count = min((len(each) / autocorrelation_time(each), len(each)) for each in errors)
            if worth < _LEAST_WORTH:
                few = f"{count:,} requests, worth {worth:.0f} independent ones"
                return Difference(found.a, found.b, why=f"{few}, do not support a mean of one run a side")
        if failed and not (failed == "b" and (found.value or 0.0) > 0):
            return Difference(None, None, why="requests failed, and a mean leaves them out")
        return replace(found, failed=failed)

    def mean(self, name: str, part: int) -> Difference:
        """A metric's mean, a stage's, or the whole wait's."""
        found = self._difference(name, part, math.inf)
        errors = self._pair.errors_in_mean(name, part) if found.spreads else []
        lasting = self._lasting(errors)
        if lasting is None:
            return Difference(found.a, found.b, why=found.why or "too few requests for a mean")
        logs = found.log_spreads
        if logs and found.a and found.b and (log := self._lasting([errors[0] / found.a, errors[1] / found.b])):
            logs = (*logs, log)
        return replace(found, spreads=(*found.spreads, lasting), log_spreads=logs)

    def _lasting(self, errors: Sequence[Floats]) -> Spread | None:
        if self._pair.paired and errors:
            return spread_of_mean(errors[1] - errors[0])
        spreads = [spread for each in errors if (spread := spread_of_mean(each))]
        if len(spreads) < 2:
            return None
        return Spread(math.hypot(*(each.error for each in spreads)), min(each.df for each in spreads))

    def ledger(self, metric: str, event: str) -> LedgerDifference:
        """What lies behind the difference of ``metric``, which is the wait until ``event``."""
        series, known = self._pair.series[metric], self._pair.known[event]
        total = self.mean(event, len(STAGE_NAMES))
        stages = {name: self.mean(event, i) for i, name in enumerate(STAGE_NAMES) if known[i]}
        return LedgerDifference(
            total=total,
            stages=stages,
            shares={name: self._share(event, name, own, total) for name, own in stages.items()},
            percentiles={
                STAGE_NAMES[stage]: {
                    p: self._difference(f"{event}.{stage}", i, _beyond(series, p))
                    for i, p in enumerate(self._pair.stage_percentiles)
                    if all(side.percentile(p).supported for side in series)
                }
                for stage in self._pair.shown[event]
            },
            unmeasured=tuple(name for name in STAGE_NAMES if name not in stages),
        )

    def _share(self, event: str, stage: str, own: Difference, total: Difference) -> Estimate | None:
        """A stage's share of the whole difference; None where that may be 0."""
        if not total.value or not total.estimate.excludes(0.0):
            return None
        drawn = self._drawn[1][event] - self._drawn[0][event]
        both = drawn[:, [STAGE_NAMES.index(stage), len(STAGE_NAMES)]]
        found = bootstrap.share_with_draws((own.value or 0.0) / total.value, both, total.value)
        return found if found.supported else None

    def _ends(self, name: str, part: int) -> tuple[float | None, float | None]:
        a, b = (float(side[name][0, part]) for side in self._measured)
        return (None if math.isnan(a) else a), (None if math.isnan(b) else b)

    def _difference(self, name: str, part: int, most_df: float) -> Difference:
        a, b = self._ends(name, part)
        drawn: list[Floats] = [side[name][:, part] for side in self._drawn]
        if a is None or b is None or np.isnan(drawn).any():
            return Difference(a, b, why="no values on a side")
        if not self._pair.too_small:
            return Difference(a, b, why="a single request has no spread")
        df = max(1.0, min(self._freedom(drawn), most_df))
        by_run = [np.array([own[name][0, part] for own in runs]) for runs in self._of_each_run]
        spreads = self._spreads(drawn[1] - drawn[0], by_run, df)
        if min(a, b, *(float(values.min()) for values in (*drawn, *by_run) if len(values))) <= 0:
            return Difference(a, b, spreads)
        logs = self._spreads(np.log(drawn[1]) - np.log(drawn[0]), [np.log(values) for values in by_run], df)
        return Difference(a, b, spreads, logs)

    def _freedom(self, drawn: Sequence[Floats]) -> float:
        """Degrees of freedom within runs: blocks of pairs less one, else Welch's of both sides' errors and blocks."""
        free, parts = [count - 1 for count in self._blocks], [float(each.var()) for each in drawn]
        if self._pair.paired or not any(parts):
            return min(free)
        return sum(parts) ** 2 / sum(part**2 / own for part, own in zip(parts, free, strict=True))

    def _spreads(self, drawn: Floats, by_run: Sequence[Floats], df: float) -> tuple[Spread, ...]:
        """Within the runs, from resampled differences; and between them, from each side's ``by_run``: a value a run.

        Between them by Student's test, and by Welch's where the side with fewer runs may be the one that varies more.
        """
        within = Spread(float(drawn.std(ddof=1)) / self._pair.too_small, df)
        freedom = sum(map(len, by_run)) - 2
        if freedom < 1 or any(np.isnan(values).any() for values in by_run):
            return (within,)
        squares = [float(((values - values.mean()) ** 2).sum()) for values in by_run]
        counts = [len(values) for values in by_run]
        pooled = Spread(math.sqrt(sum(squares) / freedom * sum(1 / count for count in counts)), float(freedom))
        if counts[0] == counts[1] or min(counts) < 2 or not any(squares):
            return within, pooled
        parts = [square / (count - 1) / count for square, count in zip(squares, counts, strict=True)]
        welch = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
        return within, pooled, Spread(math.sqrt(sum(parts)), welch)


def _failed(side_a: Sequence[RunColumns], side_b: Sequence[RunColumns]) -> FailedShares:
    """The share of each side's requests that failed; of bursts of failures, each request says less.

    A side that met no burst does not know how long they are, so both are worth what the side with the longer ones is. A
    server that failed from a moment on is no burst.
    """
    flags = [~np.concatenate([run.good for run in side]) for side in (side_a, side_b)]
    down = any(run.down for run in (*side_a, *side_b))
    time = 1.0 if down else max(autocorrelation_time(each.astype(np.float64)) for each in flags)
    a, b = (share_of(each, time) for each in flags)
    return FailedShares(a_share=a.value or 0.0, b_share=b.value or 0.0, a_ci=(a.low, a.high), b_ci=(b.low, b.high))


def _beyond(series: Sequence[Series], percentile: float) -> float:
    """Twice the number of independent values beyond a percentile, on the side that has fewer."""
    return 2 * min(s.n_eff(percentile) for s in series) * min(percentile, 100 - percentile) / 100
