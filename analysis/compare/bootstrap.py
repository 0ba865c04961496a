"""Resampling of correlated requests: how far a figure would move if the same run were drawn again.

*Stationary block bootstrap* (Politis and Romano 1994): blocks of requests in the order they were due, of geometric
length, wrapped around the end. The mean length is Politis and White's (2004) automatic choice in the corrected form of
Patton, Politis and White (2009): b = (2 G^2 / D)^(1/3) n^(1/3) with G = sum of lambda(k/M) |k| R(k), D = 2 g(0)^2,
g(0) = sum of lambda(k/M) R(k), R the autocovariances and lambda the flat-top window; M is twice the lag from which on
the autocorrelations stay within 2 sqrt(log10(n) / n).

*Quantiles* are Harrell and Davis's (1982): the mean of all order statistics, the i-th of n weighted by
I_{i/n}(a, b) - I_{(i-1)/n}(a, b), where a = p (n + 1), b = (1 - p)(n + 1) and I is the regularized incomplete beta
function. They are smooth in the data, which a bootstrap of quantiles needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import fft, sparse, special

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_INDEX = np.int32
_KERNEL_WIDTHS = 8.0  # standard deviations of the beta weights beyond which they are 0 or 1


def block_length(series: Floats) -> float:
    """Politis and White's mean block length for one series in time order; 1 for a constant or a very short one."""
    n = len(series)
    centred = series - series.mean() if n else series
    if n < 16 or not centred.any():
        return 1.0
    spectrum = fft.rfft(centred, fft.next_fast_len(2 * n, real=True))
    covariance = fft.irfft(np.abs(spectrum) ** 2)[:n] / n
    look = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = min(n - 1, math.ceil(math.sqrt(n)) + look)
    small = np.abs(covariance[1 : most + 1] / covariance[0]) < 2 * math.sqrt(math.log10(n) / n)
    lag = _first_run(small, look)
    window = min(2 * lag, most)
    k = np.arange(window + 1)
    weight = np.clip(2 * (1 - k / window), 0.0, 1.0) if window else np.ones(1)
    both = np.where(k == 0, 1.0, 2.0) * weight * covariance[: window + 1]
    spread = 2 * both.sum() ** 2
    if spread <= 0:
        return 1.0
    length = (2 * float((both * k).sum()) ** 2 / spread) ** (1 / 3) * n ** (1 / 3)
    return float(np.clip(length, 1.0, math.ceil(min(3 * math.sqrt(n), n / 3))))


def _first_run(small: NDArray[np.bool_], length: int) -> int:
    """The lag before the first ``length`` small autocorrelations in a row; else the last lag that is not small."""
    run = 0
    for at, each in enumerate(small):
        run = run + 1 if each else 0
        if run == length:
            return at + 1 - length
    large = np.flatnonzero(~small)
    return int(large[-1]) + 1 if len(large) else 0


def draw(n: int, length: float, resamples: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Indices of ``resamples`` stationary resamples of ``n`` values in a row: shape (resamples, n)."""
    starts = rng.integers(0, n, (resamples, n), dtype=_INDEX)
    if length <= 1:
        return starts
    fresh = rng.random((resamples, n), dtype=np.float32) < 1 / length
    fresh[:, 0] = True
    at = np.arange(n, dtype=_INDEX)
    began = np.maximum.accumulate(np.where(fresh, at, 0), axis=1)
    return np.asarray((np.take_along_axis(starts, began, axis=1) + at - began) % n, dtype=_INDEX)


def counts_of(drawn: NDArray[np.int32]) -> Floats:
    """How often each value was drawn: shape (resamples, n)."""
    resamples, n = drawn.shape
    flat = drawn.astype(np.int64) + np.arange(resamples)[:, None] * n
    return np.bincount(flat.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def harrell_davis(rows: Floats, percentiles: Sequence[float]) -> Floats:
    """Percentiles of each row, shape (rows, percentiles). NaN marks what is no value; none gives NaN."""
    ordered = np.sort(rows, axis=1)  # NaN last
    known = rows.shape[1] - np.isnan(ordered).sum(axis=1)
    out = np.full((len(rows), len(percentiles)), np.nan)
    for n in np.unique(known):
        if n:
            of = known == n
            out[of] = ordered[of, :n] @ _weights(int(n), percentiles).T
    return out


def _weights(n: int, percentiles: Sequence[float]) -> Floats:
    """Harrell and Davis's weights of n order statistics: shape (percentiles, n)."""
    p = np.asarray(percentiles, dtype=np.float64)[:, None] / 100
    edges = special.betainc(p * (n + 1), (1 - p) * (n + 1), np.arange(n + 1) / n)
    return np.asarray(np.diff(edges, axis=1), dtype=np.float64)


def pooled_harrell_davis(values: Floats, counts: Floats, percentiles: Sequence[float]) -> Floats:
    """The same of values that come in multiplicities: ``values`` sorted, shape (k,); ``counts``, shape (rows, k).

    Returns shape (rows, percentiles), NaN for a row of nothing. The weights are those of the rows' mean count, read
    from a table of the beta function with 500 steps a standard deviation.
    """
    total = counts.sum(axis=1)
    if not len(values) or not total.any():
        return np.full((len(counts), len(percentiles)), np.nan)
    share = np.cumsum(counts, axis=1) / np.maximum(total, 1)[:, None]
    least, most, steps = share.min(axis=0), share.max(axis=0), np.diff(values)
    out = np.empty((len(counts), len(percentiles)))
    for number, percentile in enumerate(percentiles):
        at, weight = _beta_table(percentile / 100, float(total[total > 0].mean()))
        low, high = np.searchsorted(most, at[0]), np.searchsorted(least, at[-1])
        high = min(int(high), len(values) - 1)
        below = np.interp(share[:, low:high], at, weight)
        out[:, number] = values[high] - below @ steps[low:high]
    out[total == 0] = np.nan
    return out


def _beta_table(p: float, n: float) -> tuple[Floats, Floats]:
    """The incomplete beta function of Harrell and Davis's weights around ``p``, from 0 to 1."""
    width = _KERNEL_WIDTHS * math.sqrt(p * (1 - p) / n)
    at = np.linspace(max(p - width, 0.0), min(p + width, 1.0), int(1000 * _KERNEL_WIDTHS) + 1)
    return at, np.asarray(special.betainc(p * (n + 1), (1 - p) * (n + 1), at), dtype=np.float64)


def binned(values: Floats, owner: Ints, owners: int) -> tuple[Floats, sparse.csr_array]:
    """Pooled values rounded to four significant digits, and how many each owner has of each.

    Returns the distinct values in order, shape (k,), and a sparse matrix (owners, k).
    """
    size = 10.0 ** (np.floor(np.log10(np.maximum(values, 1.0))) - 3)
    kept, column = np.unique(np.round(values / size) * size, return_inverse=True)
    ones = np.ones(len(values))
    return kept, sparse.csr_array((ones, (owner, column)), shape=(owners, max(len(kept), 1)))
