"""A figure and how well it is known, which every statistic gives; and the difference of a figure between two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from gapmeter.analysis.arrays import Floats

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
NORMAL = 1.96  # the normal's 97.5 % quantile, where a variance is taken for known


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the ends of its 95 % interval, all in the unit of what it was made from.

    An end is None where nothing bounds the figure on that side, and ``why`` says what is missing; it is infinite where
    answers that never came reach it. ``n_eff``: the independent values that it rests on, None where it is made from
    something else than values.
    """

    value: float | None
    low: float | None
    high: float | None
    n_eff: float | None = None
    why: str = ""

    @property
    def supported(self) -> bool:
        """Whether both ends exist."""
        return self.low is not None and self.high is not None

    @property
    def ends(self) -> tuple[float | None, float | None]:
        return self.low, self.high

    @property
    def known(self) -> tuple[float, float, float]:
        """Value, low and high of an estimate that has them all. Raises ValueError where one is missing."""
        if self.value is None or self.low is None or self.high is None:
            raise ValueError(self.why or "the estimate lacks an end")
        return self.value, self.low, self.high

    def excludes(self, value: float) -> bool:
        """Whether the interval has both ends and ``value`` is not in it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """How many standard errors a two-sided interval reaches: Student's t, the normal's with infinite ``freedom``."""
    return float(special.stdtrit(freedom, (1 + confidence) / 2))


POWER = 0.8


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of two sides in ns. The error of B minus A over ``error`` follows Student's t with ``df``.

    ``error`` and ``df`` are None where the samples cannot support the figure, and ``why`` says so.
    """

    a: float | None
    b: float | None
    error: float | None = None
    df: float | None = None
    why: str = ""

    @property
    def supported(self) -> bool:
        return self.value is not None

    @property
    def value(self) -> float | None:
        """B minus A."""
        return None if self.error is None or self.a is None or self.b is None else self.b - self.a

    @property
    def estimate(self) -> Estimate:
        """B minus A with its interval."""
        if self.value is None or self.df is None:
            return Estimate(None, None, None, why=self.why)
        half = self.half_width(CONFIDENCE)
        return Estimate(self.value, self.value - half, self.value + half, self.df + 1)

    @property
    def p(self) -> float | None:
        """Two-sided: how likely so large a difference is where there is none."""
        if self.value is None or self.error is None or self.df is None:
            return None
        if self.value == 0:
            return 1.0
        return float(2 * special.stdtr(self.df, -abs(self.value) / self.error)) if self.error > 0 else 0.0

    def half_width(self, confidence: float) -> float:
        """Half the interval's width at any confidence; infinite where there is no interval."""
        return math.inf if self.error is None or self.df is None else t_quantile(self.df, confidence) * self.error

    def least(self, confidence: float) -> float:
        """The smallest true difference that the test at this confidence finds in 80 of 100 such comparisons."""
        if self.error is None or self.df is None:
            return math.inf
        return self.half_width(confidence) + float(special.stdtrit(self.df, POWER)) * self.error


def holm(p: Sequence[float]) -> Floats:
    """Holm's (1979) step-down adjusted p-values: shape (n,), each at most 1 and never below that of a smaller p."""
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(np.asarray(p, dtype=np.float64)[order] * factors), 1.0)
    out = np.empty(len(p))
    out[order] = adjusted
    return out
