"""The field's picture of settings and loads: tokens per second a user against tokens per second a GPU, and its front.

A user's pace is 1000 / median TPOT in ms, as InferenceX has it; AIPerf's median of 1 / ITL of each request is the same
number, since a reciprocal only reverses the order. vLLM's plot divides throughput by the users (or the rate) asked
for instead, so that waiting for the first token counts. Where some valid point's sample supports no median, all points
are compared by the mean. What the hardware serves is the throughput of requests that succeeded, over the server's
GPUs: of a CPU server over its cores.

Both have an uncertainty. One point surely dominates another if it is better both ways, with both 95 % intervals apart;
a point that none surely dominates may be on the front. A value without an interval proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gapmeter.analysis.cost import NoPrice, hardware_units, price_of
from gapmeter.analysis.requests.figures import block_rates
from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.distribution import Distribution
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.pareto import PaceLimit, Pareto, ParetoPoint, Unit
from gapmeter.analysis.results.run import RunResult, Verdict
from gapmeter.analysis.stats.series import level_of
from gapmeter.analysis.tables import read_table
from gapmeter.scenarios.slo import BETWEEN_TOKENS, Slo


def pareto_point(
    name: str, folder: str, verdict: Verdict, tpot: Distribution, mean_ci_ms: Ends | None,
    tokens_per_s: Interval | None, manifest: Manifest,
) -> ParetoPoint:  # fmt: skip
    """A point from its TPOT, the output tokens per second of its whole server, and what that is made of."""
    median, (units, _) = tpot.at(50.0), hardware_units(manifest)
    return ParetoPoint(
        name=name,
        side="",
        folder=folder,
        verdict=verdict,
        tokens_per_s_user=None,
        tokens_per_s_unit=_scaled(tokens_per_s, 1 / units),
        by_median=_one_over(interval(median.value_ms, median.ci_ms), 1000.0),
        by_mean=_one_over(interval(tpot.mean_ms, mean_ci_ms), 1000.0),
        units=units,
        usd_per_million_output_tokens=_cost(tokens_per_s, manifest),
    )


def run_point(run: Path, name: str, folder: str, verdict: Verdict, result: RunResult) -> ParetoPoint:
    """The point of one run, from its folder. Raises NotReadable, OSError."""
    requests, tpot = read_table(run / "requests.parquet"), result.metrics["tpot"]
    mean = level_of(metric_series(measured_requests(requests), "tpot").values / 1e6)
    settled = level_of(block_rates(requests))
    rate = interval(result.throughput.output_tokens_per_s, None)
    if settled:
        rate = interval(settled.value, settled.estimate.known[1:])
    mean_ci_ms = mean.estimate.known[1:] if mean else None
    return pareto_point(name, folder, verdict, tpot, mean_ci_ms, rate, Manifest.read(run))


def pareto(points: Sequence[ParetoPoint], unit: Unit, limit: PaceLimit | None) -> Pareto | None:
    """The points with their places and their front; None where none of them has a place."""
    by_median = all(point.by_median for point in points if point.is_valid and point.by_mean)
    placed = [
        point.model_copy(update={"tokens_per_s_user": point.by_median if by_median else point.by_mean})
        for point in points
    ]
    known = [point for point in placed if point.is_valid and point.at]
    if not any(point.at for point in placed):
        return None
    front = [point for point in known if not any(surely_dominates(other, point) for other in known)]
    marked = [point.model_copy(update={"on_front": point in front if point in known else None}) for point in placed]
    return Pareto(unit=unit, statistic="median" if by_median else "mean", limit=limit, points=tuple(marked))


def surely_dominates(one: ParetoPoint, other: ParetoPoint) -> bool:
    """Whether ``one`` is faster for a user and serves more, with both intervals apart."""
    ways = zip(one.at or (), other.at or (), strict=False)
    apart = [mine.is_above(its) for mine, its in ways]
    return len(apart) == 2 and all(apart)


def pace_limit(slos: Sequence[Slo]) -> PaceLimit | None:
    """The pace that the tightest limit on token times asks for; None where no SLO has one."""
    known = [(slo.limit_ns, slo.text) for slo in slos if slo.metric in BETWEEN_TOKENS and slo.limit_ns]
    if not known:
        return None
    limit_ns, text = min(known)
    return PaceLimit(text=text, tokens_per_s_user=1e9 / limit_ns)


def merged(sides: Sequence[tuple[str, Pareto | None]]) -> Pareto | None:
    """Several of them as one, each under its side's name. Where their hardware is counted differently, per server."""
    known = [(name, one) for name, one in sides if one is not None]
    units, limits = {one.unit for _, one in known}, {one.limit for _, one in known}
    unit: Unit = units.pop() if len(units) == 1 else "server"
    points: list[ParetoPoint] = []
    for name, one in known:
        for point in one.points:
            counted = point if one.unit == unit else per_server(point)
            points.append(counted.model_copy(update={"side": name}))
    return pareto(points, unit, limits.pop() if len(limits) == 1 else None)


def per_server(point: ParetoPoint) -> ParetoPoint:
    """The same, of the whole server: where the hardware of several is counted differently."""
    whole = _scaled(point.tokens_per_s_unit, point.units)
    return point.model_copy(update={"tokens_per_s_unit": whole, "units": 1})


def interval(value: float | None, ends: Ends | None) -> Interval | None:
    """A value with its ends; None where it is unknown, or not above 0."""
    low, high = ends or (None, None)
    return Interval(value=value, low=low, high=high) if value else None


def _cost(tokens_per_s: Interval | None, manifest: Manifest) -> Interval | None:
    """USD of a million output tokens at this throughput."""
    try:
        price = price_of(manifest)
    except NoPrice:
        return None
    return _one_over(tokens_per_s, 1e6 * price.of_request(1.0))


def _scaled(known: Interval | None, factor: float) -> Interval | None:
    if known is None:
        return None
    low, high = (None if end is None else end * factor for end in (known.low, known.high))
    return Interval(value=known.value * factor, low=low, high=high)


def _one_over(known: Interval | None, amount: float) -> Interval | None:
    """``amount`` over what is known; an end that it has none for is None."""
    if known is None:
        return None
    low, high = (amount / end if end else None for end in (known.high, known.low))
    return Interval(value=amount / known.value, low=low, high=high)
