"""The answer in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.capacity import search
from gapmeter.analysis.numbers import count, rate, share, significant


def headline(found: Mapping[str, Any]) -> list[str]:
    """What the search found: the answer first, then what binds, what it takes, what is missing."""
    lines = [_answer(found)]
    if found["binding_slo"]:
        lines.append(_binding(found))
    if found["planning"]:
        lines.append(_fleet(found["planning"], found["replicas"]))
    return lines


def _answer(found: Mapping[str, Any]) -> str:
    ended = found["ended"]
    if ended == search.CLIENT:
        because = f" ({found['reason']})" if found["reason"] else ""
        return f"Capacity {_one_end(found)}: beyond that the load tester was the limit, not the server{because}."
    if ended == search.UNMEETABLE:
        return _unmeetable(found)
    if found["rate"]:
        return _interval(found)
    return f"Capacity {_one_end(found)} ({_why(found)})."


def _interval(found: Mapping[str, Any]) -> str:
    """Both ends are known; what is wider than was asked says so, and what would narrow it."""
    sure = f"{100 * found['confidence']:g} %"
    text = f"Capacity {rate(found['rate'])}, {sure} interval {_number(found['low'])} .. {_number(found['high'])}"
    ended = found["ended"]
    if ended == search.FOUND:
        return f"{text}."
    if ended != search.BUDGET:
        return f"{text}: {_why(found)}."
    more = significant(found["needs"]["seconds"] / 60, 2)
    return f"{text} (wider than the {share(found['within'])} asked; about {more} more minutes would narrow it)."


def _one_end(found: Mapping[str, Any]) -> str:
    """Only a lower end, or only an upper one, or none: what was seen beside it, which proves nothing yet."""
    low, high, seen = found["low"], found["high"], found["held_as_far_as_seen"]
    ends = [f"at least {rate(low)}"] * bool(low) + [f"below {rate(high)}, where the SLOs surely fail"] * bool(high)
    if seen and (not low or seen["rate"] > low):
        over = f"{count(seen['over'])} of {count(seen['count'])} beyond the limit"
        ends.append(f"it held as far as seen at {rate(seen['rate'])} ({over}), which is too few to be sure")
    return "; ".join(ends) or "not found: no trial has decided anything"


def _why(found: Mapping[str, Any]) -> str:
    reason = f": {found['reason']}" if found["reason"] else ""
    return {
        search.FOUND: "found",
        search.BUDGET: "the budget ended",
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
    part = found["binding_share"]
    # A stage can grow by more than the whole difference, where another shrank.
    much = f"{share(part)} of what slow ones wait" if part <= 1 else "all that slow ones wait"
    return (
        f"{text}; at {rate(found['binding_rate'])} {much} beyond typical ones is {found['binding_stage']} "
        f"({found['binding_owner']})."
    )


def _fleet(plan: Mapping[str, Any], replicas: int) -> str:
    spare = f", and {plan['spare']} spare" if plan["spare"] else ""
    return (
        f"For {rate(plan['target_rps'])}: {replicas} servers ({plan['needed']} at {rate(plan['planned_rps'])} each, "
        f"the lower bound less {share(plan['headroom'])}{spare})."
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else significant(value)
