"""A capacity search's pictures: goodput and verdicts against rate, and where the capacity probably lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapmeter.analysis.numbers import rate, share, significant
from gapmeter.analysis.results.capacity import FAILS, HOLDS, Density, Search, TrialVerdict
from gapmeter.report.charts import Axis, Plot, Point, limit, line, points, shade, stairs
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, group
from gapmeter.report.words import both

_ASKED = "offered requests per second (log scale)"
_DOTS: dict[TrialVerdict, str] = {HOLDS: "point met", FAILS: "point missed"}


def _rates(search: Search) -> Axis:
    """Logarithmic, as the search is."""
    return Axis(Scale.log([point.rate for point in search.curve]), "", _ASKED)


def _dot(at: float, verdict: TrialVerdict, value: float, ends: tuple[float, float] | None = None) -> Point:
    return Point(
        at, value, y_ends=ends, css=_DOTS.get(verdict, "point open"), size=5, title=f"{rate(at)}: {verdict}",
        data={"data_rate": repr(at), "data_value": repr(value)},
    )  # fmt: skip


def _where_it_holds(search: Search, plot: Plot) -> Fragment:
    """Shaded up to the rate that was held, lighter to the interval's upper end, where the SLOs may hold."""
    low, high = search.held or search.low, search.high
    if low is None:
        return NOTHING
    sure = shade(plot, plot.x.scale.low, low, title="every SLO holds")
    return (
        sure
        if high is None or high <= low
        else group([sure, shade(plot, low, high, "band maybe", "every SLO may hold")])
    )


def _answer(search: Search, plot: Plot) -> Fragment:
    return limit(plot, rate(search.rate), x=search.rate) if search.rate else NOTHING


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput against rate; dashed, what was asked for; shaded, the rates at which every SLO holds."""

    search: Search

    def draw(self, name: str, stamp: str | None) -> Fragment:
        known = [(p, p.goodput_per_s) for p in self.search.curve if p.goodput_per_s is not None]
        ends = [end for p, _ in known for end in p.goodput_ci or () if end is not None]
        x = _rates(self.search)
        y = Axis(Scale.linear([*ends, *(p.rate for p in self.search.curve[:-1])] or [1.0]), "req/s")
        plot = Plot(x, y, 260)
        steps = [x.scale.low * (x.scale.high / x.scale.low) ** (i / 60) for i in range(61)]
        dots = [_dot(p.rate, p.verdict, value, both(p.goodput_ci)) for p, value in known]
        listed = "; ".join(f"{rate(p.rate)} {rate(value)}" for p, value in known)
        return plot.chart(
            name, "Goodput against rate", f"Goodput by rate: {listed}",
            _where_it_holds(self.search, plot),
            line(plot, [(at, at) for at in steps if at <= y.scale.high], "curve thin", "4 4"),
            line(plot, [(dot.x, dot.y) for dot in dots]),
            points(plot, dots), _answer(self.search, plot), stamp=stamp,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure each trial is that every SLO holds at its rate."""

    search: Search

    def draw(self, name: str, stamp: str | None) -> Fragment:
        sure = [(t, t.sure_to_hold) for t in self.search.trials if t.sure_to_hold is not None]
        plot = Plot(_rates(self.search), Axis(Scale("linear", 0.0, 1.0), "share", about=3), 120)
        listed = "; ".join(f"{rate(trial.rate)} {share(value)}" for trial, value in sure)
        return plot.chart(
            name, "Verdict by rate", f"How sure each trial is that the SLOs hold: {listed}",
            _where_it_holds(self.search, plot),
            points(plot, [_dot(trial.rate, trial.verdict, value) for trial, value in sure]),
            _answer(self.search, plot), stamp=stamp,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Posterior:
    """The density over the logarithm of the rate, its interval shaded; rates that were tried as ticks at the foot.

    Of a search that has a rate, and so both ends.
    """

    search: Search

    def draw(self, name: str, stamp: str | None) -> Fragment:
        low, high, middle, found = self.search.low, self.search.high, self.search.rate, self.search.posterior
        assert low and high and middle and found
        density, reach = _coarse(found), (high / low) ** 0.75
        # Probability per step of the logarithm, so that areas are probabilities.
        steps = zip(density.masses, density.rates[:-1], density.rates[1:], strict=True)
        heights = [mass / math.log(right / left) for mass, left, right in steps]
        x = Axis(Scale("log", low / reach, high * reach), "", "requests per second (logarithmic)")
        plot = Plot(x, Axis(Scale.linear(heights), labels=False), 170)
        edges = [min(max(at, x.scale.low), x.scale.high) for at in density.rates]
        tried = [trial.rate for trial in self.search.trials if trial.confidence is not None]
        ticks = [Point(at, 0.0, y_ends=(0.0, 0.05 * max(heights)), size=0) for at in tried if x.scale.holds(at)]
        return plot.chart(
            name, "Where the capacity lies",
            f"The capacity's probability density: median {rate(middle)}, "
            f"interval {significant(low)} .. {significant(high)}.",
            shade(plot, low, high), line(plot, stairs(edges, heights)), points(plot, ticks),
            _answer(self.search, plot), stamp=stamp,
        )  # fmt: skip


def _coarse(density: Density) -> Density:
    """The density in steps four times as wide: finer ones show the grid that it was computed on."""
    masses, by = density.masses, 4
    rates = (*density.rates[:-1:by], density.rates[-1])
    return Density(rates=rates, masses=tuple(sum(masses[at : at + by]) for at in range(0, len(masses), by)))
