"""Several runs in one table: latency, capacity, cost and energy of each, and how far identical devices lie apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.compare.resample import pooled_sample
from gapmeter.analysis.compare.sides import Run
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.stats import quantiles
from gapmeter.report import bridge

_SHOWN = (("ttft", 50.0), ("ttft", 99.0), ("itl", 99.0), ("e2e", 50.0), ("e2e", 99.0))
# Of the parts that a summary may have: the figure's key, and what would measure it.
_PARTS = {
    "capacity": ("rate", "gapmeter capacity measures it"),
    "cost": ("per_request_usd", "it needs a capacity and a price"),
    "energy": ("per_request_j", "no counter of energy was read"),
}


def line_up(letters: Sequence[str], sides: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """``rows``: a row a side; ``devices``: for each device that more than one side ran on alike, their spread."""
    rows = [_row(letter, runs) for letter, runs in zip(letters, sides, strict=True)]
    return {"rows": rows, "devices": _devices(rows)}


def _row(letter: str, runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0]
    told = bridge.provenance(first.summary)
    figures = {f"{m}_{percentile_key(p)}": _estimate(runs, m, p) for m, p in _SHOWN}
    return {
        "name": letter,
        "runs": [run.name for run in runs],
        "device": bridge.hardware_words(first.manifest.get("hardware") or {}),
        "engine": told.engine,
        "load": told.load,
        "digest": first.manifest.get("scenario_digest"),
        "verdict": first.summary.get("verdict"),
        "requests": sum(run.count for run in runs),
        "figures": figures,
        **{name: _part(runs, name, *where) for name, where in _PARTS.items()},
    }


def _estimate(runs: Sequence[Run], metric: str, percentile: float) -> dict[str, Any]:
    """A percentile of all runs of a side, with its order-statistic interval; null where it is not supported."""
    found = quantiles.estimate(pooled_sample([run.sample(metric) for run in runs]), percentile)
    if not found.supported or found.value is None or found.low is None or found.high is None:
        return {"value_ms": None, "ci_ms": None, "why": "the sample is too small"}
    return {"value_ms": found.value / 1e6, "ci_ms": [found.low / 1e6, found.high / 1e6], "why": ""}


def _part(runs: Sequence[Run], part: str, key: str, remedy: str) -> dict[str, Any]:
    """A figure that only some runs have, of the first run that has it, with its interval; else null and why."""
    why = f"not in this run: {remedy}"
    for run in runs:
        known = run.summary.get(part)
        if not isinstance(known, Mapping):
            continue
        if isinstance(known.get(key), (int, float)):
            ends = known.get(f"{key}_ci") or [known.get("low"), known.get("high")]
            return {"value": float(known[key]), "ci": list(ends), "why": ""}
        why = str(known.get("reason") or why)
    return {"value": None, "ci": None, "why": why}


def _devices(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sides that ran the same scenario on devices of one name: the spread of each figure, largest over smallest."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["device"], row["digest"]), []).append(row)
    return [_spread(device, own) for (device, _), own in groups.items() if len(own) > 1]


def _spread(device: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    spreads = {}
    for key in rows[0]["figures"]:
        values = [row["figures"][key]["value_ms"] for row in rows]
        known = [value for value in values if value]
        if len(known) == len(rows):
            spreads[key] = {"low_ms": min(known), "high_ms": max(known), "relative": max(known) / min(known) - 1}
    return {"device": device, "sides": [row["name"] for row in rows], "figures": spreads}
