"""A level over time: a line through its samples, broken and shaded where there are none, on the run's time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.numbers import significant, ticks
from gapmeter.report.svg import Fragment, chart, el, group, path, percent, stretched
from gapmeter.report.timeline import Span, thin

Floats = NDArray[np.float64]

_HEIGHT = 56
_AXIS = 22


@dataclass(frozen=True, slots=True)
class Level:
    """One quantity over time: seconds from the run's origin, values in ``unit``; ``least_top`` of the axis at least.

    ``usual_s`` is the distance between samples; where one is missing the line breaks. ``shaded`` are further gaps, in
    seconds, over which the line holds since it comes from a counter.
    """

    key: str
    title: str
    unit: str
    at_s: Floats
    value: Floats
    usual_s: float
    least_top: float = 0.0
    shaded: tuple[tuple[float, float], ...] = ()


def level_panel(level: Level, span: Span, *, last: bool = False) -> Fragment:
    """The picture of one level. ``last``: with the time axis beneath."""
    at, value = level.at_s, level.value
    inside = (at >= 0) & (at <= span.length_s) & np.isfinite(value)
    at, value = at[inside], value[inside]
    largest = float(value.max()) if len(value) else 0.0
    top = max(largest, level.least_top, 1e-9) * 1.08
    gaps = missing(at, level.usual_s, span.length_s)
    parts = [_gap(span, low, high) for low, high in (*gaps, *level.shaded)]
    parts += _scale(top, level.unit)
    parts.append(_lines(at, value, [low for low, _ in gaps], top, span))
    if last:
        parts.append(_axis(span))
    told = f"mean {significant(float(value.mean()))}, largest {significant(largest)}" if len(value) else "none"
    gone = f"; {len(gaps)} gaps, {sum(high - low for low, high in gaps):.1f} s in all" if gaps else ""
    said = f"{level.title}, {level.unit or 'count'}: {told}, {len(value):,} samples{gone}."
    return chart(f"telemetry-{level.key}", _HEIGHT + (_AXIS + 6 if last else 6), level.title, said, *parts)


def missing(at_s: Floats, usual_s: float, length_s: float) -> list[tuple[float, float]]:
    """Stretches of the axis, in seconds, that have no sample where there should have been one (1.9 distances)."""
    edges = [0.0, *at_s.tolist(), length_s]
    longest = 1.9 * usual_s
    return [(low, high) for low, high in pairwise(edges) if high - low > longest]


def _gap(span: Span, low: float, high: float) -> Fragment:
    left, right = max(low / span.length_s, 0.0), min(high / span.length_s, 1.0)
    title = el("title", f"no sample from {low:.1f} to {high:.1f} s")
    return el("rect", title, x=percent(left), y=0, width=percent(right - left), height=_HEIGHT, class_="gap")


def _scale(top: float, unit: str) -> list[Fragment]:
    parts = []
    for mark in ticks(top, 2):
        y = _HEIGHT * (1 - mark / top)
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        text = f"{mark:g} {unit}" if mark else "0"
        parts.append(el("text", text, x=-8, y=y + 4, class_="tick end"))
    return parts


def _lines(at: Floats, value: Floats, breaks: Sequence[float], top: float, span: Span) -> Fragment:
    """Lines between neighbouring samples, none across a gap; a sample alone is a short stroke."""
    kept = thin(at, value, span.length_s)
    points = [(1000 * float(at[i]) / span.length_s, _HEIGHT * (1 - float(value[i]) / top)) for i in kept]
    cut = np.searchsorted(at[kept], np.asarray(breaks), side="right") if len(breaks) else np.empty(0, np.int64)
    pieces = [points[a:b] for a, b in pairwise([0, *np.unique(cut).tolist(), len(points)])]
    drawn = [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 1.0, piece[0][1])] for piece in pieces if piece]
    return stretched(_HEIGHT, *(el("path", d=path(piece), class_="curve thin") for piece in drawn))


def _axis(span: Span) -> Fragment:
    marks = ticks(span.length_s, 8)
    return group(
        el("text", f"{v:g} s" if v == marks[-1] else f"{v:g}", x=span.x(v), y=_HEIGHT + 20, class_="tick middle")
        for v in marks
    )
