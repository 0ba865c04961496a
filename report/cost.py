"""What a request costs, in money and in energy: sentences, three rows, and the interval of the cost as a picture."""

from __future__ import annotations

from typing import NamedTuple

from gapmeter.analysis.device.devices import CPU
from gapmeter.analysis.numbers import DASH, counted, large, share, significant, usd
from gapmeter.analysis.results.capacity import Fleet
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.cost import Cost, Economy, Energy, NoCost, NoEnergy, Price, Value
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.report.document import Block, Chart, Column, Figure, Row, Section, Table
from gapmeter.report.pictures import CostRange
from gapmeter.report.words import low_to_high

_CHEAP_USD = 0.001  # from which a request's own cost is shown


def cost_sentence(cost: Cost | NoCost, *, simulated: bool = False, proven: bool = True) -> str:
    """The figure with what it rests on, or why there is none. ``simulated``: no real engine served.

    ``proven``: its rate was held by a trial; else it is the lower end of a search's interval.
    """
    if isinstance(cost, NoCost):
        return f"no cost: {cost.reason}"
    price, rate = cost.price, cost.rate
    many, who = many_requests(cost.per_request_usd)
    output = cost.per_million_output_tokens_usd_ci
    said = f"at most {usd(many * cost.per_request_usd)} {who}"
    if output is not None:
        said += f" and {usd(output[1])} for a million output tokens"
    held = f"the SLOs hold at {significant(rate.low)} req/s{' or more' if rate.basis == 'capacity' else ''}"
    held = held if proven else f"at the interval's lower end, {significant(rate.low)} req/s"
    basis = f"{held}, {share(price.utilisation)} of it planned"
    unsearched = (
        ""
        if rate.basis == "capacity"
        else ". An upper limit: gapmeter capacity finds the highest rate and so the real cost"
    )
    elsewhere = f". Priced as {price.device}, but measured on {price.measured_on}" if price.measured_on else ""
    simulation = ". The simulated engine does not represent a real one" if simulated else ""
    return f"{said} ({basis}; {price_words(price)}){unsearched}{elsewhere}{simulation}"


def fleet_words(fleet: Fleet) -> str:
    """``, which is $0.68 for a million requests in whole replicas``; "" without a price."""
    if fleet.per_request_usd is None:
        return ""
    many, who = many_requests(fleet.per_request_usd)
    tokens = fleet.per_million_output_tokens_usd
    also = "" if tokens is None else f" and {usd(tokens)} for a million output tokens"
    return f", which is {usd(many * fleet.per_request_usd)} {who}{also} in whole replicas"


def many_requests(per_request: float) -> tuple[float, str]:
    """For how many requests a cost is shown, so that it has few zeros: one, or a million of cheap ones."""
    return (1.0, "a request") if per_request >= _CHEAP_USD else (1e6, "for a million requests")


def price_words(price: Price) -> str:
    """``1 x H100-SXM at $2.49 an hour, the scenario's price``; a default says so, with date and source."""
    per_core = price.device == CPU and price.is_default
    what = counted(price.units, "core") if per_core else f"{price.units} x {price.device}"
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


def value_sentence(value: Value, cost: Cost | NoCost) -> str:
    """How many good requests a dollar buys at this cost, and the share of requests that are good, which it rests on."""
    if value.good_requests_per_usd is None or cost.per_request_usd is None:
        return f"none: {value.reason}"
    least = share(value.good_requests_per_usd * cost.per_request_usd)
    worth = large(value.good_requests_per_usd)
    return f"at least {worth} requests within their own limits for a dollar ({least} or more are)"


# --- the section


class How(NamedTuple):
    """How each figure came about, in a sentence, or why there is none."""

    cost: str
    energy: str
    value: str


def how_of(economy: Economy, *, simulated: bool, proven: bool = True) -> How:
    """Of a run, or of a search for capacity; ``simulated`` and ``proven`` as ``cost_sentence`` takes them."""
    cost, energy, value = economy.cost, economy.energy, economy.value
    return How(
        cost.reason or cost_sentence(cost, simulated=simulated, proven=proven),
        energy.reason or energy_sentence(energy),
        value.reason or value_sentence(value, cost),
    )


def lines(economy: Economy, how: How) -> list[tuple[str, str]]:
    """Three (name, sentence), with a dash for a figure that there is none of; of energy the reason says so itself."""
    return [
        ("cost", f"{DASH}  {how.cost}" if economy.cost.reason else how.cost),
        ("energy", how.energy),
        ("value", f"{DASH}  {how.value}" if economy.value.reason else how.value),
    ]


def section(economy: Economy, how: How, confidence: float = CONFIDENCE, *, proven: bool = True) -> Section:
    """A row each for cost (with that of tokens beneath), efficiency and value."""
    cost, energy, value = economy.cost, economy.energy, economy.value
    rows: list[Row] = [["cost of a request", how.cost, Figure(None, "usd"), DASH]]
    if isinstance(cost, Cost):
        many, _ = many_requests(cost.per_request_usd)
        each = Figure(many * cost.per_request_usd, "usd")
        what = "cost of a million requests" if many > 1 else "cost of a request"
        rows = [[what, how.cost, each, between(cost.per_request_usd_ci, many)]]
        for what, key in (
            ("output tokens", "per_million_output_tokens_usd"),
            ("tokens", "per_million_total_tokens_usd"),
        ):
            figure = Figure(getattr(cost, key), "usd", f"cost.{key}")
            rows.append([f"cost of a million {what}", "", figure, between(getattr(cost, f"{key}_ci"))])
    ends = low_to_high(energy.tokens_per_watt_ci) if isinstance(energy, Energy) else ""
    tokens = Figure(energy.tokens_per_watt, "number", "energy.tokens_per_watt")
    worth = Figure(value.good_requests_per_usd, "large", "value.good_requests_per_usd")
    rows.append(["efficiency: output tokens per joule", how.energy, tokens, ends or DASH])
    rows.append(["value: good requests for $1", how.value, worth, DASH])
    name, interval = "Cost, efficiency and value", Column(f"{100 * confidence:g} % interval", "interval")
    table = Table(name, ["what", Column("how, or why not", "how"), "figure", interval], rows, words=2)
    blocks: list[Block] = [table, _chart(cost, proven=proven)] if isinstance(cost, Cost) else [table]
    return Section("cost", name, blocks, short="cost")


def between(ends: Ends | None, many: float = 1.0) -> str:
    """``$0.01 .. $0.02``; words for an end that nothing bounds."""
    low, high = ends or (None, None)
    if high is None:
        return DASH
    return f"up to {usd(many * high)}" if low is None else f"{usd(many * low)} .. {usd(many * high)}"


def _chart(cost: Cost, *, proven: bool) -> Chart:
    rate, price = cost.rate, cost.price
    many, who = many_requests(cost.per_request_usd)
    low, _ = cost.per_request_usd_ci
    said = f"{between(cost.per_request_usd_ci, many)} {who}"
    picture = CostRange(said, None if low is None else many * low, many * cost.per_request_usd)
    lower = "The lower end was not measured. " if low is None else ""
    upper = "" if rate.high is None else f", at most at {significant(rate.high)}"
    default = f" It is {price.source}; set yours with cost.usd_per_hour." if price.is_default else ""
    held, hour = f"{significant(rate.low)} req/s", f"{usd(price.usd_per_unit_hour)} an hour"
    formula = f"{price.units} x {hour} / (3600 x {held} x {price.utilisation:g})"
    where = f"The SLOs hold at {held} or more" if proven else f"The interval's lower end is {held}"
    caption = f"USD {who}, logarithmic. {lower}A request: {formula}. {where}{upper}.{default}"
    return Chart("cost-of-a-request", picture, caption)
