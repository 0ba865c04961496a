"""Percentile curves on an HDR axis: position is log(1 / (1 - p)), so that 90, 99 and 99.9 lie equally far apart.

A curve ends at the highest percentile that the sample supports, that is while both ends of the order-statistic
interval exist (``stats.series``); the interval is drawn as a band, an SLO as a step from its percentile on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.numbers import count, duration, in_unit, ticks, unit_of
from gapmeter.analysis.stats.series import Series
from gapmeter.report.figure import Table, Value, figure
from gapmeter.report.run import Run
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, path, percent, stamp_across, stretched

_HEIGHT = 190
_TICKS = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Named:
    """A percentile with a name: its fraction, value and interval in ms, and where it stands in summary.json."""

    p: float
    value_ms: float
    low_ms: float | None
    high_ms: float | None
    key: str


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
    named: tuple[Named, ...] = ()
    sent: Series | None = None


def named_of(figures: Mapping[str, Any], key: str) -> tuple[Named, ...]:
    """The percentiles that summary.json tells of one distribution, at ``key`` there; unsupported ones are left out."""
    found = []
    for name, value in figures.items():
        if name.endswith("_ms") and name[0] == "p" and name[1:-3].isdigit() and value is not None:
            digits = name[1:-3]
            ends = figures.get(f"p{digits}_ci_ms") or [None, None]
            found.append(Named(float(f"0.{digits}"), value, ends[0], ends[1], f"{key}.{name}"))
    return tuple(sorted(found, key=lambda one: one.p))


def curve_of(
    metric: str, values: Series, limits: Sequence[tuple[float, float, str]], named: tuple[Named, ...] = (),
    sent: Series | None = None, points: int = 400,
) -> Curve | None:  # fmt: skip
    """The supported part of a metric's distribution, ``values`` in ns; None when not even the median is supported.

    Requests that were never answered count as infinite: where they begin, the curve ends. ``named``: the percentiles
    that get a dot; ``sent``: the same counted from when it was sent, for a second line.
    """
    found = [(percentile, e) for percentile, e in values.curve(points) if math.isfinite(e.known[0])]
    answered = values.ordered[np.isfinite(values.ordered)]
    if len(found) < 2 or found[-1][0] < 50:
        return None
    ends_ms = np.array([e.known for _, e in found]) / 1e6
    return Curve(
        metric=metric,
        n=values.count,
        n_eff=values.worth.tail,
        p=np.array([percentile / 100 for percentile, _ in found]),
        value_ms=ends_ms[:, 0],
        low_ms=ends_ms[:, 1],
        high_ms=ends_ms[:, 2],
        max_ms=float(answered[-1]) / 1e6,
        unanswered=values.count - len(answered),
        limits=tuple(limits),
        named=named,
        sent=sent,
    )


def picture(curve: Curve, name: str, stamp: str | None = None) -> Fragment:
    """One metric's curve with its band and its SLO steps."""
    scale = _Scale.of(curve)
    points = [(1000 * scale.x(p), scale.y(v)) for p, v in zip(curve.p, curve.value_ms, strict=True)]
    bands = [el("path", d=path(one, closed=True), class_="band") for one in _bands(curve, scale)]
    drawn = stretched(
        _HEIGHT, *bands, _from_sent(curve, scale),
        el("path", d=path(points), class_="curve"),
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
    return chart(
        name, _HEIGHT + 26, f"{curve.metric} by percentile", describe(curve),
        scale.axes(), drawn, end, *(_step(limit, scale) for limit in curve.limits), *_hovers(curve, scale),
        stamp_across(stamp, _HEIGHT / 2 + 12, "stamp small"),
    )  # fmt: skip


def describe(curve: Curve) -> str:
    """The curve in a sentence."""
    said = ", ".join(f"p{_nines(one.p)} {duration(one.value_ms)}" for one in curve.named)
    return f"{curve.metric} of {curve.n:,} samples: {said}; largest {duration(curve.max_ms)}."


def _bands(curve: Curve, scale: _Scale) -> list[list[tuple[float, float]]]:
    """The interval as closed outlines, interrupted where percentiles between are not supported."""
    depth = -np.log10(1 - curve.p)
    steps = np.diff(depth)
    breaks = np.flatnonzero(steps > 1.5 * np.median(steps)) + 1
    outlines = []
    for rows in np.split(np.arange(len(curve.p)), breaks):
        up = [(1000 * scale.x(float(curve.p[i])), scale.y(float(curve.low_ms[i]))) for i in rows]
        outlines.append(
            up + [(1000 * scale.x(float(curve.p[i])), scale.y(float(curve.high_ms[i]))) for i in rows[::-1]]
        )
    return outlines


def _from_sent(curve: Curve, scale: _Scale) -> Fragment:
    """The same from when it was sent: a thin dashed line, as far as the curve goes."""
    if curve.sent is None or not curve.sent.count:
        return NOTHING
    ordered, n = curve.sent.ordered, curve.sent.count
    rank = np.minimum(np.ceil(curve.p * n).astype(int), len(ordered)) - 1
    points = [(1000 * scale.x(p), scale.y(v / 1e6)) for p, v in zip(curve.p, ordered[rank], strict=True)]
    return el("path", d=path(points), class_="curve sent")


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
        text = f"SLO {expression}, above this axis ↑"
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
    for one in curve.named:
        ends = f" (95 % interval {duration(one.low_ms)} to {duration(one.high_ms)})" if one.low_ms is not None else ""
        title = el("title", f"p{_nines(one.p)}: {duration(one.value_ms)}{ends}")
        x, y = percent(scale.x(one.p)), scale.y(one.value_ms)
        dots.append(
            el("circle", title, cx=x, cy=y, r=3.5, class_="sample", data_key=one.key, data_value=repr(one.value_ms))
        )  # fmt: skip
    return dots


def table(curve: Curve) -> list[list[Value | str]]:
    """The same as rows of a table: percentile, value, interval."""
    rows: list[list[Value | str]] = [
        [
            f"p{_nines(one.p)}",
            Value(duration(one.value_ms), repr(one.value_ms)),
            *(Value(duration(end), "" if end is None else repr(end)) for end in (one.low_ms, one.high_ms)),
        ]
        for one in curve.named
    ]
    return [*rows, ["max", Value(duration(curve.max_ms), repr(curve.max_ms)), "", ""]]


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


def with_table(run: Run, curve: Curve, key: str, caption: str) -> Fragment:
    """A curve with its caption and its table."""
    headers, csv = ["percentile", "value", "from", "to"], ["percentile", "value (ms)", "from (ms)", "to (ms)"]
    behind = Table(f"{curve.metric} by percentile", headers, table(curve), csv=csv)
    return figure(picture(curve, key, run.stamp), behind, run.provenance, caption, "levels")
