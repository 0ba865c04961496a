"""A figure and how well it is known: what every statistic gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

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
