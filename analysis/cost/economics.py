"""Cost, efficiency and value of a run: three figures of three kinds, never one.

Cost: dollars of a request at the SLA. Efficiency: joules of a request, tokens per watt. Value: requests within their
own limits that a dollar buys, which is cost and quality together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gapmeter.analysis.cost.cost import describe_cost, describe_tokens
from gapmeter.analysis.cost.energy import Energy, describe_energy
from gapmeter.analysis.judge.evidence import RunWarning
from gapmeter.analysis.numbers import large, share


def describe_economics(
    summary: Mapping[str, Any], manifest: Mapping[str, Any], measured: pd.DataFrame, energy: Energy | None
) -> dict[str, Any]:
    """The summary's parts ``tokens_per_request``, ``cost``, ``energy`` and ``value``; ``measured``: its requests."""
    tokens = {"tokens_per_request": describe_tokens(measured)}
    cost = describe_cost({**summary, **tokens}, manifest)
    return {
        **tokens,
        "cost": cost,
        "energy": describe_energy(summary, energy),
        "value": describe_value(cost, summary.get("goodput")),
    }


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search for capacity: its rate, whether the SLOs held at it, and the summary of its run."""

    rate: float
    held: bool
    summary: Mapping[str, Any]


def describe_search(
    summary: Mapping[str, Any], manifest: Mapping[str, Any], trials: Sequence[SearchTrial]
) -> dict[str, Any]:
    """The same parts for a search's summary, which has ``capacity``; ``manifest``: that of one of its trials.

    Tokens of a request are those of the longest trial. Energy and goodput are those of the trial at the highest rate
    that held and lies within the answer, since both follow the load.
    """
    if not trials:
        return {}
    longest = max(trials, key=lambda trial: trial.summary["counts"]["measured"])
    tokens = {"tokens_per_request": longest.summary.get("tokens_per_request")}
    cost = describe_cost({**summary, **tokens}, manifest)
    most = (summary["capacity"] or {}).get("high")
    held = [trial for trial in trials if trial.held and (most is None or trial.rate <= most)]
    best = max(held, key=lambda trial: trial.rate).summary if held else {}
    energy = best.get("energy") or describe_energy({}, None)
    return {**tokens, "cost": cost, "energy": energy, "value": describe_value(cost, best.get("goodput"))}


def describe_value(cost: Mapping[str, Any], goodput: Mapping[str, Any] | None) -> dict[str, Any]:
    """``summary["value"]``: requests within their limits for a dollar, from the goodput share's lower end."""
    bounds = (goodput or {}).get("share_ci") or [None, None]
    if cost["per_request_usd"] is None:
        reason = "there is no cost at the SLA"
        return {"good_requests_per_usd": None, "reason": reason, "sentence": f"none: {reason}"}
    if bounds[0] is None:
        reason = "the share of requests within their limits is unmeasured"
        return {"good_requests_per_usd": None, "reason": reason, "sentence": f"none: {reason}"}
    worth = bounds[0] / cost["per_request_usd"]
    said = f"at least {large(worth)} requests within their own limits for a dollar ({share(bounds[0])} or more are)"
    return {"good_requests_per_usd": worth, "reason": None, "sentence": said}


def emulation_warning(manifest: Mapping[str, Any]) -> list[RunWarning]:
    """What a result must say whose precision its device only emulates."""
    told = (manifest.get("target") or {}).get("precision") or {}
    if not told.get("emulated"):
        return []
    text = f"emulated: {told['device']} has no native {told['precision']} arithmetic"
    cause = "its speed and cost say nothing of a device that has it"
    native = next(iter(told["supported"]), "float32")
    return [RunWarning("emulated", text, cause, f"--set server.precision={native}", ("ttft", "itl", "tpot", "e2e"))]
