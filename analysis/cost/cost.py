"""What a request costs at the SLA: the price of a replica over the rate at which the SLOs are known to hold.

    USD per request = G x USD per hour / (3600 x rate x planned utilisation)

G: the GPUs of one replica; *rate*: requests per second at which the SLOs hold, its lower bound. The lower bound gives
the figure that is printed (no dearer than this, with 95 % confidence), the upper one the other end of the interval.

In an ordinary run the rate is the run's own: it held the SLOs at the load that it was offered, and may hold them at
more, so that the interval has no lower end. Its lower bound is the exact one of a Poisson count (Garwood 1936),
with counts / dispersion in place of counts for arrivals that are more or less even than Poisson's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.cost.price import NoPrice, Price, price_of
from gapmeter.analysis.device.devices import CPU
from gapmeter.analysis.numbers import share, significant, usd
from gapmeter.analysis.requests.metrics import succeeded
from gapmeter.analysis.requests.rate_curve import CHANGING
from gapmeter.analysis.stats.estimate import Estimate, Floats
from gapmeter.analysis.stats.exact import rate_bounds
from gapmeter.analysis.stats.series import Series

MILLION = 1_000_000
_CHEAP = 0.001  # USD, from which a request's own cost is told
_SEARCH = "gapmeter capacity finds the highest rate that holds them"


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second at which the SLOs hold, between ``low`` and ``high`` (None: nobody looked further up).

    ``basis``: capacity (searched for) or offered (the run's own load).
    """

    low: float
    high: float | None
    basis: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Mean tokens of a request that succeeded, each with its interval."""

    output: Estimate | None
    total: Estimate | None


@dataclass(frozen=True, slots=True)
class Cost:
    """USD per request and per million tokens; ``value`` at the rate's lower bound. None: tokens were not counted."""

    price: Price
    rate: Rate
    per_request: Estimate
    per_million_output_tokens: Estimate | None
    per_million_total_tokens: Estimate | None
    sentence: str


def cost_of(rate: Rate, price: Price, tokens: Tokens) -> Cost:
    """The cost at the SLA from the rates between which the SLOs are known to hold. Raises ValueError for rates <= 0."""
    if rate.low <= 0:
        raise ValueError(f"a rate of {rate.low} requests per second has no cost")
    dearest = usd_per_request(price, rate.low)
    cheapest = None if rate.high is None else usd_per_request(price, rate.high)
    per_request = Estimate(dearest, cheapest, dearest, why="" if cheapest else "nobody looked for a higher rate")
    output, total = (t and _per_million(dearest, cheapest, t) for t in (tokens.output, tokens.total))
    return Cost(price, rate, per_request, output, total, _sentence(dearest, output, rate, price))


def usd_per_request(price: Price, rate: float) -> float:
    """G x USD per hour / (3600 x rate x planned utilisation); ``rate`` in requests per second."""
    return price.units * price.usd_per_unit_hour / (3600 * rate * price.utilisation)


def describe_cost(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """``summary["cost"]``: the figures, or null with the ``reason`` why there is no cost at the SLA.

    ``summary`` needs ``tokens_per_request``, and ``capacity`` or what an ordinary run has: ``verdict``, ``slo``,
    ``load``, ``counts``.
    """
    try:
        price = price_of(manifest)
        rate = rate_at_sla(summary)
    except (NoPrice, NoRate) as missing:
        return {"status": "none", "reason": str(missing), "per_request_usd": None, "sentence": f"no cost: {missing}"}
    part = as_part(cost_of(rate, price, tokens_of(summary)))
    if manifest["scenario"]["server"]["engine"] == "simulated":
        part["sentence"] += ". The simulated engine stands for no real one"
    return part


def as_part(cost: Cost) -> dict[str, Any]:
    """A cost as JSON: USD, intervals as [low, high] with null for an end that nothing bounds."""
    price, tokens = asdict(cost.price), (cost.per_million_output_tokens, cost.per_million_total_tokens)
    out: dict[str, Any] = {
        "status": "bounded" if cost.rate.high is not None else "at_most",
        "reason": None,
        "price": price | {"usd_per_hour": cost.price.usd_per_hour},
        "rate": asdict(cost.rate),
    }
    names = ("per_request", "per_million_output_tokens", "per_million_total_tokens")
    for name, found in zip(names, (cost.per_request, *tokens), strict=True):
        out[f"{name}_usd"] = None if found is None else found.value
        out[f"{name}_usd_ci"] = None if found is None else list(found.ends)
    return out | {"sentence": cost.sentence}


class NoRate(ValueError):
    """There is no rate at which the SLOs are known to hold; the text says why."""


def rate_at_sla(summary: Mapping[str, Any]) -> Rate:
    """The rate that held the SLOs: of a capacity search, or of a run that passed. Raises NoRate."""
    capacity = summary.get("capacity")
    if capacity is not None:
        low, high = capacity.get("low"), capacity.get("high")
        if not low:
            raise NoRate("no rate was found at which the SLOs hold")
        return Rate(float(low), None if high is None else float(high), "capacity")
    _check_run(summary)
    low, _ = offered_rate(summary["load"], summary["counts"]["measured"])
    return Rate(low, None, "offered")


def _check_run(summary: Mapping[str, Any]) -> None:
    """Raises NoRate for a run that proves nothing about a rate."""
    verdict, load = summary["verdict"], summary["load"]
    if not summary["slo"]:
        raise NoRate("the scenario sets no SLO that a rate could hold")
    if verdict == "FAIL":
        raise NoRate(f"the SLOs were missed at this load, and a rate that misses them has no cost; {_SEARCH}")
    if verdict != "PASS":
        raise NoRate(f"the verdict is {verdict}: it is not known whether the SLOs hold at this load")
    if load["loop"] != "open":
        raise NoRate(f"a closed loop has no rate of arrivals that holds the SLOs; {_SEARCH}")
    if load["arrivals"] in CHANGING:
        raise NoRate(f"the rate changed through the run, so that no single one held the SLOs; {_SEARCH}")
    if (summary.get("steady") or {}).get("state") == "unsteady":
        raise NoRate("there was no steady state: a longer run might miss the SLOs at this rate")


def offered_rate(load: Mapping[str, Any], count: int) -> tuple[float, float]:
    """The 95 % interval of the rate that ``count`` arrivals over the run's window stand for. Raises NoRate."""
    seconds, arrivals = load["window_s"], load["arrivals"]
    if count < 2 or not seconds:
        raise NoRate("too few requests for a rate")
    measured = 1.0 if load.get("dispersion") is None else float(load["dispersion"])
    spread = {"constant": 0.0, "poisson": 1.0}.get(arrivals, max(1.0, measured))
    return rate_bounds(count, float(seconds), spread)


def describe_tokens(measured: pd.DataFrame) -> dict[str, Any]:
    """``summary["tokens_per_request"]``: mean and interval of output, prompt and both over successes."""
    good = measured[succeeded(measured)]
    sides = {side: pd.to_numeric(good[f"{side}_tokens"]).astype("Float64") for side in ("output", "prompt")}
    columns = sides | {"total": sides["output"] + sides["prompt"]}
    return {name: _mean(column.to_numpy(np.float64, na_value=np.nan)) for name, column in columns.items()}


def _mean(tokens: Floats) -> dict[str, float] | None:
    """None when any request's are unknown, or there are few requests."""
    if len(tokens) < 2 or np.isnan(tokens).any():
        return None
    mean, low, high = Series(tokens).mean().known
    return {"value": mean, "low": max(low, 0.0), "high": high}


def tokens_of(summary: Mapping[str, Any]) -> Tokens:
    """Back from ``describe_tokens``."""
    told = summary.get("tokens_per_request") or {}
    output, total = (Estimate(**told[name]) if told.get(name) else None for name in ("output", "total"))
    return Tokens(output, total)


def _per_million(dearest: float, cheapest: float | None, tokens: Estimate) -> Estimate | None:
    """Cost per request over tokens per request: dearest with fewest tokens, cheapest with most."""
    if not tokens.value or not tokens.low or not tokens.high:
        return None
    low = None if cheapest is None else cheapest / tokens.high * MILLION
    return Estimate(dearest / tokens.value * MILLION, low, dearest / tokens.low * MILLION)


def many_requests(per_request: float) -> tuple[float, str]:
    """How many requests' cost is told, so that few zeros are: one, or a million of cheap ones."""
    return (1.0, "a request") if per_request >= _CHEAP else (float(MILLION), "for a million requests")


def _sentence(dearest: float, output: Estimate | None, rate: Rate, price: Price) -> str:
    many, who = many_requests(dearest)
    said = f"at most {usd(many * dearest)} {who}"
    if output is not None:
        said += f" and {usd(output.high)} for a million output tokens"
    held = f"the SLOs hold at {significant(rate.low)} req/s, {share(price.utilisation)} of it planned"
    found = "" if rate.basis == "capacity" else ". At least this cheap; gapmeter capacity finds the rest"
    other = f". Priced as {price.device}, but measured on {price.measured_on}" if price.measured_on else ""
    return f"{said} ({held}; {price_words(price)}){found}{other}"


def price_words(price: Price) -> str:
    """``1 x H100-SXM at $2.49 an hour, the scenario's price``; a default says so, with date and source."""
    per_core = price.device == CPU and price.is_default
    what = f"{price.units} core{'s' if price.units > 1 else ''}" if per_core else f"{price.units} x {price.device}"
    each = " each" if price.units > 1 else ""
    return f"{what} at {usd(price.usd_per_unit_hour)} an hour{each}, {price.source}"
