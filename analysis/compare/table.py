"""All sides in one table: latency, cost and energy of each, and how far identical devices lie apart."""

from __future__ import annotations

from collections.abc import Sequence

from gapmeter.analysis.compare.result import DeviceSpread, FigureSpread, SideEstimate, SidePart, SideRow, SideTable
from gapmeter.analysis.compare.sides import Side
from gapmeter.analysis.provenance import hardware_words
from gapmeter.analysis.results.cost import Cost, Energy
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.stats.series import pooled

_SHOWN = (("ttft", 50.0), ("ttft", 99.0), ("itl", 99.0), ("e2e", 50.0), ("e2e", 99.0))
_NO_CAPACITY = SidePart(value=None, ci=None, why="not in this run: gapmeter capacity measures it")


def side_table(letters: Sequence[str], sides: Sequence[Side]) -> SideTable:
    """A row a side; for each device that more than one side ran on alike, their spread."""
    rows = [_row(letter, side) for letter, side in zip(letters, sides, strict=True)]
    groups: dict[tuple[str, str], list[SideRow]] = {}
    for row in rows:
        groups.setdefault((row.device, row.digest), []).append(row)
    return SideTable(rows=tuple(rows), devices=tuple(_spread(own) for own in groups.values() if len(own) > 1))


def _row(letter: str, side: Side) -> SideRow:
    manifest, result = side.first.manifest, side.first.result
    hardware = manifest.hardware
    return SideRow(
        name=letter,
        runs=tuple(each.run.name for each in side.runs),
        device=hardware_words(hardware.gpus, hardware.cpu, hardware.cores),
        engine=result.provenance.engine,
        load=result.provenance.load,
        digest=manifest.scenario_digest,
        verdict=result.verdict,
        requests=side.requests,
        figures={f"{metric}_{percentile_key(p)}": _estimate(side, metric, p) for metric, p in _SHOWN},
        capacity=_NO_CAPACITY,
        cost=_cost(side),
        energy=_energy(side),
    )


def _estimate(side: Side, metric: str, percentile: float) -> SideEstimate:
    found = pooled([each.run.series(metric) for each in side.runs]).percentile(percentile)
    if not found.supported:
        return SideEstimate(value_ms=None, ci_ms=None, why="the sample is too small")
    value, low, high = (ns / 1e6 for ns in found.known)
    return SideEstimate(value_ms=value, ci_ms=(low, high), why="")


def _cost(side: Side) -> SidePart:
    """Of the first run that has one; else why the last has none."""
    why = ""
    for each in side.runs:
        cost = each.result.cost
        if isinstance(cost, Cost):
            return SidePart(value=cost.per_request_usd, ci=cost.per_request_usd_ci, why="")
        why = cost.reason
    return SidePart(value=None, ci=None, why=why)


def _energy(side: Side) -> SidePart:
    """Likewise."""
    why = "not in this run: no counter of energy was read"
    for each in side.runs:
        energy = each.result.energy
        if isinstance(energy, Energy) and energy.per_request_j is not None:
            return SidePart(value=energy.per_request_j, ci=energy.per_request_j_ci, why="")
        why = energy.reason or why
    return SidePart(value=None, ci=None, why=why)


def _spread(rows: Sequence[SideRow]) -> DeviceSpread:
    """Of each figure that every side has."""
    spreads = {}
    for key in rows[0].figures:
        known = [value for row in rows if (value := row.figures[key].value_ms)]
        if len(known) == len(rows):
            low, high = min(known), max(known)
            spreads[key] = FigureSpread(low_ms=low, high_ms=high, relative=high / low - 1)
    return DeviceSpread(device=rows[0].device, sides=tuple(row.name for row in rows), figures=spreads)
