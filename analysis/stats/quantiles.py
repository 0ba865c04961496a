"""Percentiles with intervals that hold for correlated latencies.

Latencies of neighbouring requests are alike (they met the same queue), so n requests say less than n independent
ones. The count that they are worth is n_eff = n / tau; the interval is the exact order-statistic (binomial) one
with n_eff in place of n.

dependence.py measures that count, from the indicator "above the quantile", by two estimates: of the dependence
that is strong (short) and of the one that lasts (long). A quantile further in is met more often and so knows its
dependence better:

- from p95 on, short at the 90th and the 95th, long at the 95th;
- from p75, short at the 90th, long at the 50th; below, both at the 50th. A run that met fewer than a hundred spells
  above the 90th (or the 50th) does not know how long these are: then short at the 50th, 75th, 90th and 95th counts too.

The smallest is n_eff, for all percentiles of that range. Where no neighbours are alike, short says nothing.
docs/results has the coverage on queues whose quantiles are known, and where it falls short.

One rule for every percentile printed anywhere: it is *supported* when both ends of its 95 % interval exist.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from gapmeter.analysis.stats.dependence import autocorrelation_time as autocorrelation_time
from gapmeter.analysis.stats.dependence import exceedances as above_threshold
from gapmeter.analysis.stats.dependence import later, neighbours_alike
from gapmeter.analysis.stats.hdr import nearest_rank

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
_FEW_SPELLS = 100
_LEAST_OF_SEVERAL = 0.6
_LEVELS = (50.0, 75.0, 90.0, 95.0)
# One percentile of each part of a sample that has an n_eff of its own, whose bounds hold for those below or above it.
_ABOVE, _BELOW = (75.0, 95.0), (50.0, 90.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one metric and what they are worth.

    ``ordered`` is sorted; infinity stands for an answer that never came. ``n_eff_tail`` holds from p95 on,
    ``n_eff_body`` below, and ``n_eff_middle`` below p75 where it was measured apart. ``plain_body`` and ``plain_tail``:
    the same by the autocorrelation time alone, which a longer run of the kind would come near; for forecasts only.
    """

    ordered: Floats
    n_eff_body: float
    n_eff_tail: float
    n_eff_middle: float | None = None
    plain_body: float | None = None
    plain_tail: float | None = None

    @property
    def count(self) -> int:
        return len(self.ordered)

    def n_eff(self, percentile: float) -> float:
        if percentile >= 95:
            return self.n_eff_tail
        return self.n_eff_body if percentile >= 75 or self.n_eff_middle is None else self.n_eff_middle

    def n_th(self, rank: int | None) -> float | None:
        """The value of a 1-based rank."""
        return float(self.ordered[rank - 1]) if rank else None

    def plain(self, percentile: float) -> float:
        """What a run must grow from in a forecast: at least ``n_eff``, and that where nothing else is known.

        The least of several estimates lies below each of them, however long the run; on M/M/1 by two fifths.
        """
        plain = (self.plain_tail if percentile >= 95 else self.plain_body) or 0.0
        return max(self.n_eff(percentile), _LEAST_OF_SEVERAL * plain)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One percentile: its value, the ends of its 95 % interval (None where the sample does not reach), its support."""

    percentile: float
    value: float | None
    low: float | None
    high: float | None
    count: int
    n_eff: float

    @property
    def supported(self) -> bool:
        return self.low is not None and self.high is not None


def sample(values: ArrayLike, clusters: Iterable[NDArray[np.int64]] = ()) -> Sample:
    """Measure how many independent values these are worth.

    ``values``: shape (n,), in time order, NaN not allowed. ``clusters``: for pooled values, arrays of shape (n,)
    that number each value's cluster in time order (0, 1, ...).
    """
    series = np.asarray(values, dtype=np.float64)
    if np.isnan(series).any():
        raise ValueError("a sample holds NaN; leave out what was not measured before asking for percentiles")
    ordered = np.sort(series)
    if not len(series):
        return Sample(ordered, 0.0, 0.0, 0.0)
    groupings: list[NDArray[np.int64] | None] = [*clusters] or [None]
    by_grouping = [_effective(series, ordered, grouping) for grouping in groupings]
    return Sample(ordered, *(min(worths) for worths in zip(*by_grouping, strict=True)))


def estimate(values: Sample, percentile: float) -> Estimate:
    """A percentile, by HdrHistogram's rank, and its 95 % interval by order statistics.

    What bounds a higher percentile from above bounds this one, and what bounds a lower one from below: where the tail
    is worth more values than the body, whose slow drift means nothing there, its bounds count for the body too.
    """
    count, n_eff = values.count, values.n_eff(percentile)
    if not count:
        return Estimate(percentile, None, None, None, 0, 0.0)
    lows = [values.n_th(_ranks(values, p)[0]) for p in (percentile, *_BELOW) if p <= percentile]
    highs = [values.n_th(_ranks(values, p)[1]) for p in (percentile, *_ABOVE) if p >= percentile]
    return Estimate(
        percentile,
        _value(values.ordered, percentile),
        max((low for low in lows if low is not None), default=None),
        min((high for high in highs if high is not None), default=None),
        count,
        n_eff,
    )


def _ranks(values: Sample, percentile: float) -> tuple[int | None, int | None]:
    return interval_ranks(values.count, values.n_eff(percentile), percentile)


def more_values(values: Sample, percentile: float) -> int:
    """How many more values of the same kind would give a percentile both ends of its interval; 0 when it has them.

    Without any value, as many as independent ones would take.
    """
    needed, count = values_needed(percentile), values.count
    if not count:
        return needed
    if estimate(values, percentile).supported:
        return 0
    n_eff = values.n_eff(percentile)
    growth = _growth(n_eff, values.plain(percentile), lambda worth: worth >= needed, needed / n_eff + 1)
    return max(1, math.ceil((growth - 1) * count - 1e-6)) if growth else 1


def values_needed(percentile: float) -> int:
    """The least number of independent values whose extremes enclose a percentile with 95 % confidence.

    Both (1-q)^n and q^n at most 2.5 %: 368 for p99, 3,688 for p99.9.
    """
    share = 1 - percentile / 100
    return math.ceil(math.log(TAIL) / math.log(max(share, 1 - share)) - 1e-9)


def interval_ranks(count: int, n_eff: float, percentile: float) -> tuple[int | None, int | None]:
    """1-based ranks of the interval's ends among ``count`` sorted values, None where there is no such value.

    The upper end is the least value of which at most ``tolerable`` values lie above, the lower end the greatest
    that at least ``damning`` values reach; both by the exact binomial, so that "the interval lies below a limit"
    and "the exact test says that the percentile does" are one statement.
    """
    tolerable, damning = exceedances(n_eff, 1 - percentile / 100)
    scale = count / n_eff
    high = None if tolerable is None else count - math.floor(tolerable * scale + 1e-9)
    low = None if damning is None else count - math.ceil(damning * scale - 1e-9) + 1
    return (low if low and low >= 1 else None), high


@functools.lru_cache(maxsize=4096)
def exceedances(n_eff: float, share: float) -> tuple[float | None, float | None]:
    """How many of ``n_eff`` values may exceed a limit before the share above it is proven.

    First: the most exceedances (a real number) for which the Clopper-Pearson upper bound of the share above is
    still at most ``share``; None when even no exceedance proves it. Second: the fewest for which its lower bound is
    above ``share``; None when even all do not. Each bound is one-sided at 97.5 % (Clopper and Pearson 1934, in its
    beta form, which takes real numbers).
    """

    def upper(k: float) -> float:
        return float(special.betainc(k + 1, n_eff - k, share)) - (1 - TAIL)

    def lower(k: float) -> float:
        return float(special.betainc(k, n_eff - k + 1, share)) - TAIL

    tolerable = damning = None
    if upper(0.0) >= 0:
        tolerable = float(optimize.brentq(upper, 0.0, n_eff * (1 - 1e-12)))
    if n_eff > 0 and lower(n_eff) <= 0:
        damning = float(optimize.brentq(lower, 1e-12, n_eff))
    return tolerable, damning


def share_bounds(hits: float, count: float) -> tuple[float, float]:
    """Clopper-Pearson 95 % bounds of a share, ``hits`` of ``count``; real numbers allowed."""
    if count <= 0:
        return 0.0, 1.0
    low = float(special.betaincinv(hits, count - hits + 1, TAIL)) if hits > 0 else 0.0
    high = float(special.betaincinv(hits + 1, count - hits, 1 - TAIL)) if hits < count else 1.0
    return low, high


def growth_to_decide(hits: int, count: int, n_eff: float, share: float, plain: float | None = None) -> float | None:
    """By what factor the sample must grow until a share is proven above or below ``share``, if it stays what it is.

    ``plain``: what it is worth by its autocorrelation time alone (``Sample.plain``). None when a thousandfold sample
    would not do: the truth is too close to the limit.
    """

    def decided(worth: float) -> bool:
        tolerable, damning = exceedances(worth, share)
        k = hits / count * worth
        return (tolerable is not None and k <= tolerable) or (damning is not None and k >= damning)

    return _growth(n_eff, max(plain or n_eff, n_eff), decided, 1024.0)


def _growth(n_eff: float, plain: float, enough: Callable[[float], bool], most: float) -> float | None:
    """By what factor a sample must grow until what it will be worth is enough; None if that is more than ``most``."""
    worth = later(n_eff, plain)
    if enough(n_eff):
        return 1.0
    if not enough(worth(most)):
        return None
    low, high = 1.0, most
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(worth(middle)) else (middle, high)
    return high


def time_blocks(at_ns: NDArray[np.int64], values_ns: Floats) -> NDArray[np.int64]:
    """Number the time block of each pooled gap, so that gaps made by one engine step share a block or neighbours.

    A block is twice the median gap wide (a gap is about a step), and there are at most 4,096 of them. Gaps that
    never ended (infinite) count where they are placed, not in the width.
    """
    if not len(at_ns):
        return np.zeros(0, dtype=np.int64)
    finite = values_ns[np.isfinite(values_ns)]
    start, span = int(at_ns.min()), int(at_ns.max() - at_ns.min())
    width = max(1, int(2 * np.median(finite)) if len(finite) else 1, span // 4096 + 1)
    return (at_ns - start) // width


def curve(values: Sample, points: int = 400) -> list[Estimate]:
    """Percentiles evenly spaced on the HDR axis (log of 1 / (1 - q)), up to the last one that is supported."""
    if not values.count:
        return []
    decades = np.linspace(0, math.log10(max(values.count, 10)), points)
    along = (estimate(values, 100 * (1 - 10**-d)) for d in decades[1:])
    return [point for point in along if point.supported]


def _effective(series: Floats, ordered: Floats, clusters: NDArray[np.int64] | None) -> tuple[float, ...]:
    """n_eff of the body (p75 to p95), of the tail and of the middle, by one grouping into clusters; two forecasts."""
    at = {level: above_threshold(series, _value(ordered, level), clusters) for level in _LEVELS}
    lasting = {level: at[level].long() for level in (50.0, 95.0)}
    plain = (min(at[50.0].plain(), at[90.0].plain()), min(at[90.0].plain(), at[95.0].plain()))
    if not neighbours_alike(series, clusters):
        return lasting[50.0], min(lasting.values()), lasting[50.0], *plain
    short = {level: at[level].short() for level in _LEVELS}

    def below_p95(level: float) -> float:
        worth = min(short[level], lasting[50.0])
        return worth if at[level].spells(worth) >= _FEW_SPELLS else min(worth, *short.values())

    return below_p95(90.0), min(short[90.0], short[95.0], lasting[95.0]), below_p95(50.0), *plain


def _value(ordered: Floats, percentile: float) -> float:
    return float(ordered[nearest_rank(percentile, len(ordered)) - 1])
