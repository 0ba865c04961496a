"""The answer in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.capacity import search
from analysis.report.numbers import count, rate, share, significant


def headline(found: Mapping[str, Any]) -> list[str]:
    """What the search found: the answer first, then what binds, what it takes, what is missing."""
    lines = [_answer(found)]
    if found["binding_slo"]:
        lines.append(_binding(found))
    if found["planning"]:
        lines.append(_fleet(found["planning"], found["replicas"]))
    if found["needs"]:
        needs = found["needs"]
        lines.append(
            f"For ends within {share(found['within'])} it needs about {count(needs['requests'])} more requests "
            f"({significant(needs['seconds'] / 60, 2)} min): --budget {_minutes(found['seconds'] + needs['seconds'])}m."
        )
    return lines


def _answer(found: Mapping[str, Any]) -> str:
    sure = f"{100 * found['confidence']:g} %"
    interval = f"{sure} interval {_number(found['low'])} .. {_number(found['high'])}" if found["rate"] else ""
    ended = found["ended"]
    if ended == search.CLIENT:
        what = f"holds every SLO at {rate(found['low'])}, at least" if found["low"] else "is not known"
        return f"Capacity {what}: beyond that the load tester was the limit, not the server ({found['reason']})."
    if ended == search.UNMEETABLE:
        return _unmeetable(found)
    if found["rate"]:
        text = f"Capacity {rate(found['rate'])}, {interval}."
        return text if ended == search.FOUND else f"{text[:-1]}: {_why(found)}."
    ends = [f"it held at {rate(found['low'])}"] * bool(found["low"])
    ends += [f"it did not at {rate(found['high'])}"] * bool(found["high"])
    return f"Capacity not found ({_why(found)}); {' and '.join(ends) or 'no trial has decided anything'}."


def _why(found: Mapping[str, Any]) -> str:
    reason = f": {found['reason']}" if found["reason"] else ""
    return {
        search.FOUND: "found",
        search.BUDGET: "the budget ended before the interval was narrow enough",
        search.NOT_MEASURED: f"a trial was not valid as a measurement twice{reason}",
        search.DIED: f"the server died{reason}",
        search.INTERRUPTED: "interrupted; this is what is known",
    }[found["ended"]]


def _unmeetable(found: Mapping[str, Any]) -> str:
    seen = found["best_seen"]
    if seen is None:
        return "No rate holds every SLO."
    over = f"{count(seen['over'])} of {count(seen['count'])} values beyond its limit"
    best = f" {seen['sentence']}." if seen["sentence"] else ""
    return (
        f"No rate holds every SLO: even at {rate(seen['rate'])}, the lowest tried, {seen['slo']} fails ({over}).{best}"
    )


def _binding(found: Mapping[str, Any]) -> str:
    text = f"What binds: {found['binding_slo']}"
    if not found["binding_stage"]:
        return f"{text}; which stage is unmeasured."
    return (
        f"{text}; at {rate(found['binding_rate'])} {share(found['binding_share'])} of what slow ones wait beyond "
        f"typical ones is {found['binding_stage']} ({found['binding_owner']})."
    )


def _fleet(plan: Mapping[str, Any], replicas: int) -> str:
    spare = f", and {plan['spare']} spare" if plan["spare"] else ""
    return (
        f"For {rate(plan['target_rps'])}: {replicas} servers ({plan['needed']} at {rate(plan['planned_rps'])} each, "
        f"the lower bound less {share(plan['headroom'])}{spare})."
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else significant(value)


def _minutes(seconds: float) -> int:
    return max(1, round(seconds / 60 + 0.5))
