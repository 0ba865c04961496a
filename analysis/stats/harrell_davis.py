"""Harrell and Davis's percentiles (1982, Biometrika 69): smooth in the data, which a bootstrap of percentiles needs.

The mean of all order statistics, the i-th of n weighted by I_{i/n}(a, b) - I_{(i-1)/n}(a, b), where a = p (n + 1),
b = (1 - p)(n + 1) and I is the regularized incomplete beta function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

from gapmeter.analysis.stats.estimate import Floats

Ints = NDArray[np.int64]

_KERNEL_WIDTHS = 8.0  # standard deviations of the beta weights beyond which they are 0 or 1


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
