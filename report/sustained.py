"""Was there a steady state, what did each method say, and what would the first seconds alone have told?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.numbers import DASH, significant
from gapmeter.report.figure import Row, Table, Value, written
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import el, group

_STATES = {"steady": "steady", "unsteady": "no steady state", "unknown": "too short to tell"}
_RATIOS = {
    "ttft": "TTFT", "tpot": "TPOT", "output_tokens_per_s": "output tokens a second",
    "machine_time": "a fixed piece of CPU work: its time",
}  # fmt: skip
_LEAD = (
    "A ratio of 1 means that the first seconds were like the rest. For times above 1 they were slower, for tokens a "
    "second below 1."
)


def sustained_section(run: Run) -> Section | None:
    """The methods' answers and the first seconds over the rest; None for an older summary or a changing load."""
    steady, drift = run.summary.get("steady"), run.summary.get("drift")
    if not steady or not drift or steady["state"] == "not_applicable":
        return None
    word = _STATES[steady["state"]]
    usable = "may stand for capacity" if steady["valid_for_capacity"] else "must not be taken for capacity"
    methods = Table("Steady state", ["method", "what it found"], method_rows(steady["methods"]), words=2)
    headers = ["of the run", f"first {drift['first_s']:.0f} s over the rest", "95 % interval"]
    ratios = Table("First seconds over the rest", headers, ratio_rows(drift))
    parts = [
        el("div", el("h3", "Was there a steady state?"), written(methods, run.provenance)),
        el("div", el("h3", "First seconds against sustained"), written(ratios, run.provenance),
           el("p", _LEAD, class_="lead")),
    ]  # fmt: skip
    lead = f"{word[:1].upper()}{word[1:]}: these figures {usable}."
    return Section("steady", "Sustained", group([el("div", *parts, class_="grid2")]), lead, "sustained")


def method_rows(methods: Mapping[str, Any]) -> list[Row]:
    """MSER-5, PELT and the queue's slope in words; a method that was not asked says so."""
    told = (("MSER-5", _mser(methods["mser5"])), ("PELT", _pelt(methods["pelt"])),
            ("queue's slope", _slope(methods["queue_slope"])))  # fmt: skip
    return [[Value(name, None, {"class_": "name"}), text] for name, text in told]


def ratio_rows(drift: Mapping[str, Any]) -> list[Row]:
    """A row a ratio; a dash where the run is too short for it."""
    rows: list[Row] = []
    for key, name in _RATIOS.items():
        found = drift[key]
        if found is None:
            rows.append([name, DASH, "not estimable"])
        else:
            low, high = found["ratio_ci"]
            value = Value(significant(found["ratio"]), repr(found["ratio"]))
            rows.append([name, value, f"{significant(low)} .. {significant(high)}"])
    return rows


def _mser(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not asked"
    if found["state"] == "unsteady":
        return f"{found['metric'].upper()} kept changing"
    if not found["excluded_requests"]:
        return "no start that differs"
    done = "left out" if found["applied"] else "kept, as the scenario fixes its warm-up"
    times = f"{found['metric'].upper()} {found['ratio']:.2g} times the rest"
    return f"the first {found['excluded_requests']} requests differ ({times}); {done}"


def _pelt(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not asked"
    certain = [change for change in found["changes"] if change["certain"]]
    seen = [f"{c['metric'].upper()} {c['ratio']:.2g} times its level from request {c['request']} on" for c in certain]
    return f"{'; '.join(seen) or 'no certain change of level'} ({'agrees' if found['agrees'] else 'disagrees'})"


def _slope(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not asked: the loop is closed"
    low, high = found["per_s_ci"]
    grew = "grew" if found["grows"] else "did not grow beyond what a steady queue does"
    interval = f"95 % interval {low:.2g} .. {high:.2g}"
    return f"requests in flight {grew}: {found['per_s']:+.2g} a second ({interval})"
