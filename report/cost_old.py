"""Cost, efficiency and value: three rows and a picture of the cost's interval. Page and terminal say the same words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.numbers import DASH, large, significant, usd
from gapmeter.analysis.provenance import Provenance
from gapmeter.report.figure import Table, Value, figure, written
from gapmeter.report.shell import Section
from gapmeter.report.svg import Fragment, chart, el, group, percent
from gapmeter.report.words import many_requests

_HEIGHT = 46
_LINE = 16.0


def economy_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Three (name, sentence) for people; none for a summary of an older version."""
    parts = ("cost", "energy", "value")
    if not all(part in summary for part in parts):
        return []
    names = ("cost", "energy", "value")
    return [(name, _line(summary[part])) for name, part in zip(names, parts, strict=True)]


def cost_sentence(summary: Mapping[str, Any]) -> str:
    """What the verdict says of cost: the figure, where there is one; nothing otherwise."""
    cost = summary.get("cost") or {}
    if cost.get("per_request_usd") is None:
        return ""
    output = cost["per_million_output_tokens_usd_ci"]
    tokens = f", a million output tokens {usd(output[1])}" if output else ""
    many = many_requests(cost["per_request_usd"])[0]
    who, costs = ("a million requests", "cost") if many > 1 else ("a request", "costs")
    return f"At this SLA {who} {costs} at most {usd(many * cost['per_request_usd'])}{tokens}."


def _line(part: Mapping[str, Any]) -> str:
    if not part.get("reason"):
        return str(part["sentence"])
    reason = str(part["reason"])
    return reason if reason.startswith("unmeasured") else f"{DASH}  {reason}"


def _cell(part: Mapping[str, Any]) -> str:
    """The same in a table, whose figure has the dash."""
    return _line(part).removeprefix(DASH).strip()


def economy_section(summary: Mapping[str, Any], origin: Provenance) -> Section | None:
    """The three as a table, and the interval of a request's cost as a picture; for a run or a search for capacity."""
    if not economy_lines(summary):
        return None
    cost = summary["cost"]
    headers, name = ["what", "how, or why not", "figure", "95 % interval"], "Cost, efficiency and value"
    table = Table(name, headers, economy_rows(summary), csv=["what", "how", "figure", "interval"], words=2)
    if cost["per_request_usd"] is None:
        return Section("cost", name, written(table, origin), short="cost")
    picture = figure(cost_picture(cost), None, origin, _caption(cost), key="cost-of-a-request")
    return Section("cost", name, group([written(table, origin, own_line=False), picture]), short="cost")


def economy_rows(summary: Mapping[str, Any]) -> list[list[Value | str]]:
    """A row each for cost (with that of tokens beneath), efficiency and value."""
    cost, energy, value = summary["cost"], summary["energy"], summary["value"]
    per_watt, worth = energy["tokens_per_watt"], value["good_requests_per_usd"]
    tokens = DASH if per_watt is None else significant(per_watt)
    many = many_requests(cost["per_request_usd"])[0] if cost["per_request_usd"] is not None else 1.0
    who = "cost of a million requests" if many > 1 else "cost of a request"
    rows: list[list[Value | str]] = [[who, _cell(cost), *_figures(cost, "per_request", many)]]
    if cost["per_request_usd"] is not None:
        rows.append(["cost of a million output tokens", "", *_figures(cost, "per_million_output_tokens")])
        rows.append(["cost of a million tokens", "", *_figures(cost, "per_million_total_tokens")])
    ends = energy.get("tokens_per_watt_ci")
    spread = f"{significant(ends[0])} .. {significant(ends[1])}" if ends and None not in ends else DASH
    rows.append(["efficiency: output tokens per joule", _cell(energy), Value(tokens, per_watt), spread])
    rows.append(["value: good requests for $1", _cell(value), Value(large(worth), worth), DASH])
    return rows


def _figures(cost: Mapping[str, Any], name: str, many: float = 1.0) -> list[Value | str]:
    amount, ends = cost.get(f"{name}_usd"), cost.get(f"{name}_usd_ci")
    scaled = None if amount is None else many * amount
    low, high = ends or (None, None)
    bounds = None if high is None else (None if low is None else many * low, many * high)
    return [Value(usd(scaled), scaled), span(bounds)]


def span(bounds: tuple[float | None, float | None] | None) -> str:
    """``$0.01 .. $0.02``; an end that nothing bounds is told in words."""
    if not bounds:
        return DASH
    low, high = bounds
    return f"up to {usd(high)}" if low is None else f"{usd(low)} .. {usd(high)}"


def cost_picture(cost: Mapping[str, Any]) -> Fragment:
    """The interval of a request's cost on a logarithmic axis; open where nobody looked for its lower end."""
    many, who = many_requests(cost["per_request_usd"])
    low, high = (None if end is None else many * end for end in cost["per_request_usd_ci"])
    value = many * cost["per_request_usd"]
    assert high is not None  # a cost has an upper end, or there is none
    bottom, top = math.log10(low or value / 10) - 0.15, math.log10(high) + 0.15

    def x(amount: float) -> float:
        return min(1.0, max(0.0, (math.log10(amount) - bottom) / (top - bottom)))

    from_x = x(low) if low else 0.0
    parts = [_tick(10.0**power * digit, x) for power, digit in _ticks(bottom, top)]
    parts.append(el("rect", x=percent(from_x), y=_LINE - 6, width=percent(x(high) - from_x), height=12, class_="band"))
    if not low:
        parts.append(el("text", "← not looked for", x=2, y=_LINE + 4, class_="note"))
    dot = el("title", f"{usd(value)} {who}")
    parts.append(el("circle", dot, cx=percent(x(value)), cy=_LINE, r=4, class_="sample"))
    return chart("cost", _HEIGHT, "Cost of a request at the SLA", f"{span((low, high))} {who}", group(parts))


def _tick(amount: float, x: Any) -> Fragment:
    at = percent(x(amount))
    line = el("line", x1=at, x2=at, y1=0, y2=_LINE + 12, class_="grid")
    return group(
        [line, el("text", f"${amount:.12f}".rstrip("0").rstrip("."), x=at, y=_HEIGHT - 2, class_="tick middle")]
    )


def _ticks(bottom: float, top: float) -> list[tuple[int, int]]:
    """(power of ten, 1, 2 or 5) within the axis, at most eight."""
    every = [(p, d) for p in range(math.floor(bottom), math.ceil(top) + 1) for d in (1, 2, 5)]
    inside = [(p, d) for p, d in every if bottom <= p + math.log10(d) <= top]
    return inside if len(inside) <= 8 else [(p, d) for p, d in inside if d == 1]


def _caption(cost: Mapping[str, Any]) -> str:
    rate, price = cost["rate"], cost["price"]
    upper = "" if rate["high"] is None else f", at most at {significant(rate['high'])}"
    default = f" It is {price['source']}; say yours with cost.usd_per_hour." if price["is_default"] else ""
    rate_words, hour = f"{significant(rate['low'])} req/s", f"{usd(price['usd_per_unit_hour'])} an hour"
    who = many_requests(cost["per_request_usd"])[1]
    per_request = f"{price['units']} x {hour} / (3600 x {rate_words} x {price['utilisation']:g})"
    return f"USD {who}, logarithmic. A request: {per_request}. The SLOs hold at {rate_words} or more{upper}.{default}"
