"""Intervals of means of groups of requests that follow one another: whole stretches of the run are drawn again.

A moving queue makes neighbors alike, so requests drawn one by one would promise too much. The run is cut into
stretches of consecutive requests, longer than what one request tells of the next, and stretches are drawn with
replacement (non-overlapping block bootstrap, Carlstein 1986; intervals by the percentile method).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.stats.quantiles import Floats, autocorrelation_time

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DRAWS = 1000
FEWEST_STRETCHES = 5
_FEWEST_BLOCKS = 12


def stretches(series: Floats) -> Ints:
    """Number each element's stretch. ``series``: one value a request, in the order in which they were due.

    A stretch is four times the integrated autocorrelation time long, at least the cube root of n; there are at least
    twelve (fewer only below twelve values), so the length is an underestimate where the run is short beside it.
    """
    n = len(series)
    wanted = max(4 * autocorrelation_time(series), n ** (1 / 3))
    blocks = int(np.clip(n / max(wanted, 1.0), min(_FEWEST_BLOCKS, max(n, 1)), max(n, 1)))
    return (np.arange(n) * blocks) // max(n, 1)


def drawn_means(values: Floats, member: Bools, stretch: Ints, seed: int = 0) -> Floats | None:
    """Means of ``values`` (n, k) over the members, in 1,000 draws of stretches: shape (draws, k).

    The same seed and stretches give the same draws, so that two groups of one run can be subtracted draw by draw.
    NaN where a draw holds no member; None when the members lie in fewer than five stretches, too few to tell.
    """
    blocks = int(stretch.max(initial=-1)) + 1
    counts = np.bincount(stretch[member], minlength=blocks).astype(np.float64)
    if np.count_nonzero(counts) < FEWEST_STRETCHES:
        return None
    sums = np.zeros((blocks, values.shape[1]))
    np.add.at(sums, stretch[member], values[member])
    times = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), DRAWS).astype(np.float64)
    drawn = times @ counts
    means: Floats = np.divide(times @ sums, drawn[:, None], out=np.full((DRAWS, values.shape[1]), np.nan),
                              where=drawn[:, None] > 0)  # fmt: skip
    return means


def interval(drawn: Floats) -> list[float | None]:
    """The middle 95 % of the draws of one figure; null ends when a tenth of them say nothing."""
    told = drawn[np.isfinite(drawn)]
    if len(told) < 0.9 * len(drawn) or not len(told):
        return [None, None]
    low, high = np.quantile(told, [0.025, 0.975])
    return [float(low), float(high)] if math.isfinite(low) and math.isfinite(high) else [None, None]
