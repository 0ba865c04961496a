"""Cost, efficiency and value: three rows, and the interval of a request's cost as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from gapmeter.analysis.numbers import DASH, significant, usd
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.cost import Cost, Economy, Energy
from gapmeter.report import words
from gapmeter.report.document import Block, Chart, Column, Figure, Headers, Row, Section, Table
from gapmeter.report.pictures import CostRange

Lines = Sequence[tuple[str, str]]


def lines(economy: Economy, goodput_ci: Ends | None, *, simulated: bool) -> Lines:
    """Three (name, sentence) of a run, or of a search for capacity: the figure, or why there is none.

    ``goodput_ci``: the share of requests within their own limits; ``simulated``: no real engine served.
    """
    cost, energy, value = economy.cost, economy.energy, economy.value
    return [
        ("cost", _or_why(words.cost_sentence(cost, simulated=simulated), cost.reason)),
        ("energy", _or_why(words.energy_sentence(energy), energy.reason)),
        ("value", _or_why(words.value_sentence(value, goodput_ci), value.reason)),
    ]


def _or_why(sentence: str, reason: str | None) -> str:
    if not reason:
        return sentence
    return reason if reason.startswith("unmeasured") else f"{DASH}  {reason}"


def section(economy: Economy, said: Lines) -> Section:
    """``said``: as ``lines`` gives it."""
    cost, name = economy.cost, "Cost, efficiency and value"
    headers: Headers = ["what", Column("how, or why not", "how"), "figure", Column("95 % interval", "interval")]
    blocks: list[Block] = [Table(name, headers, rows(economy, said), words=2)]
    if isinstance(cost, Cost):
        blocks.append(_chart(cost))
    return Section("cost", name, blocks, short="cost")


def rows(economy: Economy, said: Lines) -> list[Row]:
    """A row each for cost (with that of tokens beneath), efficiency and value."""
    cost, energy, value = economy.cost, economy.energy, economy.value
    how = {name: line.removeprefix(DASH).strip() for name, line in said}  # the figure beside it has the dash
    found: list[Row]
    if isinstance(cost, Cost):
        many, _ = words.many_requests(cost.per_request_usd)
        million, output, total = "cost of a million", "per_million_output_tokens_usd", "per_million_total_tokens_usd"
        found = [
            [f"{million} requests" if many > 1 else "cost of a request", how["cost"],
             Figure(many * cost.per_request_usd, "usd"), between(cost.per_request_usd_ci, many)],
            [f"{million} output tokens", "",
             Figure(cost.per_million_output_tokens_usd, "usd", f"cost.{output}"),
             between(cost.per_million_output_tokens_usd_ci)],
            [f"{million} tokens", "", Figure(cost.per_million_total_tokens_usd, "usd", f"cost.{total}"),
             between(cost.per_million_total_tokens_usd_ci)],
        ]  # fmt: skip
    else:
        found = [["cost of a request", how["cost"], Figure(None, "usd"), DASH]]
    low, high = (energy.tokens_per_watt_ci or (None, None)) if isinstance(energy, Energy) else (None, None)
    spread = DASH if low is None or high is None else f"{significant(low)} .. {significant(high)}"
    tokens = Figure(energy.tokens_per_watt, "number", "energy.tokens_per_watt")
    worth = Figure(value.good_requests_per_usd, "large", "value.good_requests_per_usd")
    return [
        *found,
        ["efficiency: output tokens per joule", how["energy"], tokens, spread],
        ["value: good requests for $1", how["value"], worth, DASH],
    ]


def between(ends: Ends | None, many: float = 1.0) -> str:
    """``$0.01 .. $0.02``; an end that nothing bounds is told in words."""
    low, high = ends or (None, None)
    if high is None:
        return DASH
    return f"up to {usd(many * high)}" if low is None else f"{usd(many * low)} .. {usd(many * high)}"


def _chart(cost: Cost) -> Chart:
    many, who = words.many_requests(cost.per_request_usd)
    low, high = (None if end is None else many * end for end in cost.per_request_usd_ci)
    assert high is not None  # a cost has an upper end, or there is none
    range_ = CostRange(
        "Cost of a request at the SLA", f"{between(cost.per_request_usd_ci, many)} {who}", many * cost.per_request_usd,
        low, high,
    )  # fmt: skip
    return Chart("cost-of-a-request", range_, _caption(cost, who))


def _caption(cost: Cost, who: str) -> str:
    rate, price = cost.rate, cost.price
    lower = "The left end was not looked for. " if cost.per_request_usd_ci[0] is None else ""
    upper = "" if rate.high is None else f", at most at {significant(rate.high)}"
    default = f" It is {price.source}; say yours with cost.usd_per_hour." if price.is_default else ""
    held, hour = f"{significant(rate.low)} req/s", f"{usd(price.usd_per_unit_hour)} an hour"
    formula = f"{price.units} x {hour} / (3600 x {held} x {price.utilisation:g})"
    return f"USD {who}, logarithmic. {lower}A request: {formula}. The SLOs hold at {held} or more{upper}.{default}"
