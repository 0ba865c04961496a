"""A sweep's picture: latency over stage stacks, point by point."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gapmeter.analysis.numbers import DASH, bounds, duration, share, significant
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.run import INVALID
from gapmeter.analysis.results.sweep import Point, SweepResult
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report.charts import Axis, Plot, bar, limit, line, points
from gapmeter.report.charts import Point as Dot
from gapmeter.report.pictures import segment
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, group, percent
from gapmeter.report.words import both, point_css


@dataclass(frozen=True, slots=True)
class PointByPoint:
    """One metric of every point with p50 beside it, and beneath on the same order a column a point: its mean ledger."""

    result: SweepResult
    metric: str

    @property
    def level(self) -> float | None:
        """The percentile that is drawn; None for the mean."""
        return self.result.sweep.levels[self.metric]

    @property
    def points(self) -> list[Point]:
        """The points with figures."""
        return [point for point in self.result.sweep.in_order() if isinstance(point, Point)]

    def value(self, point: Point) -> float | None:
        return point.metrics[self.metric].at_level(self.level).value_ms

    def interval(self, point: Point) -> tuple[float, float] | None:
        return both(point.metrics[self.metric].at_level(self.level).ci_ms)

    def stages(self, point: Point) -> dict[str, float]:
        """The mean ledger, in ms."""
        found = point.stages.get(self.metric)
        return dict(found.stages_ms) if found else {}

    def draw(self, name: str) -> Fragment:
        return group([self._latency(f"{name}-latency"), self._columns(f"{name}-columns")])

    def _places(self) -> dict[int, int]:
        return {point.index: at for at, point in enumerate(self.result.sweep.in_order())}

    def _axis(self, *, labels: bool) -> Axis:
        sweep = self.result.sweep
        knees = {knee.point for knee in sweep.knees}

        def name(at: int) -> str:
            point = sweep.points[at]
            answered = isinstance(point, Point) and point.answered
            return f"{point.label}{' ◂ knee' * (at in knees)}{'' if answered else ' ✕'}"

        groups = [[name(at) for at in series.points] for series in sweep.series]
        return Axis(Scale.categories(groups), labels=labels)

    def _latency(self, name: str) -> Fragment:
        sweep, metric, level, places = self.result.sweep, self.metric, self.level, self._places()
        shown = [point for point in self.points if self._height(point) is not None]
        middles = {point.index: point.metrics[metric].ms(50.0) for point in self.points}
        ends = [end for point in shown for end in (self._height(point), *(self.interval(point) or ()))]
        # The objective on the highest percentile.
        slos = [slo for slo in self.result.slo if slo.metric == metric and slo.limit_ms is not None]
        slo = max(slos, key=lambda slo: (slo.percentile or 0.0, slo.limit_ms, slo.text), default=None)
        scale = Scale.fitting(
            [end for end in (*ends, *middles.values()) if end is not None], slo.limit_ms if slo else None
        )
        plot = Plot(self._axis(labels=False), Axis(scale, "ms"), height=150)
        dots = [self._dot(point, places[point.index]) for point in shown]
        drawn = []
        for series in sweep.series if sweep.key is not None else ():  # else the points have no order
            own = [one for at in series.points if isinstance(one := sweep.points[at], Point) and one.on_curves]
            for css, values in (
                ("curve thin faint", [(p.index, middles[p.index]) for p in own]),
                ("curve", [(p.index, self.value(p)) for p in own]),
            ):
                at = [(places[index], math.nan if value is None else value) for index, value in values]
                drawn.append(line(plot, at, css) if sum(not math.isnan(y) for _, y in at) > 1 else NOTHING)
        repeats = [  # the lowest and the highest of the repeats' own values
            Dot(places[point.index], end, css="dot", size=2)
            for point in shown if point.between
            for end in point.between[metric].at_level(level) or ()
        ]  # fmt: skip
        return plot.chart(
            name, f"{metric.upper()} by point",
            f"{figure_name(metric, level)} with its 95 % interval and p50, point by point.",
            *drawn, limit(plot, f"SLO {slo.text}", y=slo.limit_ms, near=dots) if slo else NOTHING,
            points(plot, repeats), points(plot, dots),
        )  # fmt: skip

    def _height(self, point: Point) -> float | None:
        """Where a point is drawn: at its percentile, or where there is none, with a ? at its mean."""
        value = self.value(point)
        return point.metrics[self.metric].mean_ms if value is None else value

    def _dot(self, point: Point, x: float) -> Dot:
        """Filled where its SLOs hold, ringed where not decided, crossed where it is no measurement."""
        value, ends, tokens = self.value(point), self.interval(point), point.tokens_per_s
        y, name = self._height(point) or 0.0, figure_name(self.metric, self.level)
        if value is None:
            refused = point.metrics[self.metric].at_level(self.level).late_ms is not None
            why = "refused" if refused else "not estimable"
            title = f"{point.label}: {name} {why}, mean {duration(y)}, {point.verdict}"
            return Dot(x, y, css="strong halo", title=title, sign="?")
        known = f" ({bounds(*ends)})" if ends else ""
        rate = significant(tokens) if tokens else DASH
        title = f"{point.label}: {name} {duration(value)}{known}, {rate} tokens/s, {point.verdict}"
        if point.verdict == INVALID:
            return Dot(x, y, y_ends=ends, css="failed", title=title, sign="✕")
        is_knee = any(knee.point == point.index for knee in self.result.sweep.knees)
        return Dot(
            x, y, y_ends=ends, css=point_css(point.verdict), size=6 if is_knee else 4.5,
            title=title, data={"data_point": point.index, "data_ms": f"{value:.6g}"},
        )  # fmt: skip

    def _columns(self, name: str) -> Fragment:
        places, ledgers = self._places(), [(point, self.stages(point)) for point in self.points]
        y = Axis(Scale.linear([sum(stages.values()) for _, stages in ledgers], room=0.1), "ms")
        plot = Plot(self._axis(labels=True), y, height=190)
        thick, drawn, said = min(0.62 / max(len(places), 1), 0.09), list[Fragment](), list[str]()
        for point, stages in ledgers:
            total, place = sum(stages.values()), places[point.index]
            is_known = point.metrics[self.metric].mean_ms is not None  # else it is refused
            said.append(f"{point.label} {duration(total if is_known else None)}")
            pieces = [
                segment(stage, ms, self.result.device, share(ms / total) if total else "", of=f"{point.label}, ")
                for stage, ms in stages.items() if ms > 0 or stage == UNEXPLAINED
            ]  # fmt: skip
            pieces = [replace(one, least_px=None, data={**one.data, "data_point": point.index}) for one in pieces]
            top = plot.down(sum(max(ms, 0.0) for ms in stages.values())) - 5
            drawn.append(bar(plot, place, pieces, thick))
            if is_known:
                drawn.append(el("text", duration(total), x=percent(plot.across(place)), y=top, class_="tick middle"))
        title = f"Mean {self.metric.upper()} by stage"
        return plot.chart(name, title, f"{title}, point by point: {'; '.join(said)}", *drawn)
