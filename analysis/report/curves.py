"""Percentile curves on an HDR axis: position is log(1 / (1 - p)), so that 90, 99 and 99.9 lie equally far apart.

A curve ends at the highest percentile that the sample supports, that is while both ends of the order-statistic
interval exist (analysis.quantiles); the interval is drawn as a band, an SLO as a step from its percentile on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.quantiles import Sample
from analysis.quantiles import curve as supported_curve
from analysis.report.numbers import count, duration, in_unit, significant, ticks, unit_of
from analysis.report.svg import NOTHING, Fragment, chart, el, group, path, percent, stretched

_HEIGHT = 190
_TICKS = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's distribution: fractions, values and interval ends in ms (at most 400 points each)."""

    metric: str
    n: int
    n_eff: float
    p: Floats
    value_ms: Floats
    low_ms: Floats
    high_ms: Floats
    max_ms: float
    unanswered: int
    limits: tuple[tuple[float, float, str], ...]  # SLOs: percentile as a fraction, ms, expression


def curve_of(metric: str, values: Sample, limits: Sequence[tuple[float, float, str]]) -> Curve | None:
    """The supported part of a metric's distribution, ``values`` in ns; None when not even the median is supported.

    Requests that were never answered count as infinite: where they begin, the curve ends.
    """
    points = [e for e in supported_curve(values) if e.value is not None and math.isfinite(e.value)]
    answered = values.ordered[np.isfinite(values.ordered)]
    if len(points) < 2 or points[-1].percentile < 50:
        return None
    return Curve(
        metric=metric,
        n=values.count,
        n_eff=values.n_eff_tail,
        p=np.array([e.percentile / 100 for e in points]),
        value_ms=np.array([e.value for e in points], dtype=np.float64) / 1e6,
        low_ms=np.array([e.low for e in points], dtype=np.float64) / 1e6,
        high_ms=np.array([e.high for e in points], dtype=np.float64) / 1e6,
        max_ms=float(answered[-1]) / 1e6,
        unanswered=values.count - len(answered),
        limits=tuple(limits),
    )


def picture(curve: Curve, name: str, stamp: str | None = None) -> Fragment:
    """One metric's curve with its band and its SLO steps."""
    scale = _Scale.of(curve)
    points = [(1000 * scale.x(p), scale.y(v)) for p, v in zip(curve.p, curve.value_ms, strict=True)]
    band = [(1000 * scale.x(p), scale.y(v)) for p, v in zip(curve.p, curve.low_ms, strict=True)]
    band += [(1000 * scale.x(p), scale.y(v)) for p, v in zip(curve.p[::-1], curve.high_ms[::-1], strict=True)]
    drawn = stretched(
        _HEIGHT, el("path", d=path(band, closed=True), class_="band"), el("path", d=path(points), class_="curve")
    )  # fmt: skip
    last = float(curve.p[-1])
    x = percent(scale.x(last))
    side, dx = ("start", 5) if scale.x(last) < 0.65 else ("end", -5)
    end = group(
        [
            el("line", x1=x, x2=x, y1=0, y2=_HEIGHT, class_="supported"),
            el("text", f"supported to p{_nines(last)}", x=x, y=_HEIGHT - 6, dx=dx, class_=f"note {side}"),
        ]
    )
    mark = (
        el("text", stamp, x="50%", y=_HEIGHT / 2 + 12, class_="stamp small", aria_hidden="true") if stamp else NOTHING
    )
    return chart(
        name, _HEIGHT + 26, f"{curve.metric} by percentile", describe(curve),
        scale.axes(), drawn, end, *(_step(limit, scale) for limit in curve.limits), *_hovers(curve, scale), mark,
    )  # fmt: skip


def describe(curve: Curve) -> str:
    """The curve in a sentence."""
    said = ", ".join(f"p{_nines(p)} {duration(v)}" for p, v, _, _ in samples(curve))
    return f"{curve.metric} of {curve.n:,} samples: {said}; largest {duration(curve.max_ms)}."


def samples(curve: Curve) -> list[tuple[float, float, float, float]]:
    """(p, value, low, high) at the percentiles that have names, as far as they are supported."""
    found = []
    for wanted in (0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999):
        if curve.p[0] <= wanted <= curve.p[-1] + 1e-12:
            i = min(int(np.searchsorted(curve.p, wanted)), len(curve.p) - 1)
            found.append((wanted, float(curve.value_ms[i]), float(curve.low_ms[i]), float(curve.high_ms[i])))
    return found


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a percentile and a value lie in the plot.

    Values are laid out in proportion, or by their logarithm where the largest is over twenty times the median.
    """

    depth: float
    bottom_ms: float
    top_ms: float
    logarithmic: bool

    @classmethod
    def of(cls, curve: Curve) -> _Scale:
        asked = [0.3 - math.log10(1 - p) for p, _, _ in curve.limits if p < 1]
        depth = max(2.0, math.ceil(-math.log10(1 - float(curve.p[-1])) - 0.02), *asked)
        highest = float(curve.high_ms[np.isfinite(curve.high_ms)].max(initial=curve.value_ms[-1]))
        top = max([highest, *(ms for _, ms, _ in curve.limits if ms <= 2.5 * highest)]) * 1.08
        top = top or 1e-3  # all tokens of every answer came in one read: gaps of 0
        lowest = float(curve.low_ms.min())
        middle = float(np.interp(0.5, curve.p, curve.value_ms))
        logarithmic = lowest > 0 and top > 20 * middle
        return cls(depth, lowest * 0.9 if logarithmic else 0.0, top, logarithmic)

    def x(self, p: float) -> float:
        return min(1.0, -math.log10(max(1 - p, 1e-12)) / self.depth)

    def y(self, ms: float) -> float:
        if self.logarithmic:
            part = math.log(max(ms, self.bottom_ms) / self.bottom_ms) / math.log(self.top_ms / self.bottom_ms)
        else:
            part = ms / self.top_ms
        return _HEIGHT * (1 - min(part, 1.0))

    def axes(self) -> Fragment:
        parts = [self._level(ms, text) for ms, text in self._levels()]
        for p in _TICKS:
            if -math.log10(1 - p) <= self.depth + 1e-9:
                x = percent(self.x(p))
                parts.append(el("line", x1=x, x2=x, y1=0, y2=_HEIGHT, class_="grid"))
                parts.append(el("text", f"p{_nines(p)}", x=x, y=_HEIGHT + 18, class_="tick middle"))
        if self.logarithmic:
            parts.append(el("text", "logarithmic", x=6, y=12, class_="note"))
        return group(parts)

    def _level(self, ms: float, text: str) -> Fragment:
        y = self.y(ms)
        line = el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid")
        return group([line, el("text", text, x=-8, y=y + 4, class_="tick end")])

    def _levels(self) -> list[tuple[float, str]]:
        if self.logarithmic:
            low, high = math.floor(math.log10(self.bottom_ms)), math.ceil(math.log10(self.top_ms))
            marks = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
            return [(ms, _round(ms)) for ms in marks if self.bottom_ms <= ms <= self.top_ms]
        unit = unit_of(self.top_ms)
        size = in_unit(1.0, unit)[0]
        return [(v / size, f"{v:g} {unit}" if v else "0") for v in ticks(self.top_ms * size, 5)]


def _round(ms: float) -> str:
    value, unit = in_unit(ms, unit_of(ms))
    return f"{value:g} {unit}"


def _step(limit: tuple[float, float, str], scale: _Scale) -> Fragment:
    """An SLO: free below its percentile, then no higher than its limit."""
    p, ms, expression = limit
    x = percent(scale.x(p))
    if ms > scale.top_ms:
        text = f"SLO {expression}, {significant(ms / scale.top_ms, 2)} times the top ↑"
        return el("text", text, x="100%", y=-6, class_="limit end")
    y = scale.y(ms)
    return group(
        [
            el("line", x1=x, x2=x, y1=0, y2=y, class_="limit"),
            el("line", x1=x, x2="100%", y1=y, y2=y, class_="limit"),
            el("text", f"SLO {expression}", x="100%", y=-6, class_="limit end"),
        ]
    )


def _hovers(curve: Curve, scale: _Scale) -> list[Fragment]:
    """A dot with its figures at every percentile that has a name."""
    dots = []
    for p, value, low, high in samples(curve):
        title = f"p{_nines(p)}: {duration(value)} (95 % interval {duration(low)} to {duration(high)})"
        dots.append(
            el("circle", el("title", title), cx=percent(scale.x(p)), cy=scale.y(value), r=3.5, class_="sample")
        )  # fmt: skip
    return dots


def table(curve: Curve) -> list[dict[str, str]]:
    """The same as rows of text."""
    rows = [
        {"percentile": f"p{_nines(p)}", "value": duration(v), "low": duration(low), "high": duration(high)}
        for p, v, low, high in samples(curve)
    ]
    return [*rows, {"percentile": "max", "value": duration(curve.max_ms), "low": "", "high": ""}]


def caption(curve: Curve) -> str:
    worth = "" if curve.n_eff >= 0.95 * curve.n else f", worth {count(curve.n_eff)} independent ones"
    lost = f"; {count(curve.unanswered)} never answered, counted as infinite" if curve.unanswered else ""
    return f"{curve.n:,} samples{worth}; largest {duration(curve.max_ms)}{lost}"


def _nines(p: float) -> str:
    """0.99 -> 99, 0.999 -> 99.9, 0.9876 -> 98.8: as many digits as tell it from 100."""
    if p <= 0:
        return "0"
    decimals = max(0, math.ceil(-math.log10(1 - p) - 1e-9) - 2) if p < 1 else 0
    return f"{math.floor(100 * p * 10**decimals + 1e-6) / 10**decimals:g}"
