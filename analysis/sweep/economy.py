"""Cost, energy and value of a sweep's point, of all its repeats together."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gapmeter.analysis.cost import describe_cost, describe_tokens, describe_value, offered_rate
from gapmeter.analysis.results.cost import AnyEnergy, Energy
from gapmeter.analysis.results.run import SloAnswer, Verdict
from gapmeter.analysis.sweep.read import MeasuredRun
from gapmeter.analysis.sweep.result import PointEconomy, PointEnergy


def describe_economy(
    verdict: Verdict, answers: Sequence[SloAnswer], runs: Sequence[MeasuredRun], measured: pd.DataFrame
) -> PointEconomy:
    """``verdict`` and ``answers`` of the point; ``measured``: the requests of all ``runs`` that count."""
    results, manifest = [run.result for run in runs], runs[0].manifest
    # Repeats play one trace of arrivals again and again: they tell no more of its rate than one of them.
    window_s = sum(each.load.window_s for each in results) / len(runs)
    load = results[0].load.model_copy(update={"window_s": window_s})
    unsteady = next((each.steady for each in results if each.steady.state == "unsteady"), None)
    rate = offered_rate(verdict, answers, load, len(measured) // len(runs), unsteady)
    cost = describe_cost(rate, describe_tokens(measured), manifest)
    good = [ends[0] for each in results if (ends := each.goodput.share_ci) and ends[0] is not None]
    precision = manifest.target.precision
    return PointEconomy(
        precision=str(manifest.scenario["server"]["precision"]),
        emulated=precision is not None and precision.emulated,
        cost=cost,
        energy=_energy([each.energy for each in results]),
        value=describe_value(cost, (min(good), 1.0) if good else None),
    )


def _energy(parts: Sequence[AnyEnergy]) -> PointEnergy:
    """Joules of all repeats over their requests and tokens; None unless every repeat measured them."""
    joules = requests = tokens = 0.0
    for part in parts:
        if not isinstance(part, Energy) or part.per_request_j is None or not part.tokens_per_watt:
            return PointEnergy(per_request_j=None, tokens_per_watt=None)
        joules += part.joules
        requests += part.joules / part.per_request_j
        tokens += part.joules * part.tokens_per_watt
    return PointEnergy(per_request_j=joules / requests, tokens_per_watt=tokens / joules)
