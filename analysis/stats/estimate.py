"""A figure and how well it is known, which every statistic gives; and the difference of a figure between two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from gapmeter.analysis.arrays import Floats

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
LEAST_SURE = 0.9  # a bound that is less sure is not reported
MOST_SURE = 0.99  # more is not claimed: what values are worth is an estimate, and a machine drifts
NORMAL = 1.96  # the normal's 97.5 % quantile, where a variance is taken for known


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure does not exceed, and how sure that is (one-sided, a share of 1)."""

    value: float
    confidence: float


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
MOST_LOG = 50.0  # more is no interval, and no growth, any more


class Spread(NamedTuple):
    """How far a figure moves by chance: its standard error, and the degrees of freedom that this rests on."""

    error: float
    df: float

    def half_width(self, confidence: float) -> float:
        return t_quantile(self.df, confidence) * self.error

    def p(self, value: float) -> float:
        """Two-sided: how likely so large a value is where the true one is 0."""
        if value == 0:
            return 1.0
        return float(2 * special.stdtr(self.df, -abs(value) / self.error)) if self.error > 0 else 0.0

    def least(self, confidence: float) -> float:
        """The smallest true value that a test at this confidence finds in 80 of 100 cases."""
        return self.half_width(confidence) + float(special.stdtrit(self.df, POWER)) * self.error


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of two sides in ns, and how far their difference, B minus A, moves by chance.

    ``spreads``: by each estimate of that (within the runs; between them, where a side has several). A claim must hold
    by all of them, so the widest interval counts. Empty where the samples cannot support the figure; ``why`` says so.
    ``log_spreads``: the same of log(B / A); empty also where a side may be 0. ``late``: so much of a side may be the
    load tester's own lateness that the figure is refused. ``failed``: on which sides it reaches requests that failed.
    """

    a: float | None
    b: float | None
    spreads: tuple[Spread, ...] = ()
    log_spreads: tuple[Spread, ...] = ()
    why: str = ""
    late: float | None = None
    failed: str = ""

    @property
    def supported(self) -> bool:
        return self.value is not None

    @property
    def value(self) -> float | None:
        """B minus A."""
        return None if not self.spreads or self.a is None or self.b is None else self.b - self.a

    @property
    def df(self) -> float | None:
        """Behind the 95 % interval."""
        return max(self.spreads, key=lambda each: each.half_width(CONFIDENCE)).df if self.spreads else None

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
        return None if (value := self.value) is None else max(each.p(value) for each in self.spreads)

    @property
    def growth(self) -> Spread | None:
        """The standard error of log(B / A), with the fewest degrees of freedom: its 95 % interval is the widest of all.

        At a stricter level it is no narrower than what those degrees of freedom ask for.
        """
        if not self.log_spreads:
            return None
        df = min(each.df for each in self.log_spreads)
        return Spread(max(each.half_width(CONFIDENCE) for each in self.log_spreads) / t_quantile(df), df)

    @property
    def growth_ends(self) -> tuple[float, float] | None:
        """The 95 % interval of B / A - 1, in which A's own error counts too."""
        if (spread := self.growth) is None or not self.a or not self.b:
            return None
        reach = math.exp(min(spread.half_width(CONFIDENCE), MOST_LOG))
        return self.b / self.a / reach - 1, self.b / self.a * reach - 1

    def half_width(self, confidence: float) -> float:
        """Half the interval's width at any confidence; infinite where there is no interval."""
        return max((each.half_width(confidence) for each in self.spreads), default=math.inf)

    def least(self, confidence: float) -> float:
        """The smallest true difference that the test at this confidence finds in 80 of 100 such comparisons."""
        return max((each.least(confidence) for each in self.spreads), default=math.inf)


def holm(p: Sequence[float]) -> Floats:
    """Holm's (1979) step-down adjusted p-values: shape (n,), each at most 1 and never below that of a smaller p."""
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(np.asarray(p, dtype=np.float64)[order] * factors), 1.0)
    out = np.empty(len(p))
    out[order] = adjusted
    return out
