"""Charts: one Scale, one Axis, one Plot, and the marks that every picture is made of. All of it is inline SVG.

Across, everything is a fraction of the plot's width, so that a chart follows the page; downward it is pixels. A chart
of its own takes ten lines::

    x = Axis(Scale.log([t.rate for t in trials]), "req/s", "requests per second asked for")
    y = Axis(Scale.fitting([t.p99_ms for t in trials], slo.limit_ms), "ms")
    dots = [Point(t.rate, t.p99_ms, y_ends=t.p99_ci_ms, label=t.name, title=t.sentence) for t in trials]
    plot = Plot(x, y, height=260)
    return plot.chart(
        "knee", "p99 TTFT by rate", "p99 TTFT stays below 500 ms up to 14 req/s.",
        line(plot, [(dot.x, dot.y) for dot in dots]),
        points(plot, dots),
        limit(plot, f"SLO {slo.expression}", y=slo.limit_ms, near=dots),
    )

Rows or columns of bars come from ``Scale.categories`` on one of the two axes; rows run downward. Several panels with
one time axis are plots with the same ``x``, ``labels=False`` for all but the last. No mark lies outside of its plot: a
limit beyond an axis is told in words at its edge. Colors and line styles are classes of report.css, so that dark mode
and print need nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Literal, TypeVar

from gapmeter.analysis.numbers import in_unit, unit_of
from gapmeter.report.marks import ink
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, group, path, percent, stretched

Side = Literal["start", "middle", "end"]
Corner = TypeVar("Corner", bound=tuple[float, ...])
_WIDTHS = (320, 560, 760, 1000)  # plot widths in px from which a text that needs them is shown
_CHARACTER, _LINE = 6.6, 14.0  # px of the 12 px type, on the safe side
_OVERHANG = 34.0  # px that a text may stand out of the plot to either side
_SPOT = 6.0  # px around the middle of a point that no text may cover


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale with its ticks in words.

    ``unit``: ms (written in the unit that keeps it short), share (per cent), $ (before the number), or a word that
    stands behind it. ``signed``: differences, + or - before each and a strong line at 0.
    """

    scale: Scale
    unit: str = ""
    title: str = ""
    signed: bool = False
    about: int = 6
    labels: bool = True

    def ticks(self, *, units: bool) -> list[tuple[float, str]]:
        """Values and their words; the last has its unit, with ``units`` every one (0 has none)."""
        values = self.scale.ticks(self.about)
        return [(v, self._words(v, with_unit=units or v == values[-1])) for v in values]

    def across(self, height: float) -> Fragment:
        """Vertical lines over the plot (none for categories), words beneath: as many as fit, the last one first."""
        ticks = self.ticks(units=self.scale.kind == "log" and self.unit in ("ms", "$"))
        drawn = []
        for value, _ in ticks if self.scale.kind != "category" else ():
            x, css = percent(self.scale.at(value)), "zero" if self.signed and value == 0 else "grid"
            drawn.append(el("line", x1=x, x2=x, y1=0, y2=height, class_=css))
        if self.labels:
            words = [[Text(words, self.scale.at(value), height + 18, css="tick")] for value, words in ticks]
            drawn.append(written([*words[-1:], *words[:-1]]))
            drawn.append(el("text", self.title, x="100%", y=height + 34, class_="tick end") if self.title else NOTHING)
        return group(drawn)

    def up(self, height: float) -> Fragment:
        """Horizontal lines over the plot with their words to the left; of categories, names without lines."""
        if self.scale.kind == "category":
            rows = [(height * self.scale.at(at) + 4, name) for at, name in self.ticks(units=False) if self.labels]
            return group(el("text", name, x=-8, y=y, class_="tick end") for y, name in rows)
        drawn, last = [], math.inf
        for value, words in self.ticks(units=True):
            y = height * (1 - self.scale.at(value))
            css = "zero" if self.signed and value == 0 else "grid"
            drawn.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_=css))
            if last - y >= _LINE and self.labels:
                drawn.append(el("text", words, x=-8, y=y + 4, class_="tick end"))
                last = y
        note = el("text", "logarithmic", x=6, y=12, class_="note") if self.scale.kind == "log" else NOTHING
        return group([*drawn, note])

    def _words(self, value: float, *, with_unit: bool) -> str:
        if self.scale.kind == "category":
            return self.scale.names[int(value)]
        if self.scale.kind == "hdr":
            return f"p{100 * value:.7g}"
        if abs(value) < 1e-12:
            return "0"
        if self.unit == "$":
            return f"${value:.10f}".rstrip("0").rstrip(".")
        unit = self.unit
        if unit == "share":
            value, unit = 100 * value, "%"
        elif unit == "ms":
            # On a logarithmic axis every tick is in its own unit, else all are in that of the longest one.
            longest = max(abs(self.scale.low), abs(self.scale.high))
            unit = unit_of(value if self.scale.kind == "log" else longest)
            value = in_unit(value, unit)
        number = f"{value:+,.6g}" if self.signed else f"{value:,.6g}"
        return f"{number} {unit}" if with_unit and unit else number


@dataclass(frozen=True, slots=True)
class Plot:
    """Two axes and a height in px: where a value lies in the picture."""

    x: Axis
    y: Axis
    height: float

    def across(self, value: float) -> float:
        return self.x.scale.at(value)

    def down(self, value: float) -> float:
        """Pixels from the top; categories run downward, numbers upward."""
        at = self.y.scale.at(value)
        return self.height * (at if self.y.scale.kind == "category" else 1 - at)

    def chart(self, name: str, title: str, said: str, *marks: Fragment) -> Fragment:
        """The whole picture, named and described for those who do not see it (``said``): axes, ``marks`` upon them.

        ``name`` makes its ids unique in the page.
        """
        foot = (26 if self.x.labels else _LINE) + (16 if self.x.title and self.x.labels else 0)
        return el(
            "svg", el("title", title, id=f"{name}-title"), el("desc", said, id=f"{name}-desc"),
            self.x.across(self.height), self.y.up(self.height), *marks,
            width="100%", height=round(self.height + foot), role="img", class_="chart",
            aria_labelledby=f"{name}-title {name}-desc",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """A text at a fraction of the width and a height in px (its baseline)."""

    words: str
    x: float
    y: float
    dx: float = 0.0
    anchor: Side = "middle"
    css: str = ""

    def sides(self, width: float) -> tuple[float, float]:
        """Left and right end in px in a plot so wide."""
        length = _CHARACTER * len(self.words)
        left = self.x * width + self.dx - {"start": 0.0, "middle": length / 2, "end": length}[self.anchor]
        return left, left + length


def written(wanted: Iterable[Sequence[Text]], spots: Sequence[tuple[float, float]] = ()) -> Fragment:
    """Texts that cover neither each other nor the ``spots`` (fraction, px), those that come first before others.

    Each is a list of places where it may stand. The one that needs the least width is taken and shown from then on; a
    text that fits nowhere is left out (its mark has a title).
    """
    placed: list[tuple[Text, int]] = []
    for places in wanted:
        found = min(((_free_from(text, placed, spots), i) for i, text in enumerate(places)), default=None)
        if found is not None and found[0] < len(_WIDTHS):
            placed.append((places[found[1]], found[0]))
    return group(
        el("text", text.words, x=percent(text.x), y=text.y, dx=text.dx or None,
           class_=f"{text.css} {text.anchor}" + (f" inside fit-{_WIDTHS[number]}" if number else ""))
        for text, number in placed
    )  # fmt: skip


def _free_from(text: Text, placed: Sequence[tuple[Text, int]], spots: Sequence[tuple[float, float]]) -> int:
    """The first of the widths from which on nothing lies under a text; their number where something always does."""
    for number in reversed(range(len(_WIDTHS))):
        width = _WIDTHS[number]
        left, right = text.sides(width)
        free = left >= -_OVERHANG and right <= width + _OVERHANG
        for other, shown in placed if free else ():
            start, stop = other.sides(width)
            free &= shown > number or abs(other.y - text.y) >= _LINE or right + 6 < start or left > stop + 6
        for x, y in spots if free else ():
            free &= not (left - _SPOT < x * width < right + _SPOT and -_LINE < y - text.y < _SPOT)
        if not free:
            return number + 1
    return 0


def line(plot: Plot, at: Iterable[tuple[float, float]], css: str = "curve", dash: str | None = None) -> Fragment:
    """Straight lines from point to point, nothing smoothed; interrupted where a value is not a number."""
    pieces = [[(1000 * plot.across(x), plot.down(y)) for x, y in piece] for piece in _unbroken(at)]
    drawn = [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 1, piece[0][1])] for piece in pieces]
    return stretched(plot.height, *(el("path", d=path(one), class_=css, stroke_dasharray=dash) for one in drawn))


def band(plot: Plot, at: Iterable[tuple[float, float, float]], css: str = "band") -> Fragment:
    """The area between (x, low, high); interrupted where an end is not a number. With low = 0, a filled curve."""
    outlines = []
    for piece in _unbroken(at):
        lower = [(1000 * plot.across(x), plot.down(low)) for x, low, _ in piece]
        outlines.append(lower + [(1000 * plot.across(x), plot.down(high)) for x, _, high in reversed(piece)])
    return stretched(plot.height, *(el("path", d=path(one, closed=True), class_=css) for one in outlines))


def _unbroken(at: Iterable[Corner]) -> list[list[Corner]]:
    runs = groupby(at, key=lambda corner: any(map(math.isnan, corner)))
    return [list(corners) for gap, corners in runs if not gap]


def stairs(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a step function, for ``line``: ``values[i]`` from ``edges[i]`` to ``edges[i + 1]``."""
    return [(x, v) for (left, right), v in zip(pairwise(edges), values, strict=True) for x in (left, right)]


@dataclass(frozen=True, slots=True)
class Point:
    """A value with its interval on either axis. ``sign`` is drawn instead of a dot: ✕ for what is no measurement.

    ``data``: attributes for the page's script, such as ``{"data_request": "r12"}``. A ``size`` of 0 draws no dot.
    """

    x: float
    y: float
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    css: str = "sample"
    size: float = 4.0
    label: str = ""
    title: str = ""
    sign: str = ""
    data: Mapping[str, object] = field(default_factory=dict)


def points(plot: Plot, found: Sequence[Point], whisker: str = "whisker") -> Fragment:
    """Dots or signs with their intervals, and their names beside them where there is room."""
    drawn: list[Fragment] = []
    places = [(plot.across(one.x), plot.down(one.y)) for one in found]
    for one, (at, y) in zip(found, places, strict=True):
        x = percent(at)
        if one.x_ends:
            low, high = (percent(plot.across(end)) for end in one.x_ends)
            drawn.append(el("line", x1=low, x2=high, y1=y, y2=y, class_=whisker))
        if one.y_ends:
            low_y, high_y = (plot.down(end) for end in one.y_ends)
            drawn.append(el("line", x1=x, x2=x, y1=low_y, y2=high_y, class_=whisker))
    for one, (at, y) in zip(found, places, strict=True):  # over all intervals
        x, title = percent(at), el("title", one.title) if one.title else NOTHING
        if one.sign:
            drawn.append(el("text", title, one.sign, x=x, y=y + 5, class_=f"{one.css} middle", **one.data))
        elif one.size:
            drawn.append(el("circle", title, cx=x, cy=y, r=one.size, class_=one.css, **one.data))
    beside: list[tuple[float, float, Side]] = [(0, -10, "middle"), (0, 20, "middle"), (10, -8, "start")]
    beside += [(-10, -8, "end"), (10, 4, "start"), (-10, 4, "end")]
    labels = [
        [Text(one.label, at, y + below, dx, side, "halo") for dx, below, side in beside]
        for one, (at, y) in zip(found, places, strict=True)
        if one.label
    ]
    return group([*drawn, written(labels, _spots(plot, found) if labels else ())])


def _spots(plot: Plot, found: Sequence[Point]) -> list[tuple[float, float]]:
    """What no text may cover: points, and the ends of their intervals."""
    at = [(one.x, y) for one in found for y in (one.y, *(one.y_ends or ()))]
    at += [(x, one.y) for one in found for x in one.x_ends or ()]
    return [(plot.across(x), plot.down(y)) for x, y in at]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a bar: its size on the axis, its paint (a color as ``#RRGGBB``, or ``url(#hatch-…)``), its label.

    ``least_px``: drawn so large even if it is too small to see, as the residual is.
    """

    size: float
    fill: str
    label: str = ""
    title: str = ""
    css: str = "stage"
    least_px: float | None = None
    data: Mapping[str, object] = field(default_factory=dict)


def bar(plot: Plot, place: float, pieces: Sequence[Segment], thick: float, start: float = 0.0) -> Fragment:
    """Pieces end to end from ``start``, along the axis that has no categories; negative ones run backward.

    ``thick``: px of a row, of a column the fraction of the plot's width. A label is written where it fits.
    """
    at, drawn = start, []
    for piece in pieces:
        low, high = sorted((at, at + piece.size))
        at += piece.size
        box = el("rect", width="100%", height="100%", fill=piece.fill, class_="segment")
        parts = [el("title", piece.title) if piece.title else NOTHING, box]
        if plot.y.scale.kind == "category":
            x, width = plot.across(low), plot.across(high) - plot.across(low)
            least = piece.least_px if piece.least_px and width * _WIDTHS[-1] < piece.least_px else None
            y, across, tall = plot.down(place) - thick / 2, least or percent(width), thick
            room = [w for w in _WIDTHS if width * w >= _CHARACTER * len(piece.label) + 8] if piece.label else []
            if room:
                css = f"middle inside fit-{room[0]}" + (" halo" if piece.fill.startswith("url") else "")
                style = f"fill:{ink(piece.fill)}"
                parts.append(el("text", piece.label, x="50%", y=thick / 2 + 4, class_=css, style=style))
        else:
            x, across = plot.across(place) - thick / 2, percent(thick)
            y, tall = plot.down(high), max(plot.down(low) - plot.down(high), piece.least_px or 0.0)
        drawn.append(el("svg", *parts, x=percent(x), y=y, width=across, height=tall, class_=piece.css, **piece.data))
    return group(drawn)


def after(plot: Plot, x: float, row: float, strong: str, rest: str = "") -> Fragment:
    """What a bar comes to, behind its end."""
    parts = el("tspan", strong, class_="strong"), el("tspan", f"  {rest}", class_="faint")
    return el("text", *parts, x=percent(plot.across(x)), dx=8, y=plot.down(row) + 4, class_="after")


def head(plot: Plot, row: float, thick: float, strong: str, rest: str = "") -> Fragment:
    """What a bar is, above it, where names to the left would take too much of the width."""
    parts = el("tspan", strong, class_="strong"), el("tspan", f"  {rest}", class_="faint rest")
    return el("text", *parts, x=0, y=plot.down(row) - thick / 2 - 7, class_="halo")


def shade(
    plot: Plot, low: float, high: float, css: str = "band", title: str = "", row: float | None = None, thick: float = 0
) -> Fragment:
    """A stretch of the x axis: over the whole height (a warm-up, a gap) or in one row (an interval, a gauge)."""
    left, right = plot.across(low), plot.across(high)
    y, height = (0.0, plot.height) if row is None else (plot.down(row) - thick / 2, thick)
    return el("rect", el("title", title) if title else NOTHING, x=percent(left), y=y, width=percent(right - left),
              height=height, class_=css)  # fmt: skip


def limit(
    plot: Plot, words: str, *, x: float | None = None, y: float | None = None, near: Sequence[Point] = ()
) -> Fragment:
    """A limit: a line at ``x`` or at ``y`` (nothing without either); with both a step, free up to x, then at most y.

    Where it lies beyond the axis, words say so; they keep clear of the points ``near``.
    """
    scale, value = (plot.y.scale, y) if y is not None else (plot.x.scale, x)
    if value is None:
        return NOTHING
    if not scale.holds(value):
        beyond = value > scale.high
        arrow = ("→" if beyond else "←") if y is None else "↑" if beyond else "↓"
        return el("text", f"{words}, beyond this axis {arrow}", x="100%", y=-6, class_="limit end halo")
    left = plot.across(x) if x is not None else 0.0
    if y is None:
        above = Text(words, left, -6, anchor="end" if left > 0.75 else "start", css="limit")
        return group([_stroke(left, left, 0, plot.height), written([[above]])])
    top, beside = plot.down(y), Text(words, 1.0, -6, anchor="end", css="limit halo")
    if x is not None:
        return group([_stroke(left, 1.0, top, top), _stroke(left, left, 0, top), written([[beside]])])
    under = Text(words, 1.0, top + 14, anchor="end", css="limit halo")
    over = [replace(under, y=top - 5), replace(under, x=0.0, y=top - 5, anchor="start")] if top > _LINE else []
    return group([_stroke(left, 1.0, top, top), written([[*over, under, beside]], _spots(plot, near))])


def _stroke(x1: float, x2: float, y1: float, y2: float) -> Fragment:
    return el("line", x1=percent(x1), x2=percent(x2), y1=y1, y2=y2, class_="limit")
