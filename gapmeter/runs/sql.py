"""SQL over all runs: DuckDB in memory, with views on the runs' Parquet files and on their summaries. It only reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.errors import UserError
from gapmeter.options import tell
from gapmeter.runs.listing import run_folders
from gapmeter.scenarios.plain_file import is_plain, read_plain

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLES = ("requests", "ledger", "gaps", "steps")


@dataclass(frozen=True, slots=True)
class _Row:
    """One run, for the columns of the table ``runs``; ``result`` is None for one without figures."""

    run: str
    folder: Path
    manifest: Manifest
    result: RunResult | None

    def server(self, key: str) -> Any:
        return self.manifest.scenario["server"].get(key)

    def text(self, name: str) -> str | None:
        """A file's own text."""
        path = self.folder / name
        return read_plain(path).decode() if path.exists() else None


def _of_result(read: Callable[[RunResult], Any]) -> Callable[[_Row], Any]:
    return lambda row: None if row.result is None else read(row.result)


def _percentile(metric: str, percentile: float) -> Callable[[_Row], Any]:
    return _of_result(lambda result: found.ms(percentile) if (found := result.metrics.get(metric)) else None)


def _most(metric: str) -> Callable[[_Row], Any]:
    return _of_result(lambda result: found.max_ms if (found := result.metrics.get(metric)) else None)


# The columns of ``runs``: each with its type, and where it is from.
_COLUMNS: dict[str, tuple[str, Callable[[_Row], Any]]] = {
    "run": ("VARCHAR", lambda row: row.run),
    "folder": ("VARCHAR", lambda row: str(row.folder)),
    "kind": ("VARCHAR", lambda _: "run"),
    "name": ("VARCHAR", lambda row: row.manifest.scenario["name"]),
    "started": ("VARCHAR", lambda row: row.manifest.started_wall),
    "status": ("VARCHAR", lambda row: row.manifest.status),
    "scenario_digest": ("VARCHAR", lambda row: row.manifest.scenario_digest),
    "command": ("VARCHAR", lambda row: row.manifest.command),
    "version": ("VARCHAR", lambda row: row.manifest.versions.get("gapmeter")),
    "engine": ("VARCHAR", lambda row: row.server("engine")),
    "model": ("VARCHAR", lambda row: row.server("model")),
    "precision": ("VARCHAR", lambda row: row.server("precision")),
    "emulated": ("BOOLEAN", lambda row: found.emulated if (found := row.manifest.target.precision) else None),
    "max_batch": ("BIGINT", lambda row: row.server("max_batch")),
    "device": ("VARCHAR", lambda row: row.manifest.device),
    "verdict": ("VARCHAR", _of_result(lambda result: result.verdict)),
    "loop": ("VARCHAR", _of_result(lambda result: result.load.loop)),
    "arrivals": ("VARCHAR", _of_result(lambda result: result.load.arrivals)),
    "requested_rate": ("DOUBLE", _of_result(lambda result: result.load.requested_rate)),
    "delivered_rate": ("DOUBLE", _of_result(lambda result: result.load.delivered_rate)),
    "concurrency": ("BIGINT", _of_result(lambda result: result.load.concurrency)),
    "measured": ("BIGINT", _of_result(lambda result: result.counts.measured)),
    "succeeded": ("BIGINT", _of_result(lambda result: result.counts.succeeded)),
    "goodput_per_s": ("DOUBLE", _of_result(lambda result: result.goodput.per_s)),
    "output_tokens_per_s": ("DOUBLE", _of_result(lambda result: result.throughput.output_tokens_per_s)),
    "usd_per_request": ("DOUBLE", _of_result(lambda result: result.cost.per_request_usd)),
    "usd_per_million_output_tokens": (
        "DOUBLE", _of_result(lambda result: getattr(result.cost, "per_million_output_tokens_usd", None)),
    ),
    "joules_per_request": ("DOUBLE", _of_result(lambda result: result.energy.per_request_j)),
    **{
        f"{metric}_p{percentile}_ms": ("DOUBLE", _percentile(metric, percentile))
        for metric in ("ttft", "itl", "tpot", "e2e")
        for percentile in (50, 90, 99)
    },
    **{f"{metric}_max_ms": ("DOUBLE", _most(metric)) for metric in ("ttft", "itl", "tpot", "e2e")},
    "summary": ("JSON", lambda row: row.text("summary.json")),
    "manifest": ("JSON", lambda row: row.text("manifest.json")),
}  # fmt: skip


def ask(query: str, runs: str | Path = "runs") -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns' names and the rows of one query. Raises UserError for no runs and for every mistake in the query."""
    import duckdb

    with connect(Path(runs)) as connection:
        try:
            statements = connection.extract_statements(query)
            allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
            if len(statements) != 1 or statements[0].type not in allowed:
                raise UserError("one SELECT at a time: this command only reads", errors.USAGE)
            answer = connection.execute(statements[0])
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.InvalidInputException as error:
            if "pytz" not in str(error):
                raise UserError(one_sentence(str(error)), errors.USAGE) from error
            text = "a time with a zone is not supported here; write CAST(… AS VARCHAR), or AS TIMESTAMP"
            raise UserError(text, errors.USAGE) from error
        except duckdb.Error as error:
            raise UserError(one_sentence(str(error)), errors.USAGE) from error
        except RuntimeError as error:
            if "interrupted" not in str(error).lower():
                raise
            raise KeyboardInterrupt from error


def connect(runs: Path) -> DuckDBPyConnection:
    """A database in memory with the views runs, requests, ledger, gaps and steps; it can open no other file.

    Each has a column ``run``, the folder's path below ``runs``. Raises UserError when there are no runs.
    """
    import duckdb

    folders = list(run_folders(runs)) if runs.is_dir() else []
    if not folders:
        raise UserError(f"there are no runs in {runs}; name a folder with --runs", errors.USAGE)
    connection = duckdb.connect(":memory:")
    files = {table: [path for f in folders if is_plain(path := f / f"{table}.parquet")] for table in TABLES}
    allowed = ", ".join(_quoted(path) for paths in files.values() for path in paths)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _) in _COLUMNS.items())
    connection.execute(f"CREATE TABLE runs ({columns})")
    marks = ", ".join("?" for _ in _COLUMNS)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # a damaged folder, which gapmeter runs lists
            result = RunResult.read(folder) if (folder / RunResult.FILE).exists() else None
            row = _Row(folder.relative_to(runs).as_posix(), folder, Manifest.read(folder), result)
            connection.execute(f"INSERT INTO runs VALUES ({marks})", [read(row) for _, read in _COLUMNS.values()])
    for table, paths in files.items():
        _add_view(connection, table, [(path, path.parent.relative_to(runs).as_posix()) for path in paths])
    return connection


def _add_view(connection: DuckDBPyConnection, table: str, paths: Sequence[tuple[Path, str]]) -> None:
    """One view over the Parquet files of all runs, columns joined by name; a damaged file is left out, and said."""
    import duckdb

    sound = []
    for path, run in paths:
        try:
            connection.execute(f"SELECT * FROM read_parquet({_quoted(path)}) LIMIT 0")
            sound.append((path, run))
        except duckdb.Error as error:
            tell(f"{path} is left out: {one_sentence(str(error))}")
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


def one_sentence(text: str) -> str:
    """DuckDB's first line, with the candidates that it offers, and without its drawing of where."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0], *hints]) if lines else "the query failed"
