"""SQL over all runs: DuckDB in memory, with views on the runs' Parquet files and on their summaries. It only reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.errors import UserError
from gapmeter.options import tell
from gapmeter.runs.listing import run_folders
from gapmeter.runs.run import UNDERIVABLE, in_a_line
from gapmeter.scenarios.plain_file import is_plain, read_plain
from gapmeter.scenarios.slo import LATENCIES

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_INTERRUPTED_WITHIN_S = 1.0
_PATH = "gapmeter_file"
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

    def launched(self, key: str, attached: str | None = None) -> Any:
        """What a server was launched with; of one that ran already, ``attached``."""
        return attached if self.server("engine") == "attach" else self.server(key)

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
    "name": ("VARCHAR", lambda row: row.manifest.scenario["name"]),
    "started": ("VARCHAR", lambda row: row.manifest.started_wall),
    "status": ("VARCHAR", lambda row: row.manifest.status),
    "scenario_digest": ("VARCHAR", lambda row: row.manifest.scenario_digest),
    "command": ("VARCHAR", lambda row: row.manifest.command),
    "version": ("VARCHAR", lambda row: row.manifest.versions.get("gapmeter")),
    "engine": ("VARCHAR", lambda row: row.server("engine")),
    "model": ("VARCHAR", lambda row: row.launched("model", row.manifest.target.model)),
    "precision": ("VARCHAR", lambda row: row.launched("precision")),
    "emulated": ("BOOLEAN", lambda row: found.emulated if (found := row.manifest.target.precision) else None),
    "max_batch": ("BIGINT", lambda row: row.launched("max_batch")),
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
        for metric in LATENCIES
        for percentile in (50, 90, 99)
    },
    **{f"{metric}_max_ms": ("DOUBLE", _most(metric)) for metric in LATENCIES},
    "summary": ("JSON", lambda row: row.text(RunResult.FILE)),
    "manifest": ("JSON", lambda row: row.text(Manifest.FILE)),
}  # fmt: skip


def ask(query: str, runs: str | Path = "runs") -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns' names and the rows of one query. Raises UserError for no runs and for every mistake in the query.

    DuckDB hears no signal while it works, so that it does so in a thread of its own, and is told.
    """
    answer: Future[tuple[list[str], list[tuple[Any, ...]]]] = Future()
    connections: list[DuckDBPyConnection] = []

    def work() -> None:
        try:
            with connect(Path(runs)) as connection:
                connections.append(connection)
                found = _answer(connection, query)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(error)
        else:
            answer.set_result(found)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        for connection in connections:
            connection.interrupt()
        thread.join(_INTERRUPTED_WITHIN_S)  # it may be too deep in one value to notice
        raise
    return answer.result()


def _answer(connection: DuckDBPyConnection, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    import duckdb

    try:
        answer = select(connection, query, "one SELECT at a time: this command only reads")
        return [column[0] for column in answer.description or ()], answer.fetchall()
    except duckdb.InvalidInputException as error:
        if "pytz" not in str(error):
            raise UserError(one_sentence(str(error)), errors.USAGE) from error
        text = "a time with a zone is not supported here; write CAST(… AS VARCHAR), or AS TIMESTAMP"
        raise UserError(text, errors.USAGE) from error
    except duckdb.CatalogException as error:
        said, there = str(error).splitlines()[0], ", ".join(("runs", *TABLES))
        text = f"{said.rstrip('!')}; there are {there}" if "Table with name" in said else one_sentence(str(error))
        raise UserError(text, errors.USAGE) from error
    except duckdb.Error as error:
        raise UserError(one_sentence(str(error)), errors.USAGE) from error


def select(connection: DuckDBPyConnection, query: str, refusal: str) -> DuckDBPyConnection:
    """Run what is one SELECT. Raises duckdb.Error, with ``refusal`` for anything else."""
    import duckdb

    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise duckdb.ParserException(refusal)
    return connection.execute(statements[0])


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
        try:
            result = RunResult.read(folder) if (folder / RunResult.FILE).exists() else None
            row = _Row(folder.relative_to(runs).as_posix(), folder, Manifest.read(folder), result)
            connection.execute(f"INSERT INTO runs VALUES ({marks})", [read(row) for _, read in _COLUMNS.values()])
        except (OSError, duckdb.Error, *UNDERIVABLE) as error:
            tell(f"{folder} is left out: {in_a_line(error)}")
    for table, paths in files.items():
        _add_view(connection, table, [(path, path.parent.relative_to(runs).as_posix()) for path in paths])
    return connection


def _add_view(connection: DuckDBPyConnection, table: str, paths: Sequence[tuple[Path, str]]) -> None:
    """One view over the Parquet files of all runs, columns joined by name; a damaged file is left out, and said."""
    import duckdb

    types: dict[str, Any] = {}  # of the columns so far
    sound = []
    for path, run in paths:
        try:
            columns = connection.execute(f"SELECT * FROM {_parquet([path])} LIMIT 0").description
        except duckdb.Error as error:
            tell(f"{path} is left out: {one_sentence(str(error))}")
            continue
        own = {name: kind for name, kind, *_ in columns or () if kind.id != "null"}  # of nothing but nulls
        if odd := [name for name in own if _is_nested(own[name]) != _is_nested(types.get(name, own[name]))]:
            tell(f"{path} is left out: its column {odd[0]!r} is {own[odd[0]]}, but {types[odd[0]]} in another run")
            continue
        types |= own
        sound.append((path, run))
    if not sound:
        connection.execute(f"CREATE VIEW {table} AS SELECT NULL::VARCHAR AS run WHERE false")
        return
    named = ", ".join(f"({_quoted(path)}, {_quoted(run)})" for path, run in sound)
    connection.execute(
        f"CREATE VIEW {table} AS SELECT named.run, r.* EXCLUDE ({_PATH}) FROM {_parquet([p for p, _ in sound])} r "
        f"JOIN (VALUES {named}) named(path, run) ON r.{_PATH} = named.path"
    )


def _is_nested(kind: Any) -> bool:
    """Whether DuckDB cannot turn a column of this type into one of texts or numbers, or the other way."""
    return kind.id in ("list", "array", "struct", "map", "union")


def _parquet(paths: Sequence[Path]) -> str:
    """The rows of these files, each with its file's path in a column of a name that ours don't have."""
    listed = ", ".join(map(_quoted, paths))
    return f"read_parquet([{listed}], union_by_name = true, filename = '{_PATH}')"


def _quoted(value: object) -> str:
    """A text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def one_sentence(text: str) -> str:
    """DuckDB's first line, with the candidates that it offers, and without its drawing of where."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0], *hints]) if lines else "the query failed"
