"""The page's tables of what grows from point to point, one for each metric that is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.numbers import DASH, bounds, duration, share
from gapmeter.analysis.provenance import Provenance
from gapmeter.analysis.stages import owner_words
from gapmeter.analysis.sweep.compared import figure_words
from gapmeter.analysis.sweep.growth import SLOW_LEVEL, is_sure
from gapmeter.report import marks
from gapmeter.report.figure import Row, Table, written
from gapmeter.report.shell import Section
from gapmeter.report.svg import el, group

_KNEE = (
    "The knee is one of the measured points: where throughput stops to grow (doubling the load brings less than 15 % "
    "more), or where latency begins to climb (furthest below the line between the curve's ends: Kneedle, Satopää and "
    "others 2011). It is named only where 95 % of what the points might as well have been have one."
)


def growth_section(sweep: Mapping[str, Any], origin: Provenance, device: str) -> Section | None:
    """None where no two points lie on one curve."""
    metrics = list(dict.fromkeys(growth["metric"] for growth in sweep["growth"]))
    if not metrics:
        return None
    of = {metric: [g for g in sweep["growth"] if g["metric"] == metric] for metric in metrics}
    parts = [part for growths in of.values() for part in _part(growths, origin, device)]
    knees = [el("p", f"{knee['series'] + ': ' if knee['series'] else ''}{_of_knee(knee)}") for knee in sweep["knees"]]
    lead = (
        "From each point to the next, and which stage makes up most of it. Intervals draw stretches of consecutive "
        "requests, since neighbors in a queue are alike. More than 100 %: the other stages together went the other way."
    )
    more = [*knees, el("p", _KNEE, class_="note")] if knees else []
    return Section("growth", "What grows", group([*parts, *more]), lead, "growth")


def _part(growths: Sequence[Mapping[str, Any]], origin: Provenance, device: str) -> list[Any]:
    first = growths[0]
    what, level = figure_words(first["metric"], first["percentile"]), first["percentile"]
    which = "the slowest requests (p98.5 and up)" if level is not None and level >= SLOW_LEVEL else "all requests"
    if first["metric"] == "itl":
        which = which.replace("requests", "token gaps")
    names = ["from → to", f"{what} grows by", "95 % interval", "largest stage", "owner", "its share", "95 % interval"]
    table = Table(f"What grows: {what}", names, [_row(growth, device) for growth in growths], words=1)
    return [el("h3", f"{what}; stages of the mean over {which}"), written(table, origin)]


def _row(growth: Mapping[str, Any], device: str) -> Row:
    ends, parts, sure = growth["grows_ci_ms"], growth["share_ci"], is_sure(growth)
    told = sure and growth["stage"]
    known = told and parts  # a share without an interval is not told
    owner = owner_words(growth["owner"], device) if told else DASH
    return [
        f"{growth['from']} → {growth['to']}{' (knee)' if growth['at_knee'] else ''}",
        duration(growth["grows_ms"]), bounds(*(ends or (None, None))),
        marks.words(growth["stage"]) if told else "not beyond its interval", owner,
        share(growth["share"]) if known else DASH, f"{share(parts[0])} .. {share(parts[1])}" if known else DASH,
    ]  # fmt: skip


def _of_knee(knee: Mapping[str, Any]) -> str:
    """How sure the answer is, and of what."""
    if knee["state"] == "undecided":
        return f"Knee: not decided ({share(knee['certainty'])} of draws have one): {knee['why']}."
    where = knee["label"] or "none"
    ends = knee["range_labels"]
    between = f", between {ends[0]} and {ends[1]}" if ends and ends[0] != ends[1] else ""
    return f"Knee: {where}{between}, by {knee['by']} ({share(knee['certainty'])} of draws): {knee['why']}."
