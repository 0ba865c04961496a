"""Each stage's own distribution, one at a time."""

from __future__ import annotations

from gapmeter.analysis.requests.figures import EVENTS, ledgers_of, stage_values_ns
from gapmeter.analysis.requests.metrics import measured_requests
from gapmeter.analysis.stats.series import Series
from gapmeter.report import curves, marks
from gapmeter.report.figure import chooser, panel, switch
from gapmeter.report.run import Run
from gapmeter.report.svg import NOTHING, Fragment, el, group

_PARTS = {"first_token": "stages_to_first_token", "last_token": "stages"}
_UNTIL = {"first_token": "to the first token", "last_token": "to the last token"}
_POINTS = 90
_LEAD = "Percentiles of single stages do not add up; the stacks above do. Stages that took no time are left out."


def stage_curves(run: Run) -> Fragment:
    """A list of stages to choose from, and the curve of the one chosen, to either event."""
    drawn = {event: _of_event(run, event) for event in EVENTS if run.summary[_PARTS[event]]}
    names = list(dict.fromkeys(name for found in drawn.values() for name in found))
    if not names:
        return NOTHING
    told = run.summary["tail"]["stage"]
    first = told if told in names else names[0]
    event = "first_token" if run.summary["tail"]["metric"] == "ttft" else "last_token"
    switches = el(
        "div",
        chooser("stage-curve", "stage", [(n, marks.words(n)) for n in names], first),
        switch("stage-until", "time", [(e, _UNTIL[e]) for e in drawn], event),
        class_="switches",
    )
    none = el("p", "It took no time here, or the sample supports no percentile.", class_="empty")
    panels = [
        panel(found.get(name, none), shown=(name, e) == (first, event), **{"stage-curve": name, "stage-until": e})
        for e, found in drawn.items()
        for name in names
    ]
    return group([el("h3", "One stage by itself"), el("p", _LEAD, class_="lead"), switches, *panels])


def _of_event(run: Run, event: str) -> dict[str, Fragment]:
    rows = ledgers_of(run.ledger, measured_requests(run.requests), event)
    part, out = _PARTS[event], {}
    for name, values in stage_values_ns(rows).items():
        if not len(values) or not values.any():
            continue
        named = curves.named_of(run.summary[part][name], f"{part}.{name}")
        curve = curves.curve_of(marks.words(name), Series(values), (), named, points=_POINTS)
        if curve is not None:
            key = f"stage-{name}-{event.replace('_', '-')}"
            caption = f"{marks.words(name)} {_UNTIL[event]}: {curves.caption(curve)}"
            out[name] = curves.with_table(run, curve, key, caption)
    return out
