"""What a request costs at the SLA: the price of a replica over the rate at which the SLOs are known to hold.

    USD per request = G x USD per hour / (3600 x rate x planned utilisation)

G: the GPUs of one replica; *rate*: requests per second at which the SLOs hold, its lower bound. The lower bound gives
the figure that is printed (no dearer than this, with 95 % confidence), the upper one the other end of the interval.

In an ordinary run the rate is the run's own: it held the SLOs at the load that it was offered, and may hold them at
more, so that the interval has no lower end. Its lower bound is the exact one of a Poisson count (Garwood 1936),
with counts / dispersion in place of counts for arrivals that are more or less even than Poisson's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.cost.price import NoPrice, price_of
from gapmeter.analysis.requests.metrics import succeeded
from gapmeter.analysis.requests.rate_curve import CHANGING
from gapmeter.analysis.results.cost import Cost, Interval, NoCost, Price, SlaRate, TokensPerRequest
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import LoadFacts
from gapmeter.analysis.results.run import FAIL, PASS, SloAnswer, Verdict
from gapmeter.analysis.results.trust import Steady
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.exact import rate_bounds
from gapmeter.analysis.stats.series import Series

MILLION = 1_000_000
_SEARCH = "gapmeter capacity finds the highest rate that holds them"


class NoRate(ValueError):
    """There is no rate at which the SLOs are known to hold; the text says why."""


def describe_cost(rate: SlaRate | NoRate, tokens: TokensPerRequest, manifest: Manifest) -> Cost | NoCost:
    """The cost at the SLA, or why there is none."""
    try:
        price = price_of(manifest)
    except NoPrice as missing:
        return NoCost(status="none", reason=str(missing), per_request_usd=None)
    if isinstance(rate, NoRate):
        return NoCost(status="none", reason=str(rate), per_request_usd=None)
    return cost_of(rate, price, tokens)


def cost_of(rate: SlaRate, price: Price, tokens: TokensPerRequest) -> Cost:
    """The cost from the rates between which the SLOs are known to hold. Raises ValueError for rates <= 0."""
    if rate.low <= 0:
        raise ValueError(f"a rate of {rate.low} requests per second has no cost")
    dearest = usd_per_request(price, rate.low)
    cheapest = None if rate.high is None else usd_per_request(price, rate.high)
    output, total = (_per_million(dearest, cheapest, each) for each in (tokens.output, tokens.total))
    return Cost(
        status="at_most" if rate.high is None else "bounded",
        reason=None,
        price=price,
        rate=rate,
        per_request_usd=dearest,
        per_request_usd_ci=(cheapest, dearest),
        per_million_output_tokens_usd=output.value if output else None,
        per_million_output_tokens_usd_ci=(output.low, output.high) if output else None,
        per_million_total_tokens_usd=total.value if total else None,
        per_million_total_tokens_usd_ci=(total.low, total.high) if total else None,
    )


def usd_per_request(price: Price, rate: float) -> float:
    """G x USD per hour / (3600 x rate x planned utilisation); ``rate`` in requests per second."""
    return price.units * price.usd_per_unit_hour / (3600 * rate * price.utilisation)


def searched_rate(low: float | None, high: float | None) -> SlaRate | NoRate:
    """What a search for capacity found: the interval of the highest rate that holds the SLOs."""
    if not low:
        return NoRate("no rate was found at which the SLOs hold")
    return SlaRate(low=low, high=high, basis="capacity")


def offered_rate(
    verdict: Verdict, answers: Sequence[SloAnswer], load: LoadFacts, measured: int, steady: Steady | None
) -> SlaRate | NoRate:
    """The rate of a run that held its SLOs, ``measured`` requests of which count."""
    if not answers:
        return NoRate("the scenario sets no SLO that a rate could hold")
    if verdict == FAIL:
        return NoRate(f"the SLOs were missed at this load, and a rate that misses them has no cost; {_SEARCH}")
    if verdict != PASS:
        return NoRate(f"the verdict is {verdict}: it is not known whether the SLOs hold at this load")
    if load.loop != "open":
        return NoRate(f"a closed loop has no rate of arrivals that holds the SLOs; {_SEARCH}")
    if load.arrivals in CHANGING:
        return NoRate(f"the rate changed through the run, so that no single one held the SLOs; {_SEARCH}")
    if steady is not None and steady.state == "unsteady":
        return NoRate("there was no steady state: a longer run might miss the SLOs at this rate")
    if measured < 2 or not load.window_s:
        return NoRate("too few requests for a rate")
    dispersion = 1.0 if load.dispersion is None else load.dispersion
    spread = {"constant": 0.0, "poisson": 1.0}.get(load.arrivals, max(1.0, dispersion))
    return SlaRate(low=rate_bounds(measured, load.window_s, spread)[0], high=None, basis="offered")


def describe_tokens(measured: pd.DataFrame) -> TokensPerRequest:
    """Mean and interval of output, prompt and both over successes."""
    good = measured[succeeded(measured)]
    output, prompt = (pd.to_numeric(good[f"{side}_tokens"]).astype("Float64") for side in ("output", "prompt"))
    means = [_mean(each.to_numpy(np.float64, na_value=np.nan)) for each in (output, prompt, output + prompt)]
    return TokensPerRequest(output=means[0], prompt=means[1], total=means[2])


def _mean(tokens: Floats) -> Interval | None:
    """None when any request's are unknown, or there are few requests."""
    if len(tokens) < 2 or np.isnan(tokens).any():
        return None
    mean, low, high = Series(tokens).mean().known
    return Interval(value=mean, low=max(low, 0.0), high=high)


def _per_million(dearest: float, cheapest: float | None, tokens: Interval | None) -> Interval | None:
    """Cost per request over tokens per request: dearest with fewest tokens, cheapest with most."""
    if tokens is None or tokens.value <= 0 or not tokens.low or not tokens.high:
        return None
    low = None if cheapest is None else cheapest / tokens.high * MILLION
    return Interval(value=dearest / tokens.value * MILLION, low=low, high=dearest / tokens.low * MILLION)
