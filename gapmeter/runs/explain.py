"""``gapmeter explain``: two groups of a run's requests, and the stages ranked by what explains their difference."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from gapmeter import errors
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.ledger.explore import FEWEST, difference
from gapmeter.analysis.numbers import bounds, counted, share
from gapmeter.analysis.requests.figures import LEDGER_OF, ledgers_of
from gapmeter.analysis.requests.metrics import measured_requests, request_values_ns
from gapmeter.analysis.results.latency import GroupDifference
from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.stages import STAGE_NAMES, column
from gapmeter.analysis.tables import read_table
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.report import document as doc
from gapmeter.report import marks, terminal
from gapmeter.report.explore import difference_sentence
from gapmeter.runs.run import Run, analysed, require_one_run
from gapmeter.runs.sql import one_sentence, select

REST = "rest"
_KEPT = ("index", "turn", "worker", "prompt_tokens", "output_tokens", "cached_tokens", "finish_reason", "request_id")
_SHOWN = 12
_EXAMPLE = "prompt_tokens > 64 and ttft_ms >= 200"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Two groups of requests, each by its condition, and what makes the first slower (or faster) than the second."""

    a: str
    b: str
    metric: str
    device: str
    difference: GroupDifference
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """As ``gapmeter explain --json`` prints it."""
        names = {"a": self.a, "b": self.b, "metric": self.metric, "device": self.device}
        return {**names, **self.difference.to_json(), "provenance": self.provenance.to_json()}


def explain(path: str | Path, group: str, against: str = REST, metric: str = "ttft") -> Explanation:
    """The difference of two groups of a run's requests.

    A group is a condition of SQL (as in DuckDB) on the columns of ``columns_of``; ``against`` "rest": all others, but
    for those of which it is unknown. Raises UserError when the folder was not analysed, has no ledger, or a condition
    is wrong or leaves too few.
    """
    path = Path(path)
    with analysed(path):
        run, requests, rows, origin_ns = _read(path, metric)
        columns = columns_of(requests, rows, origin_ns)
    found = holds(group, columns)
    a, b = found == 1, found == 0 if against == REST else holds(against, columns) == 1
    names = (group, "the rest" if against == REST else against)
    for name, rows_in in zip(names, (a, b), strict=True):
        if rows_in.sum() < FEWEST:
            text = f"{name!r} holds for {int(rows_in.sum())} of {len(rows):,} requests; {FEWEST} are needed"
            raise UserError(text, errors.USAGE)
    return Explanation(*names, metric, run.manifest.device, difference(rows, a, b), run.result.provenance)


def holds(condition: str, columns: dict[str, pd.Series]) -> Floats:
    """1 for a row for which a condition holds, 0 where not, NaN where an unknown value decides. Raises UserError."""
    table = pa.Table.from_pandas(pd.DataFrame(columns).assign(row_=range(len(next(iter(columns.values()))))))
    with duckdb.connect(":memory:", config={"enable_external_access": False}) as connection:
        connection.register("requests", table)
        connection.execute("SET lock_configuration = true")
        try:
            several = "it is more than one expression"
            # Once without brackets around it, so that it closes none but its own.
            kind = select(connection, f"SELECT {condition}\n FROM requests LIMIT 0", several).description[0][1]
            if kind != duckdb.sqltypes.BOOLEAN:
                raise UserError(f"{condition!r} is not a condition; write one as: {_EXAMPLE}", errors.USAGE)
            # A condition must be one of WHERE too, where no value makes several rows.
            query = f"SELECT ({condition}\n)::BOOLEAN FROM requests WHERE true OR ({condition}\n) ORDER BY row_"
            found = select(connection, query, several).fetchall()
        except duckdb.Error as error:
            names = ", ".join(sorted(columns))
            why = one_sentence(str(error))
            text = f"{condition!r} is not a condition: {why}; write one as: {_EXAMPLE}. Columns: {names}"
            raise UserError(text, errors.USAGE) from error
    return np.array([value for (value,) in found], dtype=np.float64)


def _read(path: Path, metric: str) -> tuple[Run, pd.DataFrame, pd.DataFrame, int]:
    """The run, its requests with a ledger, that, and the earliest due time."""
    run = Run(RunFolder(path), require_one_run(path))
    everyone = read_table(path / "requests.parquet")
    requests = measured_requests(everyone)
    ledger = read_table(path / "ledger.parquet")
    if not run.result.stages:
        raise UserError(f"{path}: the run has no ledger, so nothing says where its time went", errors.NOT_VALID)
    rows = ledgers_of(ledger, requests, LEDGER_OF[metric])
    requests = requests.set_index("request_id").loc[rows["request_id"]].reset_index()
    return run, requests, rows, int(everyone["due_ns"].min())


def columns_of(requests: pd.DataFrame, rows: pd.DataFrame, origin_ns: int) -> dict[str, pd.Series]:
    """What a condition may name: the request's own columns, its latencies and its stages in ms, its place by wait."""
    columns = {name: requests[name] for name in _KEPT if name in requests}
    columns["due_s"] = (requests["due_ns"] - origin_ns).astype("float64") / 1e9  # as the report's time axis
    for metric in ("ttft", "tpot", "e2e"):
        columns[f"{metric}_ms"] = pd.Series(request_values_ns(requests, metric) / 1e6)
    columns["rank_percent"] = rows["total_ns"].rank(pct=True) * 100
    for stage in STAGE_NAMES:
        if column(stage) in rows:
            columns[f"{stage}_ms"] = rows[column(stage)] / 1e6
    return columns


def show(found: Explanation) -> None:
    """Print it as a table on standard output."""
    parts = found.difference
    counts = f"{parts.a_count:,} requests against {parts.b_count:,}, in {counted(parts.stretches, 'stretch')}."
    low, high = parts.difference_ci_ms
    proven = low is not None and high is not None and not low <= 0 <= high  # of nothing there are no shares
    rows: list[doc.Row] = [
        [marks.with_owner(row.stage, found.device), doc.Figure(row.a_ms), doc.Figure(row.b_ms), doc.Figure(row.ms),
         share(row.share if proven else None), bounds(*row.ci_ms)]
        for row in [row for row in parts.ranked if row.ms][:_SHOWN]
    ]  # fmt: skip
    headers = ["stage (owner)", "these", "others", "difference", "share", "95 % interval"]
    blocks: list[doc.Block] = [doc.Table("By stage", headers, rows), doc.Paragraph(found.provenance.line())]
    answer = f"{difference_sentence(parts, found.a, found.b, found.device)}."
    section = doc.Section("stages", "", blocks, on=doc.TERMINAL)
    shown = doc.Document(
        "", doc.Header(""), doc.Verdict("", "", answer, more=[doc.Said(counts)]), [section], found.provenance
    )
    terminal.show(shown, sys.stdout)
