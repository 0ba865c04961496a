"""The field's picture of settings and loads: tokens per second a user against tokens per second a GPU, and its front.

A user's pace is 1000 / median TPOT in ms, as InferenceX has it; AIPerf's median of 1 / ITL of each request is the same
number, since the reciprocal turns the order round and nothing else. vLLM's plot divides throughput by concurrency
(or by the rate asked for) instead, so that waiting for the first token counts. What the hardware serves is the throughput of requests that
succeeded, over the server's GPUs: of a CPU server over its cores.

Both are known only so well. One point surely dominates another where it is better both ways with both 95 % intervals
apart; a point that none surely dominates may be on the front. A value without an interval is sure of nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gapmeter.analysis.cost import NoPrice, hardware_units, price_of
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.distribution import Distribution
from gapmeter.analysis.results.manifest import Manifest, Slo
from gapmeter.analysis.results.pareto import PaceLimit, Pareto, ParetoPoint, Unit
from gapmeter.analysis.results.run import RunResult, Verdict
from gapmeter.analysis.stats.series import level_of
from gapmeter.analysis.sweep.read import block_rates


def pareto_point(
    name: str, folder: str, verdict: Verdict, tpot: Distribution, rate: tuple[float | None, Ends | None],
    manifest: Manifest,
) -> ParetoPoint:  # fmt: skip
    """A point from its TPOT, the output tokens per second of its whole server, and what that is made of."""
    median, (units, _), (tokens, ends) = tpot.at(50.0), hardware_units(manifest), rate
    pace = median.value_ms or tpot.mean_ms
    cost, cost_ends = _cost(tokens, ends, manifest)
    return ParetoPoint(
        name=name,
        side="",
        folder=folder,
        verdict=verdict,
        tokens_per_s_user=_over(1000.0, pace),
        tokens_per_s_user_ci=_turned(1000.0, median.ci_ms) if median.value_ms else None,
        tokens_per_s_unit=None if tokens is None else tokens / units,
        tokens_per_s_unit_ci=ends and (_over(ends[0], units), _over(ends[1], units)),
        units=units,
        usd_per_million_output_tokens=cost,
        usd_per_million_output_tokens_ci=cost_ends,
    )


def run_point(run: Path, name: str, folder: str, verdict: Verdict, result: RunResult) -> ParetoPoint:
    """The point of one run, from its folder. Raises NotReadable, OSError."""
    rates = block_rates(pd.read_parquet(run / "requests.parquet"))
    settled = None if rates is None else level_of(rates)
    rate = (settled.value, settled.estimate.known[1:]) if settled else (result.throughput.output_tokens_per_s, None)
    return pareto_point(name, folder, verdict, result.metrics["tpot"], rate, Manifest.read(run))


def pareto(points: Sequence[ParetoPoint], unit: Unit, limit: PaceLimit | None) -> Pareto | None:
    """The points with their front; None where none of them has a place."""
    known = [point for point in points if point.is_measurement]
    if not any(point.at for point in points):
        return None
    marked = [
        point.model_copy(update={"on_front": not any(surely_dominates(other, point) for other in known)})
        if point.is_measurement
        else point
        for point in points
    ]
    return Pareto(unit=unit, limit=limit, points=tuple(marked))


def surely_dominates(one: ParetoPoint, other: ParetoPoint) -> bool:
    """Whether ``one`` is faster for a user and serves more, with both intervals apart."""
    ways = (
        (one.tokens_per_s_user_ci, other.tokens_per_s_user_ci), (one.tokens_per_s_unit_ci, other.tokens_per_s_unit_ci)
    )  # fmt: skip
    for mine, others in ways:
        low, high = (mine or (None, None))[0], (others or (None, None))[1]
        if low is None or high is None or low <= high:
            return False
    return True


def pace_limit(slos: Sequence[Slo]) -> PaceLimit | None:
    """Of the tightest limit on token times; None where no SLO has one."""
    known = [(slo.limit_ns, slo.text) for slo in slos if slo.metric in ("itl", "tpot") and slo.limit_ns]
    if not known:
        return None
    limit_ns, text = min(known)
    return PaceLimit(text=text, tokens_per_s_user=1e9 / limit_ns)


def merged(sides: Sequence[tuple[str, Pareto | None]]) -> Pareto | None:
    """Several of them as one, each under its side's name. Where their hardware is counted differently, per server."""
    known = [(name, one) for name, one in sides if one is not None]
    units, limits = {one.unit for _, one in known}, {one.limit for _, one in known}
    unit: Unit = units.pop() if len(units) == 1 else "server"
    points = [
        (point if one.unit == unit else _per_server(point)).model_copy(update={"side": name})
        for name, one in known
        for point in one.points
    ]
    return pareto(points, unit, limits.pop() if len(limits) == 1 else None)


def _per_server(point: ParetoPoint) -> ParetoPoint:
    rate, ends, units = point.tokens_per_s_unit, point.tokens_per_s_unit_ci, point.units
    scaled = ends and tuple(None if end is None else end * units for end in ends)
    whole = {"tokens_per_s_unit": rate and rate * units, "tokens_per_s_unit_ci": scaled, "units": 1}
    return point.model_copy(update=whole)


def _cost(tokens: float | None, ends: Ends | None, manifest: Manifest) -> tuple[float | None, Ends | None]:
    """USD of a million output tokens at this throughput, with what its interval makes of that."""
    try:
        price = price_of(manifest)
    except NoPrice:
        return None, None
    second = 1e6 * price.usd_per_hour / (3600 * price.utilisation)
    return _over(second, tokens), _turned(second, ends)


def _turned(amount: float, ends: Ends | None) -> Ends | None:
    """The interval of ``amount`` over a value with the interval ``ends``."""
    return ends and (_over(amount, ends[1]), _over(amount, ends[0]))


def _over(amount: float | None, count: float | None) -> float | None:
    """A quotient; None where either is unknown, or there is nothing above 0 to divide by."""
    return None if amount is None or count is None or count <= 0 else amount / count
