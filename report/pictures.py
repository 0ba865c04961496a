"""The pictures of where time goes: frozen values that draw themselves on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gapmeter.analysis.numbers import duration, share, significant, usd
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.latency import Band
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report import marks
from gapmeter.report.charts import Axis, Plot, Point, Segment, after, bar, head, limit, points, shade
from gapmeter.report.document import Gauge
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, percent
from gapmeter.report.words import both

_FAR = 1.8  # times the longest bar: an objective farther off is told in words, so that bars stay long
_BEHIND = 0.16  # of the longest bar, kept free for the number behind it
_LIMIT_AT = 0.78  # of a gauge's width; beyond it is what breaks the objective
_SEEN = 0.002  # of the longest bar: a stage with less is no pixel wide
_ONE_ROW = Axis(Scale.categories([("",)]), labels=False)


def segment(stage: str, ms: float, device: str, whole: str, *, label: str = "", of: str = "") -> Segment:
    """A stage's piece of a bar; ``whole``: what part it is of what. The residual is drawn however small it is."""
    words = ", ".join(filter(None, (f"{of}{marks.words(stage)}: {duration(ms)}", whole)))
    return Segment(
        ms, marks.paint(stage), label, f"{words} · {marks.owner(stage, device)} · {marks.kind(stage)}",
        least_px=4 if stage == UNEXPLAINED else None, data={"data_stage": stage, "data_ms": f"{ms:.7g}"},
    )  # fmt: skip


def _segments(band: Band, device: str, *, labels: bool = False, of: str = "") -> list[Segment]:
    """The whole bar of a band."""
    return [
        segment(stage, ms, device, f"{share(ms / band.total_ms)} of the bar" if band.total_ms else "",
                label=marks.words(stage) if labels else "", of=of)
        for stage, ms in band.stages_ms.items() if ms > 0 or stage == UNEXPLAINED
    ]  # fmt: skip


def stages_in(ledgers: Iterable[Mapping[str, float]]) -> list[str]:
    """The stages that any of the bars shows, in the order of the timeline; the residual always."""
    known = list(ledgers)
    names = dict.fromkeys(stage for ledger in known for stage in ledger)
    return [s for s in names if s == UNEXPLAINED or any(ledger.get(s, 0) > 0 for ledger in known)]


def visible_in(bands: Iterable[Band]) -> list[str]:
    """Those of the stages that can be seen in some bar, on the axis that all share; the residual always can."""
    known = list(bands)
    least = _SEEN * max((band.total_ms for band in known), default=0.0)
    shown = stages_in(band.stages_ms for band in known)
    return [s for s in shown if s == UNEXPLAINED or any(band.stages_ms.get(s, 0.0) > least for band in known)]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Where typical and slow requests spend their time, on one axis, and what makes the difference.

    A band's stack is the mean over the real requests in it, so that its stages add up to the bar. ``what`` they are:
    requests, or token gaps; the slow ones lie above ``percentile``.
    """

    metric: str
    what: str
    typical: Band
    slow: Band
    percentile: float
    slo: SloAnswer | None
    device: str
    requests: int  # in all

    def draw(self, name: str) -> Fragment:
        thick, bands = 34, (self.typical, self.slow)
        longest = max(band.total_ms for band in bands) or 1e-3  # gaps of 0: tokens that came in one read
        ends = [longest, self.slo.limit] if self.slo and self.slo.limit <= _FAR * longest else [longest]
        rows = Axis(Scale.categories([("typical", "slow", "difference")]), labels=False)
        plot = Plot(Axis(Scale.linear(ends, room=0.02), "ms"), rows, height=198)
        grown = self._grown()
        beyond = self.requests - int(self.percentile / 100 * self.requests)
        more = self.slow.count > beyond  # of p98.5 there are at least seven
        slow = f"that waited longest, of {self.requests:,}" if more else f"from p{self.percentile:g} up"
        which = (("typical", "from p45 to p55"), ("slow", slow))
        heads = [
            (f"{kind} {duration(band.total_ms)}", f"{self.what} {where}, mean of {band.count:,}")
            for (kind, where), band in zip(which, bands, strict=True)
        ]
        heads.append((f"difference {duration(self.slow.total_ms - self.typical.total_ms)}",
                      f"what slow {self.what} wait beyond typical ones, largest first"))  # fmt: skip
        return plot.chart(
            name, f"{self.metric}: typical against slow {self.what}", self.sentence(),
            *(bar(plot, row, _segments(band, self.device, labels=True), thick) for row, band in enumerate(bands)),
            bar(plot, 2, grown, thick, start=self.slow.total_ms - sum(piece.size for piece in grown)),
            self._objective(plot),
            *(head(plot, row, thick, *words) for row, words in enumerate(heads)),
        )  # fmt: skip

    def _objective(self, plot: Plot) -> Fragment:
        if self.slo is None:
            return NOTHING
        ms, words = self.slo.limit, self.slo.text
        if plot.x.scale.holds(ms):
            return limit(plot, f"SLO {words}", x=ms)
        times = significant(ms / (self.slow.total_ms or plot.x.scale.high))
        return el("text", f"SLO {words}: {times} times the slow bar →", x="100%", y=-6, class_="limit end")

    def sentence(self) -> str:
        """The picture for those who do not see it."""
        stage, extra = self._excess()[0]
        waits = f"Typical {self.what} take {duration(self.typical.total_ms)}, slow ones {duration(self.slow.total_ms)}"
        return f"{waits}; the largest part of the difference is {marks.words(stage)}, {duration(extra)}."

    def _excess(self) -> list[tuple[str, float]]:
        """Slow minus typical a stage, in ms, the largest first."""
        slow, typical = self.slow.stages_ms, self.typical.stages_ms
        gain = {stage: slow.get(stage, 0.0) - typical.get(stage, 0.0) for stage in {**slow, **typical}}
        return sorted(gain.items(), key=lambda item: -item[1])

    def _grown(self) -> list[Segment]:
        """What grew, laid end to end up to the slow total; what shrank makes it begin before the typical total."""
        whole, pieces = self.slow.total_ms - self.typical.total_ms, []
        for stage, ms in self._excess():
            if ms > 0:
                part = share(ms / whole) if whole > 0 else ""
                more = part if ms <= whole else f"+{duration(ms)}"  # others shrank: it is more than all of it
                label = f"{marks.words(stage)} {more}"
                pieces.append(segment(stage, ms, self.device, f"{part} of the excess", label=label))
        return pieces


@dataclass(frozen=True, slots=True)
class Ranks:
    """Everyone by rank: a bar a slice of the distribution, the fastest first, each the mean of the requests in it."""

    title: str
    slices: Mapping[str, Band]
    device: str

    def draw(self, name: str) -> Fragment:
        x = Axis(Scale.linear([one.total_ms for one in self.slices.values()], room=_BEHIND), "ms")
        plot = Plot(x, Axis(Scale.categories([list(self.slices)])), height=34 * len(self.slices))
        said = "; ".join(f"{which} {duration(one.total_ms)}" for which, one in self.slices.items())
        drawn = []
        for row, (which, one) in enumerate(self.slices.items()):
            drawn.append(bar(plot, row, _segments(one, self.device, of=f"{which}, "), 24))
            drawn.append(after(plot, one.total_ms, row, duration(one.total_ms), f"n = {one.count:,}"))
        return plot.chart(name, self.title, f"Means by rank: {said}.", *drawn)


@dataclass(frozen=True, slots=True)
class Shares:
    """Bars as long as all of the wait, each cut by who was at work: (name, total in ms, requests, parts)."""

    title: str
    said: str
    rows: Sequence[tuple[str, float, int, Sequence[Segment]]]

    def draw(self, name: str) -> Fragment:
        thick = 28
        scale = Axis(Scale.categories([[row[0] for row in self.rows]]), labels=False)
        plot = Plot(Axis(Scale("linear", 0.0, 1.0), "share", about=5), scale, height=58 * len(self.rows))
        drawn = []
        for at, (row, total_ms, count, parts) in enumerate(self.rows):
            drawn.append(bar(plot, at, parts, thick))
            drawn.append(head(plot, at, thick, f"{row} {duration(total_ms)}", f"mean of {count:,}"))
        return plot.chart(name, self.title, self.said, *drawn)


@dataclass(frozen=True, slots=True)
class StageChange:
    """How much longer a stage took, with its interval; ``behind`` is told after it, ``title`` when asked for."""

    stage: str
    ms: float
    ends_ms: Ends | None
    behind: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """A bar a stage from 0, to the right where more was waited, with its interval."""

    title: str
    said: str
    rows: Sequence[StageChange]
    device: str

    def draw(self, name: str) -> Fragment:
        ends = [end for one in self.rows for end in (one.ms, *(one.ends_ms or ())) if end is not None]
        names = Axis(Scale.categories([[marks.words(one.stage) for one in self.rows]]))
        plot = Plot(Axis(Scale.linear(ends, room=0.14), "ms", signed=True), names, height=30 * len(self.rows))
        drawn = []
        for row, one in enumerate(self.rows):
            piece = segment(one.stage, one.ms, self.device, one.title)
            drawn.append(bar(plot, row, [piece], 18))
            if known := both(one.ends_ms):
                drawn.append(points(plot, [Point(one.ms, row, known, size=0)], "whisker ink"))
            _, high_ms = one.ends_ms or (None, None)
            drawn.append(after(plot, max(one.ms, high_ms or 0.0, 0.0), row, duration(one.ms), one.behind))
        return plot.chart(name, self.title, self.said, *drawn)


@dataclass(frozen=True, slots=True)
class Shift:
    """The difference of a metric at each decile, around 0: a dot at each that is known, one at least."""

    metric: str
    deciles: Sequence[str]
    dots: Sequence[Point]

    def draw(self, name: str) -> Fragment:
        ends = [end for dot in self.dots for end in (dot.y, *(dot.y_ends or ()))]
        x, y = Axis(Scale.categories([self.deciles])), Axis(Scale.linear(ends), "ms", signed=True)
        plot = Plot(x, y, height=170)
        worst = max(self.dots, key=lambda dot: abs(dot.y))
        said = f"{self.metric}: the largest shift is at {worst.title}."
        title = f"{self.metric}: difference at each decile"
        return plot.chart(name, title, said, points(plot, self.dots, "whisker ink"))


@dataclass(frozen=True, slots=True)
class CostRange:
    """What a request costs at most at the SLO, on a logarithmic axis; no ``low`` where nobody looked for the least."""

    said: str
    low: float | None
    high: float

    def draw(self, name: str) -> Fragment:
        x = Axis(Scale.log([self.low or self.high / 10, self.high], room=1.4), "$")
        plot = Plot(x, _ONE_ROW, height=32)
        css = "band" if self.low else "band maybe"
        band = shade(plot, self.low or x.scale.low, self.high, css, row=0, thick=12)
        dot = points(plot, [Point(self.high, 0, title=usd(self.high))])
        return plot.chart(name, "Cost of a request at the SLO", self.said, band, dot)


def ledger_bar(parts: Mapping[str, float], longest_ms: float) -> Fragment:
    """One request's stages as a bar in a row of a list, on the axis of the longest."""
    scale = Axis(Scale("linear", 0.0, longest_ms), labels=False)
    plot = Plot(scale, _ONE_ROW, height=16)
    pieces = [
        Segment(ms, marks.paint(stage), title=f"{marks.words(stage)}: {duration(ms)}",
                data={"data_stage": stage, "data_ms": f"{ms:.6g}"})
        for stage, ms in parts.items() if ms > 0
    ]  # fmt: skip
    return el("svg", bar(plot, 0, pieces, 16), width="100%", height=16, aria_hidden="true")


def gauge_line(gauge: Gauge) -> Fragment:
    """An objective's figure and 95 % interval on a line from 0 that ends beyond its limit."""
    limit = gauge.limit.value or 0.0
    top = limit / _LIMIT_AT if limit > 0 else 1.0
    scale = Axis(Scale("linear", 0.0, top), labels=False)
    plot = Plot(scale, _ONE_ROW, height=20)
    parts = [shade(plot, 0.0, top, "track", row=0, thick=6), shade(plot, limit, top, "beyond", row=0, thick=6)]
    if gauge.low is not None or gauge.high is not None:
        low = gauge.low or 0.0  # of a bound alone
        high, css = (top, "sure open") if gauge.high is None else (gauge.high, "sure")
        high = max(high, low + 0.004 * top)  # an interval of no width is seen too
        parts.append(shade(plot, low, high, css, row=0, thick=10))
    if gauge.never or (gauge.value is not None and gauge.value > top):
        parts.append(points(plot, [Point(top, 0, css="off end", sign="▸")]))
    elif gauge.value is not None:
        parts.append(points(plot, [Point(gauge.value, 0, css="at", size=4.5)]))
    x = percent(plot.across(limit))
    words = f"{gauge.measured}, 95 % interval {gauge.interval}; the limit is {gauge.limit}"
    line = el("line", x1=x, x2=x, y1=1, y2=19, class_="limit")
    return el("svg", el("title", words), *parts, line, width="100%", height=20, aria_hidden="true")
