"""What a request costs, in money and in energy."""

from __future__ import annotations

from collections.abc import Sequence

from gapmeter.analysis.device.devices import CPU
from gapmeter.analysis.numbers import DASH, large, share, significant, usd
from gapmeter.analysis.results.cost import Cost, Energy, NoCost, NoEnergy, Price, Value

_CHEAP_USD = 0.001  # from which a request's own cost is told


def cost_sentence(cost: Cost | NoCost, *, simulated: bool = False) -> str:
    """The figure with what it rests on, or why there is none. ``simulated``: no real engine served."""
    if isinstance(cost, NoCost):
        return f"no cost: {cost.reason}"
    price, rate = cost.price, cost.rate
    many, who = many_requests(cost.per_request_usd)
    dearest, output = cost.per_request_usd_ci[1], cost.per_million_output_tokens_usd_ci
    said = f"at most {usd(None if dearest is None else many * dearest)} {who}"
    if output is not None:
        said += f" and {usd(output[1])} for a million output tokens"
    basis = f"the SLOs hold at {significant(rate.low)} req/s, {share(price.utilisation)} of it planned"
    unsearched = "" if rate.basis == "capacity" else ". At least this cheap; gapmeter capacity finds the rest"
    elsewhere = f". Priced as {price.device}, but measured on {price.measured_on}" if price.measured_on else ""
    simulation = ". The simulated engine stands for no real one" if simulated else ""
    return f"{said} ({basis}; {price_words(price)}){unsearched}{elsewhere}{simulation}"


def many_requests(per_request: float) -> tuple[float, str]:
    """How many requests' cost is told, so that few zeros are: one, or a million of cheap ones."""
    return (1.0, "a request") if per_request >= _CHEAP_USD else (1e6, "for a million requests")


def price_words(price: Price) -> str:
    """``1 x H100-SXM at $2.49 an hour, the scenario's price``; a default says so, with date and source."""
    per_core = price.device == CPU and price.is_default
    what = f"{price.units} core{'s' if price.units > 1 else ''}" if per_core else f"{price.units} x {price.device}"
    each = " each" if price.units > 1 else ""
    return f"{what} at {usd(price.usd_per_unit_hour)} an hour{each}, {price.source}"


def energy_sentence(energy: Energy | NoEnergy) -> str:
    """Joules of a request, output tokens of a joule; or why nobody knows."""
    if isinstance(energy, NoEnergy):
        return f"energy {energy.reason}"
    each = DASH if energy.per_request_j is None else f"{significant(energy.per_request_j)} J"
    rate = DASH if energy.tokens_per_watt is None else significant(energy.tokens_per_watt)
    idle = "idle share unmeasured" if energy.idle_share is None else f"{share(energy.idle_share)} of it idle power"
    return f"{each} a request, {rate} output tokens per joule ({idle}; {energy.source})"


def value_sentence(value: Value, goodput_ci: Sequence[float | None] | None) -> str:
    """How many good requests a dollar buys; ``goodput_ci``: the share of requests that are good."""
    if value.good_requests_per_usd is None:
        return f"none: {value.reason}"
    least = share(goodput_ci[0] if goodput_ci else None)
    worth = large(value.good_requests_per_usd)
    return f"at least {worth} requests within their own limits for a dollar ({least} or more are)"
