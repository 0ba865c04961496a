"""Where a number lies in a picture of a sweep: in proportion from zero, or by its logarithm where it must reach far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gapmeter.analysis.numbers import in_unit, significant, ticks, unit_of
from gapmeter.report.svg import NOTHING, Fragment, el, group, percent

_NEAR, _SIDE = 22.0, 0.24  # px, share of the width: as large as a limit's name
FAR = 12.0  # largest over smallest value from which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``bottom`` (0 when linear) to ``top``."""

    bottom: float
    top: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], extra: float | None = None) -> Scale:
        """Room for all ``values``, and for an ``extra`` one (a limit) that is not far beyond them."""
        largest, smallest = max(values, default=1.0), min(values, default=0.0)
        if extra is not None and extra <= 3 * largest:
            largest, smallest = max(largest, extra), min(smallest, extra)
        largest = largest or 1.0
        if smallest > 0 and largest / smallest > FAR:
            return cls(smallest / 1.25, largest * 1.25, logarithmic=True)
        return cls(0.0, largest * 1.12, logarithmic=False)

    def part(self, value: float) -> float:
        """0 at the bottom, 1 at the top; never outside."""
        if self.logarithmic:
            value = max(value, self.bottom)
            return min(math.log(value / self.bottom) / math.log(self.top / self.bottom), 1.0)
        return min(max(value / self.top, 0.0), 1.0)

    def marks(self) -> list[float]:
        """Round values along it: 1, 2 and 5 times powers of ten where it is logarithmic."""
        if not self.logarithmic:
            return ticks(self.top, 5)
        low, high = math.floor(math.log10(self.bottom)), math.ceil(math.log10(self.top))
        steps = (1, 3) if high - low > 2 else (1, 2, 5)
        found = [step * 10.0**power for power in range(low, high + 1) for step in steps]
        return [value for value in found if self.bottom <= value <= self.top]


def levels_ms(scale: Scale, height: int) -> Fragment:
    """Horizontal lines with times."""
    unit = unit_of(scale.top)
    size = in_unit(1.0, unit)[0]
    marks = scale.marks() if scale.logarithmic else [value / size for value in ticks(scale.top * size, 5)]
    parts = []
    for ms in marks:
        y = height * (1 - scale.part(ms))
        text = f"{in_unit(ms, unit)[0]:g} {unit}" if ms else "0"
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(el("text", text, x=-8, y=y + 4, class_="tick end"))
    if scale.logarithmic:
        parts.append(el("text", "logarithmic", x=6, y=height - 6, class_="note"))
    return group(parts)


def along(scale: Scale, height: int, unit: str) -> Fragment:
    """Vertical lines with numbers, the last with its unit."""
    parts = []
    marks = scale.marks()
    for value in marks:
        x = percent(scale.part(value))
        text = significant(value, 3).rstrip("0").rstrip(".") if value and "." in significant(value, 3) else (
            significant(value, 3) if value else "0")  # fmt: skip
        parts.append(el("line", x1=x, x2=x, y1=0, y2=height, class_="grid"))
        parts.append(el("text", text, x=x, y=height + 17, class_="tick middle"))
    parts.append(el("text", unit, x="100%", y=height + 34, class_="tick end"))
    return group(parts)


def limit_line(
    limit: tuple[float, str] | None, scale: Scale, height: int, points: Sequence[tuple[float, float]] = ()
) -> Fragment:
    """The objective across; where it lies far above, words say so."""
    if limit is None:
        return NOTHING
    ms, text = limit
    if ms > scale.top or ms < scale.bottom:
        return el("text", f"SLO {text}: beyond this picture", x="100%", y=12, class_="limit end")
    y = height * (1 - scale.part(ms))
    left = _crowded(points, y, left=False) and not _crowded(points, y, left=True)
    return group(
        [el("line", x1=0, x2="100%", y1=y, y2=y, class_="limit"),
         el("text", f"SLO {text}", x="0" if left else "100%", dx=4 if left else 0, y=y - 5 if y > 16 else y + 14,
            class_=f"limit halo {'start' if left else 'end'}")]
    )  # fmt: skip


def _crowded(points: Sequence[tuple[float, float]], y: float, *, left: bool) -> bool:
    """Whether a point lies where the name of a line at height ``y`` would be written."""
    return any(
        abs(down - y + 8) < _NEAR and (across < _SIDE if left else across > 1 - _SIDE) for across, down in points
    )
