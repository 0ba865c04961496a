"""The run over time: when each request was due and how long it took, what was in flight, what the engine held.

The panels share one time axis, in seconds from the first due time. At most 2,000 dots are drawn: each column of
the picture keeps its smallest and largest request, and every request that failed stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.numbers import duration, in_unit, significant, ticks, unit_of
from gapmeter.report.svg import Fragment, chart, el, group, path, percent, stamp_across, stretched

_DOTS = 2000
_COLUMNS = 500
_FAILED = 5000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """The time axis: its length, the warm-up at its start, and where the last measured request was due; seconds."""

    length_s: float
    warmup_s: float
    end_s: float

    def x(self, seconds: float) -> str:
        return percent(min(max(seconds / self.length_s, 0.0), 1.0))

    def shade(self, height: int) -> Fragment:
        """The warm-up shaded grey, the part that is measured tinted."""
        parts = []
        if self.warmup_s > 0:
            title = el("title", f"warm-up, the first {self.warmup_s:.1f} s: left out of every figure")
            parts.append(el("rect", title, x=0, y=0, width=self.x(self.warmup_s), height=height, class_="warmup"))
        width = percent(max(self.end_s - self.warmup_s, 0.0) / self.length_s)
        measured = el("rect", x=self.x(self.warmup_s), y=0, width=width, height=height, class_="measured")
        return group([*parts, measured])


def extent(requests: pd.DataFrame, origin_ns: int) -> Span:
    """From the first due time to the last answer; ``requests`` with ``measured``."""
    measured = (requests.loc[requests["measured"], "due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    warmup_s, end_s = (float(measured.min()), float(measured.max())) if len(measured) else (0.0, 0.0)
    ends = pd.concat([requests["due_ns"], requests["last_token_ns"].dropna()])
    length = (float(ends.max()) - origin_ns) / 1e9 if len(ends) else 1.0
    return Span(max(length, 1e-3), warmup_s, end_s)


def thin(at: Floats, value: Floats, length: float) -> NDArray[np.int64]:
    """Rows to draw: all when few, else the first, last, smallest and largest of each of 500 columns of time."""
    if len(at) <= _DOTS:
        return np.arange(len(at))
    column = np.minimum((at / length * _COLUMNS).astype(np.int64), _COLUMNS - 1)
    by_value = np.lexsort((value, column))
    by_time = np.lexsort((at, column))
    edges = np.flatnonzero(np.diff(column[by_value], prepend=-1))
    ends = np.append(edges[1:], len(at)) - 1
    kept = np.concatenate([by_value[edges], by_value[ends], by_time[edges], by_time[ends]])
    return np.unique(kept)


@dataclass(frozen=True, slots=True)
class Dots:
    """What a panel of dots is drawn from: seconds, ms, whether it was answered, which requests can be opened."""

    at_s: Floats
    ms: Floats
    good: NDArray[np.bool_]
    outcome: list[str]
    ids: list[str]
    open: frozenset[str]


def dots_of(requests: pd.DataFrame, origin_ns: int, column: str, open_: frozenset[str]) -> Dots:
    """``column``: the stamp that ends the latency."""
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    ms = (requests[column].to_numpy(dtype=np.float64, na_value=np.nan) - requests["due_ns"].to_numpy()) / 1e6
    good = (requests["outcome"] == "ok").to_numpy(dtype=np.bool_) & np.isfinite(ms)
    return Dots(at, ms, good, [str(o) for o in requests["outcome"]], [str(i) for i in requests["request_id"]], open_)


def latency_panel(
    dots: Dots, span: Span, metric: str, limit: tuple[float, str] | None, stamp: str | None = None
) -> Fragment:
    """Dots of one metric over due time; failed requests as crosses along the top.

    Drawn are all of few; of many the extremes of each column, every one that broke the limit or failed (up to 5,000
    each), and those that can be opened, which are buttons.
    """
    height, good = 170, dots.good
    largest = float(np.nanmax(dots.ms[good])) if good.any() else 1.0
    top = max(largest, limit[0] if limit and limit[0] <= 1.5 * largest else 0.0) * 1.06 or 1.0
    rows = _drawn(dots, span, limit[0] if limit else np.inf)
    circles = [_dot(dots, i, span, height * (1 - dots.ms[i] / top), limit) for i in rows]
    failed = np.flatnonzero([o not in ("ok", "unsent", "abandoned") for o in dots.outcome])
    crosses = [_cross(span.x(dots.at_s[i]), dots.outcome[i], dots.at_s[i]) for i in failed[:_FAILED]]
    levels = _levels(top, height) if good.any() else _none_answered(height)
    said = f"{metric} of {int(good.sum()):,} requests over time, largest {duration(largest)}; {len(failed)} failed."
    name = f"timeline-{metric.lower()}"
    return chart(
        name, height + 28, f"{metric} over time", said, span.shade(height), levels,
        *_limit(limit, top, height, crowded=bool(len(failed))),
        el("g", *circles, class_="dots", data_metric_dots=metric), *crosses,
        _seconds(span, height), stamp_across(stamp, height / 2 + 12, "stamp small"),
    )  # fmt: skip


def _none_answered(height: int) -> Fragment:
    return el("text", "no request was answered", x="50%", y=height / 2, class_="faint middle")


def _drawn(dots: Dots, span: Span, limit_ms: float) -> NDArray[np.int64]:
    rows = np.flatnonzero(dots.good)
    kept = rows[thin(dots.at_s[rows], dots.ms[rows], span.length_s)]
    over = rows[dots.ms[rows] > limit_ms][:_FAILED]
    openable = np.array([i for i in rows if dots.ids[i] in dots.open], dtype=np.int64)
    return np.unique(np.concatenate([kept, over, openable]))


def _dot(dots: Dots, row: int, span: Span, y: float, limit: tuple[float, str] | None) -> Fragment:
    css = "dot over" if limit and dots.ms[row] > limit[0] else "dot"
    if dots.ids[row] not in dots.open:
        return el("circle", cx=span.x(dots.at_s[row]), cy=y, r=2, class_=css)
    words = f"{dots.ids[row]}: {duration(dots.ms[row])}, due at {dots.at_s[row]:.2f} s"
    return el(
        "circle", el("title", words), cx=span.x(dots.at_s[row]), cy=y, r=3, class_=f"{css} open",
        data_request=dots.ids[row], role="button", tabindex=-1, aria_label=f"open {words}",
    )  # fmt: skip


def _cross(x: str, outcome: str, at: float) -> Fragment:
    """A failed request: a mark and its word, never by colour alone."""
    return el("text", el("title", f"{outcome} at {at:.2f} s"), "✕", x=x, y=-5, class_="failed middle")


def _levels(top_ms: float, height: int) -> Fragment:
    unit = unit_of(top_ms)
    size = in_unit(1.0, unit)[0]
    parts = []
    for value in ticks(top_ms * size, 5):
        y = height * (1 - value / (top_ms * size))
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(el("text", f"{value:g} {unit}" if value else "0", x=-8, y=y + 4, class_="tick end"))
    return group(parts)


def _limit(limit: tuple[float, str] | None, top: float, height: int, *, crowded: bool) -> list[Fragment]:
    """``crowded``: failed requests are marked above the plot, so that an objective beyond it is named inside."""
    if limit is None or not top:
        return []
    y = height * (1 - limit[0] / top)
    if y < 0:
        return [el("text", f"SLO {limit[1]}, above this axis ↑", x="100%", y=14 if crowded else -6,
                   class_="limit end halo")]  # fmt: skip
    return [
        el("line", x1=0, x2="100%", y1=y, y2=y, class_="limit"),
        el("text", f"SLO {limit[1]}", x="100%", y=y - 5 if y > 16 else y + 14, class_="limit end"),
    ]


def in_flight(requests: pd.DataFrame, origin_ns: int) -> tuple[Floats, Floats]:
    """Seconds and the number of requests sent and not yet ended from then on."""
    sent = requests.dropna(subset=["sent_ns"])
    start = sent["sent_ns"].to_numpy(dtype=np.float64)
    end = sent["end_ns"] if "end_ns" in sent else sent["last_token_ns"]
    stop = end.dropna().to_numpy(dtype=np.float64)
    at = np.concatenate([start, stop])
    change = np.concatenate([np.ones(len(start)), -np.ones(len(stop))])
    order = np.argsort(at, kind="stable")
    return (at[order] - origin_ns) / 1e9, np.cumsum(change[order])


@dataclass(frozen=True, slots=True)
class Series:
    """A count over time: a step function that changes at ``at_s``; ``unit`` stands on its axis."""

    key: str
    title: str
    unit: str
    at_s: Floats
    value: Floats
    note: str = ""


def arrivals(requests: pd.DataFrame, origin_ns: int, length_s: float) -> Series:
    """Requests due per second, counted in bins that are a 1, 2 or 5 long, about a hundred of them."""
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    width = ticks(length_s, 100)[1]
    edges = np.arange(0.0, length_s + width, width)
    counts, _ = np.histogram(at, edges)
    rate = np.append(counts / width, 0.0)
    return Series("arrivals", "Arrivals", "req/s", edges, rate, f"counted in bins of {width:g} s")


def count_panel(series: Series, span: Span, stamp: str | None = None) -> Fragment:
    """A count over time, as the range between its smallest and largest value in each column of the picture."""
    height, title = 74, series.title
    low, high = envelope(series.at_s, series.value, np.linspace(0.0, span.length_s, _COLUMNS + 1))
    largest = float(high.max()) if len(high) else 0.0
    top = (largest or 1.0) * 1.12
    step = 1000 / len(low)
    upper = [(x, height * (1 - v / top)) for i, v in enumerate(high) for x in (i * step, (i + 1) * step)]
    lower = [(x, height * (1 - v / top)) for i, v in enumerate(low) for x in (i * step, (i + 1) * step)]
    parts = [span.shade(height)]
    for mark in dict.fromkeys((0.0, largest)):
        y = height * (1 - mark / top)
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        text = f"{significant(mark)} {series.unit}" if mark % 1 else f"{mark:,.0f} {series.unit}"
        parts.append(el("text", text.strip() if mark else "0", x=-8, y=y + 4, class_="tick end"))
    area = [(0.0, float(height)), *upper, (1000.0, float(height))]
    parts.append(
        stretched(
            height, el("path", d=path(area, closed=True), class_="area"),
            el("path", d=path(upper), class_="curve thin"),
            el("path", d=path(lower), class_="curve faint"),
        )
    )  # fmt: skip
    parts += [_seconds(span, height), stamp_across(stamp, height / 2 + 12, "stamp small")]
    said = f"{title} over time, at most {largest:g} {series.unit}."
    return chart(f"timeline-{series.key}", height + 28, title, said, *parts)


def envelope(at: Floats, value: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Least and greatest value of a step function between neighboring edges; it is 0 before its first change."""
    first, after = np.searchsorted(at, edges[:-1], side="right"), np.searchsorted(at, edges[1:], side="right")
    before = np.concatenate([[0.0], value])
    low, high = np.empty(len(edges) - 1), np.empty(len(edges) - 1)
    for i, (a, b) in enumerate(zip(first, after, strict=True)):
        piece = before[a : b + 1]
        low[i], high[i] = piece.min(), piece.max()
    return low, high


def _seconds(span: Span, height: int) -> Fragment:
    marks = ticks(span.length_s, 8)
    return group(
        el("text", f"{v:g} s" if v == marks[-1] else f"{v:g}", x=span.x(v), y=height + 20, class_="tick middle")
        for v in marks
    )
