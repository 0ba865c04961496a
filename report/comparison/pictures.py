"""The pictures of a comparison: the shift of each decile, and what each stage adds to the difference of the means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.numbers import in_unit, ticks, unit_of
from gapmeter.analysis.stages import owner_words
from gapmeter.report import marks
from gapmeter.report.comparison.words import difference, interval
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, percent

_SHIFT_HEIGHT = 170
_ROW, _LABELS = 24, 0.24  # px a stage; share of the width for its name


def shift(name: str, metric: str, points: Sequence[Mapping[str, Any]], stamp: str | None = None) -> Fragment | None:
    """Difference at each decile with its 95 % interval, around 0; None where no decile is supported."""
    known = [p for p in points if p["ci_ms"] is not None]
    if not known:
        return None
    scale = _Scale.of([end for p in known for end in (*p["ci_ms"], 0.0)], _SHIFT_HEIGHT)
    drawn = [_decile(p, scale) for p in known]
    names = [
        el("text", f"p{p['percentile']:g}", x=percent(_x(p)), y=_SHIFT_HEIGHT + 18, class_="tick middle")
        for p in points
    ]
    worst = max(known, key=lambda p: abs(p["difference_ms"]))
    said = f"{metric}: the largest shift is {difference(worst)} at p{worst['percentile']:g}."
    return chart(
        name, _SHIFT_HEIGHT + 26, f"{metric}: difference at each decile", said,
        scale.lines(), *names, *drawn, _stamp(stamp, _SHIFT_HEIGHT),
    )  # fmt: skip


def _x(point: Mapping[str, Any]) -> float:
    return float(point["percentile"]) / 100


def _decile(point: Mapping[str, Any], scale: _Scale) -> Fragment:
    x, (low, high) = percent(_x(point)), point["ci_ms"]
    title = el("title", f"p{point['percentile']:g}: {difference(point)} ({interval(point)})")
    line = el("line", x1=x, x2=x, y1=scale.y(low), y2=scale.y(high), stroke="var(--accent)", stroke_width=2)
    return el("g", title, line, el("circle", cx=x, cy=scale.y(point["difference_ms"]), r=4, class_="sample"))


class _Scale:
    """Heights of differences, with 0 always in the plot."""

    def __init__(self, low: float, high: float, height: int) -> None:
        self.low, self.high, self.height = low, high, height

    @classmethod
    def of(cls, values: Sequence[float], height: int) -> _Scale:
        low, high = min(values), max(values)
        room = 0.08 * (high - low) or 1e-3
        return cls(low - room, high + room, height)

    def y(self, ms: float) -> float:
        return self.height * (self.high - ms) / (self.high - self.low)

    def lines(self) -> Fragment:
        """Levels with their values, and a strong one at no difference."""
        unit = unit_of(max(abs(self.low), abs(self.high)))
        size = in_unit(1.0, unit)[0]
        values = ticks(max(self.high, -self.low) * size, 4)
        both = [sign * value / size for value in values for sign in (1, -1)]
        levels = [ms for ms in dict.fromkeys(both) if self.low <= ms <= self.high]
        return group([self._level(ms, size, unit) for ms in levels])

    def _level(self, ms: float, size: float, unit: str) -> Fragment:
        y, text = self.y(ms), "0" if ms == 0 else f"{ms * size:+g} {unit}"
        stroke = {"stroke": "var(--ink)", "stroke_width": 1} if ms == 0 else {"class_": "grid"}
        line = el("line", x1=0, x2="100%", y1=y, y2=y, **stroke)
        return group([line, el("text", text, x=-8, y=y + 4, class_="tick end")])


def contributions(name: str, found: Mapping[str, Any], device: str, stamp: str | None = None) -> Fragment | None:
    """A bar a stage, to the right where B is slower: the differences of the means, which add up to the whole."""
    largest = max((abs(s["difference_ms"] or 0.0) for s in found["stages"]), default=0.0)
    rows = [s for s in found["stages"] if abs(s["difference_ms"] or 0.0) >= 0.01 * largest and largest > 0]
    if not rows:
        return None
    ends = [end for s in rows for end in (*(s["ci_ms"] or ()), s["difference_ms"], 0.0)]
    low, high = float(min(ends)), float(max(ends))
    height = _ROW * len(rows) + 8

    def x(ms: float) -> float:
        return _LABELS + (1 - _LABELS) * (ms - low) / (high - low)

    zero = el("line", x1=percent(x(0)), x2=percent(x(0)), y1=0, y2=height, stroke="var(--ink)", stroke_width=1)
    axis = group(_tick(ms, x, height, text) for ms, text in _ticks(low, high))
    bars = [_bar(number, s, x, device) for number, s in enumerate(rows)]
    said = f"The mean differs by {difference(found['total'])}; a bar is what one stage adds to that."
    title = "What each stage adds to the difference"
    return chart(name, height + 24, title, said, axis, *bars, zero, _stamp(stamp, height))


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round differences from ``low`` to ``high`` in ms, with their signs; the largest with its unit."""
    unit = unit_of(max(high, -low))
    size = in_unit(1.0, unit)[0]
    step = ticks((high - low) * size, 6)[-1] / max(len(ticks((high - low) * size, 6)) - 1, 1) or 1.0
    values = [step * i for i in range(-int(-low * size / step), int(high * size / step) + 1)]
    signs = [f"{v:+g}" if v else "0" for v in values]
    signs[-1] += f" {unit}"
    return [(v / size, sign) for v, sign in zip(values, signs, strict=True)]


def _tick(ms: float, x: Any, height: float, text: str) -> Fragment:
    at = percent(x(ms))
    line = el("line", x1=at, x2=at, y1=0, y2=height, class_="grid")
    return group([line, el("text", text, x=at, y=height + 17, class_="tick middle")])


def _bar(number: int, row: Mapping[str, Any], x: Any, device: str) -> Fragment:
    y, ms = _ROW * number + 4, row["difference_ms"]
    left, right = sorted((x(0.0), x(ms)))
    title = el(
        "title",
        f"{marks.words(row['stage'])} ({owner_words(row['owner'], device)}): {difference(row)} ({interval(row)})",
    )
    label = el("text", f"{marks.words(row['stage'])}  {difference(row)}", x=0, y=y + 14)
    bar = el("rect", x=percent(left), width=percent(right - left), y=y, height=_ROW - 8, fill=marks.fill(row["stage"]),
             class_="segment")  # fmt: skip
    ends = [x(end) for end in row["ci_ms"]] if row["ci_ms"] else []
    middle = y + (_ROW - 8) / 2
    whisker = (
        el(
            "line",
            x1=percent(ends[0]),
            x2=percent(ends[1]),
            y1=middle,
            y2=middle,
            stroke="var(--ink)",
            stroke_width=1.5,
        )
        if ends
        else NOTHING
    )
    return el("g", title, label, bar, whisker)


def _stamp(text: str | None, height: float) -> Fragment:
    if text is None:
        return NOTHING
    return el(
        "text", text, x="50%", y=height / 2 + 12, class_="stamp small", aria_hidden="true", style="font-size:26px"
    )
