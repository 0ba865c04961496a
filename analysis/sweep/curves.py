"""Along the curves of a sweep: where each has its knee, what grows from point to point, and both in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd

from gapmeter.analysis.judge import verdict
from gapmeter.analysis.requests.metrics import request_values_ns, succeeded
from gapmeter.analysis.stats.means import Level, level_of, level_of_interval
from gapmeter.analysis.sweep.compared import figure_key, figure_words
from gapmeter.analysis.sweep.growth import Side, describe_growth, is_sure
from gapmeter.analysis.sweep.knee import KNEE, NONE, UNDECIDED, Knee, find_knee, latency_turn, throughput_turn
from gapmeter.analysis.sweep.read import Frames
from gapmeter.report.sweep.axis import Axis, is_load, place

EVENT_OF = {"ttft": "first", "e2e": "last", "itl": "gaps"}
GROWS_WITH = "server.max_batch"  # more of it may bring more throughput, as more load does
_TOKENS = "throughput"


@dataclass(frozen=True, slots=True)
class Seen:
    """A point that curves may run through: ``figures`` has what is compared by metric, and ``throughput``."""

    point: Mapping[str, Any]
    figures: Mapping[str, Level | None]
    frames: Frames


def seen(point: Mapping[str, Any], frames: Frames, levels: Mapping[str, float | None]) -> Seen | None:
    """None for a point that is not a valid measurement: no curve runs through it."""
    if not point["metrics"] or point["verdict"] == verdict.INVALID:
        return None
    found = {metric: _compared(point["metrics"][metric], frames, metric, levels[metric]) for metric in EVENT_OF}
    return Seen(point, found | {_TOKENS: rate_level(frames)}, frames)


def mean_level(frames: Frames, metric: str) -> Level | None:
    """A metric's mean in ms over the successes of a point; None where it cannot be known, or is no figure a request."""
    if metric == "itl":
        if not len(frames.gaps):
            return None
        return level_of(frames.gaps["gap_ns"].to_numpy(float) / 1e6)
    values = request_values_ns(frames.measured, metric) / 1e6
    good = succeeded(frames.measured) & ~pd.isna(values)
    return level_of(values[good])


def rate_level(frames: Frames) -> Level | None:
    """Output tokens a second over a point's blocks of time."""
    return None if frames.rates is None else level_of(frames.rates)


def knees_of(
    axis: Axis, points: Sequence[Mapping[str, Any]], sights: Sequence[Seen | None], main: str,
    levels: Mapping[str, float | None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The knee of each curve along a load or a batch size: where, by which figure, how sure, or why there is none."""
    if axis.key is None or not (is_load(axis.key) or axis.key == GROWS_WITH):
        return []
    found = []
    for name, members in axis.series:
        shown = [at for at in members if sights[at] is not None]
        load = [place(points[at], axis.key) for at in shown]
        knee, by = _knee([sight for at in shown if (sight := sights[at])], load, axis.key, main)
        ends = None if knee.low is None or knee.high is None else [shown[knee.low], shown[knee.high]]
        at = None if knee.at is None else shown[knee.at]
        found.append({
            "series": name, "state": knee.state, "point": at, "label": None if at is None else points[at]["label"],
            "range": ends, "range_labels": ends and [points[end]["label"] for end in ends],
            "by": by if by == _TOKENS else figure_words(by, levels[by]), "bend": knee.bend, "why": knee.why,
            "certainty": knee.certainty, "after": _after(shown, at, sights),
            "or_at": [points[k]["label"] for k in _hidden(members, shown, at, both=by != _TOKENS)],
        })  # fmt: skip
    return found


def growths_of(
    axis: Axis, sights: Sequence[Seen | None], knees: Sequence[Mapping[str, Any]], main: str,
    levels: Mapping[str, float | None], device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """From each point to the next of its curve: what grows, of the sweep's main metric and of a token gap.

    Points without numbers to order them (precisions, engines) are held side by side as the scenario lists them.
    """
    at_knee = {knee["series"]: knee["point"] for knee in knees}
    told = []
    for name, members in axis.series if axis.key else (("", tuple(range(len(sights)))),):
        shown = [at for at in members if sights[at] is not None]
        for one, two in pairwise(shown):
            turned_at = two if axis.key == GROWS_WITH else one  # what a batch brought up to there, a load from there on
            for metric in dict.fromkeys((main, "itl")):
                before, after = _side(sights[one], metric), _side(sights[two], metric)
                told.append(
                    {"series": name, "from_point": one, "to_point": two, "at_knee": turned_at == at_knee.get(name)}
                    | describe_growth(before, after, metric, levels[metric], device)
                )
    return told


def headline(
    points: Sequence[Mapping[str, Any]], knees: Sequence[Mapping[str, Any]], growths: Sequence[Mapping[str, Any]],
    main: str,
) -> list[str]:  # fmt: skip
    """What a person reads first: a sentence a curve, and how many points have no figures."""
    told = [line for knee in knees for line in _knee_lines(knee, growths)]
    if growths and not any(knee["state"] == KNEE for knee in knees):
        told += _largest_changes(growths, main)
    told += _left_out(points)
    return told


def _compared(told: Mapping[str, Any], frames: Frames, metric: str, level: float | None) -> Level | None:
    if level is None:
        return mean_level(frames, metric)
    key = figure_key(level)
    ends = told[f"{key}_ci_ms"]
    known = ends is not None and None not in ends and ends[0] > 0
    return level_of_interval(told[f"{key}_ms"], *ends) if known else None


def _knee(sights: Sequence[Seen], load: Sequence[float], key: str, main: str) -> tuple[Knee, str]:
    """Users wait for their answers, so throughput shows the limit of a closed loop; an open one's is asked of it."""
    rising = key == GROWS_WITH
    closed = all(sight.point["loop"] == "closed" for sight in sights)
    asks = [(_TOKENS, throughput_turn)] if rising else [(main, latency_turn), (_TOKENS, throughput_turn)]
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


def _after(shown: Sequence[int], at: int | None, sights: Sequence[Seen | None]) -> dict[str, Any] | None:
    """How throughput changes from the knee to the last point of its curve, as a ratio with its 95 % interval."""
    if at is None or (one := sights[at]) is None or (two := sights[shown[-1]]) is None:
        return None
    before, after = one.figures[_TOKENS], two.figures[_TOKENS]
    if before is None or after is None:
        return None
    ratio = after.over(before)
    return {"to": two.point["label"], "ratio": ratio.value, "ratio_ci": list(ratio.ends)}


def _hidden(members: Sequence[int], shown: Sequence[int], at: int | None, *, both: bool) -> list[int]:
    """Points that have no valid figures and lie where the knee may be as well: next to it, before (or beyond) it."""
    if at is None:
        return []
    here = shown.index(at)
    low = members.index(shown[here - 1]) if here else -1
    high = members.index(shown[here + 1]) if both and here + 1 < len(shown) else members.index(at)
    return [k for k in members[low + 1 : high] if k not in shown]


def _side(sight: Seen | None, metric: str) -> Side:
    if sight is None:
        raise ValueError("a curve ran through a point that is not valid")
    return Side(sight.point["label"], sight.figures[metric], getattr(sight.frames, EVENT_OF[metric]))


def _knee_lines(knee: Mapping[str, Any], growths: Sequence[Mapping[str, Any]]) -> list[str]:
    lead = f"{knee['series']}: " if knee["series"] else ""
    if knee["state"] == UNDECIDED:
        return [
            f"{lead}Whether there is a knee is not decided: {knee['why']}{_by(knee)}. Longer points or repeats tell."
        ]
    if knee["state"] == NONE:
        return [f"{lead}No knee among these points: {knee['why']}{_by(knee)}."]
    first, last = knee["range_labels"]
    where = "" if first == last else f" (between {first} and {last})"
    if knee["or_at"]:
        where += f", or at {' or '.join(knee['or_at'])}, of which there are no valid figures"
    lines = [f"{lead}The knee is at {knee['label']}{where}: {_turned(knee)}."]
    beyond = [g for g in growths if g["at_knee"] and g["series"] == knee["series"]]
    return lines + [f"{lead}{g['sentence']}." for g in beyond if is_sure(g) or g is beyond[0]]


def _turned(knee: Mapping[str, Any]) -> str:
    if knee["by"] != _TOKENS:
        return f"{knee['by']} begins to climb there"
    after = knee["after"]
    if after is None:
        return str(knee["why"])
    low, high = (_percent(end) for end in after["ratio_ci"])
    # What still grows, but by less than the rule asks for, has not stopped.
    turned = "beyond it throughput grows little" if after["ratio_ci"][0] > 1 else "throughput stops to grow there"
    return f"{turned} (to {after['to']} {_percent(after['ratio'])}, 95 % interval {low} to {high})"


def _by(knee: Mapping[str, Any]) -> str:
    return "" if knee["by"] == _TOKENS or not knee["certainty"] else f" (by {knee['by']})"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'−' if change < 0 else '+'}{abs(change):.1f} %"


def _largest_changes(growths: Sequence[Mapping[str, Any]], main: str) -> list[str]:
    """The largest difference between neighbors that is beyond its interval, by metric."""
    told = []
    for metric in dict.fromkeys((main, "itl")):
        sure = [g for g in growths if g["metric"] == metric and is_sure(g)]
        if sure:
            told.append(f"{max(sure, key=lambda g: abs(g['grows_ms']))['sentence']}.")
    return told or ["Between no two neighboring points does the difference go beyond its interval."]


def _left_out(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Points that no curve runs through, and why."""
    told = []
    invalid = [point["label"] for point in points if point["metrics"] and point["verdict"] == verdict.INVALID]
    if invalid:
        told.append(f"Left out of curves and comparisons, since not valid as a measurement: {', '.join(invalid)}.")
    lost = [point["label"] for point in points if not point["metrics"]]
    if lost:
        told.append(f"No figures for {len(lost)} of {len(points)} points: {', '.join(lost)}.")
    return told
