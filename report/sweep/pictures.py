"""A sweep's pictures: throughput against latency, latency point by point, and stage stacks on the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import bounds, duration, share, significant
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.analysis.sweep.compared import figure_key, figure_words
from gapmeter.analysis.sweep.read import tokens_per_s
from gapmeter.report import marks
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, path, percent, stretched
from gapmeter.report.sweep.scale import Scale, along, levels_ms, limit_line

_HEIGHT, _LATENCY, _STACK = 300, 150, 190
_LABEL_WIDTH, _LABEL_HEIGHT = 0.12, 15.0  # of the width, in px: nearer names would cover each other
_DASHES = (None, "7 4", "2 4", "9 3 2 3")  # a curve is told apart by its line and its name, not by its colour
_BROKEN = ("INVALID",)

Point = Mapping[str, Any]
Limit = tuple[float, str] | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What the pictures show: one metric, two percentiles of it, the points by curve, knees by point."""

    metric: str
    level: float | None
    series: Sequence[tuple[str, Sequence[Point]]]
    knees: frozenset[int]
    limit: Limit
    device: str  # what computed the forwards

    @property
    def key(self) -> str:
        return f"{figure_key(self.level)}_ms"

    @property
    def words(self) -> str:
        """What is drawn, as ``p95 TTFT``."""
        return figure_words(self.metric, self.level)

    def shown(self) -> list[Point]:
        return [point for _, points in self.series for point in points if point["metrics"]]

    def value(self, point: Point, key: str | None = None) -> float | None:
        found = point["metrics"][self.metric][key or self.key]
        return None if found is None else float(found)

    def interval(self, point: Point) -> tuple[float, float] | None:
        found = point["metrics"][self.metric].get(self.key.replace("_ms", "_ci_ms"))
        return (float(found[0]), float(found[1])) if found and None not in found else None


def tradeoff(sight: Sight, name: str) -> Fragment:
    """Throughput against latency: what more load brings, and what it costs."""
    points = [p for p in sight.shown() if tokens_per_s(p) is not None and _height(sight, p) is not None]
    ends = [end for p in points for end in (sight.interval(p) or ())]
    y = Scale.of([_height(sight, p) or 0.0 for p in points] + ends, sight.limit[0] if sight.limit else None)
    x = Scale(0.0, max([_most_tokens(p) for p in points], default=1.0) * 1.14, logarithmic=False)
    drawn: list[Fragment] = []
    labels = _label_heights(sight, points, x, y)
    for number, (title, members) in enumerate(sight.series):
        drawn.append(_curve(sight, members, x, y, _DASHES[number % len(_DASHES)]))
        drawn += [_dot(sight, p, x, y, labels[p["index"]]) for p in members if p in points]
        drawn.append(_curve_name(sight, title, members, x, y))
    spots = [(x.part(tokens_per_s(p) or 0.0), _down(sight, p, y, _HEIGHT)) for p in points]
    said = f"{sight.words} against output tokens per second, {len(points)} points."
    return chart(
        name, _HEIGHT + 40, f"Throughput against {sight.metric.upper()}", said,
        levels_ms(y, _HEIGHT), along(x, _HEIGHT, "output tokens per second"),
        limit_line(sight.limit, y, _HEIGHT, spots),
        *drawn,
    )  # fmt: skip


def latency(sight: Sight, name: str) -> Fragment:
    """The same percentile point by point, p50 beside it, on the order that the stacks have."""
    places = _places(sight)
    points = [p for p in sight.shown() if _height(sight, p) is not None]
    values = [v for p in points for v in (_height(sight, p), sight.value(p, "p50_ms"), *(sight.interval(p) or ())) if v]
    y = Scale.of(values, sight.limit[0] if sight.limit else None)
    parts: list[Fragment] = []
    for _, members in sight.series:
        for key, css in {"p50_ms": "curve thin faint", sight.key: "curve"}.items():
            at = [(1000 * places[p["index"]], _LATENCY * (1 - y.part(v))) for p in members
                  if _joined(p) and (v := sight.value(p, key)) is not None]  # fmt: skip
            if len(at) > 1 and all(_has_order(p) for p in members):
                parts.append(stretched(_LATENCY, el("path", d=path(at), class_=css)))
    for point in points:
        x = percent(places[point["index"]])
        parts += [_bar(sight, point, x, y, _LATENCY), _mark(sight, point, x, y, _LATENCY)]
    spots = [(places[p["index"]], _down(sight, p, y, _LATENCY)) for p in points]
    said = f"{sight.words} with its 95 % interval and p50, point by point."
    return chart(
        name, _LATENCY + 8, f"{sight.metric.upper()} by point", said, levels_ms(y, _LATENCY),
        limit_line(sight.limit, y, _LATENCY, spots), *parts,
    )  # fmt: skip


def stack_columns(sight: Sight, metric: str, name: str, part: str = "stages", *, labels: bool = True) -> Fragment:
    """A column a point: the mean ledger by stage, so the pieces add up to the mean."""
    places = _places(sight)
    totals = [sum(_stages(p, metric, part).values()) for p in sight.shown()]
    y = Scale(0.0, max(totals, default=1.0) * 1.1 or 1.0, logarithmic=False)
    width = min(0.62 / max(len(places), 1), 0.09)
    columns = [_column(p, sight, part, places[p["index"]], width, y) for p in sight.shown()]
    said = f"Mean {metric.upper()} by stage, point by point: " + "; ".join(
        f"{p['label']} {duration(total)}" for p, total in zip(sight.shown(), totals, strict=True)
    )
    feet = [_foot(sight, p, places[p["index"]]) for p in _in_order(sight)] if labels else []
    return chart(
        name, _STACK + (44 if labels else 8), f"Mean {metric.upper()} by stage", said, levels_ms(y, _STACK), *columns,
        *feet,
    )  # fmt: skip


def stages_shown(sight: Sight, metric: str, part: str = "stages") -> list[str]:
    """The stages that any column has something of, in the order of the timeline."""
    found: dict[str, float] = {}
    for point in sight.shown():
        for stage, ms in _stages(point, metric, part).items():
            found[stage] = max(found.get(stage, 0.0), ms)
    return [stage for stage, ms in found.items() if ms > 0 or stage == UNEXPLAINED]


def _stages(point: Point, metric: str, part: str) -> Mapping[str, float]:
    if part == "slow_stages":
        return dict((point["slow_stages"] or {}).get(metric, {}))
    return dict((point["stages"] or {}).get(metric, {}).get("stages_ms", {}))


def _most_tokens(point: Point) -> float:
    ends = point["throughput"]["steady_ci"]
    return float(ends[1]) if ends else tokens_per_s(point) or 0.0


def _height(sight: Sight, point: Point) -> float | None:
    """Where a point is drawn: at its percentile, or where its sample supports none, with a ? at its mean."""
    value = sight.value(point)
    return sight.value(point, "mean_ms") if value is None else value


def _down(sight: Sight, point: Point, y: Scale, height: int) -> float:
    return height * (1 - y.part(_height(sight, point) or 0.0))


def _joined(point: Point) -> bool:
    """Whether a line may run through a point: not through one that is no valid measurement."""
    return bool(point["metrics"]) and point["verdict"] not in _BROKEN


def _has_order(point: Point) -> bool:
    return bool(point.get("ordered", True))


def _curve(sight: Sight, members: Sequence[Point], x: Scale, y: Scale, dash: str | None) -> Fragment:
    """Straight lines from point to point of one curve; nothing is smoothed."""
    good = [p for p in members if _joined(p) and tokens_per_s(p) is not None and sight.value(p) is not None]
    if len(good) < 2 or not all(_has_order(p) for p in members):
        return NOTHING
    at = [(1000 * x.part(tokens_per_s(p) or 0.0), _HEIGHT * (1 - y.part(sight.value(p) or 0.0))) for p in good]
    return stretched(_HEIGHT, el("path", d=path(at), class_="curve", stroke_dasharray=dash))


def _label_heights(sight: Sight, points: Sequence[Point], x: Scale, y: Scale) -> dict[int, float]:
    """Where each point's name is written: at its own height, or below the name above it that it would cover."""
    placed: list[tuple[float, float]] = []
    found: dict[int, float] = {}
    for point in sorted(points, key=lambda p: -y.part(_height(sight, p) or 0.0)):
        across, down = x.part(tokens_per_s(point) or 0.0), _HEIGHT * (1 - y.part(_height(sight, point) or 0.0))
        for other, height in placed:
            if abs(other - across) < _LABEL_WIDTH and down < height + _LABEL_HEIGHT:
                down = height + _LABEL_HEIGHT
        placed.append((across, down))
        found[int(point["index"])] = down
    return found


def _dot(sight: Sight, point: Point, x: Scale, y: Scale, label: float) -> Fragment:
    at = x.part(tokens_per_s(point) or 0.0)
    place = percent(at)
    right = at < 0.86
    top = _HEIGHT * (1 - y.part(_height(sight, point) or 0.0))
    words = el("text", point["label"] + (" ◂ knee" if point["index"] in sight.knees else ""), x=place,
               y=label + 4, dx=9 if right else -9, class_=f"{'start' if right else 'end'} halo")  # fmt: skip
    return group([_range(point, x, top), _bar(sight, point, place, y, _HEIGHT),
                  _mark(sight, point, place, y, _HEIGHT), words])  # fmt: skip


def _curve_name(sight: Sight, title: str, members: Sequence[Point], x: Scale, y: Scale) -> Fragment:
    """The curve's name at its first point."""
    first = next((p for p in members if p["metrics"] and sight.value(p) is not None and tokens_per_s(p)), None)
    if not title or first is None:
        return NOTHING
    top = _HEIGHT * (1 - y.part(sight.value(first) or 0.0))
    return el("text", title, x=percent(x.part(tokens_per_s(first) or 0.0)), y=top - 12, class_="strong halo middle")


def _range(point: Point, x: Scale, top: float) -> Fragment:
    """The 95 % interval of throughput, repeats included."""
    found = point["throughput"]["steady_ci"]
    if not found:
        return NOTHING
    low, high = (percent(x.part(end)) for end in found)
    return el("line", x1=low, x2=high, y1=top, y2=top, class_="whisker")


def _bar(sight: Sight, point: Point, x: str, y: Scale, height: int) -> Fragment:
    """The 95 % interval, and the repeats' own values as ticks beside it."""
    found = sight.interval(point)
    parts = []
    if found:
        parts.append(el("line", x1=x, x2=x, y1=height * (1 - y.part(found[0])), y2=height * (1 - y.part(found[1])),
                        class_="whisker"))  # fmt: skip
    between = (point["between"] or {}).get(sight.metric, {}).get(sight.key)
    for end in between or ():
        at = height * (1 - y.part(end))
        parts.append(el("circle", cx=x, cy=at, r=2, class_="dot"))
    return group(parts)


def _mark(sight: Sight, point: Point, x: str, y: Scale, height: int) -> Fragment:
    """The point itself: filled where its SLOs hold, ringed where not decided, crossed where it is no measurement."""
    if sight.value(point) is None:
        return _unsupported(sight, point, x, y, height)
    value = sight.value(point) or 0.0
    top = height * (1 - y.part(value))
    interval = sight.interval(point)
    known = f" ({bounds(*interval)})" if interval else ""
    tokens = tokens_per_s(point)
    title = el("title", f"{point['label']}: {sight.words} {duration(value)}{known}, "
                        f"{significant(tokens) if tokens else '–'} tokens/s, {point['verdict']}")  # fmt: skip
    if point["verdict"] in _BROKEN:
        return el("text", title, "✕", x=x, y=top + 5, class_="failed middle")
    css = {"PASS": "point met", "FAIL": "point missed"}.get(point["verdict"], "point open")
    return el("circle", title, cx=x, cy=top, r=6 if point["index"] in sight.knees else 4.5, class_=css,
               data_point=point["index"], data_ms=f"{value:.6g}")  # fmt: skip


def _unsupported(sight: Sight, point: Point, x: str, y: Scale, height: int) -> Fragment:
    mean = _height(sight, point)
    title = f"{point['label']}: {sight.words} not estimable, mean {duration(mean)}, {point['verdict']}"
    return el(
        "text", el("title", title), "?", x=x, y=height * (1 - y.part(mean or 0.0)) + 5, class_="strong halo middle"
    )


def _in_order(sight: Sight) -> list[Point]:
    return [point for _, points in sight.series for point in points]


def _places(sight: Sight) -> dict[int, float]:
    """The middle of each point's column as a fraction of the width; a gap between curves."""
    gaps = len(sight.series) - 1
    slots = len(_in_order(sight)) + 0.6 * gaps
    places, at = {}, 0.0
    for _, members in sight.series:
        for point in members:
            places[int(point["index"])] = (at + 0.5) / slots
            at += 1
        at += 0.6
    return places


def _column(point: Point, sight: Sight, part: str, middle: float, width: float, y: Scale) -> Fragment:
    stages = _stages(point, sight.metric, part)
    total, at, pieces = sum(stages.values()), 0.0, []
    for stage, ms in stages.items():
        if ms <= 0 and stage != UNEXPLAINED:
            continue
        top, bottom = _STACK * (1 - y.part(at + ms)), _STACK * (1 - y.part(at))
        at += max(ms, 0.0)
        title = f"{point['label']}: {marks.words(stage)} {duration(ms)}, {share(ms / total) if total else ''}"
        whose = f"{marks.owner(stage, sight.device)} · {marks.kind(stage)}"
        pieces.append(el(
            "rect", el("title", f"{title} · {whose}"), x=percent(middle - width / 2), y=top,
            width=percent(width), height=max(bottom - top, 0.0), fill=marks.fill(stage), class_="segment stage",
            data_stage=stage, data_ms=f"{ms:.7g}", data_point=point["index"],
        ))  # fmt: skip
    head = el("text", duration(total), x=percent(middle), y=_STACK * (1 - y.part(at)) - 5, class_="tick middle")
    return group([*pieces, head])


def _foot(sight: Sight, point: Point, middle: float) -> Fragment:
    words = point["label"] if point["metrics"] else f"{point['label']} ✕"
    knee = el("text", "knee", x=percent(middle), y=_STACK + 33, class_="note middle") if (
        point["index"] in sight.knees) else NOTHING  # fmt: skip
    return group([el("text", words, x=percent(middle), y=_STACK + 17, class_="tick middle"), knee])


__all__ = ["Sight", "latency", "stack_columns", "stages_shown", "tradeoff"]
