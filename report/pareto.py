"""What is said of measured points on the field's plane: a user's pace against what the hardware serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from gapmeter.analysis.numbers import DASH, significant, usd
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.pareto import Pareto, ParetoPoint
from gapmeter.report import marks
from gapmeter.report.charts import Axis, Plot, Point, limit, line, points, shade
from gapmeter.report.document import Block, Chart, Figure, Headers, Html, Mark, Row, Section, Table
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el
from gapmeter.report.words import both, low_to_high, point_css, tone

_SIDES = 8  # colors of report.css
_DASHES = (None, "7 4", "2 4", "9 3 2 3")  # a curve is told apart by its line and its name, not by its color
_COLORS = "Green: SLOs met; red: missed; hollow: undecided"


@dataclass(frozen=True, slots=True)
class Plane:
    """All points with their intervals, the front as a staircase, and the pace that an SLO asks for.

    ``by_side``: colors tell the sides of a comparison; else they tell the SLOs.
    """

    pareto: Pareto
    by_side: bool = False

    def draw(self, name: str) -> Fragment:
        shown, pace = [(point, at) for point in self.pareto.points if (at := point.at)], self.pareto.limit
        across, up = (
            [end for one in values for end in (one.low, one.value, one.high) if end is not None]
            for values in zip(*(at for _, at in shown), strict=True)
        )
        if pace and min(across) / 2 <= pace.tokens_per_s_user <= 1.5 * max(across):
            across.append(pace.tokens_per_s_user)
        across.append(max(across) / 2)  # what hardly differs shall not seem to
        x = Scale.linear(across, zero=min(across) < max(across) / 2)
        plot = Plot(Axis(x, title="output tokens/s per user →"), Axis(Scale.linear(up, room=0.1)), 320)
        said = "; ".join(f"{p.name} {significant(at[0].value)}, {significant(at[1].value)}" for p, at in shown)
        return plot.chart(
            name, f"Tokens per second per user and per {self.pareto.unit}",
            f"Output tokens per second, per user and per {self.pareto.unit}: {said}.",
            shade(plot, pace.tokens_per_s_user, x.high, "within", f"within {pace.text}") if pace else NOTHING,
            el("text", f"tokens/s per {self.pareto.unit} ↑", x=0, dx=-62, y=-8, class_="tick"),
            *self._curves(plot), line(plot, self._stairs(plot), "curve front"),
            limit(plot, f"SLO {pace.text}", x=pace.tokens_per_s_user) if pace else NOTHING,
            points(plot, [self._dot(point, *at) for point, at in sorted(shown, key=self._order)]),
        )  # fmt: skip

    def _stairs(self, plot: Plot) -> list[tuple[float, float]]:
        """Around what was reached, by the values alone: nothing was measured between two points."""
        best = sorted({(p.at[0].value, p.at[1].value) for p in self.pareto.points if p.at and p.on_front})
        corners = [at for number, at in enumerate(best) if all(at[1] > other[1] for other in best[number + 1 :])]
        if not corners:
            return []
        steps = [(plot.x.scale.low, corners[0][1]), corners[0]]
        for (x, _), right in pairwise(corners):
            steps += [(x, right[1]), right]
        return [*steps, (corners[-1][0], plot.y.scale.low)]

    def _is_last(self, point: ParetoPoint) -> bool:
        """Whether a point is the last of its curve, or of its side of a comparison."""
        own = self._sides()[point.side]
        return (self.by_side or len(own) > 1) and point is own[-1]

    def _order(self, shown: tuple[ParetoPoint, object]) -> tuple[bool, bool]:
        """Sort key for naming points while there is room: valid ones first, and of these the ends of curves."""
        return not shown[0].is_valid, not self._is_last(shown[0])

    def _sides(self) -> dict[str, list[ParetoPoint]]:
        return {side: list(own) for side, own in groupby(self.pareto.points, key=lambda point: point.side)}

    def _curves(self, plot: Plot) -> list[Fragment]:
        """Lines from point to point of each side, in their order."""
        drawn = []
        for number, own in enumerate(self._sides().values()):
            known = [(p.at[0].value, p.at[1].value) for p in own if p.at and p.is_valid]
            css = f"curve thin side-{number % _SIDES}" if self.by_side else "curve thin faint"
            drawn.append(line(plot, known, css, _DASHES[number % len(_DASHES)]) if len(known) > 1 else NOTHING)
        return drawn

    def _dot(self, point: ParetoPoint, x: Interval, y: Interval) -> Point:
        cost, sides = point.usd_per_million_output_tokens, self._sides()
        label = point.name if cost is None else f"{point.name}, {usd(cost.value)}"
        if point.side and self._is_last(point):
            label = f"{point.side}: {label}"  # where a curve ends, with the most load
        title = (
            f"{', '.join(filter(None, (point.side, point.name)))}: {_known(x)} tokens/s per user, {_known(y)} per "
            f"{self.pareto.unit}, {usd(cost.value if cost else None)} a million, {point.verdict}"
        )
        ends = both((x.low, x.high)), both((y.low, y.high))
        if not point.is_valid:
            return Point(x.value, y.value, *ends, "failed", label=label, title=title, sign="✕")
        css = point_css(point.verdict)
        if self.by_side:
            css += f" side-{list(sides).index(point.side) % _SIDES}"
        data = {"data_user": repr(x.value), "data_unit": repr(y.value), "data_front": str(point.on_front).lower()}
        size, off = (6.0, "") if point.on_front else (4.0, " off")
        return Point(x.value, y.value, *ends, css + off, size, label, title, data=data)


def section(pareto: Pareto | None, where: str, sides: Mapping[str, str] | None = None) -> Section | None:
    """The picture with its table; None where no point has a place.

    ``where`` it stands in the result's JSON; ``sides``: of a comparison, what each one is.
    """
    if pareto is None:
        return None
    by_side = sides is not None
    blocks: list[Block] = [
        Chart("pareto", Plane(pareto, by_side), _caption(pareto, by_side), _table(pareto, where), "levels")
    ]
    if sides:
        names = dict.fromkeys(point.side for point in pareto.points)
        key = [(f"var(--side-{at % _SIDES})", f"{name}: {sides[name]}") for at, name in enumerate(names)]
        blocks.insert(0, Html(marks.key(key)))
    return Section("pareto", f"Tokens per second per user and per {pareto.unit}", blocks, _lead(pareto), "Pareto front")


def _lead(pareto: Pareto) -> str:
    mean = "" if pareto.statistic == "median" else " (some point's sample supports no median)"
    priced = (
        " $: a million of them at this throughput and the planned utilisation; points that miss their SLOs have it "
        "too, unlike a cost at the SLO."
    )
    return (
        f"Further right answers faster, further up serves more on the same hardware. Per user: 1000 / "
        f"{pareto.statistic} TPOT in ms{mean}. Per {pareto.unit}: output tokens of all requests that succeeded, within "
        f"their SLOs or not.{priced if any(point.usd_per_million_output_tokens for point in pareto.points) else ''}"
    )


def _caption(pareto: Pareto, by_side: bool) -> str:
    fill = "Filled: SLOs met; hollow: missed or undecided" if by_side else _COLORS
    invalid = "" if all(point.is_valid for point in pareto.points) else "; ✕: not valid as a measurement"
    pace = f" Shaded: the {pareto.statistic} TPOT is within the limit of {pareto.limit.text}." if pareto.limit else ""
    return (
        f"{fill}{invalid}. Bars: 95 % intervals. The staircase is the Pareto front of what was measured. A point that "
        f"another one beats both ways, with their intervals apart, is off it (small and faint); any other may be on "
        f"it.{pace}"
    )


def _known(one: Interval) -> str:
    return f"{significant(one.value)} ({_between(one)})"


def _between(one: Interval | None) -> str:
    return low_to_high((one.low, one.high) if one else None) or DASH


def in_short(pareto: Pareto) -> Table:
    """The terminal's: each load, side by side, and what a million output tokens cost at its throughput."""
    loads = list(dict.fromkeys(point.name for point in pareto.points))
    rows: list[Row] = [
        [point.name, point.side, *map(_known, point.at), usd(cost.value) if cost else DASH]
        for point in sorted(pareto.points, key=lambda point: loads.index(point.name))
        if point.at and point.is_valid
        for cost in [point.usd_per_million_output_tokens]
    ]
    headers: Headers = ["", "", "output tokens/s per user", f"per {pareto.unit}", "a million cost"]
    return Table("Tokens per second", headers, rows, words=2)


def _table(pareto: Pareto, where: str) -> Table:
    def figure(at: int, name: str, unit: Literal["number", "usd"] = "number") -> Figure:
        known: Interval | None = getattr(pareto.points[at], name)
        return Figure(None) if known is None else Figure(known.value, unit, f"{where}.points.{at}.{name}.value")

    sides = any(point.side for point in pareto.points)
    rows: list[Row] = []
    for at, point in enumerate(pareto.points):
        front = {True: "may be on it", False: "off", None: DASH}[point.on_front]
        rows.append([
            *([point.side] if sides else []), point.name, Mark(point.verdict, tone(point.verdict)),
            figure(at, "tokens_per_s_user"), _between(point.tokens_per_s_user),
            figure(at, "tokens_per_s_unit"), _between(point.tokens_per_s_unit),
            figure(at, "usd_per_million_output_tokens", "usd"), front,
        ])  # fmt: skip
    headers: Headers = [
        *(["of"] if sides else []), "point", "verdict", "tokens/s per user", "95 % interval",
        f"tokens/s per {pareto.unit}", "95 % interval", "a million at this throughput", "the front",
    ]  # fmt: skip
    return Table("Tokens per second", headers, rows, words=2 + sides)
