"""Cost, efficiency and value of a run: three figures of three kinds, never one.

Cost: dollars of a request at the SLA. Efficiency: joules of a request, tokens per watt. Value: requests within their
own limits that a dollar buys, which is cost and quality together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from gapmeter.analysis.cost.cost import describe_cost, describe_tokens, offered_rate, searched_rate
from gapmeter.analysis.cost.energy import UNMEASURED, describe_energy
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.cost import Cost, Economy, NoCost, NoEnergy, Value
from gapmeter.analysis.results.device import EnergyWindow
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import RunFigures, RunResult
from gapmeter.analysis.results.trust import Steady


def describe_economics(
    figures: RunFigures, steady: Steady, manifest: Manifest, measured: pd.DataFrame, energy: EnergyWindow | None
) -> Economy:
    """Of a run; ``measured``: its requests."""
    tokens = describe_tokens(measured)
    rate = offered_rate(figures.verdict, figures.slo, figures.load, figures.counts.measured, steady)
    cost = describe_cost(rate, tokens, manifest)
    return Economy(
        tokens_per_request=tokens,
        cost=cost,
        energy=describe_energy(energy, figures.throughput),
        value=describe_value(cost, figures.goodput.share_ci),
    )


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search for capacity: its rate, whether the SLOs held at it, and what its run found."""

    rate: float
    held: bool
    result: RunResult


def describe_search(
    low: float | None, high: float | None, manifest: Manifest, trials: Sequence[SearchTrial]
) -> Economy | None:
    """Of a search whose answer lies between ``low`` and ``high``; ``manifest``: that of one of its trials.

    Tokens of a request are those of the longest trial. Energy and goodput are those of the trial at the highest rate
    that held and lies within the answer, since both follow the load. None without trials.
    """
    if not trials:
        return None
    tokens = max(trials, key=lambda trial: trial.result.counts.measured).result.tokens_per_request
    cost = describe_cost(searched_rate(low, high), tokens, manifest)
    held = [trial for trial in trials if trial.held and (high is None or trial.rate <= high)]
    best = max(held, key=lambda trial: trial.rate).result if held else None
    return Economy(
        tokens_per_request=tokens,
        cost=cost,
        energy=best.energy if best else NoEnergy(status="unmeasured", reason=UNMEASURED),
        value=describe_value(cost, best.goodput.share_ci if best else None),
    )


def describe_value(cost: Cost | NoCost, goodput_ci: Ends | None) -> Value:
    """Requests within their limits for a dollar, from the goodput share's lower end."""
    if isinstance(cost, NoCost):
        return Value(good_requests_per_usd=None, reason="there is no cost at the SLA")
    least = goodput_ci[0] if goodput_ci else None
    if least is None:
        return Value(good_requests_per_usd=None, reason="the share of requests within their limits is unmeasured")
    return Value(good_requests_per_usd=least / cost.per_request_usd, reason=None)
