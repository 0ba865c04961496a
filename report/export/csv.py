"""A run as CSV files. Each begins with comment lines that say what was measured, where, and how to repeat it.

``pandas.read_csv(file, comment="#")`` and R's ``read.csv(file, comment.char = "#")`` pass these over.
"""

from __future__ import annotations

from csv import QUOTE_NONNUMERIC
from pathlib import Path
from typing import Any

import pandas as pd

from gapmeter.analysis.results import Result, RunResult
from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.tables import read_table
from gapmeter.records import RunFolder

_TABLES = ("requests", "ledger", "gaps", "timeline", "steps")
_LISTS = ("token_ns", "chunk_tokens", "engine_metrics", "receive_wait_ns")


def write_csv(folder: RunFolder, into: Path) -> list[Path]:
    """Write every figure and table of an analysed run into a folder, which is made; the files written.

    Raises FileNotFoundError when the run has not been analysed, OSError.
    """
    result = RunResult.read(folder.path)
    into.mkdir(parents=True, exist_ok=True)
    about = result.provenance
    written = [_write(into / f"{name}.csv", table, about) for name, table in figures(result).items() if len(table)]
    for name in _TABLES:
        file = folder.path / f"{name}.parquet"
        if file.exists():
            table = read_table(file)
            flat = table.drop(columns=[column for column in _LISTS if column in table.columns])
            written.append(_write(into / f"{name}.csv", flat, about))
    return written


def figures(result: RunResult) -> dict[str, pd.DataFrame]:
    """The result's tables: metrics (from due and from sent), stages, groups, slo. Times are ms."""
    metrics = [
        {"metric": metric, "counted_from": origin, **_flat(found)}
        for origin, part in (("due", result.metrics), ("sent", result.metrics_from_sent))
        for metric, found in part.items()
    ]
    stages = [
        {"stage": stage, "to": event, **_flat(found)}
        for event, part in (("last token", result.stages), ("first token", result.stages_to_first_token))
        for stage, found in part.items()
    ]
    groups = [{"group": group, **_flat(found)} for group, found in result.groups.items()]
    tables = {"metrics": metrics, "stages": stages, "groups": groups, "slo": list(map(_flat, result.slo))}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _flat(found: Result) -> dict[str, Any]:
    """Figures by their names in JSON, intervals and bounds as two columns; other nested parts are left to the JSON."""
    out: dict[str, Any] = {}
    for key, value in found.to_json().items():
        if key.endswith("_ci_ms"):
            stem = key.removesuffix("_ci_ms")
            low, high = value or (None, None)
            out |= {f"{stem}_low_ms": low, f"{stem}_high_ms": high}
        elif key == "at_most":  # an SLO's own, or by percentile
            for name, bound in ({"": value} if "ms" in value else value).items():
                stem = f"{name}_at_most".removeprefix("_")
                out |= {f"{stem}_ms": bound["ms"], f"{stem}_confidence": bound["confidence"]}
        elif not isinstance(value, (dict, list)):
            out[key] = value
    return out


def _write(path: Path, table: pd.DataFrame, about: Provenance) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {' '.join(value.split())}\n" for name, value in about.facts().items())
        table.to_csv(file, index=False, quoting=QUOTE_NONNUMERIC)  # a # in an error is no comment
    return path
