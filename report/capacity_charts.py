"""A capacity search's pictures: latency and goodput against rate, and where the capacity probably lies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from gapmeter.analysis.numbers import duration, rate, significant
from gapmeter.analysis.results.capacity import FAILS, CountedSlo, LatencyCurve, Search, TrialResult, TrialVerdict
from gapmeter.report.charts import Axis, Plot, Point, Side, Text, band, limit, line, points, shade, stairs, written
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, group, percent
from gapmeter.report.words import both, point_css

_TOP = 2.0  # of the limit: how far up latencies are drawn
_BESIDE: tuple[tuple[float, Side], ...] = ((-5, "end"), (5, "start"))


def _dot(at: float, verdict: TrialVerdict, value: float, ends: tuple[float, float] | None = None) -> Point:
    return Point(
        at, value, y_ends=ends, css=point_css(verdict), size=5, title=f"{rate(at)}: {verdict}",
        data={"data_rate": repr(at), "data_value": repr(value)},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latency:
    """A percentile against rate: the curve in its interval, each trial's own, and where the curve meets the limit.

    ``percentile``: its name, as ``p99 TTFT``. Of a search that has a rate, and so both ends.
    """

    search: Search
    curve: LatencyCurve
    percentile: str

    def draw(self, name: str) -> Fragment:
        search, found, limit_ms = self.search, self.curve.points, self.curve.limit_ms
        middle, ends = search.rate, both((search.low, search.high))
        assert middle and ends
        rates, tried = [point.rate for point in found], list(measured(search, self.curve))
        x = Axis(Scale.linear(rates, zero=rates[0] < rates[-1] / 2, room=0.0), "", "offered requests per second")
        values = [slo.value_ms for _, slo in tried if slo.value_ms and slo.value_ms < limit_ms]
        plot = Plot(x, Axis(Scale.fitting([_TOP * limit_ms, *values]), "ms"), 300)
        top = plot.y.scale.high
        dots = [self._dot(trial, slo, top) for trial, slo in tried if x.scale.holds(trial.rate)]
        within = [[top if end is None else min(end, top) for end in point.ci_ms] for point in found]
        answer = Point(middle, limit_ms, ends, css="point", size=6, title=f"capacity {rate(middle)}")
        listed = "; ".join(f"{rate(point.rate)} {duration(point.value_ms)}" for point in found[::5])
        return plot.chart(
            name, f"{self.percentile} against rate",
            f"{self.percentile} by rate, as the curve has it: {listed}. It meets {self.curve.slo} at {rate(middle)}.",
            self._proven(plot),
            band(plot, [(at, low, high) for at, (low, high) in zip(rates, within, strict=True)]),
            limit(plot, f"SLO {self.curve.slo}", y=limit_ms, near=[*dots, answer]), limit(plot, rate(middle), x=middle),
            line(plot, self._up_to(top)), self._planned(plot), points(plot, dots),
            points(plot, [answer], "whisker ink"),
        )  # fmt: skip

    def _up_to(self, top: float) -> list[tuple[float, float]]:
        """The curve, until it leaves the picture."""
        found = self.curve.points
        known = [(point.rate, math.inf if point.value_ms is None else point.value_ms) for point in found]
        inside = [at for at in known if at[1] <= top]
        if not 0 < len(inside) < len(known):
            return inside
        (left, value), (right, beyond) = known[len(inside) - 1 : len(inside) + 1]
        return [*inside, (left + (right - left) * (top - value) / (beyond - value), top)]

    def _proven(self, plot: Plot) -> Fragment:
        """Up to the rate that was held, shaded with its name."""
        if (held := self.search.held) is None:
            return NOTHING
        name = Text(f"proven to hold: {rate(held)}", plot.across(held), 14, -6, "end", "note")
        return group([shade(plot, plot.x.scale.low, held, "within"), written([[name]])])

    def _planned(self, plot: Plot) -> Fragment:
        """From the curve down at the rate that a fleet's servers are planned for."""
        plan = self.search.planning
        if plan is None or plan.expected is None or plan.expected.value_ms is None:
            return NOTHING
        at, value = plot.across(plan.planned_rps), plan.expected.value_ms
        high = plan.expected.ci_ms[1]
        words = f"planned {rate(plan.planned_rps)}{'' if high is None else f': at most {duration(high)}'}"
        name = [Text(words, at, plot.height - 6, dx, side, "note halo") for dx, side in _BESIDE]
        down = el("line", x1=percent(at), x2=percent(at), y1=plot.down(value), y2=plot.height, class_="supported")
        return group([down, written([name])])

    def _dot(self, trial: TrialResult, slo: CountedSlo, top: float) -> Point:
        """At the upper edge, with its value, where that is beyond it."""
        value = slo.value_ms or 0.0
        beyond = f"{duration(value)} ↑" if value > top else ""
        said = f"trial {trial.number}, {rate(trial.rate)}: {self.percentile} {duration(value)}, {trial.verdict}"
        dot = _dot(trial.rate, trial.verdict, value, None if beyond else both(slo.ci_ms))
        return replace(dot, y=min(value, top), label=beyond, title=said)


def measured(search: Search, curve: LatencyCurve) -> Iterator[tuple[TrialResult, CountedSlo]]:
    """The trials that measured the curve's percentile, with what they found of it."""
    for trial in search.trials:
        yield from ((trial, slo) for slo in trial.slos if slo.text == curve.slo and slo.value_ms is not None)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput against rate; dashed, what was asked for.

    Shaded: up to the rate that was held, lighter to the interval's upper end, where the SLOs may hold. The line is
    broken where trials begin to fail: nobody measured how goodput falls between.
    """

    search: Search

    def draw(self, name: str) -> Fragment:
        curve, held, high = self.search.curve, self.search.held, self.search.high
        low = held or self.search.low
        known = [(p, p.goodput_per_s) for p in curve if p.goodput_per_s is not None]
        ends = [end for p, _ in known for end in p.goodput_ci or () if end is not None]
        x = Axis(Scale.log([p.rate for p in curve]), "", "offered requests per second (log scale)")
        y = Axis(Scale.linear([*ends, *(p.rate for p in curve[:-1])] or [1.0]), "req/s")
        plot = Plot(x, y, 260)
        holds = [] if held is None else [shade(plot, x.scale.low, held, title="every SLO holds")]
        if low is not None and high is not None and low < high:
            holds.append(shade(plot, low, high, "band maybe", "every SLO may hold"))
        steps = [x.scale.low * (x.scale.high / x.scale.low) ** (i / 60) for i in range(61)]
        dots = [_dot(p.rate, p.verdict, value, both(p.goodput_ci)) for p, value in known]
        failing = next((at for at, (p, _) in enumerate(known) if p.verdict == FAILS), len(known))
        listed = "; ".join(f"{rate(p.rate)} {rate(value)}" for p, value in known)
        return plot.chart(
            name, "Goodput against rate", f"Goodput by rate: {listed}", *holds,
            line(plot, [(at, at) for at in steps if at <= y.scale.high], "curve thin", "4 4"),
            *(line(plot, [(dot.x, dot.y) for dot in part]) for part in (dots[:failing], dots[failing:]) if part),
            points(plot, dots), limit(plot, rate(self.search.rate), x=self.search.rate),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Posterior:
    """The density over the logarithm of the rate, its interval shaded; rates that were tried as ticks at the foot.

    Of a search that has a rate, and so both ends.
    """

    search: Search

    def draw(self, name: str) -> Fragment:
        low, high, middle, found = self.search.low, self.search.high, self.search.rate, self.search.posterior
        assert low and high and middle and found
        by, reach = 4, (high / low) ** 0.75  # finer steps show the grid that it was computed on
        rates = [*found.rates[:-1:by], found.rates[-1]]
        masses = [sum(found.masses[at : at + by]) for at in range(0, len(found.masses), by)]
        # Probability per step of the logarithm, so that areas are probabilities.
        steps = zip(masses, pairwise(rates), strict=True)
        heights = [mass / math.log(right / left) for mass, (left, right) in steps]
        x = Axis(Scale("log", low / reach, high * reach), "", "requests per second (logarithmic)")
        plot = Plot(x, Axis(Scale.linear(heights), labels=False), 170)
        edges = [min(max(at, x.scale.low), x.scale.high) for at in rates]
        tried = [trial.rate for trial in self.search.trials if trial.confidence is not None]
        ticks = [Point(at, 0.0, y_ends=(0.0, 0.05 * max(heights)), size=0) for at in tried if x.scale.holds(at)]
        return plot.chart(
            name, "Where the capacity lies",
            f"The capacity's probability density: median {rate(middle)}, "
            f"interval {significant(low)} .. {significant(high)}.",
            shade(plot, low, high), line(plot, stairs(edges, heights)), points(plot, ticks),
            limit(plot, rate(middle), x=middle),
        )  # fmt: skip
