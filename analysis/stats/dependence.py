"""How many independent values a run of correlated ones is worth, as far as a run that may be too short can know.

What is asked is the variance V of a share F of values above a threshold; n_eff = F (1 - F) / V. Values may be pooled
from clusters (token gaps of one request, or of one engine step). The share is then a ratio estimator (Cochran 1977,
Sampling Techniques, chapter 9A): with c_j exceedances among the n_j values of cluster j and residuals
r_j = c_j - F n_j in time order, V = J / (J - 1) sum(r^2) tau / N^2. Values that are not pooled are clusters of one.

Two estimates of V, and the larger counts, since each sees what the other misses:

- *short*: tau by Geyer's initial positive sequence (1992, Practical Markov chain Monte Carlo, section 3.3): with
  Gamma_k = rho_2k + rho_2k+1, tau = -1 + 2 * sum of Gamma_k up to the first that is not positive. The mean was taken
  from the same J values, which lowers every covariance by the variance of that mean: summed over L lags, tau is
  divided by 1 - L / J. This sees dependence that is strong, however short.
- *long*: the mean square of the first twelve cosine coefficients of the series, which is J times the variance of its
  mean if nothing lasts longer than about a twelfth of the run (Mueller 2007, A theory of robust long-run variance
  estimation; Lazarus, Lewis, Stock and Watson 2018, HAR inference). This sees dependence that is weak and lasts, such
  as a wait before a long independent service, which drowns in the noise of single lags.

*A variance that was estimated is itself uncertain*, and in a short run mostly too small: a calm run does not know how
bad bad spells are. So Student's t stands where the normal's quantile z would: n_eff is multiplied by (z / t)^2, with nu
degrees of freedom. For the long estimate nu is its number of coefficients. For the short one
1 / nu = L / J + 3 (1 - 1 / d)^2 / S. The first term is that of a sum over L lags (Sokal 1997, Monte Carlo methods in
statistical mechanics, section 3). The second is that of a sum of squared spell lengths, S of them, exponential: the
relative variance of the sum is E x^4 / (E x^2)^2 / S = 6 / S, and nu is 2 over that. d = count / n_eff is how many
values one independent value stands for, a spell's mean length is then (d + 1) / 2, and independent values (d = 1) have
no such error.

*A few values* cannot show what strong dependence would look like, so the short estimate would let twenty independent
ones count for two. But strong dependence leaves neighbors alike, which a test of the ranks of all values sees in
samples that small (Bartels 1982, The rank version of von Neumann's ratio test for randomness, JASA 77): where it finds
no sign of that at the 10 % level, only the long estimate counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from gapmeter.analysis.arrays import Floats, Ints, changes, runs
from gapmeter.analysis.stats.estimate import t_quantile

COSINES = 12
LEAST = 0.5  # of n_eff; with so little no percentile has any end
_LAGS, _SHORT = (1 << 13, 1 << 17), 16  # how far to look first in a series that is so many times as long
ALIKE = 0.1  # a test of order with a p-value below this finds neighbors alike
_NORMAL = float(special.ndtri(0.975))


@dataclass(frozen=True)
class Exceedances:
    """The values above a threshold: their ``share``, of ``count`` in all, in so many ``clusters`` if pooled.

    ``residuals`` are by cluster in time order, 0 for numbers that no value has.
    """

    share: float
    count: int
    clusters: int | None
    residuals: Floats

    def plain(self) -> float:
        """n_eff by the autocorrelation time as it is estimated, no allowance made; between 1 and the count."""
        if self.known:
            return self.known
        time, _ = self._time
        if self.clusters is None:
            return self.count / time
        return max(1.0, min(self._worth(self._spread() * time), float(self.count)))

    def short(self) -> float:
        """n_eff by the autocorrelation time, between ``LEAST`` and the count."""
        if self.known:
            return self.known
        clusters = len(self.residuals)
        time, lags = self._time
        worth = min(self._worth(self._spread() * time / (1 - min(lags / clusters, 0.9))), self.count)
        excess = (1 - worth / self.count) ** 2
        freedom = 1 / (lags / clusters + 3 * excess / self.spells(worth))
        return self._bounded(worth * _allowance(max(freedom, 1.0)))

    def long(self) -> float:
        """n_eff by the first cosines, between ``LEAST`` and the count."""
        if self.known:
            return self.known
        low = first_cosines(self.residuals)
        return self._bounded(self._worth(len(self.residuals) * float(np.mean(low**2))) * _allowance(len(low)))

    def spells(self, worth: float) -> float:
        """How many spells above the threshold (or below, if fewer) the run has met, if it is worth so much."""
        events = self.count * min(self.share, 1 - self.share)
        return 2 * events / (self.count / worth + 1)

    @property
    def known(self) -> float | None:
        """n_eff where there is nothing to estimate: all values on one side, or one cluster, which shows no spread."""
        if self.share in (0.0, 1.0):
            return float(self.clusters or self.count)
        return 1.0 if len(self.residuals) < 2 else None

    @functools.cached_property
    def _time(self) -> tuple[float, int]:
        return _geyer(self.residuals)

    def _spread(self) -> float:
        clusters = len(self.residuals)
        return _sum_of_squares(self.residuals) * clusters / (clusters - 1)

    def _worth(self, squares: float) -> float:
        return self.share * (1 - self.share) * self.count**2 / max(squares, 1e-300)

    def _bounded(self, worth: float) -> float:
        return min(max(worth, LEAST), float(self.count))


def exceedances(series: Floats, threshold: float, clusters: Ints | None, sizes: Ints | None = None) -> Exceedances:
    """What lies above a threshold. ``clusters`` numbers each value's cluster (0, 1, ...); None: each is its own.

    ``sizes``: theirs, where they are known already. Where the threshold is infinite, the answers that never came are
    what lies above.
    """
    above = np.isinf(series) if np.isinf(threshold) else series > threshold
    share = float(np.count_nonzero(above) / len(series))
    if clusters is None:
        return Exceedances(share, len(series), None, np.asarray(above - share, dtype=np.float64))
    sizes = np.bincount(clusters) if sizes is None else sizes
    residuals = np.bincount(clusters[above], minlength=len(sizes)) - share * sizes
    return Exceedances(share, len(series), int(np.count_nonzero(sizes)), np.asarray(residuals, dtype=np.float64))


def first_cosines(residuals: Floats) -> Floats:
    """The first twelve cosine coefficients of a centred series of two values or more; of few values, half as many.

    Their mean square is the number of values times the variance of their mean, and each is a degree of freedom of it.
    """
    n = len(residuals)
    number = np.arange(1, min(COSINES, n // 2) + 1)
    # The cosine transform of a series is the Fourier transform of its even values and then its odd ones backwards
    # (Makhoul 1980, A fast cosine transform in one and two dimensions).
    spectrum = np.fft.fft(np.concatenate([residuals[::2], residuals[1::2][::-1]]))[number]
    return np.asarray(math.sqrt(2 / n) * (spectrum * np.exp(-0.5j * np.pi * number / n)).real)


def ranks_of(values: Floats) -> Floats:
    """Each value's rank, from 1; equal ones share their mean rank."""
    order = np.argsort(values)
    first, last = runs(changes(values[order]))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((first + last) / 2 + 1, last - first + 1)
    return ranks


def neighbors_alike(ranks: Floats, clusters: Ints | None, sizes: Ints | None) -> bool:
    """Whether neighbors have nearer ranks than chance gives them, by Bartels' ratio and its normal approximation.

    ``ranks`` of a series' values, equal ones sharing theirs. Of pooled values, neighboring clusters' mean ranks, with
    ``sizes`` as above. False where there is no order to find: under four, all equal.
    """
    if clusters is not None and sizes is not None:
        ranks = ranks_of((np.bincount(clusters, weights=ranks) / np.maximum(sizes, 1))[sizes > 0])
    n = len(ranks)
    centred = ranks - ranks.mean()
    if n < 4 or not centred.any():
        return False
    ratio = _sum_of_squares(np.diff(ranks)) / _sum_of_squares(centred)
    variance = 4 * (n - 2) * (5 * n**2 - 2 * n - 9) / (5 * n * (n + 1) * (n - 1) ** 2)
    return float(special.ndtr((ratio - 2) / math.sqrt(variance))) <= ALIKE


def _sum_of_squares(values: Floats) -> float:
    """Not ``values @ values``, which wakes all threads of a BLAS for work that takes one a millisecond."""
    return float(np.einsum("i,i->", values, values))


def later(worth: float, plain: float) -> Callable[[float], float]:
    """What a run ``factor`` times as long will be worth, if this one is worth ``worth``, and ``plain`` unallowed for.

    Twice the run has twice the degrees of freedom, so that the allowance for its own ignorance shrinks as it grows.
    """
    if worth >= plain:
        return lambda factor: plain * factor
    low, high = 0.2, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _allowance(middle) < worth / plain else (low, middle)
    return lambda factor: plain * factor * min(_allowance(low * factor), 1.0)


def autocorrelation_time(series: Floats) -> float:
    """Integrated autocorrelation time by Geyer's initial positive sequence; at least 1, and 1 for a constant."""
    return _geyer(series)[0]


def _geyer(series: Floats) -> tuple[float, int]:
    """The time, and over how many lags, the mirrored ones included, it was summed."""
    n = len(series)
    if n < 4:
        return 1.0, 1
    centred = series - series.mean()
    largest = float(np.abs(centred).max())
    if largest <= n * np.finfo(np.float64).eps * np.abs(series).max():  # constant, but for rounding
        return 1.0, 1
    centred /= largest  # squares of very small ones would be 0
    for lags in (*(lags for lags in _LAGS if _SHORT * lags < n), n):
        covariance = autocovariances(centred, lags)
        pairs = (covariance / covariance[0])[: lags - lags % 2].reshape(-1, 2).sum(axis=1)
        negative = np.flatnonzero(pairs <= 0)
        if len(negative):
            break
    stop = int(negative[0]) if len(negative) else len(pairs)
    return max(1.0, float(2 * pairs[:stop].sum() - 1)), max(4 * stop - 1, 1)


def autocovariances(centred: Floats, lags: int) -> Floats:
    """Sums of products with what comes 0, 1, … ``lags`` - 1 later.

    By transforms of blocks as long as there are lags, which a long series has many of: one transform of all of it takes
    several times its memory.
    """
    n = len(centred)
    size = 1 << (min(3 * lags, 2 * n) - 1).bit_length()
    products = np.zeros(size // 2 + 1, np.complex128)
    for at in range(0, n, lags):
        block = np.fft.rfft(centred[at : at + lags], size)
        products += np.conj(block) * (np.fft.rfft(centred[at : at + 2 * lags], size) if lags < n else block)
    return np.fft.irfft(products)[:lags]


def _allowance(freedom: float) -> float:
    """(z / t)^2 at the 97.5 % quantiles."""
    return (_NORMAL / t_quantile(freedom)) ** 2
