"""``gapmeter explain``: two groups of a run's requests, and the stages ranked by what explains their difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from gapmeter import errors
from gapmeter.analysis.ledger.condition import ConditionError, holds
from gapmeter.analysis.ledger.explore import FEWEST, METRICS, difference
from gapmeter.analysis.numbers import DASH, bounds, duration, share
from gapmeter.analysis.requests.figures import ledgers_of
from gapmeter.analysis.requests.metrics import measured_requests, request_values_ns
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column, owner_words
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.report import bridge
from gapmeter.runs.damage import rederivable
from gapmeter.runs.parts import want_one_run

REST = "rest"
_KEPT = ("index", "turn", "worker", "prompt_tokens", "output_tokens", "cached_tokens", "finish_reason", "request_id")
_SHOWN = 12


def explain(path: Path, group: str, against: str, metric: str, *, as_json: bool, quiet: bool = False) -> int:
    """Print the difference of two groups: as a table on standard error, as JSON on standard output where asked for.

    Raises UserError when the folder was not analysed, has no ledger, or a condition is wrong or leaves too few.
    """
    with rederivable(path):
        summary, manifest, requests, rows = _read(RunFolder(path), metric)
        columns = columns_of(requests, rows)
    a = _group(group, columns)
    b = ~a if against == REST else _group(against, columns)
    names = (group, "the rest" if against == REST else against)
    for name, rows_in in zip(names, (a, b), strict=True):
        if rows_in.sum() < FEWEST:
            raise UserError(
                f"{name!r} holds for {int(rows_in.sum())} of {len(rows):,} requests; {FEWEST} are needed", errors.USAGE
            )
    found = difference(rows, a, b)
    origin = bridge.provenance(summary)
    told = {
        "a": names[0],
        "b": names[1],
        "metric": metric,
        "device": manifest.get("device", "GPU"),
        **found.to_json(),
        "provenance": origin.facts(),
    }
    if as_json:
        print(json.dumps(told, indent=1))
    if not quiet and not as_json:
        _print(told, origin.line())
    return errors.OK


def _read(folder: RunFolder, metric: str) -> tuple[dict[str, Any], dict[str, Any], pd.DataFrame, pd.DataFrame]:
    if folder.manifest.exists():
        want_one_run(folder)
    try:
        summary, manifest = bridge.read_run(folder.path), folder.read_manifest()
        requests = measured_requests(pd.read_parquet(folder.path / "requests.parquet"))
        ledger = pd.read_parquet(folder.path / "ledger.parquet")
    except (FileNotFoundError, NotADirectoryError) as error:
        name = Path(error.filename).name if error.filename else "summary.json"
        raise UserError(
            f"{folder.path}: no {name}; analyse it with: gapmeter report {folder.path}", errors.USAGE
        ) from error
    except OSError as error:
        if error.filename is not None:  # a right or a name, no content
            raise
        raise ValueError(str(error)) from error
    if not summary["stages"]:
        raise UserError(f"{folder.path}: the run has no ledger, so nothing says where its time went", errors.NOT_VALID)
    rows = ledgers_of(ledger, requests, METRICS[metric])
    return summary, manifest, requests.set_index("request_id").loc[rows["request_id"]].reset_index(), rows


def columns_of(requests: pd.DataFrame, rows: pd.DataFrame) -> dict[str, pd.Series]:
    """What a condition may name: the request's own columns, its latencies and its stages in ms, its place by wait."""
    known = {name: requests[name] for name in _KEPT if name in requests}
    at_ns = requests["due_ns"].astype("float64")
    known["due_s"] = (at_ns - at_ns.min()) / 1e9
    for metric in ("ttft", "tpot", "e2e"):
        known[f"{metric}_ms"] = pd.Series(request_values_ns(requests, metric) / 1e6)
    known["rank_percent"] = rows["total_ns"].rank(pct=True) * 100
    for stage in (*(s.name for s in STAGES), UNEXPLAINED):
        if column(stage) in rows:
            known[f"{stage}_ms"] = rows[column(stage)] / 1e6
    return known


def _group(text: str, columns: dict[str, pd.Series]) -> NDArray[np.bool_]:
    try:
        return holds(text, columns)
    except ConditionError as error:
        raise UserError(str(error), errors.USAGE) from error


def _print(told: dict[str, Any], origin: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"{bridge.difference_sentence(told, told['a'], told['b'], told['device'])}.", markup=False)
    console.print(f"{told['a_count']:,} requests against {told['b_count']:,}, in {told['stretches']} stretches.")
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "owner"):
        table.add_column(name)
    for name in ("a", "b", "difference", "95 % interval", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [row for row in told["ranked"] if row["ms"]][:_SHOWN]:
        part = share(row["share"]) if row["share"] is not None else DASH
        owner = owner_words(row["owner"], told["device"])
        table.add_row(row["stage"], owner, duration(row["a_ms"]), duration(row["b_ms"]), duration(row["ms"]),
                      bounds(*row["ci_ms"]), part)  # fmt: skip
    console.print(table)
    console.print(origin, style="dim", markup=False)
