"""What is said of measured points on the field's plane: a user's pace against what the hardware serves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from gapmeter.analysis.numbers import DASH, significant, usd
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.pareto import Pareto, ParetoPoint
from gapmeter.analysis.results.run import FAIL, INVALID, PASS
from gapmeter.report.charts import Axis, Plot, Point, Scale, Text, limit, line, points, shade, written
from gapmeter.report.document import Chart, Column, Figure, Headers, Key, Mark, Row, Section, Table
from gapmeter.report.svg import NOTHING, Fragment
from gapmeter.report.words import both, tone

_SIDES = 8  # colours of report.css
_DASHES = (None, "7 4", "2 4", "9 3 2 3")  # a curve is told apart by its line and its name, not by its colour
_VERDICTS = {PASS: "met", FAIL: "missed"}


def _front(shown: list[ParetoPoint]) -> list[tuple[float, float]]:
    """The corners of what was reached, by the values alone: from the slowest and most serving point to the fastest."""
    best = sorted({point.at for point in shown if point.at and point.on_front and point.tokens_per_s_user_ci})
    return [at for number, at in enumerate(best) if all(at[1] > other[1] for other in best[number + 1 :])]


@dataclass(frozen=True, slots=True)
class Plane:
    """All points with their intervals, the front as a staircase, and the pace that an SLO asks for.

    ``by_side``: colours tell the sides of a comparison; else they tell the SLOs.
    """

    pareto: Pareto
    by_side: bool = False

    def draw(self, name: str, stamp: str | None) -> Fragment:
        shown, pace = [point for point in self.pareto.points if point.at], self.pareto.limit
        places = [at for point in shown if (at := point.at)]
        across = [end for p in shown for end in both(p.tokens_per_s_user_ci) or ()] + [x for x, _ in places]
        up = [end for p in shown for end in both(p.tokens_per_s_unit_ci) or ()] + [y for _, y in places]
        if pace and min(across) / 2 <= pace.tokens_per_s_user <= 1.5 * max(across):
            across.append(pace.tokens_per_s_user)
        x = Scale.linear(across, zero=min(across) < max(across) / 2, room=0.08)
        plot = Plot(
            Axis(x, title="output tokens per second, a user"), Axis(Scale.linear(up, room=0.1), "tokens/s"), 320
        )
        dots = [self._dot(point, *at) for point in shown if (at := point.at)]
        corners = _front(shown)
        said = "; ".join(f"{p.name} {significant(at[0])}, {significant(at[1])}" for p in shown if (at := p.at))
        return plot.chart(
            name, f"Tokens per second a user against a {self.pareto.unit}",
            f"Output tokens per second, a user's and a {self.pareto.unit}'s: {said}.",
            shade(plot, pace.tokens_per_s_user, x.high, "within", f"within {pace.text}") if pace else NOTHING,
            *self._curves(plot), line(plot, self._stairs(plot, corners), "curve front") if corners else NOTHING,
            limit(plot, f"SLO {pace.text}", x=pace.tokens_per_s_user) if pace else NOTHING,
            points(plot, dots), self._names(plot), stamp=stamp,
        )  # fmt: skip

    def _stairs(self, plot: Plot, corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """What lies below and to the left of it was reached; between two points nothing was measured."""
        steps = [(plot.x.scale.low, corners[0][1]), corners[0]]
        for (x, _), right in pairwise(corners):
            steps += [(x, right[1]), right]
        return [*steps, (corners[-1][0], plot.y.scale.low)]

    def _sides(self) -> dict[str, list[ParetoPoint]]:
        sides: dict[str, list[ParetoPoint]] = {}
        for point in self.pareto.points:
            sides.setdefault(point.side, []).append(point)
        return sides

    def _curves(self, plot: Plot) -> list[Fragment]:
        """From point to point of a side, in their order."""
        drawn = []
        for number, own in enumerate(self._sides().values()):
            known = [p.at for p in own if p.at and p.is_measurement and p.tokens_per_s_user_ci]
            css = f"curve thin side-{number % _SIDES}" if self.by_side else "curve thin faint"
            drawn.append(line(plot, known, css, _DASHES[number % len(_DASHES)]) if len(known) > 1 else NOTHING)
        return drawn

    def _names(self, plot: Plot) -> Fragment:
        """Each side's name at its last point, that with the most load."""
        names = []
        for side, own in self._sides().items():
            known = [at for point in own if (at := point.at)]
            if side and known and len(own) > 1:
                x, y = plot.across(known[-1][0]), plot.down(known[-1][1])
                names.append([Text(side, x, y - 26, css="strong halo"), Text(side, x, y + 36, css="strong halo")])
        return written(names)

    def _dot(self, point: ParetoPoint, x: float, y: float) -> Point:
        cost = point.usd_per_million_output_tokens
        label = point.name if cost is None else f"{point.name}, {usd(cost)}"
        title = (
            f"{f'{point.side}, ' if point.side and self.by_side else ''}{point.name}: {_known(x, point.tokens_per_s_user_ci)} "
            f"tokens/s a user, {_known(y, point.tokens_per_s_unit_ci)} a {self.pareto.unit}, "
            f"{usd(cost)} a million, {point.verdict}"
        )
        ends = both(point.tokens_per_s_user_ci), both(point.tokens_per_s_unit_ci)
        if point.verdict == INVALID:
            return Point(x, y, *ends, "failed", label=label, title=title, sign="✕")
        if ends[0] is None:
            return Point(x, y, *ends, "strong halo", label=label, title=title, sign="?")
        css = f"point {_VERDICTS.get(point.verdict, 'open')}"
        if self.by_side:
            css += f" side-{list(self._sides()).index(point.side) % _SIDES}"
        off = " off" if point.on_front is False else ""
        data = {"data_user": repr(x), "data_unit": repr(y), "data_front": str(bool(point.on_front)).lower()}
        return Point(x, y, *ends, css + off, 4 if off else 6, label, title, data=data)


def section(pareto: Pareto | None, *, by_side: bool = False) -> Section | None:
    """The picture with its table; None where no point has a place."""
    if pareto is None:
        return None
    chart = Chart("pareto", Plane(pareto, by_side), _caption(pareto, by_side=by_side), _table(pareto), "levels")
    names = dict.fromkeys(point.side for point in pareto.points)
    key = [Key([(f"var(--side-{at % _SIDES})", name) for at, name in enumerate(names)])] if by_side else []
    return Section(
        "pareto", f"Tokens per second: a user's and a {pareto.unit}'s", [*key, chart], _lead(pareto), "Pareto front"
    )


def _lead(pareto: Pareto) -> str:
    unit = pareto.unit
    return (
        f"Further right is faster for a user, further up serves more on the same hardware. A user's pace is 1000 / "
        f"median TPOT in ms; a {unit}'s throughput counts the output tokens of all requests that succeeded, within "
        f"their SLOs or not. Bars: 95 % intervals. $: a million output tokens at this throughput and the planned "
        f"utilisation."
    )


def _caption(pareto: Pareto, *, by_side: bool) -> str:
    shown = [point for point in pareto.points if point.at]
    said = ["Filled: SLOs met; hollow: missed or undecided" if by_side else "Green: SLOs met; red: missed; hollow: undecided"]
    said += ["✕: not valid as a measurement"] * any(point.verdict == INVALID for point in shown)
    said += ["?: its sample supports no median, so it stands at the mean"] * any(
        point.tokens_per_s_user_ci is None and point.is_measurement for point in shown
    )
    front = (
        "The staircase is the Pareto front of what was measured. Small and faint: surely off it, since another point is "
        "better both ways with the 95 % intervals apart; any other point may be on it."
    )
    pace = f" Shaded: a median token keeps {pareto.limit.text}'s limit." if pareto.limit else ""
    return f"{'; '.join(said)}. {front}{pace}"


def _known(value: float | None, ends: Ends | None) -> str:
    return f"{significant(value)} ({_interval(ends)})" if value and ends else DASH if value is None else significant(value)


def _interval(ends: Ends | None) -> str:
    return DASH if both(ends) is None else " .. ".join(map(significant, both(ends) or ()))


def _table(pareto: Pareto) -> Table:
    sides = any(point.side for point in pareto.points)
    rows: list[Row] = []
    for at, point in enumerate(pareto.points):
        front = {True: "may be on it", False: "off", None: DASH}[point.on_front]
        rows.append([
            *([point.side] if sides else []), point.name, Mark(point.verdict, tone(point.verdict)),
            Figure(point.tokens_per_s_user, "number"), _interval(point.tokens_per_s_user_ci),
            Figure(point.tokens_per_s_unit, "number"), _interval(point.tokens_per_s_unit_ci),
            Figure(point.usd_per_million_output_tokens, "usd"), front,
        ])  # fmt: skip
    headers: Headers = [
        *(["of"] if sides else []), "point", "verdict", "tokens/s a user", "95 % interval",
        f"tokens/s a {pareto.unit}", "95 % interval", "a million output tokens", Column("the front"),
    ]  # fmt: skip
    return Table("Tokens per second", headers, rows, words=2 + sides)
