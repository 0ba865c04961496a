"""The run over time: when each request was due and how long it took, what was in flight, what the engine held.

The panels share one time axis, in seconds from the first due time. At most 2,000 dots are drawn: each column of
the picture keeps its smallest and largest request, and every request that failed stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.report.numbers import duration, in_unit, ticks, unit_of
from analysis.report.svg import NOTHING, Fragment, chart, el, group, path, percent, stretched

_DOTS = 2000
_COLUMNS = 500
_FAILED = 5000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """The time axis: its length and the part of it that is warm-up, in seconds."""

    length_s: float
    warmup_s: float

    def x(self, seconds: float) -> str:
        return percent(min(max(seconds / self.length_s, 0.0), 1.0))


def extent(requests: pd.DataFrame, origin_ns: int, warmup_s: float) -> Span:
    """From the first due time to the last answer."""
    ends = pd.concat([requests["due_ns"], requests["last_token_ns"].dropna()])
    length = (float(ends.max()) - origin_ns) / 1e9 if len(ends) else 1.0
    return Span(max(length, 1e-3), warmup_s)


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


def latency_panel(
    requests: pd.DataFrame, origin_ns: int, span: Span, metric: str, column: str, limit: tuple[float, str] | None,
    stamp: str | None = None,
) -> Fragment:  # fmt: skip
    """Dots of one metric over due time; failed requests as crosses along the top."""
    height = 150
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    ms = (requests[column].to_numpy(dtype=np.float64, na_value=np.nan) - requests["due_ns"].to_numpy()) / 1e6
    good = (requests["outcome"] == "ok").to_numpy() & np.isfinite(ms)
    rows = np.flatnonzero(good)[thin(at[good], ms[good], span.length_s)]
    largest = float(np.nanmax(ms[good])) if good.any() else 1.0
    drawn_limit = limit if limit and limit[0] <= 1.5 * largest else None
    top = max(largest, drawn_limit[0] if drawn_limit else 0.0) * 1.06
    dots = [
        el("circle", cx=span.x(at[i]), cy=height * (1 - ms[i] / top), r=2, class_=_dot_class(ms[i], limit))
        for i in rows
    ]
    failed = np.flatnonzero(~(requests["outcome"] == "ok").to_numpy())
    crosses = [_cross(span.x(at[i]), str(requests["outcome"].iloc[i]), at[i]) for i in failed[:_FAILED]]
    said = f"{metric} of {int(good.sum()):,} requests over time, largest {duration(largest)}; {len(failed)} failed."
    return chart(
        f"timeline-{metric.lower()}", height + 6, f"{metric} over time", said, _warmup(span, height),
        _levels(top, height), *_limit(drawn_limit, top, height), *dots, *crosses,
        el("text", stamp, x="50%", y=height / 2 + 12, class_="stamp small", aria_hidden="true") if stamp else NOTHING,
    )  # fmt: skip


def _dot_class(ms: float, limit: tuple[float, str] | None) -> str:
    return "dot over" if limit and ms > limit[0] else "dot"


def _cross(x: str, outcome: str, at: float) -> Fragment:
    """A failed request: a mark and its word, never by colour alone."""
    return el("text", el("title", f"{outcome} at {at:.2f} s"), "✕", x=x, y=-5, class_="failed middle")


def _warmup(span: Span, height: int) -> Fragment:
    if span.warmup_s <= 0:
        return NOTHING
    title = el("title", f"warm-up, the first {span.warmup_s:.1f} s: left out of every figure")
    return el("rect", title, x=0, y=0, width=span.x(span.warmup_s), height=height, class_="warmup")


def _levels(top_ms: float, height: int) -> Fragment:
    unit = unit_of(top_ms)
    size = in_unit(1.0, unit)[0]
    parts = []
    for value in ticks(top_ms * size, 5):
        y = height * (1 - value / (top_ms * size))
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(el("text", f"{value:g} {unit}" if value else "0", x=-8, y=y + 4, class_="tick end"))
    return group(parts)


def _limit(limit: tuple[float, str] | None, top: float, height: int) -> list[Fragment]:
    if limit is None:
        return []
    y = height * (1 - limit[0] / top)
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


def count_panel(name: str, title: str, at: Floats, value: Floats, span: Span, *, last: bool = False) -> Fragment:
    """A count over time, as the range between its smallest and largest value in each column of the picture."""
    height = 64
    low, high = _envelope(at, value, span.length_s)
    largest = float(high.max()) if len(high) else 0.0
    top = max(largest, 1.0) * 1.1
    step = 1000 / len(low)
    upper = [(x, height * (1 - v / top)) for i, v in enumerate(high) for x in (i * step, (i + 1) * step)]
    lower = [(x, height * (1 - v / top)) for i, v in enumerate(low) for x in (i * step, (i + 1) * step)]
    parts = [_warmup(span, height)]
    for mark in dict.fromkeys((0.0, largest)):
        y = height * (1 - mark / top)
        parts.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(el("text", f"{mark:g}", x=-8, y=y + 4, class_="tick end"))
    area = [(0.0, float(height)), *upper, (1000.0, float(height))]
    parts.append(
        stretched(
            height, el("path", d=path(area, closed=True), class_="area"),
            el("path", d=path(upper), class_="curve thin"),
            el("path", d=path(lower), class_="curve faint"),
        )
    )  # fmt: skip
    if last:
        parts.append(_seconds(span, height))
    said = f"{title} over time, at most {largest:g}."
    return chart(f"timeline-{name}", height + (28 if last else 6), title, said, *parts)


def _envelope(at: Floats, value: Floats, length: float) -> tuple[Floats, Floats]:
    """Least and greatest value of a step function in each column; a column without a change keeps the last value."""
    edges = np.linspace(0.0, length, _COLUMNS + 1)
    first, after = np.searchsorted(at, edges[:-1], side="right"), np.searchsorted(at, edges[1:], side="right")
    before = np.concatenate([[0.0], value])
    low, high = np.empty(_COLUMNS), np.empty(_COLUMNS)
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
