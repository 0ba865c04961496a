"""What a first run of chat-p99 tells: is its p99 there with both ends, is every SLO decided, is there a cost?

The scenario as it is shipped, again and again on each engine, in turn, so that both meet the machine alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.machine.instrument import NotMeasured
from gapmeter.options import Options
from gapmeter.scenarios import load_scenario
from gapmeter.study.study import run_scenario

SCENARIO = "chat-p99"
_METRIC, _PERCENTILE = "ttft", 99.0


def measure(
    engines: Sequence[str], repeats: int, folder: Path, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """So many runs an engine, after those of ``earlier``.

    Raises UserError or ServerFailed when one cannot be had, NotMeasured when the earlier ones are of another load.
    """
    digest = load_scenario(SCENARIO).digest()
    if earlier and earlier["digest"] != digest:
        raise NotMeasured(f"the runs to add to are of {SCENARIO} as it was: leave out --add to replace them")
    rows = list(earlier["rows"]) if earlier else []
    for _ in range(repeats):
        for engine in engines:
            done = run_scenario(SCENARIO, [f"server.engine={engine}"], Options(folder, quiet=True))
            rows.append(row_of(done.folder))
    return {"scenario": SCENARIO, "digest": digest, "rows": rows}


def row_of(folder: Path) -> dict[str, Any]:
    """What a run's folder says."""
    result, manifest = RunResult.read(folder), Manifest.read(folder)
    percentile = result.metrics[_METRIC].percentiles[_PERCENTILE]
    return {
        "engine": manifest.asked.server.engine,
        "verdict": result.verdict,
        "requests": result.counts.measured,
        "seconds": result.load.window_s,
        "n_eff": result.metrics[_METRIC].n_eff,
        "p99_ms": percentile.value_ms,
        "ci_ms": percentile.ci_ms,
        "at_most_ms": percentile.at_most.ms if percentile.at_most else None,
        "undecided": [slo.text for slo in result.slo if slo.status not in ("PASS", "FAIL")],
        "cost": result.cost.per_request_usd is not None,
        "lag_p99_ms": result.trust.lag_p99_ms,
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """A row an engine."""
    lines = [
        "| engine | runs | p99 with both ends | 95 % interval | all SLOs decided | a cost | p99, ms | ±, % | load, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return [*lines, *_rows(found["rows"]), "", f"`{found['scenario']}`; ranges from run to run."]


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        whole = [row for row in own if row["p99_ms"] is not None]
        low, high = share_bounds(len(whole), len(own))
        halves = [50 * (row["ci_ms"][1] - row["ci_ms"][0]) / row["p99_ms"] for row in whole]
        yield (
            f"| {engine} | {len(own)} | {len(whole)} | {low:.0%} to {high:.0%} "
            f"| {sum(not row['undecided'] for row in own)} | {sum(row['cost'] for row in own)} "
            f"| {_range([row['p99_ms'] for row in whole])} | {_range(halves)} "
            f"| {_range([row['seconds'] for row in own])} |"
        )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "–"
