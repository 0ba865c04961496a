"""Cost, efficiency and value of a run: three figures of three kinds, never one.

*Cost*: dollars of a request at the SLO, which is the price of a replica over the rate at which the SLOs are known to
hold.

    USD per request = G x USD per hour / (3600 x rate x planned utilisation)

G: the GPUs of one replica; *rate*: requests per second at which the SLOs hold, its lower bound. The lower bound gives
the figure that is printed (no dearer than this, with 95 % confidence), the upper one the other end of the interval. In
an ordinary run the rate is the one that was asked for: it held the SLOs at that load, and may hold them at more, so
that the interval has no lower end. How many requests happened to arrive adds nothing to a rate that is known; that
chance is in the verdict already, as n_eff. Only where no rate was asked for (conversations, bursts) is it counted: the
exact lower bound of a Poisson count (Garwood 1936), with count / dispersion for count.

    USD per request of a fleet = replicas x G x USD per hour / (3600 x target rate)

is what is paid for a load that is known: whole replicas, spares included, whatever they could carry.

The scenario's own price wins over the catalogue's; a result says when it used the catalogue's. If the scenario names no
device, it is the machine's own, by the driver's name. A machine without a GPU is priced by its server's cores.

*Efficiency*: joules of a request, tokens per watt, from what telemetry counted over the measured window. Energy is a
whole machine's or device's, idle share included and stated: idle power x time, measured before the load. Tokens per
watt is output tokens per second over watts, which is output tokens per joule.

*Value*: requests within their own limits that a dollar buys, which is cost and quality together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis import numbers
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.device.devices import CPU, UnknownDevice, catalogue, find_device, recognize
from gapmeter.analysis.requests.metrics import ended_by_us, numbers_of, succeeded
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.cost import (
    Cost,
    Economy,
    Energy,
    Interval,
    NoCost,
    NoEnergy,
    Price,
    SloRate,
    TokensPerRequest,
    Value,
)
from gapmeter.analysis.results.device import EnergyWindow
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.pareto import Unit
from gapmeter.analysis.results.requests import LoadFacts
from gapmeter.analysis.results.run import FAIL, PASS, RunFigures, RunResult, SloAnswer, Verdict
from gapmeter.analysis.results.trust import Steady
from gapmeter.analysis.run_figures import RunTables
from gapmeter.analysis.stats.exact import rate_at_least
from gapmeter.analysis.stats.series import Series
from gapmeter.scenarios.model import CHANGING_ARRIVALS

_NO_COUNTER = "unmeasured: no energy counter could be read on this machine"
_NO_TRIAL = "unmeasured: no trial's load is known to lie near the answer"
_MILLION = 1_000_000
_SEARCH = "gapmeter capacity finds the highest rate that holds them"
_AT_A_RATE = ("constant", "poisson", "gamma")  # arrivals whose rate was asked for, and holds throughout
_PARALLEL = (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp"))


@dataclass(frozen=True, slots=True)
class NoRate:
    """There is no rate at which the SLOs are known to hold, and why."""

    why: str


class NoPrice(ValueError):
    """Nobody knows what this replica costs; the text says what to write."""


def describe_economics(
    figures: RunFigures, steady: Steady, manifest: Manifest, tables: RunTables, energy: EnergyWindow | None
) -> Economy:
    """Cost, efficiency and value of a run."""
    measured = tables.measured
    tokens = describe_tokens(measured)
    rate = offered_rate(figures.verdict, figures.slo, figures.load, figures.counts.measured, steady)
    cost = describe_cost(rate, tokens, manifest)
    return Economy(
        tokens_per_request=tokens,
        cost=cost,
        energy=describe_energy(energy, *(_answered(tables.requests, measured) if energy else (0.0, None))),
        value=describe_value(cost, figures.goodput.share_ci),
    )


def _answered(requests: pd.DataFrame, measured: pd.DataFrame) -> tuple[float, float | None]:
    """Requests and output tokens of the time that the energy is of: from the first due time to the last answer's end.

    Of a request of the warm-up that was in flight then, as much of it as came in that time.
    """
    good = requests[succeeded(requests)]
    others = ~good["measured"].to_numpy(bool)
    share, output = np.where(others, 0.0, 1.0), numbers_of(good, "output_tokens")
    if len(measured) and others.any():
        since, until = measured["due_ns"].min(), measured["end_ns"].max()
        came = [np.asarray(at) for at in good["token_ns"][others]]
        share[others] = [((since < at) & (at <= until)).mean() if len(at) else 0.0 for at in came]
    used = share > 0
    return float(share.sum()), None if np.isnan(output[used]).any() else float(output[used] @ share[used])


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search for capacity: its rate, whether the SLOs held (None: undecided), and what its run found."""

    rate: float
    held: bool | None
    result: RunResult


def describe_search(
    low: float | None, high: float | None, manifest: Manifest, trials: Sequence[SearchTrial]
) -> Economy:
    """Cost, efficiency and value of a search that found ``low`` to ``high``; ``manifest``: that of one of its trials.

    Tokens of a request are those of the longest trial that held, else of the longest: an overload may refuse most
    requests. Energy and goodput follow the load, so they are those of one trial: at the highest rate that held and lies
    within the answer, else the undecided one nearest to ``low``: below that more are good than at the rate that is paid
    for, so it tells no value. Raises ValueError without trials.
    """
    tokens = max(trials, key=lambda trial: (bool(trial.held), trial.result.counts.measured)).result.tokens_per_request
    cost = describe_cost(searched_rate(low, high), tokens, manifest)
    best = _at_the_answer(low, high, trials)
    good = best.result.goodput.share_ci if best and best.rate >= (low or 0.0) else None
    energy = best.result.energy if best else NoEnergy(status="unmeasured", reason=_NO_TRIAL)
    if best and isinstance(energy, Energy):
        energy = energy.model_copy(update={"source": f"{energy.source}, at {numbers.rate(best.rate)}"})
    return Economy(tokens_per_request=tokens, cost=cost, energy=energy, value=describe_value(cost, good))


def _at_the_answer(low: float | None, high: float | None, trials: Sequence[SearchTrial]) -> SearchTrial | None:
    """The trial whose load is most like the one that is paid for; None where none is known to be like it."""
    held = [trial for trial in trials if trial.held and (high is None or trial.rate <= high)]
    if held:
        return max(held, key=lambda trial: trial.rate)
    undecided = [trial for trial in trials if trial.held is None]
    if low is None or not undecided:
        return None
    return min(undecided, key=lambda trial: abs(math.log(trial.rate / low)))


def describe_value(cost: Cost | NoCost, goodput_ci: Ends | None) -> Value:
    """Requests within their limits for a dollar, from the goodput share's lower end."""
    if isinstance(cost, NoCost):
        return Value(good_requests_per_usd=None, reason="there is no cost at the SLO")
    least = goodput_ci[0] if goodput_ci else None
    if least is None:
        return Value(good_requests_per_usd=None, reason="the share of requests within their limits is unmeasured")
    return Value(good_requests_per_usd=least / cost.per_request_usd, reason=None)


def describe_cost(rate: SloRate | NoRate, tokens: TokensPerRequest, manifest: Manifest) -> Cost | NoCost:
    """The cost at the SLO, or why there is none."""
    try:
        price = price_of(manifest)
    except NoPrice as missing:
        return NoCost(status="none", reason=str(missing), per_request_usd=None)
    if isinstance(rate, NoRate):
        return NoCost(status="none", reason=rate.why, per_request_usd=None)
    return cost_of(rate, price, tokens)


def cost_of(rate: SloRate, price: Price, tokens: TokensPerRequest) -> Cost:
    """The cost from the rates between which the SLOs are known to hold. Raises ValueError for rates <= 0."""
    if rate.low <= 0:
        raise ValueError(f"a rate of {rate.low} requests per second has no cost")
    dearest = price.of_request(rate.low)
    cheapest = None if rate.high is None else price.of_request(rate.high)

    def per_million(count: Interval | None) -> tuple[float | None, Ends | None]:
        """Dearest with the fewest tokens, cheapest with the most."""
        if count is None or count.value <= 0 or not count.low or not count.high:
            return None, None
        low = None if cheapest is None else cheapest / count.high * _MILLION
        return dearest / count.value * _MILLION, (low, dearest / count.low * _MILLION)

    (output, output_ci), (total, total_ci) = per_million(tokens.output), per_million(tokens.total)
    return Cost(
        status="at_most" if rate.high is None else "bounded",
        reason=None,
        price=price,
        rate=rate,
        per_request_usd=dearest,
        per_request_usd_ci=(cheapest, dearest),
        per_million_output_tokens_usd=output,
        per_million_output_tokens_usd_ci=output_ci,
        per_million_total_tokens_usd=total,
        per_million_total_tokens_usd_ci=total_ci,
    )


def searched_rate(low: float | None, high: float | None) -> SloRate | NoRate:
    """What a search for capacity found: the interval of the highest rate that holds the SLOs."""
    if not low:
        return NoRate("no rate was found at which the SLOs hold")
    return SloRate(low=low, high=high, basis="capacity")


def offered_rate(
    verdict: Verdict, answers: Sequence[SloAnswer], load: LoadFacts, measured: int, steady: Steady | None
) -> SloRate | NoRate:
    """The rate of a run that held its SLOs, ``measured`` requests of which count."""
    if not answers:
        return NoRate("the scenario sets no SLO that a rate could hold")
    if load.loop != "open":
        return NoRate(f"a closed loop has no rate of arrivals that holds the SLOs; {_SEARCH}")
    if load.arrivals in CHANGING_ARRIVALS:
        return NoRate(f"the rate changed through the run, so that no single one held the SLOs; {_SEARCH}")
    if verdict == FAIL:
        return NoRate(f"the SLOs were missed at this load, and a rate that misses them has no cost; {_SEARCH}")
    if verdict != PASS:
        return NoRate(f"the verdict is {verdict}: it is not known whether the SLOs hold at this load")
    if steady is not None and not steady.lasts:
        why = "there was no steady state" if steady.state == "unsteady" else "the server failed for a time"
        return NoRate(f"{why}: a longer run might miss the SLOs at this rate")
    if measured < 2 or not load.window_s:
        return NoRate("too few requests for a rate")
    if load.requested_rate and load.unit == "requests" and load.arrivals in _AT_A_RATE:
        return SloRate(low=load.requested_rate, high=None, basis="offered")
    spread = max(1.0, load.dispersion or 1.0)
    return SloRate(low=rate_at_least(measured, load.window_s, spread), high=None, basis="offered")


def describe_tokens(measured: pd.DataFrame) -> TokensPerRequest:
    """Mean and interval of output, prompt and both; None where any success's are unknown, or few are.

    One that the server failed is paid for, too, and brought none.
    """
    asked = measured[~ended_by_us(measured)]
    output, prompt = (
        np.where(succeeded(asked), numbers_of(asked, f"{side}_tokens"), 0.0) for side in ("output", "prompt")
    )

    def interval(tokens: Floats) -> Interval | None:
        if len(tokens) < 2 or np.isnan(tokens).any():
            return None
        mean, low, high = Series(tokens).mean().known
        return Interval(value=mean, low=max(low, 0.0), high=high)

    return TokensPerRequest(output=interval(output), prompt=interval(prompt), total=interval(output + prompt))


def price_of(manifest: Manifest) -> Price:
    """The price that a run's manifest leads to. Raises NoPrice."""
    asked, gpus, here = manifest.asked.cost, manifest.hardware.gpus, manifest.is_server_here
    attached = manifest.asked.server.engine == "attach"
    own = None if not here else recognize(gpus[0]) if gpus else catalogue()[CPU]  # what the server ran on
    device = own
    if asked.gpu is not None:
        try:
            device = find_device(asked.gpu)
        except UnknownDevice as error:  # written by a version with another catalogue
            raise NoPrice(str(error)) from error
    elif not here:
        if asked.usd_per_hour is None:
            text = "the attached server's device is unknown; set cost.gpu, for example H100-SXM, or cost.usd_per_hour"
            raise NoPrice(text)
    elif attached and len(gpus) > 1 and not asked.gpus_per_replica:
        raise NoPrice(f"nobody knows how many of {len(gpus)} GPUs the attached server has; set cost.gpus_per_replica")
    units = _gpus(manifest)
    if device is not None:
        label = device.key
    elif here:
        label = gpus[0].partition(",")[0]
    else:
        units, label = hardware_units(manifest)
    if asked.usd_per_hour is not None:
        usd, source = asked.usd_per_hour, "the scenario's price"
        units = 1 if device is not None and device.is_cpu else units
    elif attached and device is not None and device.is_cpu:
        raise NoPrice("nobody knows how many cores the attached server has; set cost.usd_per_hour, for all of it")
    elif device is not None:
        usd, source = device.price.usd, f"a default price ({device.price.source}, {device.price.date})"
        units = _cores(manifest) if device.is_cpu else units
    else:
        known = ", ".join(catalogue())
        raise NoPrice(f"{label} is not in the catalogue; write cost.usd_per_hour, or cost.gpu with one of {known}")
    return Price(
        device=label,
        units=units,
        usd_per_unit_hour=usd,
        source=source,
        is_default=asked.usd_per_hour is None,
        utilisation=asked.utilisation,
        measured_on=own.key if own is not None and device is not None and own.key != device.key else "",
        usd_per_hour=units * usd,
    )


def hardware_units(manifest: Manifest) -> tuple[int, Unit]:
    """How many of what a server was measured on; one server where nobody knows what somebody else's has."""
    asked = manifest.asked.cost
    if manifest.asked.server.engine == "attach":
        has_one = asked.gpu is None and manifest.is_server_here and len(manifest.hardware.gpus) == 1
        return (_gpus(manifest), "GPU") if asked.gpus_per_replica or _is_gpu(asked.gpu) or has_one else (1, "server")
    return (_gpus(manifest), "GPU") if manifest.hardware.gpus else (_cores(manifest), "core")


def _is_gpu(name: str | None) -> bool:
    """Whether a scenario names one, by whatever alias."""
    try:
        return name is not None and not find_device(name).is_cpu
    except UnknownDevice:  # as in price_of
        return True


def _gpus(manifest: Manifest) -> int:
    """GPUs of one replica: as set, or what the flags spread a model over (tensor x pipeline x data parallel), or 1."""
    flags = manifest.asked.server.flags
    sizes = [next((flags[name] for name in names if name in flags), 1) for names in _PARALLEL]
    return manifest.asked.cost.gpus_per_replica or math.prod(int(size) for size in sizes if str(size).isdigit()) or 1


def _cores(manifest: Manifest) -> int:
    """Cores that the server had; all of the machine's where it was not confined."""
    return len(manifest.placement.server) or manifest.hardware.cores


def describe_energy(window: EnergyWindow | None, requests: float, tokens: float | None) -> Energy | NoEnergy:
    """Energy spread over the ``requests`` that succeeded, and their output ``tokens`` (None where one did not tell).

    What failed requests took is included, however long they were waited for.
    """
    if window is None:
        return NoEnergy(status="unmeasured", reason=_NO_COUNTER)
    joules, low, high = window.joules, window.low_j, window.high_j
    return Energy(
        status="measured",
        reason=None,
        source=window.source,
        seconds=window.seconds,
        joules=joules,
        joules_ci=(low, high),
        watts=_over(joules, window.seconds),
        per_request_j=_over(joules, requests),
        per_request_j_ci=(_over(low, requests), _over(high, requests)),
        per_output_token_j=_over(joules, tokens),
        per_output_token_j_ci=(_over(low, tokens), _over(high, tokens)),
        tokens_per_watt=_over(tokens or None, joules),
        tokens_per_watt_ci=(_over(tokens or None, high), _over(tokens or None, low)),
        idle_share=window.idle_share,
    )


def _over(amount: float | None, count: float | None) -> float | None:
    """A quotient; None where either is unknown, or there is nothing to divide by."""
    return None if amount is None or not count else amount / count
