"""A run as CSV files. Each begins with comment lines that say what was measured, where, and how to repeat it.

``pandas.read_csv(file, comment="#")`` and R's ``read.csv(file, comment.char = "#")`` pass these over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from gapmeter.analysis.provenance import Provenance
from gapmeter.records import RunFolder
from gapmeter.report.run import read_run

_TABLES = ("requests", "ledger", "gaps", "timeline", "steps")
_LISTS = ("token_ns", "chunk_tokens", "engine_metrics")


def write_csv(folder: RunFolder, into: Path) -> list[Path]:
    """Write every figure and table of an analysed run into a folder, which is made; the files written.

    Raises FileNotFoundError when the run has not been analysed, OSError.
    """
    run = read_run(folder)
    into.mkdir(parents=True, exist_ok=True)
    about = run.provenance
    written = [_write(into / f"{name}.csv", table, about) for name, table in figures(run.summary).items() if len(table)]
    for name in _TABLES:
        file = folder.path / f"{name}.parquet"
        if file.exists():
            table = pd.read_parquet(file)
            flat = table.drop(columns=[column for column in _LISTS if column in table.columns])
            written.append(_write(into / f"{name}.csv", flat, about))
    return written


def figures(summary: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The summary's tables: metrics (from due and from sent), stages, groups, slo. Times are ms."""
    metrics = [
        {"metric": metric, "counted_from": origin, **_flat(found)}
        for origin, part in (("due", "metrics"), ("sent", "metrics_from_sent"))
        for metric, found in summary[part].items()
    ]
    stages = [
        {"stage": stage, "to": event, **_flat(found)}
        for event, part in (("last token", "stages"), ("first token", "stages_to_first_token"))
        for stage, found in summary[part].items()
    ]
    groups = [{"group": group, **_flat(found)} for group, found in summary["groups"].items()]
    slos = [_flat(row) for row in summary["slo"]]
    tables = {"metrics": metrics, "stages": stages, "groups": groups, "slo": slos}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals as two columns; what has further parts is left to the JSON."""
    out: dict[str, Any] = {}
    for key, value in found.items():
        if key.endswith("_ci_ms"):
            stem = key.removesuffix("_ci_ms")
            low, high = value or (None, None)
            out |= {f"{stem}_low_ms": low, f"{stem}_high_ms": high}
        elif not isinstance(value, (dict, list)):
            out[key] = value
    return out


def _write(path: Path, table: pd.DataFrame, about: Provenance) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(about.comments())
        table.to_csv(file, index=False)
    return path
