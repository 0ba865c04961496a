"""Where values lie along an axis, and which of them it names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

from gapmeter.analysis.numbers import round_step

_FAR = 12.0  # largest over smallest value from which a fitting axis is logarithmic
_GAP = 0.6  # of a category, between groups of them


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value lies between 0 and 1, from ``low`` to ``high``.

    linear: in proportion. log: by its logarithm. hdr: a percentile as a fraction, by log(1 / (1 - p)), so that p90, p99
    and p99.9 lie equally far apart. category: the middle of the value-th of ``names``; fractions lie between them.
    """

    kind: Literal["linear", "log", "hdr", "category"]
    low: float
    high: float
    names: tuple[str, ...] = ()
    breaks: tuple[int, ...] = ()  # categories before which a new group begins

    @classmethod
    def linear(cls, values: Iterable[float], *, zero: bool = True, room: float = 0.08) -> Scale:
        """All finite ``values`` with ``room`` at the ends that are not 0; ``zero``: 0 is on the axis."""
        known = [value for value in values if math.isfinite(value)] + ([0.0] if zero else [])
        low, high = min(known, default=0.0), max(known, default=0.0)
        free = room * ((high - low) or abs(high)) or 1e-3  # every value the same: an axis all the same
        return cls("linear", low - (free if low != 0 else 0.0), high + (free if high != 0 or low == 0 else 0.0))

    @classmethod
    def log(cls, values: Iterable[float], room: float = 1.15) -> Scale:
        """All ``values`` above 0, with a factor of ``room`` at both ends."""
        known = [value for value in values if 0 < value < math.inf]
        return cls("log", min(known, default=1.0) / room, max(known, default=1.0) * room)

    @classmethod
    def fitting(cls, values: Sequence[float], limit: float | None = None) -> Scale:
        """Linear from 0, or logarithmic where the values reach far; a ``limit`` not far beyond them is on the scale."""
        known = [value for value in values if math.isfinite(value)]
        if limit is not None and limit <= 3 * max(known, default=0.0):
            known.append(limit)
        return cls.log(known, 1.25) if known and 0 < _FAR * min(known) < max(known) else cls.linear(known, room=0.1)

    @classmethod
    def hdr(cls, deepest: float, *limits: float) -> Scale:
        """Percentiles from 0 to the next whole nines beyond ``deepest``, p99 at least, and a bit beyond ``limits``."""
        depth = max(
            2.0, math.ceil(-math.log10(1 - deepest) - 0.02), *(0.3 - math.log10(1 - p) for p in limits if p < 1)
        )
        return cls("hdr", 0.0, 1 - 10.0**-depth)

    @classmethod
    def categories(cls, groups: Sequence[Sequence[str]]) -> Scale:
        """Names side by side, with a gap between groups; ``[names]`` where there is one group."""
        names, breaks = tuple(chain(*groups)), tuple(accumulate(map(len, groups[:-1])))
        return cls("category", 0.0, len(names) + _GAP * len(breaks), names, breaks)

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high end; never outside."""
        if self.kind == "log":
            value = max(value, self.low)
            found = math.log(value / self.low) / math.log(self.high / self.low)
        elif self.kind == "hdr":
            found = math.log(1 - min(value, self.high)) / math.log(1 - self.high)
        elif self.kind == "category":
            found = (value + 0.5 + _GAP * sum(value >= at for at in self.breaks)) / (self.high or 1.0)
        else:
            found = (value - self.low) / (self.high - self.low)
        return 0.0 if found < 0.0 else min(found, 1.0)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, about: int) -> list[float]:
        """Round values along it, ``about`` so many where they are numbers."""
        if self.kind == "category":
            return [float(i) for i in range(len(self.names))]
        if self.kind == "hdr":
            return [p for p in (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999) if p <= self.high + 1e-12]
        if self.kind == "log":
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [[d * 10.0**power for power in powers for d in digits] for digits in ((1, 2, 5), (1, 3), (1,))]
            inside = [[value for value in values if self.holds(value)] for values in every]
            if len(inside[0]) >= 3:  # fewer: the axis is so short that even steps read better
                return next((values for values in inside if len(values) <= about + 2), inside[-1])
        step = round_step((self.high - self.low) / about)
        found = self._every(step)
        return found if len(found) > 1 else self._every(round_step(0.4 * step))  # the next finer one

    def _every(self, step: float) -> list[float]:
        """The multiples of ``step`` that it holds."""
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * i for i in range(first, last + 1)]
