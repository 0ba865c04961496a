"""The curves of a sweep: what orders its points, what is compared along them, and where each has its knee.

Two rules, each for a curve of known points; a knee is one of the points, never one between them.

- *Throughput stops growing*: the first point from which on doubling the load brings less than 15 % more (to any later
  point), while up to it every doubling had brought at least 32 % on average.
- *Latency begins to climb*: Kneedle (Satopää, Albrecht, Irwin, Raghavan 2011, "Finding a 'Kneedle' in a Haystack"), for
  a curve that rises and bends upwards: load and latency are each scaled to 0..1, and the knee is where the curve lies
  furthest below the straight line from its first point to its last.

The points are known only so well, so the rule is asked 1,000 times, of points drawn from what is known of each (fixed
seed). What at least 95 % of the draws say is said; otherwise the answer is that the points do not tell.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.results.distribution import Percentile, figure_name
from gapmeter.analysis.results.sweep import THROUGHPUT, AnyPoint, CurveKnee, Point, PointFacts, ThroughputChange
from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL
from gapmeter.analysis.stats.series import Level, level_of, level_of_interval
from gapmeter.analysis.sweep.read import Frames

LOAD = "load"  # the key that orders points of both loops: users of the one, requests per second of the other
_WORDS = {
    "load.concurrency": "{} users", "load.rate": "{} {unit}/s", "server.max_batch": "max batch {}",
    "workload.prompt_tokens": "prompt {}", "workload.output_tokens": "output {}", "server.precision": "{}",
    "server.engine": "{}", "server.model": "{}",
}  # fmt: skip
# What a load is, then the server's size; they order points before whatever else has numbers.
_TITLES = {
    LOAD: "users, or requests per second",
    "load.concurrency": "users (closed loop)", "load.rate": "requests per second asked for (open loop)",
    "server.max_batch": "max batch", "workload.prompt_tokens": "prompt tokens",
    "workload.output_tokens": "output tokens",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Axis:
    """What orders a sweep's points, and the curves that they make.

    ``key`` is the swept key that orders them, None where none has numbers; ``series`` has the points (positions in the
    sweep) of each curve in its order, after the words for the values that they share.
    """

    key: str | None
    title: str
    series: tuple[tuple[str, tuple[int, ...]], ...]


def axis_of(points: Sequence[PointFacts], unit: str = "req") -> Axis:
    """The axis of these points, which have the same swept keys. ``unit``: what a rate counts."""
    keys = list(dict.fromkeys(key for point in points for key in point.resolved))
    loops = {point.loop for point in points}
    ordering = None
    for key in (*_TITLES, *keys):
        values = [_value(point, key) for point in points]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if (key in keys or key == LOAD) and numbers and len({str(value) for value in values}) > 1:
            ordering = key
            break
    laws = {point.resolved.get("load.arrivals") for point in points if point.loop == "open"}
    alike = ("load.arrivals",) if len(laws) < 2 else ()  # a closed loop has none
    ordered_by = ("load.concurrency", "load.rate", *alike) if ordering == LOAD else (ordering,)
    groups: dict[str, list[int]] = {}
    for at, point in enumerate(points):
        name = label({key: value for key, value in point.resolved.items() if key not in ordered_by}, unit)
        if len(loops) > 1:
            name = ", ".join(filter(None, (name, f"{point.loop} loop")))
        groups.setdefault(name, []).append(at)

    def rank(at: int) -> float:
        return place(points[at], ordering) if ordering else at

    title = _TITLES.get(ordering or "", (ordering or "").rpartition(".")[2])
    return Axis(
        ordering, title if unit == "req" else title.replace("requests", unit),
        tuple((name, tuple(sorted(group, key=rank))) for name, group in groups.items()),
    )  # fmt: skip


def place(point: PointFacts, key: str) -> float:
    """Where a point lies along the key that orders it."""
    return float(_value(point, key))


def _value(point: PointFacts, key: str) -> Any:
    """A point's value; its load is how many users or requests per second its loop asked for, where both loops occur."""
    if key != LOAD:
        return point.resolved.get(key)
    swept = {"load.concurrency", "load.rate"} <= set(point.resolved)
    return point.resolved.get("load.concurrency" if point.loop == "closed" else "load.rate") if swept else None


def label(values: Mapping[str, Any], unit: str = "req") -> str:
    """A point's name, from its values: ``8 users, float32``. What is unset is named where nothing else is set.

    ``unit``: what a rate counts.
    """
    known = {key: value for key, value in values.items() if value is not None}
    return ", ".join(_word(key, value, unit) for key, value in (known or values).items())


def _word(key: str, value: Any, unit: str) -> str:
    if key == "load.concurrency" and value == 1:
        return "1 user"
    text = value if isinstance(value, str) else _number(value) if isinstance(value, float) else json.dumps(value)
    return _WORDS.get(key, f"{key.rpartition('.')[2].replace('_', ' ')} {{}}").format(text, unit=unit)


def _number(value: float) -> str:
    """A third as 0.333333."""
    return f"{round(value, max(0, 5 - math.floor(math.log10(abs(value))))) if value else value:,.12g}"


FEWEST = 4
LEAST_BEND = 0.1  # of the box that the curve fills; less is a straight line, or the noise of one
LEAST_RISE = 1.25  # last over lowest latency
_KNOWN = "known well enough: longer points or repeats would tell"
FLAT = math.log2(1.15)  # elasticity: growth of the logarithm of throughput over that of the load
GROWING = math.log2(1.32)
DRAWS = 1000

KNEE, NONE, UNDECIDED = "knee", "none", "undecided"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rule says of one curve without uncertainty: the knee's place (None: none), the reason, the bend."""

    at: int | None
    why: str
    bend: float | None = None


@dataclass(frozen=True, slots=True)
class Knee:
    """What the points support. ``state``: a knee, none, or undecided.

    ``at`` is the likeliest place, ``low`` and ``high`` the places that hold it in 95 % of draws, ``certainty`` the
    share of draws that say what is said (for undecided: that there is a knee at all). ``bend`` of a latency: how far
    below the straight line the curve lies there, as a share of the box that it fills; the median of the draws.
    """

    state: str
    why: str
    certainty: float
    at: int | None = None
    low: int | None = None
    high: int | None = None
    bend: float | None = None


def throughput_turn(load: Sequence[float], rate: Sequence[float]) -> Turn:
    """Where throughput stops growing; ``load`` and ``rate`` positive, the former rising strictly."""
    x, y = np.log(load), np.log(rate)
    for k in range(len(x) - 1):
        if np.all((y[k + 1 :] - y[k]) < FLAT * (x[k + 1 :] - x[k])):
            if k == 0:
                return Turn(None, "throughput does not grow from the first point on: the knee lies before it")
            if (y[k] - y[0]) >= GROWING * (x[k] - x[0]):
                return Turn(k, "throughput stops growing there")
            return Turn(None, "throughput grows ever more slowly and has no place where it turns")
    return Turn(None, "throughput still grows at the last point: the knee lies beyond it")


def latency_turn(load: Sequence[float], latency: Sequence[float]) -> Turn:
    """Where latency begins to climb; ``load`` rises strictly, any units."""
    low, high = min(latency), max(latency)
    if latency[-1] < LEAST_RISE * low or high <= low:
        return Turn(None, "latency hardly rises over this range: the knee lies beyond its last point")
    span = load[-1] - load[0]
    below = [(at - load[0]) / span - (value - low) / (high - low) for at, value in zip(load, latency, strict=True)]
    best = max(range(len(below)), key=lambda at: below[at])
    if below[best] < LEAST_BEND or best in (0, len(load) - 1):
        text = "latency rises about in proportion to the load from the first point on: the knee lies before it"
        return Turn(None, text, below[best])
    return Turn(best, "latency begins to climb there", below[best])


Rule = Callable[[Sequence[float], Sequence[float]], Turn]


def find_knee(load: Sequence[float], levels: Sequence[Level], rule: Rule) -> Knee:
    """What ``rule`` says of points that are known only so well."""
    if len(load) < FEWEST:
        return Knee(UNDECIDED, f"only {len(load)} of the {FEWEST} points that it takes", 0.0)
    rng = np.random.default_rng(0)
    drawn = np.stack([level.drawn(rng, DRAWS) for level in levels], axis=1)
    turns = [rule(load, row.tolist()) for row in drawn]
    places = np.array([turn.at for turn in turns if turn.at is not None], dtype=np.float64)
    share = len(places) / DRAWS
    if share >= CONFIDENCE:
        likeliest = int(Counter(places.tolist()).most_common(1)[0][0])
        there = [turn for turn in turns if turn.at == likeliest]
        bends = [turn.bend for turn in there if turn.bend is not None]
        low, high = (int(end) for end in np.quantile(places, [TAIL, 1 - TAIL], method="nearest"))
        return Knee(KNEE, there[0].why, share, likeliest, low, high, float(np.median(bends)) if bends else None)
    if 1 - share >= CONFIDENCE:
        whys = Counter(turn.why for turn in turns if turn.at is None).most_common()
        return Knee(NONE, ", or ".join(why for why, times in whys if times >= TAIL * DRAWS), 1 - share)
    return Knee(UNDECIDED, "what is known of the points allows for a knee and for none", share)


WITH_LEDGERS = (*LEDGER_OF, "itl")  # metrics that stages tell of
GROWS_WITH = "server.max_batch"  # more of it may bring more throughput, as more load does


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point that curves may run through: ``figures`` has what is compared by metric, and ``throughput``."""

    point: Point
    figures: Mapping[str, Level | None]
    frames: Frames


def curve_point(point: AnyPoint, frames: Frames | None, levels: Mapping[str, float | None]) -> CurvePoint | None:
    """None for a point that is not a valid measurement: no curve runs through it."""
    if frames is None or not isinstance(point, Point) or not point.on_curves:
        return None
    found = {metric: _compared(point.metrics[metric].at_level(levels[metric])) for metric in WITH_LEDGERS}
    return CurvePoint(point, found | {THROUGHPUT: level_of(frames.rates)}, frames)


def _compared(found: Percentile) -> Level | None:
    low, high = found.ci_ms or (None, None)
    if found.value_ms is None or low is None or high is None or low <= 0:
        return None
    return level_of_interval(found.value_ms, low, high)


def knees_of(
    axis: Axis, points: Sequence[AnyPoint], curve_points: Sequence[CurvePoint | None], main: str,
    levels: Mapping[str, float | None],
) -> Iterator[CurveKnee]:  # fmt: skip
    """The knee of each curve along a load or a batch size: where, by which figure, how sure, or why there is none."""
    if axis.key not in (LOAD, "load.concurrency", "load.rate", GROWS_WITH):
        return
    for name, members in axis.series:
        shown = [at for at in members if curve_points[at] is not None]
        load = [place(points[at], axis.key) for at in shown]
        knee, by = _knee([each for at in shown if (each := curve_points[at])], load, axis.key, main)
        ends = None if knee.low is None or knee.high is None else (shown[knee.low], shown[knee.high])
        at = None if knee.at is None else shown[knee.at]
        yield CurveKnee(
            series=name,
            state=knee.state,
            point=at,
            label=None if at is None else points[at].label,
            range=ends,
            range_labels=ends and (points[ends[0]].label, points[ends[1]].label),
            by=by if by == THROUGHPUT else figure_name(by, levels[by]),
            bend=knee.bend,
            why=knee.why,
            certainty=knee.certainty,
            after=_after(shown, at, curve_points),
            or_at=tuple(points[k].label for k in _hidden(members, shown, at, both=by != THROUGHPUT)),
        )


def _knee(curve_points: Sequence[CurvePoint], load: Sequence[float], key: str, main: str) -> tuple[Knee, str]:
    """Users wait for their answers, so throughput shows the limit of a closed loop; an open one's is asked of it."""
    closed = all(each.point.loop == "closed" for each in curve_points)
    asks: list[tuple[str, Rule]] = [(THROUGHPUT, throughput_turn)]
    if key != GROWS_WITH:
        asks.insert(0, (main, latency_turn))
    answers = []
    for by, rule in reversed(asks) if closed else asks:
        known = [each.figures[by] for each in curve_points]
        levels = [level for level in known if level is not None]
        if len(levels) == len(known):
            answers.append((find_knee(load, levels, rule), by))
        elif by != THROUGHPUT and not closed:
            answers.append((Knee(UNDECIDED, f"at some point latency is not {_KNOWN}", 0.0), by))
    if not answers:
        return Knee(UNDECIDED, f"at some point neither latency nor throughput is {_KNOWN}", 0.0), asks[0][0]
    # An open loop's throughput grows with its rate up to the ceiling, and so never tells that latency has no knee.
    order = {KNEE: 0, NONE: 1, UNDECIDED: 2} if closed else {KNEE: 0, UNDECIDED: 1, NONE: 2}
    return min(answers, key=lambda answer: order[answer[0].state])


def _after(shown: Sequence[int], at: int | None, curve_points: Sequence[CurvePoint | None]) -> ThroughputChange | None:
    """How throughput changes from the knee to the last point of its curve."""
    if at is None or (one := curve_points[at]) is None or (two := curve_points[shown[-1]]) is None:
        return None
    before, after = one.figures[THROUGHPUT], two.figures[THROUGHPUT]
    if before is None or after is None:
        return None
    ratio, *ends = after.over(before).known
    return ThroughputChange(to=two.point.label, ratio=ratio, ratio_ci=(ends[0], ends[1]))


def _hidden(members: Sequence[int], shown: Sequence[int], at: int | None, *, both: bool) -> list[int]:
    """Points that have no valid figures and lie where the knee may be as well: next to it, before (or beyond) it."""
    if at is None:
        return []
    here = shown.index(at)
    low = members.index(shown[here - 1]) if here else -1
    high = members.index(shown[here + 1]) if both and here + 1 < len(shown) else members.index(at)
    return [k for k in members[low + 1 : high] if k not in shown]
