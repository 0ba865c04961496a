"""Means of what is alike in a row, and ratios of means: positive figures, known on the scale of their logarithm.

Neighbors in a queue are alike, so a mean of n values is known less well than s / sqrt n.

*A level* (``level_of``): its variance is taken twice, and the larger counts: from the first twelve cosine coefficients
of the series in time order (Mueller 2007, A theory of robust long-run variance estimation; Lazarus, Lewis, Stock and
Watson 2018, HAR inference), which sees what lasts, drifts and differences between repeats included, and from the
autocorrelation time (Geyer 1992), which sees what is strong and short. Both with Student's t for twelve coefficients,
since a variance that was estimated is itself uncertain.

*Ratios*: of geometric means by Welch's t on logarithms (Welch 1947, Biometrika 34), of means and of sums by the delta
method (Cochran 1977, Sampling Techniques, section 6.3); each part is worth n / tau values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.stats.dependence import autocorrelation_time, first_cosines
from gapmeter.analysis.stats.estimate import NORMAL, Estimate, Floats, t_quantile

FEWEST = 12  # values below which a level has no interval
FEWEST_OF_RATIO = 8  # values on either side


@dataclass(frozen=True, slots=True)
class Level:
    """A positive figure, the standard error of its logarithm, and the degrees of freedom behind that."""

    value: float
    log_error: float
    freedom: float

    @property
    def estimate(self) -> Estimate:
        """With its interval, on the logarithm: never below zero."""
        reach = math.exp(t_quantile(self.freedom) * self.log_error)
        return Estimate(self.value, self.value / reach, self.value * reach, self.freedom + 1)

    def drawn(self, rng: np.random.Generator, count: int) -> Floats:
        """What it might as well have been: shape (count,)."""
        return self.value * np.exp(self.log_error * rng.standard_t(self.freedom, count))

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


def level_of(series: Floats) -> Level | None:
    """The mean of a series in time order, any unit; None for fewer than twelve values, or a mean not above 0."""
    n = len(series)
    if n < FEWEST or not math.isfinite(mean := float(series.mean())) or mean <= 0:
        return None
    low = first_cosines(series - mean)
    lasting = float(np.mean(low**2)) / n
    brief = float(series.var(ddof=1)) * autocorrelation_time(series) / n
    return Level(mean, math.sqrt(max(lasting, brief)) / mean, len(low))


def level_of_interval(value: float, low: float, high: float) -> Level:
    """A percentile from its 95 % interval, taken for normal on the logarithm."""
    return Level(value, math.log(max(high, value) / min(low, value)) / (2 * NORMAL), math.inf)


def ratio_of_geometric_means(one: Floats, two: Floats) -> Estimate | None:
    """Of two series of logarithms, ``one`` over ``two``; None where either is short.

    Welch's degrees of freedom, on what each part is worth by the autocorrelation time of ``two``, the longer one.
    """
    if min(len(one), len(two)) < FEWEST_OF_RATIO:
        return None
    time = autocorrelation_time(two)
    parts = [(float(part.var(ddof=1)), max(len(part) / time, 2.0)) for part in (one, two)]
    errors = [variance / worth for variance, worth in parts]
    ratio, total = math.exp(float(one.mean() - two.mean())), sum(errors)
    if total <= 0:
        return Estimate(ratio, ratio, ratio)
    freedom = total**2 / sum(e**2 / (worth - 1) for e, (_, worth) in zip(errors, parts, strict=True))
    return Level(ratio, math.sqrt(total), freedom).estimate


def ratio_of_means(one: Floats, two: Floats) -> Estimate | None:
    """Of two series in time order, ``one`` over ``two``, the longer one; None where either mean is 0."""
    if not one.mean() or not two.mean():
        return None
    time = autocorrelation_time(two)
    error = math.sqrt(sum(float(part.var(ddof=1)) * time / len(part) / float(part.mean()) ** 2 for part in (one, two)))
    return Level(float(one.mean() / two.mean()), error, max(len(one) / time - 1, 1.0)).estimate


def ratio_of_sums(amount: Floats, per: Floats) -> Estimate:
    """``amount`` over ``per``, summed over two values and more in time order; their residuals are what is alike."""
    ratio = float(amount.sum() / per.sum())
    left = amount - ratio * per
    n_eff = len(per) / autocorrelation_time(left)
    half = NORMAL * float(np.sqrt((left**2).sum() / len(per) / max(n_eff - 1, 1.0)) / per.mean())
    return Estimate(ratio, ratio - half, ratio + half, n_eff)
