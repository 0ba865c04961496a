"""Sampled quantities over the run's time, as lines one beneath the other: they break where a sample is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.numbers import counted, significant
from gapmeter.report.charts import Axis, Plot, line, shade
from gapmeter.report.document import Column, Figure, Headers, Row, Table
from gapmeter.report.scale import Scale
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.timeline import FROM_TO, Span, exact, from_to, stretches, thin


@dataclass(frozen=True, slots=True)
class Level:
    """One quantity over time; the axis reaches ``least_top`` at least.

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

    @property
    def name(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of one source, one beneath the other, the last with the time axis."""

    span: Span
    levels: Sequence[Level]

    def draw(self, name: str) -> Fragment:
        last = self.levels[-1]
        return group(
            group([el("h3", level.name), _level(f"{name}-{level.key}", level, self.span, last=level is last)])
            for level in self.levels
        )

    def table(self) -> Table:
        """For each stretch: the mean of every level's samples in it, and the largest; a dash where there was none."""
        rows: list[Row] = []
        for low, high in stretches(self.span.length_s):
            row = [*from_to(low, high)]
            for level in self.levels:
                inside = level.value[(level.at_s >= low) & (level.at_s < high) & np.isfinite(level.value)]
                known = (float(inside.mean()), float(inside.max())) if len(inside) else None
                row += map(exact, known) if known else [Figure(None, "number")] * 2
            rows.append(row)
        headers: Headers = [
            column
            for level in self.levels
            for column in (Column(level.name, f"{level.name}: mean"), Column("largest", f"{level.name}: largest"))
        ]
        return Table("Samples over time, means and largest", [*FROM_TO, *headers], rows, words=0, css="dense")


def _level(name: str, level: Level, span: Span, *, last: bool) -> Fragment:
    inside = (level.at_s >= 0) & (level.at_s <= span.length_s) & np.isfinite(level.value)
    at, value = level.at_s[inside], level.value[inside]
    largest = float(value.max(initial=0.0))
    top = max(largest, level.least_top, 1e-9)
    plot = Plot(span.axis(labels=last), Axis(Scale.linear([top]), level.unit, about=2), height=56)
    # Where there should have been a sample, but is none.
    apart = pairwise([0.0, *at.tolist(), span.length_s])
    gaps = [(low, high) for low, high in apart if high - low > 1.9 * level.usual_s]
    shown = [shade(plot, max(low, 0.0), min(high, span.length_s), "gap", f"no sample from {low:.1f} to {high:.1f} s")
             for low, high in (*gaps, *level.shaded)]  # fmt: skip
    mean = f"mean {significant(float(value.mean()))}, largest {significant(largest)}" if len(value) else "none"
    gone = f"; {counted(len(gaps), 'gap')}, {sum(high - low for low, high in gaps):.1f} s in all" if gaps else ""
    said = f"{level.title}, {level.unit or 'count'}: {mean}, {counted(len(value), 'sample')}{gone}."
    kept = thin(at, value, span.length_s)
    breaks = [(low + 1e-9, float("nan")) for low, _ in gaps]  # no number in a gap: there the line breaks
    samples = line(plot, sorted([*zip(at[kept].tolist(), value[kept].tolist(), strict=True), *breaks]), "curve thin")
    return plot.chart(name, level.title, said, *shown, samples)
