"""Two bootstraps of requests that follow one another: how far a figure would move if the same run were drawn again.

A moving queue makes neighbors alike, so requests drawn one by one would promise too much. Whole stretches of the run
are drawn instead, longer than what one request tells of the next.

*Means of groups of one run* (``drawn_means``): stretches of equal length, side by side, drawn with replacement
(non-overlapping block bootstrap, Carlstein 1986, Annals of Statistics 14); intervals by the percentile method.

*Figures of two runs* (``draw``): blocks of geometric length, wrapped around the end (stationary bootstrap, Politis and
Romano 1994, JASA 89). The mean length is Politis and White's (2004) automatic choice in the corrected form of Patton,
Politis and White (2009): b = (2 G^2 / D)^(1/3) n^(1/3) with G = sum of lambda(k/M) |k| R(k), D = 2 g(0)^2, g(0) = sum
of lambda(k/M) R(k), R the autocovariances and lambda the flat-top window; M is twice the lag from which on the
autocorrelations stay within 2 sqrt(log10(n) / n).

*Percentiles* are Harrell and Davis's (1982, Biometrika 69): smooth in the data, which their bootstrap needs.

The mean of all order statistics, the i-th of n weighted by I_{i/n}(a, b) - I_{(i-1)/n}(a, b), where a = p (n + 1),
b = (1 - p)(n + 1) and I is the regularized incomplete beta function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from gapmeter.analysis.arrays import Bools, Floats
from gapmeter.analysis.stats.dependence import autocorrelation_time, autocovariances
from gapmeter.analysis.stats.estimate import TAIL, Estimate

DRAWS = 1000
FEWEST_STRETCHES = 5
_FEWEST_BLOCKS, _MOST_BLOCKS = 12, 2000
_INDEX = np.int32


def stretches(series: Floats) -> NDArray[np.int32]:
    """Number each element's stretch. ``series``: one value a request, in the order in which they were due.

    A stretch is four times the integrated autocorrelation time long, at least the cube root of n; there are at least
    twelve (fewer only below twelve values), so the length is an underestimate where the run is short beside it. There
    are at most 2,000: more would draw the same intervals, and of millions of values take gigabytes.
    """
    n = len(series)
    length = max(4 * autocorrelation_time(series), n ** (1 / 3))
    blocks = int(np.clip(n / max(length, 1.0), min(_FEWEST_BLOCKS, max(n, 1)), min(max(n, 1), _MOST_BLOCKS)))
    begins = -(-np.arange(blocks + 1) * n // max(blocks, 1))
    return np.repeat(np.arange(blocks, dtype=np.int32), np.diff(begins))


def drawn_means(values: Floats, stretch: NDArray[np.int32], member: Bools, seed: int = 0) -> Floats:
    """Means of a group's ``values`` (n, k), in 1,000 draws of the run's stretches: shape (draws, k).

    ``stretch``: the number of each of the run's rows; ``member``: which of these are the group. The same seed and
    stretches give the same draws, so that two groups of one run can be subtracted draw by draw. NaN where a draw holds
    no member; throughout when the members lie in fewer than five stretches, too few to tell.
    """
    blocks, of_members = int(stretch[-1]) + 1, stretch[member]
    counts = np.bincount(of_members, minlength=blocks).astype(np.float64)
    means = np.full((DRAWS, values.shape[1]), np.nan)
    if np.count_nonzero(counts) < FEWEST_STRETCHES:
        return means
    sums = np.zeros((blocks, values.shape[1]))
    for column, each in enumerate(values.T):
        sums[:, column] = np.bincount(of_members, weights=each, minlength=blocks)
    times = _times_drawn(blocks, seed).astype(np.float64)
    drawn = (times @ counts)[:, None]
    return np.asarray(np.divide(times @ sums, drawn, out=means, where=drawn > 0), dtype=np.float64)


@functools.lru_cache(maxsize=1)
def _times_drawn(blocks: int, seed: int) -> NDArray[np.uint16]:
    """How often each stretch is in each draw, shape (draws, blocks); groups of one run ask for it one after another."""
    return np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), DRAWS).astype(np.uint16)


def with_draws(value: float, drawn: Floats) -> Estimate:
    """A figure with the middle 95 % of its draws; without ends where there are none, or a tenth of them say nothing."""
    finite = drawn[np.isfinite(drawn)]
    if not len(finite) or len(finite) < 0.9 * len(drawn):
        return Estimate(value, None, None, why="too few stretches of the run tell of it")
    low, high = np.quantile(finite, [TAIL, 1 - TAIL])
    return Estimate(value, float(low), float(high))


def share_with_draws(value: float, drawn: Floats, sign: float = 1.0) -> Estimate:
    """A part's share of a whole difference. ``drawn``: both in every draw, shape (draws, 2).

    A draw in which the whole goes the other way than ``sign`` says nothing.
    """
    same = drawn[:, 1] * sign > 0
    return with_draws(value, np.where(same, drawn[:, 0] / np.where(same, drawn[:, 1], 1.0), np.nan))


def block_length(series: Floats) -> float:
    """Politis and White's mean block length for one series in time order; 1 for a constant or a very short one."""
    n = len(series)
    centred = series - series.mean() if n else series
    if n < 16 or not centred.any():
        return 1.0
    look = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(n - 1, math.ceil(math.sqrt(n)) + look)
    covariance = autocovariances(centred, most + 1) / n
    small = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(n) / n)
    calm = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(small, look).all(axis=1))
    # The lag before the first ``look`` small autocorrelations in a row; else the last lag that is not small.
    lag = int(calm[0] if len(calm) else np.flatnonzero(~small)[-1] + 1)
    window = min(2 * lag, most)
    k = np.arange(window + 1)
    weight = np.clip(2 * (1 - k / window), 0.0, 1.0) if window else np.ones(1)
    both = np.where(k == 0, 1.0, 2.0) * weight * covariance[: window + 1]
    spread = 2 * both.sum() ** 2
    if spread <= 0:
        return 1.0
    length = (2 * float((both * k).sum()) ** 2 / spread) ** (1 / 3) * n ** (1 / 3)
    return float(np.clip(length, 1.0, math.ceil(min(3 * math.sqrt(n), n / 3))))


def draw(n: int, length: float, resamples: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Indices of ``resamples`` stationary resamples of ``n`` values in a row: shape (resamples, n)."""
    starts = rng.integers(0, max(n, 1), (resamples, n), dtype=_INDEX)
    if length <= 1:
        return starts
    fresh = rng.random((resamples, n), dtype=np.float32) < 1 / length
    fresh[:, 0] = True
    at = np.arange(n, dtype=_INDEX)
    began = np.maximum.accumulate(np.where(fresh, at, 0), axis=1)
    return np.asarray((np.take_along_axis(starts, began, axis=1) + at - began) % n, dtype=_INDEX)


def counts_of(drawn: NDArray[np.int32]) -> NDArray[np.int32]:
    """How often each of n values was drawn: shape (n, resamples)."""
    resamples, n = drawn.shape
    flat = drawn.astype(np.int64) + np.arange(resamples)[:, None] * n
    counts = np.bincount(flat.ravel(), minlength=resamples * n).reshape(resamples, n)
    return np.ascontiguousarray(counts.T, dtype=_INDEX)


_KERNEL_WIDTHS = 8.0  # standard deviations of the beta weights beyond which they are 0 or 1
_TAIL_VALUES = 40  # and so many values more, since near 0 and 1 the beta distribution falls off like an exponential
_GROUPS = 256


class Resampled:
    """Values that are put in order once; percentiles of a resample then need only how often it holds each.

    ``values``: shape (n,); NaN is no value.
    """

    def __init__(self, values: Floats) -> None:
        from scipy import sparse  # only comparisons resample, and every report would wait for it

        order = np.argsort(values, kind="stable")[: len(values) - int(np.isnan(values).sum())].astype(_INDEX)
        edges = np.linspace(0, len(order), min(_GROUPS, len(order)) + 1).astype(_INDEX)
        # A row for each group of neighbors in the order: times a resample's counts, how much of it is in the group.
        self._groups = sparse.csr_array((np.ones_like(order), order, edges), shape=(len(edges) - 1, len(values)))
        self._values = values

    def harrell_davis(self, counts: NDArray[np.int32], percentiles: Sequence[float]) -> Floats:
        """Percentiles of each resample, shape (resamples, percentiles); NaN for one without a value.

        ``counts``: how often each has every value, shape (n, resamples).
        """
        order, edges = self._groups.indices, self._groups.indptr
        below = np.zeros((len(edges), counts.shape[1]), dtype=_INDEX)  # how many lie below each edge
        np.cumsum(self._groups @ counts, axis=0, out=below[1:])
        sizes, which = np.unique(below[-1], return_inverse=True)
        out = np.full((counts.shape[1], len(percentiles)), np.nan)
        if not sizes.any():
            return out
        for number, percentile in enumerate(percentiles):
            tables = [_weights_below(max(int(size), 1), percentile) for size in sizes]
            width = max(len(table) for _, table in tables)
            weights = np.concatenate([np.pad(table, (0, width - len(table)), mode="edge") for _, table in tables])
            first = np.array([first for first, _ in tables], dtype=_INDEX)[which]
            # Weights are 0 below the edge ``low`` and above ``high`` in every resample.
            low = int(np.flatnonzero((below <= first).all(axis=1))[-1])
            high = int(np.append(np.flatnonzero((below >= first + width - 1).all(axis=1)), len(edges) - 1)[0])
            within = order[edges[low] : edges[high]]
            values = self._values[within]
            steps = np.diff(values)
            out[:, number] = values[-1]
            if steps.any():
                rank = counts.take(within[:-1], axis=0).cumsum(axis=0, dtype=_INDEX)
                rank += below[low] - first
                np.clip(rank, 0, width - 1, out=rank)
                out[:, number] -= np.einsum("i,ij->j", steps, weights.take(rank + which * width))
        out[below[-1] == 0] = np.nan
        return out


@functools.lru_cache(maxsize=1024)
def _weights_below(n: int, percentile: float) -> tuple[int, Floats]:
    """Harrell and Davis's weights of the first i of n order statistics together: the first i, and those from it on.

    Before, they are 0; after the last, 1.
    """
    p = percentile / 100
    half = _KERNEL_WIDTHS * math.sqrt(p * (1 - p) * n) + _TAIL_VALUES
    first, last = max(math.floor(p * n - half), 0), min(math.ceil(p * n + half), n)
    table = special.betainc(p * (n + 1), (1 - p) * (n + 1), np.arange(first, last + 1) / n)
    return first, np.asarray(table, dtype=np.float64)


def pooled_harrell_davis(values: Floats, counts: Floats, percentiles: Sequence[float]) -> Floats:
    """The same of values that come in multiplicities: ``values`` sorted, shape (k,); ``counts``, shape (rows, k).

    Returns shape (rows, percentiles), NaN for a row of nothing. The weights are those of the rows' mean count; many
    are read from a table of the beta function with 500 steps a standard deviation.
    """
    total = counts.sum(axis=1)
    if not len(values) or not total.any():
        return np.full((len(counts), len(percentiles)), np.nan)
    share = np.cumsum(counts, axis=1) / np.maximum(total, 1)[:, None]
    least, most, steps = share.min(axis=0), share.max(axis=0), np.diff(values)
    out = np.empty((len(counts), len(percentiles)))
    n = float(total[total > 0].mean())
    for number, percentile in enumerate(percentiles):
        p = percentile / 100
        width = _KERNEL_WIDTHS * math.sqrt(p * (1 - p) / n)
        at = np.linspace(max(p - width, 0.0), min(p + width, 1.0), int(1000 * _KERNEL_WIDTHS) + 1)
        low, high = np.searchsorted(most, at[0]), np.searchsorted(least, at[-1])
        high = min(int(high), len(values) - 1)
        within = share[:, low:high]
        weights = functools.partial(special.betainc, p * (n + 1), (1 - p) * (n + 1))
        below = weights(within) if within.size < len(at) else np.interp(within, at, weights(at))
        out[:, number] = values[high] - below @ steps[low:high]
    out[total == 0] = np.nan
    return out
