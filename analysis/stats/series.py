"""A series of values that are not independent, and what it says: percentiles, a mean, a share, each with its interval.

Latencies of neighboring requests are alike (they met the same queue), so n requests say less than n independent
ones. The count that they are worth is n_eff = n / tau; a percentile's interval is the exact order-statistic (binomial)
one with n_eff in place of n.

dependence.py measures that count, from the indicator "above the quantile", by two estimates: of the dependence
that is strong (short) and of the one that lasts (long). A quantile further in is met more often and so knows its
dependence better:

- from p99 on, short at the 90th and the 95th, long at the 99th: what lasts, such as a machine that is slower for half
  a minute, moves the body of a queue's latencies more than what its longest bursts bring;
- from p95, the same with long at the 95th;
- from p75, short at the 90th, long at the 50th; below, both at the 50th. A run that met fewer than a hundred spells
  above the 90th (or the 50th) does not know how long these are: then short at the 50th, 75th, 90th and 95th counts too.

The smallest is n_eff, for all percentiles of that range. Where no neighbors are alike, short says nothing.
docs/results has the coverage on queues whose quantiles are known, and where it falls short.

One rule for every percentile printed anywhere: it is *supported* when both ends of its 95 % interval exist. Where the
upper one does not, the largest value still bounds it, with the confidence that is left: a share 1 - q of n_eff values
lies above a percentile, and none of them was met, which has the chance q^n_eff (``at_most``).

*A level* (``level_of``): its variance is taken twice, and the larger counts: from the first twelve cosine coefficients
of the series in time order (Mueller 2007, A theory of robust long-run variance estimation; Lazarus, Lewis, Stock and
Watson 2018, HAR inference), which sees what lasts, drifts and differences between repeats included, and from the
autocorrelation time (Geyer 1992), which sees what is strong and short. Both with Student's t for twelve coefficients,
since a variance that was estimated is itself uncertain.

*Ratios*: of geometric means by Welch's t on logarithms (Welch 1947, Biometrika 34), of means and of sums by the delta
method (Cochran 1977, Sampling Techniques, section 6.3); each part is worth n / tau values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.stats.dependence import (
    autocorrelation_time,
    exceedances,
    first_cosines,
    neighbors_alike,
    ranks_of,
)
from gapmeter.analysis.stats.estimate import LEAST_SURE, MOST_SURE, NORMAL, TAIL, Bound, Estimate, Spread, t_quantile
from gapmeter.analysis.stats.exact import growth, interval_ranks, share_bounds, values_needed
from gapmeter.analysis.stats.hdr import at_rank

_FEW_SPELLS = 100
_LEAST_OF_SEVERAL = 0.6
_LEVELS = (50.0, 75.0, 90.0, 95.0)
# One percentile of each part of a series that has an n_eff of its own, whose bounds hold for those below or above it.
_ABOVE, _BELOW = (75.0, 95.0, 99.0), (50.0, 90.0, 95.0)
LONGEST_PAUSE_NS = 10_000_000_000  # without a token


@dataclass(frozen=True, slots=True)
class Worth:
    """How many independent values a series is worth.

    ``far`` from p99 on (None: as ``tail``), ``tail`` from p95, ``body`` from p75, ``middle`` below.
    ``plain_body`` and ``plain_tail``: the same by the autocorrelation time alone, which a longer run of the kind would
    come near; for forecasts only.
    """

    middle: float
    body: float
    tail: float
    far: float | None = None
    plain_body: float = 0.0
    plain_tail: float = 0.0


@dataclass(frozen=True, eq=False)
class Series:
    """Values of one thing in the order in which their requests were due: shape (n,), without NaN.

    Infinity stands for an answer that never came. ``clusters``: of pooled values (token gaps), arrays of shape (n,)
    that number each value's cluster in time order (0, 1, ...). ``known``: what they are worth, where it need not be
    measured; ``what`` they are called where there are too few. Raises ValueError for NaN.
    """

    values: Floats
    clusters: Sequence[Ints] = ()
    known: Worth | None = None
    what: str = "values"

    def __post_init__(self) -> None:
        if np.isnan(self.values).any():
            raise ValueError("a series holds NaN; leave out what was not measured before asking for percentiles")

    @property
    def count(self) -> int:
        return len(self.values)

    @functools.cached_property
    def ordered(self) -> Floats:
        """The values, ascending."""
        return np.sort(self.values)

    @functools.cached_property
    def worth(self) -> Worth:
        """Measured when it is first asked for; by each way of clustering, of which the least counts."""
        if self.known is not None:
            return self.known
        if not self.count:
            return Worth(0.0, 0.0, 0.0)
        groupings: Sequence[Ints | None] = self.clusters or [None]
        ranks = ranks_of(self.values)
        found = [self._worth(ranks, grouping) for grouping in groupings]
        return Worth(*(min(each) for each in zip(*found, strict=True)))

    def n_eff(self, percentile: float) -> float:
        """How many independent values this percentile rests on."""
        if percentile >= 99 and self.worth.far is not None:
            return self.worth.far
        if percentile >= 95:
            return self.worth.tail
        return self.worth.body if percentile >= 75 else self.worth.middle

    def plain(self, percentile: float) -> float:
        """What a run must grow from in a forecast: at least ``n_eff``, and that where nothing else is known.

        The least of several estimates lies below each of them, however long the run; on M/M/1 by two fifths.
        """
        plain = self.worth.plain_tail if percentile >= 95 else self.worth.plain_body
        return max(self.n_eff(percentile), _LEAST_OF_SEVERAL * plain)

    def percentile(self, percentile: float) -> Estimate:
        """A percentile, by HdrHistogram's rank, and its interval by order statistics.

        What bounds a higher percentile from above bounds this one, and what bounds a lower one from below: where the
        tail is worth more values than the body, whose slow drift means nothing there, its bounds hold for the body too.
        """
        if not self.count:
            return Estimate(None, None, None, 0.0, self._too_few(percentile))
        n_eff, own, fixed = self.n_eff(percentile), self._ends(percentile), self._fixed_ends
        lows = [own[0], *(fixed[p][0] for p in _BELOW if p < percentile)]
        highs = [own[1], *(fixed[p][1] for p in _ABOVE if p > percentile)]
        low = max((end for end in lows if end is not None), default=None)
        high = min((end for end in highs if end is not None), default=None)
        why = "" if low is not None and high is not None else self._too_few(percentile)
        return Estimate(at_rank(self.ordered, percentile), low, high, n_eff, why)

    def at_most(self, percentile: float) -> Bound | None:
        """What bounds a percentile from above; None where that is less than 90 % sure, or answers never came.

        The upper end of its interval where it has one, one side of which is 97.5 % sure; else the largest value.
        """
        if not self.count:
            return None
        high = self.percentile(percentile).high
        if high is not None:
            return Bound(high, 1 - TAIL) if math.isfinite(high) else None
        above = (percentile, *(p for p in _ABOVE if p > percentile))
        sure = min(max(1 - (p / 100) ** self.n_eff(p) for p in above), MOST_SURE)
        largest = float(self.ordered[-1])
        return Bound(largest, sure) if sure >= LEAST_SURE and math.isfinite(largest) else None

    def more_values(self, percentile: float) -> int:
        """How many more values of the same kind would give a percentile both ends of its interval; 0 when it has them.

        Without any value, as many as independent ones would take.
        """
        needed = values_needed(percentile)
        if not self.count:
            return needed
        if self.percentile(percentile).supported:
            return 0
        n_eff = self.n_eff(percentile)
        factor = growth(n_eff, self.plain(percentile), lambda worth: worth >= needed, needed / n_eff + 1)
        return max(1, math.ceil((factor - 1) * self.count - 1e-6)) if factor else 1

    def curve(self, points: int) -> list[tuple[float, Estimate]]:
        """Percentiles evenly spaced on the HDR axis (log of 1 / (1 - q)), up to the last one that is supported."""
        if not self.count:
            return []
        decades = np.linspace(0, math.log10(max(self.count, 10)), points)[1:]
        along = ((percentile, self.percentile(percentile)) for percentile in (100 * (1 - 10**-d) for d in decades))
        return [(percentile, found) for percentile, found in along if found.supported]

    def mean(self) -> Estimate:
        """The mean of two values or more with Student's interval, n_eff = n / tau for n."""
        mean, deviation = float(self.values.mean()), float(self.values.std(ddof=1))
        if deviation == 0:
            return Estimate(mean, mean, mean, float(self.count))
        n_eff = max(self.count / autocorrelation_time(self.values), 2.0)
        half = t_quantile(n_eff - 1) * deviation / math.sqrt(n_eff)
        return Estimate(mean, mean - half, mean + half, n_eff)

    @functools.cached_property
    def _fixed_ends(self) -> dict[float, tuple[float | None, float | None]]:
        return {percentile: self._ends(percentile) for percentile in {*_ABOVE, *_BELOW}}

    def _ends(self, percentile: float) -> tuple[float | None, float | None]:
        ranks = interval_ranks(self.count, self.n_eff(percentile), percentile)
        low, high = (float(self.ordered[rank - 1]) if rank else None for rank in ranks)
        return low, high

    def _too_few(self, percentile: float) -> str:
        n_eff = self.n_eff(percentile)
        worth = ""
        if self.count and n_eff < 1:
            worth = ", which move as one,"
        elif n_eff < 0.95 * self.count:
            worth = f", worth {n_eff:,.0f} independent one{'s' * (n_eff >= 1.5)},"
        return f"{self.count:,} {self.what}{worth} do not support p{percentile:g}"

    def _worth(self, ranks: Floats, clusters: Ints | None) -> tuple[float, ...]:
        """The figures of ``Worth``, by one way of clustering."""
        sizes = None if clusters is None else np.bincount(clusters)
        at = {
            level: exceedances(self.values, at_rank(self.ordered, level), clusters, sizes) for level in (*_LEVELS, 99.0)
        }
        lasting = {level: at[level].long() for level in (50.0, 95.0, 99.0)}
        plain = (min(at[50.0].plain(), at[90.0].plain()), min(at[90.0].plain(), at[95.0].plain()))
        if not neighbors_alike(ranks, clusters, sizes):
            tail, far = (min(lasting[50.0], lasting[level]) for level in (95.0, 99.0))
            return lasting[50.0], lasting[50.0], tail, far, *plain
        short = {level: at[level].short() for level in _LEVELS}

        def below_p95(level: float) -> float:
            worth = min(short[level], lasting[50.0])
            return worth if at[level].spells(worth) >= _FEW_SPELLS else min(worth, *short.values())

        tail, far = (min(short[90.0], short[95.0], lasting[level]) for level in (95.0, 99.0))
        return below_p95(50.0), below_p95(90.0), tail, far, *plain


def pooled(series: Sequence[Series], what: str = "values") -> Series:
    """Several runs' values as one series: worth what they are worth together."""
    worths = [each.worth for each in series]
    far = sum(each.n_eff(99.0) for each in series)
    known = Worth(sum(w.middle for w in worths), sum(w.body for w in worths), sum(w.tail for w in worths), far)
    return Series(np.concatenate([each.values for each in series]), known=known, what=what)


def share_of(flags: Bools, time: float = 1.0) -> Estimate:
    """The share of requests that are so, in due order, with Clopper and Pearson's bounds; n_eff = n / tau for n.

    ``time``: tau at least, as far as it is known from elsewhere.
    """
    if not len(flags):
        return Estimate(None, 0.0, 1.0, 0.0, "no requests")
    n_eff = len(flags) / max(autocorrelation_time(flags.astype(np.float64)), time)
    share = float(flags.mean())
    low, high = share_bounds(share * n_eff, n_eff)
    return Estimate(share, low, high, n_eff)


def bursts_in(flags: Bools, n_eff: float) -> float:
    """In how many bursts so flagged requests came, worth ``n_eff`` in all.

    Those that are not quite in a row are a burst to tau: of geometric ones it is twice the mean length less one.
    """
    hits, in_a_row = float(flags.sum()), float(np.count_nonzero(np.diff(flags.astype(int), prepend=0) == 1))
    return min(in_a_row, 2 * hits / (len(flags) / n_eff + 1)) if hits else 0.0


def time_blocks(at_ns: Ints, values_ns: Floats) -> Ints:
    """Number the time block of each pooled gap, so that gaps made by one engine step share a block or neighbors.

    There is one gap or more, in the order of time. A block is twice the median gap wide (a gap is about a step), and
    there are at most 4,096 of them. Gaps that never ended (infinite) count where they are placed, not in the width. Of
    the time between a point's repeats, in which other points ran, only ``LONGEST_PAUSE_NS`` counts.
    """
    finite = values_ns[np.isfinite(values_ns)]
    at_ns = np.cumsum(np.minimum(np.diff(at_ns, prepend=at_ns[0]), LONGEST_PAUSE_NS))
    width = max(1, int(2 * np.median(finite)) if len(finite) else 1, int(at_ns[-1]) // 4096 + 1)
    return (at_ns // width).astype(np.int32)


FEWEST = 12  # values below which a level has no interval
FEWEST_OF_RATIO = 8  # values on either side
FEWEST_WORTH = 3.0  # independent ones
_MOST = 1 << 20  # values of a mean one by one: of more, neighbors are taken together, to spare memory


@dataclass(frozen=True, slots=True)
class Level:
    """A positive figure, the standard error of its logarithm, and the degrees of freedom behind that."""

    value: float
    log_error: float
    freedom: float

    @property
    def estimate(self) -> Estimate:
        """The value with its interval, on the logarithm: never below zero."""
        reach = math.exp(t_quantile(self.freedom) * self.log_error)
        return Estimate(self.value, self.value / reach, self.value * reach, self.freedom + 1)

    def drawn(self, rng: np.random.Generator, count: int) -> Floats:
        """What it might as well have been: shape (count,)."""
        # NumPy draws NaN of Student's t with infinite freedom.
        errors = rng.standard_normal(count) if math.isinf(self.freedom) else rng.standard_t(self.freedom, count)
        return self.value * np.exp(self.log_error * errors)

    def minus(self, other: Level) -> Estimate:
        """The difference, with the fewer degrees of freedom of both."""
        error = math.hypot(self.log_error * self.value, other.log_error * other.value)
        freedom = min(self.freedom, other.freedom)
        half, more = t_quantile(freedom) * error, self.value - other.value
        return Estimate(more, more - half, more + half, freedom + 1)

    def over(self, other: Level) -> Estimate:
        """The ratio, with the fewer degrees of freedom of both."""
        error = math.hypot(self.log_error, other.log_error)
        return Level(self.value / other.value, error, min(self.freedom, other.freedom)).estimate


def level_of(series: Floats | None) -> Level | None:
    """The mean of a series in time order, any unit; None for unknown or under twelve values, or if not above 0."""
    if series is None or not len(series) or not math.isfinite(mean := float(series.mean())) or mean <= 0:
        return None
    spread = spread_of_mean(series)
    return Level(mean, spread.error / mean, spread.df) if spread else None


def spread_of_mean(series: Floats) -> Spread | None:
    """How far the mean of a series in time order moves by chance; None for fewer than twelve values."""
    if len(series) < FEWEST:
        return None
    if (width := len(series) // _MOST) > 1:
        series = series[: len(series) - len(series) % width].reshape(-1, width).mean(axis=1)
    n = len(series)
    low = first_cosines(series - series.mean())
    lasting = float(np.mean(low**2)) / n
    brief = float(series.var(ddof=1)) * autocorrelation_time(series) / n
    return Spread(math.sqrt(max(lasting, brief)), len(low))


def level_of_interval(value: float, low: float, high: float) -> Level:
    """A percentile from its 95 % interval, taken for normal on the logarithm."""
    return Level(value, math.log(max(high, value) / min(low, value)) / (2 * NORMAL), math.inf)


def ratio_of_geometric_means(one: Floats, two: Floats) -> Estimate | None:
    """Of two series of logarithms, ``one`` over ``two``; None where either is short.

    Welch's degrees of freedom, on what each part is worth by the autocorrelation time of the longer one.
    """
    if min(len(one), len(two)) < FEWEST_OF_RATIO:
        return None
    time = autocorrelation_time(max(one, two, key=len))
    parts = [(float(part.var(ddof=1)), max(len(part) / time, 2.0)) for part in (one, two)]
    errors = [variance / worth for variance, worth in parts]
    ratio, total = math.exp(float(one.mean() - two.mean())), sum(errors)
    if total <= 0:
        return Estimate(ratio, ratio, ratio)
    freedom = total**2 / sum(e**2 / (worth - 1) for e, (_, worth) in zip(errors, parts, strict=True))
    return Level(ratio, math.sqrt(total), freedom).estimate


def ratio_of_means(one: Floats, two: Floats) -> Estimate | None:
    """Of two series in time order, ``one`` over ``two``; None where either mean is 0, or a part is worth under three.

    A load that changes makes neighbors alike for minutes: then ten seconds are one value, whose spread nobody knows.
    """
    time = autocorrelation_time(max(one, two, key=len))
    worth = min(len(one), len(two)) / time
    if not one.mean() or not two.mean() or worth < FEWEST_WORTH:
        return None
    error = math.sqrt(sum(float(part.var(ddof=1)) * time / len(part) / float(part.mean()) ** 2 for part in (one, two)))
    return Level(float(one.mean() / two.mean()), error, worth - 1).estimate


def ratio_of_sums(amount: Floats, per: Floats) -> Estimate:
    """``amount`` over ``per``, summed over two values and more in time order; their residuals are what is alike."""
    ratio = float(amount.sum() / per.sum())
    left = amount - ratio * per
    n_eff = len(per) / autocorrelation_time(left)
    half = NORMAL * float(np.sqrt((left**2).sum() / len(per) / max(n_eff - 1, 1.0)) / per.mean())
    return Estimate(ratio, ratio - half, ratio + half, n_eff)
