"""Percentiles: a curve a metric on an HDR axis, the tables of metrics and stages, other tools' definitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.stats.series import Series
from gapmeter.report import curves, head, reconcile, tables
from gapmeter.report.figure import Row, Table, Value, written
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.stage_curves import stage_curves
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.tables import METRICS

_LEAD = (
    "Counted from when a request was due. The axis spaces 90, 99 and 99.9 evenly; a curve ends where the sample can no "
    "longer support a percentile. Shaded: the 95 % interval. Heavy dashes: the objective."
)
_NOTE = (
    "Over requests that succeeded, unless it says otherwise: with failures at their time-out, each of them counts as "
    "at least that long, and a percentile that falls among them is only known to be longer. – : the sample does not "
    "support this percentile; each is judged by how alike its own neighbors are, so that a higher one can be known."
)
_OTHERS = (
    "The same records, as other load testers would have counted them; by each tool's rules for percentiles, without "
    "intervals. What their own event loops would have added is not in it."
)


def percentiles_section(run: Run) -> Section:
    """The four metrics' percentile curves, failed requests counted as infinite, and the table of every percentile."""
    measured = measured_requests(run.requests)
    limits = head.limits(run.summary)
    drawn = [_curve(run, name, measured, limits.get(name, [])) for name in METRICS]
    body = [el("div", *drawn, class_="grid2"), written(_metric_table(run), run.provenance)]
    body += [el("p", _NOTE, class_="lead"), stage_curves(run)]
    return Section("percentiles", "Percentiles", group(body), _LEAD, "percentiles")


def _curve(run: Run, name: str, measured: Any, limits: list[tuple[float, float, str]]) -> Fragment:
    title, values = el("h3", METRICS[name]), metric_series(measured, name, failures=True)
    figures, key = run.summary["metrics"][name], f"metrics.{name}"
    if "with_failures" in figures:
        figures, key = figures["with_failures"], f"{key}.with_failures"
    sent = metric_series(measured, name, "sent") if name in ("ttft", "e2e") else None
    curve = curves.curve_of(METRICS[name], values, limits, curves.named_of(figures, key), sent)
    if curve is None:
        none = _no_curve(values)
        return el("div", title, el("p", none, class_="lead"))
    caption = curves.caption(curve) + ("; thin and dashed: counted from when it was sent" if sent else "")
    return el("div", title, curves.with_table(run, curve, f"curve-{name}", caption))


def _no_curve(values: Series) -> str:
    if not values.count:
        return "Nothing to count."
    if not np.isfinite(values.ordered).any():
        return "No request succeeded, so there is nothing to draw."
    return f"{values.count:,} sample{'s support' if values.count > 1 else ' supports'} no percentile."


def _value(cell: tables.Cell, name: str) -> Value:
    known: dict[str, Any] = {name: cell.key}
    return Value(cell.text, cell.raw, known | ({"title": cell.hint} if cell.hint else {}))


def _metric_table(run: Run) -> Table:
    names = list(tables.percentile_names(run.summary).values())
    rows = tables.metric_rows(run.summary)
    cells: list[Row] = [[r.metric, r.origin, *(_value(c, "data_metric") for c in r.cells), r.count] for r in rows]
    return Table(
        "Percentiles of every metric",
        ["metric", "counted from", *names, "n"],
        cells,
        csv=["metric", "counted from", *(f"{name} (ms)" for name in names)],
        words=2,
        groups=frozenset(i for i, row in enumerate(rows) if row.first),
    )


def definitions_section(run: Run) -> Section | None:
    """The same run by other tools' definitions, where that was asked for."""
    rows = reconcile.definition_rows(run.summary)
    if not rows:
        return None
    cells: list[Row] = [
        [r.metric if r.first else "", Value(r.who, None, {"class_": "name"}), r.differs, r.p50, r.p99, r.mean, r.n]
        for r in rows
    ]
    headers = ["metric", "by", "what it is there", "p50", "p99", "mean", "n"]
    groups = frozenset(i for i, row in enumerate(rows) if row.first)
    table = Table("By other tools' definitions", headers, cells, words=3, groups=groups)
    return Section(
        "definitions", "By other tools' definitions", written(table, run.provenance), _OTHERS, "other definitions"
    )


def stages_section(run: Run) -> Section | None:
    """Every stage's percentiles by itself."""
    rows = tables.stage_rows(run.summary, run.device)
    if not rows:
        return None
    cells: list[Row] = [[_stage_name(row), row.owner, row.kind, *_stage_cells(row)] for row in rows]
    names = [f"{p} to {event} token" for event in ("first", "last") for p in ("p50", "p90", "p99")]
    csv = ["stage", "owner", "kind", *(f"{name} (ms)" for name in names)]
    table = Table("Every stage", ["stage", "owner", "kind", *names], cells, csv=csv, words=3)
    lead = "Percentiles of each stage by itself; they do not add up, the stacks above do."
    return Section("stages", "Every stage", written(table, run.provenance), lead, "stages")


def _stage_name(row: tables.StageRow) -> Value:
    return Value(group([row.swatch, el("span", row.stage)]), None, {"title": row.meaning})


def _stage_cells(row: tables.StageRow) -> list[Value]:
    cells = []
    for part in row.parts:
        if part.unmeasured:
            cells += [Value("unmeasured", "unmeasured", {"class_": "unmeasured"})] * 3
        for cell in part.cells:
            value = _value(cell, "data_stage_value")
            cells.append(
                Value(
                    value.text,
                    value.raw,
                    value.attributes | {"class_": "zero"} if cell.text == "0 ms" else value.attributes,
                )
            )
    return cells
