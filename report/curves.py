"""Percentile curves on an HDR axis: position is log(1 / (1 - p)), so that 90, 99 and 99.9 lie equally far apart.

A curve ends at the highest percentile that the sample supports, that is while both ends of the order-statistic
interval exist (``stats.series``); the interval is drawn as a band, an objective as a step from its percentile on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.numbers import count, duration
from gapmeter.analysis.results.distribution import Distribution, percentile_key
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.stats.series import Series
from gapmeter.report.charts import Axis, Plot, Point, band, limit, line, points
from gapmeter.report.document import Chart, Figure, Headers, Row, Table, in_ms
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, percent


@dataclass(frozen=True, slots=True)
class NamedPercentile:
    """A percentile with a name: its fraction, value and interval in ms, and where it stands in the result."""

    p: float
    value_ms: float
    low_ms: float | None
    high_ms: float | None
    key: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's distribution: fractions, values and interval ends in ms (at most 400 points each).

    ``sent_ms``: the same from when it was sent.
    """

    metric: str
    count: int
    n_eff: float
    p: Floats
    value_ms: Floats
    low_ms: Floats
    high_ms: Floats
    max_ms: float
    unanswered: int
    slos: Sequence[SloAnswer] = ()
    named: Sequence[NamedPercentile] = ()
    sent_ms: Floats | None = None

    def draw(self, name: str) -> Fragment:
        supported = [one.p for one in self.named if one.low_ms is not None and one.high_ms is not None]
        deepest, height = max(float(self.p[-1]), *supported, 0.0), 190
        slos = [((slo.percentile or 0.0) / 100, slo.limit, slo.text) for slo in self.slos]
        x = Axis(Scale.hdr(deepest, *(p for p, _, _ in slos)))
        known = [float(v) for v in (*self.low_ms, *self.value_ms, *self.high_ms) if math.isfinite(v)]
        known += [ms for _, ms, _ in slos if ms <= 2.5 * max(known)]
        # In proportion, or by the logarithm where the largest value is over twenty times the median.
        far = max(known) > 20 * float(np.interp(0.5, self.p, self.value_ms)) and min(known) > 0
        plot = Plot(x, Axis(Scale.log(known, room=1.1) if far else Scale.linear(known), "ms", about=5), height)
        dots = []
        for one in self.named:
            ends = (
                f" (95 % interval {duration(one.low_ms)} to {duration(one.high_ms)})" if one.low_ms is not None else ""
            )
            title = f"p{100 * one.p:.7g}: {duration(one.value_ms)}{ends}"
            data = {"data_key": one.key, "data_value": repr(one.value_ms)}
            dots.append(Point(one.p, one.value_ms, size=3.5, title=title, data=data))
        said = ", ".join(f"p{100 * one.p:.7g} {duration(one.value_ms)}" for one in self.named)
        sent = line(plot, zip(self.p, self.sent_ms, strict=True), "curve sent") if self.sent_ms is not None else NOTHING
        # The interval is interrupted where percentiles between are not supported.
        steps = np.diff(-np.log10(1 - self.p))
        breaks = np.flatnonzero(steps > 1.5 * np.median(steps)) + 1
        corners = np.split(np.column_stack([self.p, self.low_ms, self.high_ms]), breaks)
        at = plot.across(deepest)
        side, dx = ("start", 5) if at < 0.65 else ("end", -5)
        words, css = f"supported to p{_nines(deepest)}", f"note {side}"
        end = el("line", x1=percent(at), x2=percent(at), y1=0, y2=height, class_="supported")
        # A step for each objective, and their names on one line.
        objectives = [limit(plot, "", x=p, y=ms) for p, ms, _ in slos if plot.y.scale.holds(ms)]
        named = [words + ("" if plot.y.scale.holds(ms) else ", above this axis ↑") for _, ms, words in slos]
        names = el("text", f"SLO {'; '.join(named)}", x="100%", y=-6, class_="limit end halo") if named else NOTHING
        return plot.chart(
            name, f"{self.metric} by percentile",
            f"{self.metric} of {self.count:,} samples: {said}; largest {duration(self.max_ms)}.",
            *(band(plot, map(tuple, piece.tolist())) for piece in corners), sent,
            line(plot, zip(self.p, self.value_ms, strict=True)),
            el("g", end, el("text", words, x=percent(at), y=height - 6, dx=dx, class_=css)),
            *objectives, names, points(plot, dots),
        )  # fmt: skip

    def caption(self) -> str:
        worth = "" if self.n_eff >= 0.95 * self.count else f", effective n {count(self.n_eff)}"
        lost = f"; {count(self.unanswered)} never answered, counted as infinite" if self.unanswered else ""
        return f"{self.count:,} samples{worth}; largest {duration(self.max_ms)}{lost}"

    def chart(self, key: str, caption: str) -> Chart:
        """The picture with its percentiles as a table."""
        rows: list[Row] = [
            [f"p{100 * one.p:.7g}", Figure(one.value_ms), Figure(one.low_ms), Figure(one.high_ms)] for one in self.named
        ]
        rows.append(["max", Figure(self.max_ms), "", ""])
        headers: Headers = ["percentile", *in_ms("value", "from", "to")]
        return Chart(key, self, caption, Table(f"{self.metric} by percentile", headers, rows), "levels")


def named_of(figures: Distribution, key: str) -> list[NamedPercentile]:
    """The percentiles of a distribution, which stands at ``key`` of the result; unsupported ones are left out."""
    return [
        NamedPercentile(p / 100, found.value_ms, *(found.ci_ms or (None, None)), f"{key}.{percentile_key(p)}_ms")
        for p, found in sorted(figures.percentiles.items())
        if found.value_ms is not None
    ]


def curve_of(
    metric: str, values: Series, named: Sequence[NamedPercentile], slos: Sequence[SloAnswer] = (),
    sent: Series | None = None, late_ns: Callable[[float], float | None] = lambda _: None,
) -> Curve | None:  # fmt: skip
    """The supported part of a metric's distribution, ``values`` in ns; None when not even the median is supported.

    Requests that were never answered count as infinite: where they begin, the curve ends. It is interrupted at
    percentiles that are refused: ``late_ns`` says for how much lateness, None if one is not.
    """
    found = [(percentile, e.known) for percentile, e in values.curve(400) if math.isfinite(e.known[0])]
    while found and late_ns(found[-1][0]) is not None:
        found.pop()
    answered = values.ordered[np.isfinite(values.ordered)]
    if len(found) < 2 or found[-1][0] < 50:
        return None
    p = np.array([percentile / 100 for percentile, _ in found])
    stands = np.array([late_ns(percentile) is None for percentile, _ in found])
    value_ms, low_ms, high_ms = np.where(stands, np.array([known for _, known in found]).T / 1e6, np.nan)
    sent_ms = None
    if sent is not None and sent.count:
        rank = np.minimum(np.ceil(p * sent.count).astype(int), len(sent.ordered)) - 1
        sent_ms = np.asarray(sent.ordered[rank] / 1e6)
    unanswered = values.count - len(answered)
    return Curve(
        metric, values.count, values.worth.tail, p, value_ms, low_ms, high_ms, float(answered[-1]) / 1e6, unanswered,
        slos, named, sent_ms,
    )  # fmt: skip


def _nines(p: float) -> str:
    """0.99 -> 99, 0.999 -> 99.9, 0.9876 -> 98.8: as many digits as tell it from 100."""
    if p <= 0:
        return "0"
    decimals = max(0, math.ceil(-math.log10(1 - p) - 1e-9) - 2) if p < 1 else 0
    return f"{math.floor(100 * p * 10**decimals + 1e-6) / 10**decimals:g}"
