"""SQL over all runs: DuckDB in memory, with views on the runs' Parquet files and on their summaries. It only reads."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.runs.listing import kind_of, read_object, run_folders

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLES = ("requests", "ledger", "gaps", "steps")
_METRICS = ("ttft", "itl", "tpot", "e2e")
_FIGURES = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
_COLUMNS: dict[str, str] = {
    "run": "VARCHAR", "folder": "VARCHAR", "kind": "VARCHAR", "name": "VARCHAR", "started": "VARCHAR",
    "status": "VARCHAR", "scenario_digest": "VARCHAR", "command": "VARCHAR", "version": "VARCHAR",
    "engine": "VARCHAR", "model": "VARCHAR", "precision": "VARCHAR", "emulated": "BOOLEAN", "max_batch": "BIGINT",
    "device": "VARCHAR", "verdict": "VARCHAR", "loop": "VARCHAR", "arrivals": "VARCHAR", "requested_rate": "DOUBLE",
    "delivered_rate": "DOUBLE", "concurrency": "BIGINT", "measured": "BIGINT", "succeeded": "BIGINT",
    "goodput_per_s": "DOUBLE", "output_tokens_per_s": "DOUBLE", "usd_per_request": "DOUBLE",
    "usd_per_million_output_tokens": "DOUBLE", "joules_per_request": "DOUBLE",
    **{f"{metric}_{figure}": "DOUBLE" for metric in _METRICS for figure in _FIGURES},
    "summary": "JSON", "manifest": "JSON",
}  # fmt: skip


def print_answer(query: str, runs: Path, *, form: str) -> int:
    """Run one SELECT over the folder's runs and print it: ``form`` table, csv or json. Raises UserError."""
    from gapmeter.report.sheet import print_table

    headers, rows = ask(query, runs)
    if form == "json":
        print(json.dumps([dict(zip(headers, map(_plain, row), strict=True)) for row in rows], indent=1, default=str))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([headers, *rows])
    else:
        numbers = [i for i in range(len(headers)) if rows and isinstance(rows[0][i], int | float)]
        print_table(headers, [[_shown(cell) for cell in row] for row in rows], right=numbers)
    return errors.OK


def ask(query: str, runs: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns' names and the rows of one query. Raises UserError for no runs and for every mistake in the query."""
    import duckdb

    with connect(runs) as connection:
        try:
            statements = connection.extract_statements(query)
            allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
            if len(statements) != 1 or statements[0].type not in allowed:
                raise UserError("one SELECT at a time, please: this reads, and changes nothing", errors.USAGE)
            answer = connection.execute(statements[0])
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            raise UserError(_one_sentence(str(error)), errors.USAGE) from error


def connect(runs: Path) -> DuckDBPyConnection:
    """A database in memory with the views runs, requests, ledger, gaps and steps; it can open no other file.

    Each has a column ``run``, the folder's path below ``runs``. Raises UserError when there are no runs.
    """
    import duckdb

    folders = list(run_folders(runs)) if runs.is_dir() else []
    if not folders:
        raise UserError(f"there are no runs in {runs}; name a folder with --runs", errors.USAGE)
    connection = duckdb.connect(":memory:")
    files = {table: [path for f in folders if (path := f / f"{table}.parquet").exists()] for table in TABLES}
    allowed = ", ".join(_quoted(path) for paths in files.values() for path in paths)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    _add_runs(connection, [(folder, folder.relative_to(runs).as_posix()) for folder in folders])
    for table, paths in files.items():
        _add_view(connection, table, [(path, path.parent.relative_to(runs).as_posix()) for path in paths])
    return connection


def _add_runs(connection: DuckDBPyConnection, folders: Sequence[tuple[Path, str]]) -> None:
    columns = ", ".join(f'"{name}" {kind}' for name, kind in _COLUMNS.items())
    connection.execute(f"CREATE TABLE runs ({columns})")
    marks = ", ".join("?" for _ in _COLUMNS)
    rows = [row for folder, run in folders if (row := _run_row(folder, run))]
    if rows:
        connection.executemany(f"INSERT INTO runs VALUES ({marks})", rows)


def _run_row(folder: Path, run: str) -> list[Any] | None:
    """One run's values in the order of the columns; None for a damaged folder, which gapmeter runs lists."""
    try:
        manifest = read_object(folder / "manifest.json")
        summary = read_object(folder / "summary.json", missing_ok=True)
    except (OSError, ValueError):
        return None
    found = dict(_flat(manifest, summary))
    found |= {"run": run, "folder": str(folder), "kind": kind_of(folder, manifest, summary)}
    found |= {"summary": json.dumps(summary) if summary else None, "manifest": json.dumps(manifest)}
    return [found.get(name) for name in _COLUMNS]


def _flat(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    scenario = manifest.get("scenario") or {}
    server = scenario.get("server") or {}
    yield from ((name, server.get(name)) for name in ("engine", "model", "precision", "max_batch"))
    yield from ((name, manifest.get(name)) for name in ("status", "scenario_digest", "command", "device"))
    yield "name", scenario.get("name")
    yield "started", manifest.get("started_wall")
    yield "version", (manifest.get("versions") or {}).get("gapmeter")
    yield "emulated", ((manifest.get("target") or {}).get("precision") or {}).get("emulated")
    yield "verdict", summary.get("verdict")
    load, counts = summary.get("load") or {}, summary.get("counts") or {}
    for name in ("loop", "arrivals", "requested_rate", "delivered_rate", "concurrency"):
        yield name, load.get(name)
    yield from ((name, counts.get(name)) for name in ("measured", "succeeded"))
    yield "goodput_per_s", (summary.get("goodput") or {}).get("per_s")
    yield "output_tokens_per_s", (summary.get("throughput") or {}).get("output_tokens_per_s")
    cost, energy = summary.get("cost") or {}, summary.get("energy") or {}
    yield "usd_per_request", cost.get("per_request_usd")
    yield "usd_per_million_output_tokens", cost.get("per_million_output_tokens_usd")
    yield "joules_per_request", energy.get("per_request_j")
    for metric in _METRICS:
        figures = (summary.get("metrics") or {}).get(metric) or {}
        yield from ((f"{metric}_{figure}", figures.get(figure)) for figure in _FIGURES)


def _add_view(connection: DuckDBPyConnection, table: str, paths: Sequence[tuple[Path, str]]) -> None:
    """One view over the Parquet files of all runs, columns joined by name; a damaged file is left out, and said."""
    import duckdb

    sound = []
    for path, run in paths:
        try:
            connection.execute(f"SELECT * FROM read_parquet({_quoted(path)}) LIMIT 0")
            sound.append((path, run))
        except duckdb.Error as error:
            print(f"gapmeter: {path} is left out: {_one_sentence(str(error))}", file=sys.stderr)
    if not sound:
        connection.execute(f"CREATE VIEW {table} AS SELECT NULL::VARCHAR AS run WHERE false")
        return
    listed = ", ".join(_quoted(path) for path, _ in sound)
    named = ", ".join(f"({_quoted(path)}, {_quoted(run)})" for path, run in sound)
    connection.execute(
        f"CREATE VIEW {table} AS SELECT named.run, r.* EXCLUDE (filename) "
        f"FROM read_parquet([{listed}], union_by_name = true, filename = true) r "
        f"JOIN (VALUES {named}) named(path, run) ON r.filename = named.path"
    )


def _quoted(value: object) -> str:
    """A text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def _one_sentence(text: str) -> str:
    """DuckDB's first line, with the candidates that it offers, and without its drawing of where."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0], *told]) if lines else "the query failed"


def _plain(cell: Any) -> Any:
    """A cell as JSON has it: no NaN, numbers as numbers."""
    if isinstance(cell, Decimal):
        return float(cell)
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _shown(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:g}" if isinstance(cell, float) else str(cell)
