"""Cost, energy, the rate that held the SLOs, latency, of every point side by side: what a precision or a batch buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.cost import describe_cost, describe_tokens, usd
from analysis.economics import describe_value
from analysis.provenance import Provenance
from analysis.report.cost import span
from analysis.report.figure import Row, Table, Value, written
from analysis.report.numbers import DASH, bounds, count, duration, significant
from analysis.report.shell import Section

_LEAD = (
    "A request costs what a replica costs in an hour, over the requests that it serves in one at the planned share of "
    "a rate that held the SLOs: at most, since nobody looked further up. A point that missed them has no cost."
)
_HEADERS = (
    "point", "precision", "cost of a request", "95 % interval", "of a million output tokens", "J a request",
    "output tokens per J", "good requests for $1", "SLOs held at", "TTFT p99", "95 % interval", "ITL p99",
    "95 % interval", "why there is no cost",
)  # fmt: skip


def describe_economy(
    point: Mapping[str, Any],
    summaries: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
    measured: pd.DataFrame,
) -> dict[str, Any]:
    """A point's ``economy``, of all its repeats together: cost, energy and value as in a run's summary.

    ``point``: its verdict, SLOs and metrics; ``measured``: the requests that count.
    """
    first, times = summaries[0], len(summaries)
    # Repeats play one trace of arrivals again and again: they tell no more of its rate than one of them.
    pooled = {
        "verdict": point["verdict"],
        "slo": point["slo"],
        "load": {**first["load"], "window_s": sum(each["load"]["window_s"] for each in summaries) / times},
        "counts": {"measured": len(measured) // times},
        "warnings": [warning for each in summaries for warning in each["warnings"]],
        "tokens_per_request": describe_tokens(measured),
    }
    cost = describe_cost(pooled, manifest)
    least = [each["goodput"]["share_ci"][0] for each in summaries if each["goodput"]["share_ci"]]
    told = (manifest.get("target") or {}).get("precision") or {}
    return {
        "precision": manifest["scenario"]["server"]["precision"],
        "emulated": bool(told.get("emulated")),
        "cost": cost,
        "energy": _energy([each["energy"] for each in summaries if "energy" in each]),
        "value": describe_value(cost, {"share_ci": [min(least), 1.0]} if least else None),
    }


def economy_section(sweep: Mapping[str, Any], origin: Provenance) -> Section | None:
    """The points' economies as a table; None for a sweep without measured points."""
    shown = [sweep["points"][at] for entry in sweep["series"] for at in entry["points"]]
    shown = [point for point in shown if point.get("economy")]
    rows = [economy_row(point) for point in shown]
    if not rows:
        return None
    table = Table("Cost, efficiency and value", _HEADERS, rows, words=2)
    default = next(
        (p["economy"]["cost"] for p in shown if p.get("economy") and p["economy"]["cost"].get("price")), None
    )
    price = f" {price_note(default)}" if default else ""
    return Section("economy", "Cost, efficiency, value", written(table, origin), f"{_LEAD}{price}", "cost")


def economy_row(point: Mapping[str, Any]) -> Row:
    """One point's cells, in the order of the headers."""
    economy, metrics = point["economy"], point["metrics"]
    cost, energy, worth = economy["cost"], economy["energy"], economy["value"]["good_requests_per_usd"]
    held = (cost.get("rate") or {}).get("low")
    ttft, itl = (metrics[name] for name in ("ttft", "itl"))
    return [
        point["label"],
        f"{economy['precision']}{', emulated' if economy['emulated'] else ''}",
        Value(usd(cost["per_request_usd"]), cost["per_request_usd"]),
        span(cost.get("per_request_usd_ci")),
        Value(usd(cost.get("per_million_output_tokens_usd")), cost.get("per_million_output_tokens_usd")),
        _number(energy["per_request_j"]),
        _number(energy["tokens_per_watt"]),
        Value(count(worth), worth),
        Value(DASH if held is None else f"{significant(held)} req/s", held),
        *(cell for found in (ttft, itl) for cell in (_p99(found), bounds(*(found["p99_ci_ms"] or (None, None))))),
        cost["reason"] or "",
    ]


def price_note(cost: Mapping[str, Any]) -> str:
    """Whose price the table is at."""
    price = cost["price"]
    mend = "; say yours with cost.usd_per_hour" if price["is_default"] else ""
    return (
        f"{price['units']} x {price['device']} at {usd(price['usd_per_unit_hour'])} an hour, {price['source']}{mend}."
    )


def _energy(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joules of all repeats over their requests and tokens; null unless every repeat measured them."""
    told: dict[str, Any] = {"per_request_j": None, "tokens_per_watt": None}
    if not parts or any(part["per_request_j"] is None or not part["tokens_per_watt"] for part in parts):
        return told
    joules = sum(part["joules"] for part in parts)
    requests = sum(part["joules"] / part["per_request_j"] for part in parts)
    tokens = sum(part["joules"] * part["tokens_per_watt"] for part in parts)
    return {"per_request_j": joules / requests, "tokens_per_watt": tokens / joules}


def _p99(found: Mapping[str, Any]) -> Value:
    return Value(duration(found["p99_ms"]), found["p99_ms"])


def _number(value: float | None) -> Value:
    return Value(DASH if value is None else significant(value), value)
