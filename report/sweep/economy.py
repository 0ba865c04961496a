"""Cost, energy, the rate that held the SLOs, latency, of every point side by side: what a precision or a batch buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gapmeter.analysis.cost.cost import MILLION, describe_cost, describe_tokens, offered_rate
from gapmeter.analysis.cost.economics import describe_value
from gapmeter.analysis.numbers import DASH, bounds, duration, large, significant, usd
from gapmeter.analysis.provenance import Provenance
from gapmeter.analysis.results.cost import Price
from gapmeter.analysis.results.run import SloAnswer, Verdict
from gapmeter.analysis.sweep.compared import figure_key
from gapmeter.analysis.sweep.read import PointRun
from gapmeter.report import bridge, head
from gapmeter.report.figure import Row, Table, Value, written
from gapmeter.report.shell import Section
from gapmeter.report.svg import el
from gapmeter.report.words import price_words, value_sentence

_LEAD = (
    "A request costs what a replica costs in an hour, over the requests that it serves in one at the planned share of "
    "a rate that held the SLOs: at most, since nobody looked further up. A point that missed them has no cost."
)
_HEADERS = (
    "point", "precision", "cost of a million requests", "of a million output tokens", "J a request",
    "output tokens per J", "good requests for $1", "SLOs held at",
)  # fmt: skip


def describe_economy(
    verdict: Verdict, answers: Sequence[SloAnswer], runs: Sequence[PointRun], measured: pd.DataFrame
) -> dict[str, Any]:
    """A point's ``economy``, of all its repeats together: cost, energy and value as in a run's result.

    ``measured``: the requests that count.
    """
    results = [run.result for run in runs if run.result is not None]
    manifest = next(run.typed_manifest for run in runs if run.typed_manifest is not None)
    first, times = results[0], len(results)
    # Repeats play one trace of arrivals again and again: they tell no more of its rate than one of them.
    load = first.load.model_copy(update={"window_s": sum(each.load.window_s for each in results) / times})
    steady = next((each.steady for each in results if each.steady.state == "unsteady"), None)
    rate = offered_rate(verdict, answers, load, len(measured) // times, steady)
    cost = describe_cost(rate, describe_tokens(measured), manifest)
    least = [ends[0] for each in results if (ends := each.goodput.share_ci) and ends[0] is not None]
    value = describe_value(cost, (min(least), 1.0) if least else None)
    support = manifest.target.precision
    return {
        "precision": manifest.scenario["server"]["precision"],
        "emulated": support is not None and support.emulated,
        "cost": bridge.cost_document(cost, manifest),
        "energy": _energy([each.energy.to_json() for each in results]),
        "value": value.to_json() | {"sentence": value_sentence(value, (min(least), 1.0) if least else None)},
    }


def economy_section(sweep: Mapping[str, Any], origin: Provenance) -> Section | None:
    """The points' economies as a table; None for a sweep without measured points."""
    shown = [sweep["points"][at] for entry in sweep["series"] for at in entry["points"]]
    shown = [point for point in shown if point.get("economy")]
    if not shown:
        return None
    name = "Cost, efficiency and value"
    if all(_nothing_known(point["economy"]) for point in shown):
        return Section("economy", name, el("p", _no_point(shown)), short="cost")
    levels = {metric: figure_key(sweep["levels"][metric]) for metric in ("ttft", "itl")}
    heads = [f"{metric.upper()} {level}" for metric, level in levels.items()]
    rows = [economy_row(point, levels) for point in shown]
    first, last = list(_HEADERS[:2]), [*_HEADERS[2:], *heads]
    if any(row[-1] for row in rows):  # words stand before the numbers
        first.append("why there is no cost")
        rows = [[*row[:2], row[-1], *row[2:-1]] for row in rows]
    else:
        rows = [row[:-1] for row in rows]
    table = Table(name, [*first, *last], rows, words=len(first), css="dense")
    priced = [point["economy"]["cost"] for point in shown if point["economy"]["cost"].get("price")]
    price = f" The price is {price_note(priced[0]['price'])}." if priced else ""
    return Section("economy", name, written(table, origin), f"{_LEAD}{price}", "cost")


def _nothing_known(economy: Mapping[str, Any]) -> bool:
    return economy["cost"]["per_request_usd"] is None and economy["energy"]["per_request_j"] is None


def _no_point(shown: Sequence[Mapping[str, Any]]) -> str:
    """Why no point has a cost, each reason once, with whose it is where they differ."""
    reasons: dict[str, list[str]] = {}
    for point in shown:
        reasons.setdefault(point["economy"]["cost"]["reason"], []).append(point["label"])
    told = [reason if len(reasons) == 1 else f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
    return f"No point has a cost, and energy was not measured. {head.as_sentence('; '.join(told))}"


def economy_row(point: Mapping[str, Any], levels: Mapping[str, str]) -> Row:
    """One point's cells, in the order of the headers; ``levels``: at which percentile each metric is told (p99)."""
    economy = point["economy"]
    cost, energy, worth = economy["cost"], economy["energy"], economy["value"]["good_requests_per_usd"]
    held = (cost.get("rate") or {}).get("low")
    return [
        point["label"],
        f"{economy['precision']}{', emulated' if economy['emulated'] else ''}",
        _dollars(None if cost["per_request_usd"] is None else MILLION * cost["per_request_usd"]),
        _dollars(cost.get("per_million_output_tokens_usd")),
        _number(energy["per_request_j"]),
        _number(energy["tokens_per_watt"]),
        Value(large(worth), worth),
        Value(DASH if held is None else f"{significant(held)} req/s", held),
        *(_latency(point["metrics"][metric], level) for metric, level in levels.items()),
        cost["reason"] or "",
    ]


def price_note(price: Mapping[str, Any]) -> str:
    """Whose price the table is at."""
    mend = "; say yours with cost.usd_per_hour" if price["is_default"] else ""
    return f"{price_words(Price.model_validate(price))}{mend}"


def _energy(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joules of all repeats over their requests and tokens; null unless every repeat measured them."""
    told: dict[str, Any] = {"per_request_j": None, "tokens_per_watt": None}
    if not parts or any(part["per_request_j"] is None or not part["tokens_per_watt"] for part in parts):
        return told
    joules = sum(part["joules"] for part in parts)
    requests = sum(part["joules"] / part["per_request_j"] for part in parts)
    tokens = sum(part["joules"] * part["tokens_per_watt"] for part in parts)
    return {"per_request_j": joules / requests, "tokens_per_watt": tokens / joules}


def _latency(found: Mapping[str, Any], level: str) -> Value:
    """A percentile and its interval in one cell."""
    value, ends = found[f"{level}_ms"], found[f"{level}_ci_ms"]
    return Value(DASH if value is None else f"{duration(value)} ({bounds(*(ends or (None, None)))})", value)


def _dollars(value: float | None) -> Value:
    return Value(usd(value), value)


def _number(value: float | None) -> Value:
    return Value(DASH if value is None else significant(value), value)
