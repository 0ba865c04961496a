"""Along the curves of a sweep: where each has its knee, and what grows from point to point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from gapmeter.analysis.requests.metrics import request_values_ns, succeeded
from gapmeter.analysis.stats.means import Level, level_of, level_of_interval
from gapmeter.analysis.sweep.axis import Axis, is_load, place
from gapmeter.analysis.sweep.growth import Side, growth_between
from gapmeter.analysis.sweep.knee import KNEE, NONE, UNDECIDED, Knee, find_knee, latency_turn, throughput_turn
from gapmeter.analysis.sweep.read import Frames
from gapmeter.analysis.sweep.result import (
    THROUGHPUT,
    AnyPoint,
    CurveKnee,
    Growth,
    Point,
    ThroughputChange,
    figure_name,
)

EVENT_OF = {"ttft": "first", "e2e": "last", "itl": "gaps"}
GROWS_WITH = "server.max_batch"  # more of it may bring more throughput, as more load does


@dataclass(frozen=True, slots=True)
class Seen:
    """A point that curves may run through: ``figures`` has what is compared by metric, and ``throughput``."""

    point: Point
    figures: Mapping[str, Level | None]
    frames: Frames


def seen(point: AnyPoint, frames: Frames | None, levels: Mapping[str, float | None]) -> Seen | None:
    """None for a point that is not a valid measurement: no curve runs through it."""
    if frames is None or not isinstance(point, Point) or not point.on_curves:
        return None
    found = {metric: _compared(point, frames, metric, levels[metric]) for metric in EVENT_OF}
    return Seen(point, found | {THROUGHPUT: rate_level(frames)}, frames)


def _compared(point: Point, frames: Frames, metric: str, level: float | None) -> Level | None:
    if level is None:
        return mean_level(frames, metric)
    found = point.metrics[metric].at(level)
    low, high = found.ci_ms or (None, None)
    if found.value_ms is None or low is None or high is None or low <= 0:
        return None
    return level_of_interval(found.value_ms, low, high)


def mean_level(frames: Frames, metric: str) -> Level | None:
    """A metric's mean in ms over the successes of a point; None where it cannot be known, or is no figure a request."""
    if metric == "itl":
        return level_of(frames.gaps["gap_ns"].to_numpy(float) / 1e6) if len(frames.gaps) else None
    values = request_values_ns(frames.measured, metric) / 1e6
    return level_of(values[succeeded(frames.measured) & ~pd.isna(values)])


def rate_level(frames: Frames) -> Level | None:
    """Output tokens a second over a point's blocks of time."""
    return None if frames.rates is None else level_of(frames.rates)


def knees_of(
    axis: Axis, points: Sequence[AnyPoint], sights: Sequence[Seen | None], main: str,
    levels: Mapping[str, float | None],
) -> Iterator[CurveKnee]:  # fmt: skip
    """The knee of each curve along a load or a batch size: where, by which figure, how sure, or why there is none."""
    if axis.key is None or not (is_load(axis.key) or axis.key == GROWS_WITH):
        return
    for name, members in axis.series:
        shown = [at for at in members if sights[at] is not None]
        load = [place(points[at], axis.key) for at in shown]
        knee, by = _knee([sight for at in shown if (sight := sights[at])], load, axis.key, main)
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
            after=_after(shown, at, sights),
            or_at=tuple(points[k].label for k in _hidden(members, shown, at, both=by != THROUGHPUT)),
        )


def _knee(sights: Sequence[Seen], load: Sequence[float], key: str, main: str) -> tuple[Knee, str]:
    """Users wait for their answers, so throughput shows the limit of a closed loop; an open one's is asked of it."""
    closed = all(sight.point.loop == "closed" for sight in sights)
    asks = [(THROUGHPUT, throughput_turn)]
    if key != GROWS_WITH:
        asks = [(main, latency_turn), *asks]
    answers = []
    for by, rule in reversed(asks) if closed else asks:
        known = [sight.figures[by] for sight in sights]
        levels = [level for level in known if level is not None]
        if len(levels) == len(known):
            answers.append((find_knee(load, levels, rule), by))
    order = {KNEE: 0, NONE: 1, UNDECIDED: 2}
    if not answers:
        return Knee(UNDECIDED, "at some point neither latency nor throughput is known well enough", 0.0), asks[0][0]
    return min(answers, key=lambda answer: order[answer[0].state])


def _after(shown: Sequence[int], at: int | None, sights: Sequence[Seen | None]) -> ThroughputChange | None:
    """From the knee to the last point of its curve."""
    if at is None or (one := sights[at]) is None or (two := sights[shown[-1]]) is None:
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


def growths_of(
    axis: Axis, sights: Sequence[Seen | None], knees: Sequence[CurveKnee], main: str,
    levels: Mapping[str, float | None],
) -> Iterator[Growth]:  # fmt: skip
    """From each point to the next of its curve: what grows, of the sweep's main metric and of a token gap.

    Points without numbers to order them (precisions, engines) are held side by side as the scenario lists them.
    """
    at_knee = {knee.series: knee.point for knee in knees}
    for name, members in axis.series if axis.key else (("", tuple(range(len(sights)))),):
        shown = [sight for at in members if (sight := sights[at])]
        for one, two in pairwise(shown):
            turned = two if axis.key == GROWS_WITH else one  # what a batch brought up to there, a load from there on
            for metric in dict.fromkeys((main, "itl")):
                before, after = (
                    Side(sight.point, sight.figures[metric], getattr(sight.frames, EVENT_OF[metric]))
                    for sight in (one, two)
                )
                yield growth_between(
                    before, after, metric, levels[metric], name, at_knee=turned.point.index == at_knee.get(name)
                )
