"""The tables behind the charts over time: the time axis in at most twenty stretches, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gapmeter.analysis.numbers import DASH, duration, significant, ticks
from gapmeter.report.figure import Row, Table, Value
from gapmeter.report.levels import Level
from gapmeter.report.timeline import Dots, Floats, Series, envelope

_ROWS = 20
_TIMES = ("from (s)", "to (s)")


def stretches(length_s: float) -> list[tuple[float, float]]:
    """The time axis cut at round seconds (1, 2 or 5 times a power of ten apart), at most twenty-one stretches."""
    step = ticks(length_s, _ROWS)[1]
    edges = [step * i for i in range(int(np.ceil(length_s / step - 1e-9)))]
    return list(pairwise([*edges, length_s]))


def latency_table(metric: str, dots: Dots, length_s: float) -> Table:
    """Of each stretch: how many were due, how many failed; least, median and largest of those that were answered."""
    failed = np.asarray([outcome not in ("ok", "unsent", "abandoned") for outcome in dots.outcome], dtype=np.bool_)
    rows: list[Row] = []
    for low, high in stretches(length_s):
        inside = (dots.at_s >= low) & (dots.at_s < high)
        ms = dots.ms[inside & dots.good]
        figures = (ms.min(), np.median(ms), ms.max()) if len(ms) else (None,) * 3
        rows.append([
            *_times(low, high), f"{int(inside.sum()):,}", f"{int((inside & failed).sum()):,}",
            *(Value(DASH if v is None else duration(float(v)), "" if v is None else repr(float(v))) for v in figures),
        ])  # fmt: skip
    name, figures_of = f"{metric} by the time it was due", ("least", "median", "largest")
    csv = [*_TIMES, "due", "failed", *(f"{metric} {word} (ms)" for word in figures_of)]
    return Table(name, ["due from", "to", "due", "failed", *figures_of], rows, csv=csv, words=0)


def count_table(series: Series, length_s: float) -> Table:
    """Of each stretch: least, mean over the time, and most of a count that holds between its changes."""
    between = stretches(length_s)
    edges = np.asarray([between[0][0], *(high for _, high in between)])
    low, high = envelope(series.at_s, series.value, edges)
    mean = _means(series.at_s, series.value, edges)
    rows: list[Row] = [
        [*_times(*ends), *(_figure(float(v)) for v in figures)]
        for ends, figures in zip(between, zip(low, mean, high, strict=True), strict=True)
    ]
    words = ("least", "mean", "most")
    csv = [*_TIMES, *(f"{word} ({series.unit})" for word in words)]
    return Table(f"{series.title} over time", ["from", "to", *words], rows, csv=csv, words=0)


def levels_table(levels: Sequence[Level], length_s: float) -> Table:
    """Of each stretch: the mean of every level's samples in it, and the largest; a dash where there was none."""
    rows: list[Row] = [
        [*_times(low, high), *(cell for level in levels for cell in _held(level, low, high))]
        for low, high in stretches(length_s)
    ]
    names = [f"{level.title}{f', {level.unit}' if level.unit else ''}" for level in levels]
    headers = ["from", "to", *(header for name in names for header in (name, "largest"))]
    csv = [*_TIMES, *(header for name in names for header in (f"{name}: mean", f"{name}: largest"))]
    return Table("Samples over time, means and largest", headers, rows, csv=csv, words=0, css="dense")


def _held(level: Level, low: float, high: float) -> tuple[Value, Value]:
    held = level.value[(level.at_s >= low) & (level.at_s < high) & np.isfinite(level.value)]
    return (_figure(float(held.mean())), _figure(float(held.max()))) if len(held) else (Value(DASH, ""),) * 2


def _means(at: Floats, value: Floats, edges: Floats) -> Floats:
    """Means over each stretch of a step function that is 0 before its first change and holds after its last."""
    if not len(at):
        return np.zeros(len(edges) - 1)
    knots = np.concatenate([[min(0.0, at[0])], at, [max(edges[-1], at[-1])]])
    area = np.concatenate([[0.0], np.cumsum(np.diff(knots) * np.concatenate([[0.0], value]))])
    return np.asarray(np.diff(np.interp(edges, knots, area)) / np.diff(edges))


def _times(low: float, high: float) -> tuple[Value, Value]:
    return Value(f"{low:g} s", f"{low:g}"), Value(f"{high:.4g} s", repr(high))


def _figure(value: float) -> Value:
    return Value(significant(value) if value % 1 else f"{value:,.0f}", repr(value))
