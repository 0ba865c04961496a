"""What a capacity search found, as one plain dictionary: ``summary.json`` of its folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.capacity import search
from gapmeter.analysis.capacity.planning import plan_fleet
from gapmeter.analysis.capacity.posterior import Posterior, posterior
from gapmeter.analysis.capacity.read import Measured
from gapmeter.analysis.capacity.search import Goal
from gapmeter.analysis.capacity.trial import FAILS, HOLDS, INVALID, Trial
from gapmeter.analysis.jsonable import SCHEMA_VERSION, json_safe
from gapmeter.analysis.stages import owner_words
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.report.capacity.sentences import headline

EXIT_CODES = {
    search.FOUND: 0, search.BUDGET: 98, search.CLIENT: 98, search.NOT_MEASURED: 98, search.UNMEETABLE: 99,
    search.INTERRUPTED: 105, search.DIED: 106,
}  # fmt: skip


def build_summary(goal: Goal, measured: Sequence[Measured], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a search that has ended as its manifest says. ``measured``: every trial, in order."""
    asked, ended = manifest["capacity"], manifest["capacity"]["ended"]
    trials = [each.trial for each in measured]
    told = [trial for trial in trials if trial.verdict != INVALID]
    known = posterior(told) if told else None
    found = _estimate(goal, told, known, ended)
    binding = _binding(goal, measured, found)
    part: dict[str, Any] = {
        **found,
        "held_as_far_as_seen": None if found["rate"] else _held_as_far(goal, told, found["high"]),
        "confidence": goal.confidence,
        "within": goal.within,
        "ended": ended,
        **binding,
        "replicas": None,
        "planning": None,
        "target_rps": asked["target_rps"],
        "requests": sum(trial.outcome.requests for trial in trials),
        "seconds": sum(trial.outcome.seconds for trial in trials),
        "needs": _needs(goal, trials, found) if ended == search.BUDGET else None,
        "best_seen": _best_seen(goal, measured) if ended == search.UNMEETABLE else None,
        "reason": _reason(trials, ended),
        "trials": [_trial(goal, at + 1, each) for at, each in enumerate(measured)],
        "curve": [_point(each) for each in sorted(measured, key=lambda each: each.trial.rate)
                  if each.trial.verdict != INVALID],
        "posterior": None if known is None else _density(known),
    }  # fmt: skip
    if asked["target_rps"] and found["low"] and ended != search.UNMEETABLE:
        fleet = plan_fleet(found["low"], asked["target_rps"], asked["headroom"], asked["spare"])
        part |= {"replicas": fleet.replicas, "planning": dataclasses.asdict(fleet)}
    part["headline"] = headline(part)
    safe: dict[str, Any] = json_safe(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "capacity",
            "name": manifest["scenario"]["name"],
            "exit_code": EXIT_CODES[ended],
            "headline": part["headline"],
            "slo": [{"text": promise.text, "metric": promise.metric} for promise in goal.promises],
            "capacity": part,
        }
    )
    return safe


def _reason(trials: Sequence[Trial], ended: str) -> str | None:
    """What the last trial ended of, or what showed that the load tester was the limit."""
    told = [t for t in trials if t.outcome.client_limit] if ended == search.CLIENT else list(trials[-1:])
    return told[-1].outcome.died or told[-1].outcome.invalid or None if told else None


def _estimate(goal: Goal, told: Sequence[Trial], known: Posterior | None, ended: str) -> dict[str, Any]:
    """Rate and interval. Without a rate that held, or without one that failed, only one end is known."""
    held = [trial.rate for trial in told if trial.verdict == HOLDS]
    failed = [trial.rate for trial in told if trial.verdict == FAILS]
    if known is None or not held or not failed or ended in (search.UNMEETABLE, search.CLIENT):
        low = max((rate for rate in held if not failed or rate < min(failed)), default=None)
        high = min(failed, default=None)
        return {"rate": None, "low": low, "high": high, "spread": None}
    low, high = known.interval(goal.confidence)
    return {"rate": known.quantile(0.5), "low": low, "high": high, "spread": search.spread(known, goal.confidence)}


def _binding(goal: Goal, measured: Sequence[Measured], found: Mapping[str, Any]) -> dict[str, Any]:
    """The promise that breaks first, and what slow requests wait for where it does: just above the capacity."""
    edge = found["rate"] or found["high"] or 0.0
    above = sorted(
        (m for m in measured if m.trial.verdict == FAILS and m.trial.rate >= edge), key=lambda m: m.trial.rate
    )
    if not above:
        above = sorted((m for m in measured if m.trial.verdict == FAILS), key=lambda m: -m.trial.rate)
    none: dict[str, Any] = {
        "binding_slo": None,
        "binding_stage": None,
        "binding_owner": None,
        "binding_share": None,
        "binding_rate": None,
    }
    if not above:
        return none
    promise = goal.promises[above[0].trial.finding.promise]
    none["binding_slo"] = promise.text
    for each in above:
        tail = (each.summary or {}).get("tail") or {}
        anatomy = tail.get(promise.metric) if promise.metric in tail else tail
        if anatomy and anatomy.get("stage"):
            owner = owner_words(anatomy["owner"], _device(each))
            return none | {"binding_stage": anatomy["stage"], "binding_owner": owner,
                           "binding_share": anatomy["share"], "binding_rate": each.trial.rate}  # fmt: skip
    return none


def _device(each: Measured) -> str:
    """What computed the forwards of a trial."""
    return str(((each.summary or {}).get("compute") or {}).get("device", "GPU"))


def _trial(goal: Goal, number: int, each: Measured) -> dict[str, Any]:
    trial, outcome = each.trial, each.trial.outcome
    finding = trial.finding
    slos = [
        {"text": promise.text, "over": count.over, "count": count.count, "n_eff": count.n_eff, "allowed": promise.share}
        for promise, count in zip(goal.promises, outcome.counts, strict=True)
    ]
    return {
        "number": number,
        "rate": trial.rate,
        "verdict": trial.verdict,
        "confidence": None if trial.verdict == INVALID else finding.confidence,
        "leaning": None if trial.verdict == INVALID else finding.leaning,
        "slo": goal.promises[finding.promise].text,
        "slos": slos,
        "requests": outcome.requests,
        "measured": outcome.measured,
        "seconds": outcome.seconds,
        "reason": outcome.died or outcome.invalid or None,
        "folder": outcome.name or None,
    }


def _point(each: Measured) -> dict[str, Any]:
    """Goodput at one rate; its interval is that of the share of good requests, at the rate asked for."""
    outcome = each.trial.outcome
    share = outcome.good / outcome.measured if outcome.measured else None
    ends = share_bounds((share or 0.0) * outcome.good_n_eff, outcome.good_n_eff)
    rate = each.trial.rate
    return {
        "rate": rate,
        "good_share": share,
        "good_share_ci": list(ends) if share is not None else None,
        "goodput_per_s": None if share is None else share * rate,
        "goodput_ci": [end * rate for end in ends] if share is not None else None,
        "verdict": each.trial.verdict,
        "n": outcome.measured,
    }


def _density(known: Posterior) -> dict[str, Any]:
    """The posterior: rates at its steps, and the probability between each two of them."""
    return {"rates": [math.exp(edge) for edge in known.edges], "masses": list(known.masses)}


def _needs(goal: Goal, trials: Sequence[Trial], found: Mapping[str, Any]) -> dict[str, Any]:
    """About how much more it takes; None for what cannot be told without an interval.

    The width of an interval falls with the square root of what is spent on it.
    """
    spent = sum(trial.outcome.requests for trial in trials)
    seconds = sum(trial.outcome.seconds for trial in trials)
    if not found["spread"]:
        return {"requests": None, "seconds": None, "budget_s": None}
    factor = max((found["spread"] / goal.within) ** 2 - 1, 0.25)
    return {"requests": math.ceil(spent * factor), "seconds": seconds * factor, "budget_s": seconds * (1 + factor)}


def _held_as_far(goal: Goal, told: Sequence[Trial], high: float | None) -> dict[str, Any] | None:
    """The highest rate below ``high`` at which what was seen leans to holding, be it too little to be sure."""
    leaning = [t for t in told if t.finding.leaning == HOLDS and (high is None or t.rate < high)]
    if not leaning:
        return None
    at = max(leaning, key=lambda trial: (trial.rate, trial.outcome.measured))
    number = at.finding.promise
    count = at.outcome.counts[number]
    return {"rate": at.rate, "slo": goal.promises[number].text, "over": count.over, "count": count.count}


def _best_seen(goal: Goal, measured: Sequence[Measured]) -> dict[str, Any] | None:
    """At the lowest rate tried: what the promise that fails was measured to be."""
    lowest = min((m for m in measured if m.trial.verdict != INVALID), key=lambda m: m.trial.rate, default=None)
    if lowest is None:
        return None
    at = lowest.trial.finding.promise
    count = lowest.trial.outcome.counts[at]
    row = (lowest.summary or {}).get("slo", [{}] * (at + 1))[at]
    return {
        "rate": lowest.trial.rate, "slo": goal.promises[at].text, "over": count.over, "count": count.count,
        "share_over": count.over / count.count if count.count else None, "sentence": row.get("sentence"),
    }  # fmt: skip
