"""A run's percentiles: a curve a metric, every metric and stage in a table, and what other tools would have told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gapmeter.analysis.numbers import count, over
from gapmeter.analysis.requests.figures import LEDGER_OF, ledgers_of, stage_values_ns
from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.results.distribution import CensoredDistribution, Distribution, StageDistribution, percentile_key
from gapmeter.analysis.results.requests import PeerFigures
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stages import STAGES
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series
from gapmeter.report import marks
from gapmeter.report.curves import curve_of, named_of
from gapmeter.report.document import (
    MARKDOWN,
    Block,
    Choice,
    Column,
    Columns,
    Figure,
    Headers,
    Heading,
    Medium,
    Name,
    Panel,
    Paragraph,
    Row,
    Section,
    Stage,
    Switch,
    Table,
    Unmeasured,
    Words,
    in_ms,
)
from gapmeter.report.run_folder import Run

METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
_BETWEEN = ("itl", "tpot")  # two tokens, so that it makes no difference when the request was sent
_LEAD = (
    "Counted from when a request was due. The axis spaces 90, 99 and 99.9 evenly; a curve ends where the sample can no "
    "longer support a percentile. Shaded: the 95 % interval. Heavy dashes: the objective."
)
_NOTE = (
    "Over requests that succeeded, unless it says otherwise: with failures at their time-out, each of them counts as "
    "at least that long, and a percentile that falls among them is only known to be longer. – : the sample does not "
    "support this percentile; each is judged by how alike its own neighbors are, so that a higher one can be known."
)


def percentiles(run: Run) -> Section:
    """The metrics' curves, failed requests counted as infinite, every percentile, and each stage by itself."""
    result, measured = run.result, measured_requests(run.requests)
    curves: list[list[Block]] = []
    for metric, title in METRICS.items():
        values = metric_series(measured, metric, failures=True)
        known, key = result.metrics[metric], f"metrics.{metric}"
        figures: Distribution = known
        if known.with_failures is not None:
            figures, key = known.with_failures, f"{key}.with_failures"
        sent = None if metric in _BETWEEN else metric_series(measured, metric, "sent")
        curve = curve_of(title, values, named_of(figures, key), limits_of(result, metric), sent)
        if curve is None:
            curves.append([Heading(title), Paragraph(_no_curve(values), "quiet")])
        else:
            caption = curve.caption() + ("; thin and dashed: counted from when it was sent" if sent else "")
            curves.append([Heading(title), curve.chart(f"curve-{metric}", caption)])
    blocks = [Columns(curves), _metric_table(result), Paragraph(_NOTE, "quiet"), *_stage_curves(run)]
    return Section("percentiles", "Percentiles", blocks, _LEAD, "percentiles")


def limits_of(result: RunResult, metric: str) -> list[tuple[float, float, str]]:
    """The objectives on a metric: percentile as a fraction, ms, words."""
    return [
        (slo.percentile / 100, slo.limit, slo.text)
        for slo in result.slo
        if slo.metric == metric and slo.percentile is not None
    ]


def main_limit(result: RunResult, metric: str) -> tuple[float, str] | None:
    """The objective that a picture of slow requests shows: the one on the highest percentile."""
    known = limits_of(result, metric)
    return max(known, key=lambda limit: limit[0])[1:] if known else None


def _no_curve(values: Series) -> str:
    if not values.count:
        return "Nothing to count."
    if not np.isfinite(values.ordered).any():
        return "No request succeeded, so there is nothing to draw."
    return f"{values.count:,} sample{'s support' if values.count > 1 else ' supports'} no percentile."


# --- tables


def figure(found: Distribution, percentile: float, key: str) -> Figure:
    """One percentile of a distribution that stands at ``key``, with what it would need if it is not supported."""
    one, name = found.at(percentile), percentile_key(percentile)
    hint = text = ""
    if one.value_ms is None:
        if isinstance(found, CensoredDistribution) and name in found.over_ms:
            hint, text = "so many requests failed", over(found.over_ms[name])
        elif one.infinite:
            hint, text = "so many requests were never answered", "∞"
        elif one.needs:
            minutes = one.needs.minutes
            span = f", about {minutes:.0f} min" if minutes and minutes >= 1 else ""
            hint = f"not estimable: needs {count(one.needs.requests)} more requests{span}"
    return Figure(one.value_ms, "ms", f"{key}.{name}_ms", hint, text)


def _figures(found: Distribution, percentiles_: Sequence[float], key: str) -> list[Words]:
    return [*(figure(found, p, key) for p in percentiles_), Figure(found.max_ms, "ms", f"{key}.max_ms")]


def _metric_table(result: RunResult) -> Table:
    """Every metric counted from due, with failures at their time-out where there are any, and counted from sent."""
    shown = sorted({*PERCENTILES, *(slo.percentile for slo in result.slo if slo.percentile is not None)})
    rows, groups = list[Row](), set[int]()
    for metric, title in METRICS.items():
        groups.add(len(rows))
        origin = "token to token" if metric in _BETWEEN else "due"
        parts: list[tuple[str, str, Mapping[str, Distribution]]] = [("metrics", origin, result.metrics)]
        if result.failures:
            parts.append(("metrics_censored", f"{origin}, failures at their time-out", result.metrics_censored))
        if metric not in _BETWEEN:
            parts.append(("metrics_from_sent", "sent", result.metrics_from_sent))
        for at, (part, words, found) in enumerate(parts):
            cells = _figures(found[metric], shown, f"{part}.{metric}")
            rows.append([title if not at else "", words, *cells, count(found[metric].count)])
    headers: Headers = ["metric", "counted from", *in_ms(*(f"p{p:g}" for p in shown), "max"), "n"]
    return Table("Percentiles of every metric", headers, rows, words=2, groups=frozenset(groups))


def metrics(result: RunResult) -> Section:
    """The percentiles that are always told, in short."""
    rows: list[Row] = [
        [METRICS[metric], *_figures(found, PERCENTILES, f"metrics.{metric}"), count(found.count)]
        for metric, found in result.metrics.items()
    ]
    headers: Headers = [" ", *(f"p{p:g}" for p in PERCENTILES), "max", "n"]
    return Section("metrics", "", [Table("Percentiles", headers, rows)], on=MARKDOWN)


def stages(result: RunResult, device: str) -> Section | None:
    """Every stage's percentiles by itself, in the order of the timeline, also those that nobody could stamp."""
    parts = {"stages_to_first_token": result.stages_to_first_token, "stages": result.stages}
    if not any(parts.values()):
        return None
    rows: list[Row] = [
        [Stage(stage.name, stage.meaning), marks.owner(stage.name, device), stage.kind,
         *(cell for part, found in parts.items() for cell in _stage(found.get(stage.name), f"{part}.{stage.name}"))]
        for stage in STAGES
    ]  # fmt: skip
    names = [f"{p} to {event} token" for event in ("first", "last") for p in ("p50", "p90", "p99")]
    table = Table("Every stage", ["stage", "owner", "kind", *in_ms(*names)], rows, words=3)
    lead = "Percentiles of each stage by itself; they do not add up, the stacks above do."
    return Section("stages", "Every stage", [table], lead, "stages")


def _stage(found: StageDistribution | None, key: str) -> list[Words]:
    if found is None or found.kind == "unmeasured":
        return [Unmeasured()] * 3
    return [figure(found, p, key) for p in (50.0, 90.0, 99.0)]


# --- one stage by itself

_STAGES_LEAD = "Percentiles of single stages do not add up; the stacks above do. Stages that took no time are left out."
_UNTIL = {"first_token": "to the first token", "last_token": "to the last token"}


def _stage_curves(run: Run) -> list[Block]:
    """A list of stages to choose from, and the curve of the one chosen, to either event."""
    result = run.result
    parts = {"first_token": result.stages_to_first_token, "last_token": result.stages}
    charts: dict[str, dict[str, Block]] = {}
    for event in LEDGER_OF.values():
        if found := parts[event]:
            charts[event] = _event_curves(found, run, event)
    names = list(dict.fromkeys(name for drawn in charts.values() for name in drawn))
    if not names:
        return []
    first = result.tail.stage if result.tail.stage in names else names[0]
    until = "first_token" if result.tail.metric == "ttft" else "last_token"
    none = Paragraph("It took no time here, or the sample supports no percentile.", "empty")
    choice = Choice(
        [
            Switch("stage-curve", "stage", [(n, marks.words(n)) for n in names], str(first), list=True),
            Switch("stage-until", "time", [(event, _UNTIL[event]) for event in charts], until),
        ],
        [
            Panel({"stage-curve": name, "stage-until": event}, [drawn.get(name, none)])
            for event, drawn in charts.items()
            for name in names
        ],
    )
    return [Heading("One stage by itself"), Paragraph(_STAGES_LEAD, "quiet"), choice]


def _event_curves(found: Mapping[str, StageDistribution], run: Run, event: str) -> dict[str, Block]:
    part = "stages_to_first_token" if event == "first_token" else "stages"
    drawn: dict[str, Block] = {}
    for name, values in stage_values_ns(ledgers_of(run.ledger, measured_requests(run.requests), event)).items():
        if len(values) and values.any():
            named = named_of(found[name], f"{part}.{name}")
            curve = curve_of(marks.words(name), Series(values), named, points=90)
            if curve is not None:
                caption = f"{marks.words(name)} {_UNTIL[event]}: {curve.caption()}"
                drawn[name] = curve.chart(f"stage-{name}-{event.replace('_', '-')}", caption)
    return drawn


# --- other tools' definitions

_OTHERS = (
    "The same records, as other load testers would have counted them; by each tool's rules for percentiles, without "
    "intervals. What their own event loops would have added is not in it."
)
_OURS = {
    "ttft": "from when it was due to the first chunk that carries a token",
    "itl": "gaps between chunks that carry tokens, pooled",
    "tpot": "(last - first token) / (tokens - 1), one a request",
    "e2e": "from when it was due to the last chunk that carries a token",
}


def definitions(result: RunResult, on: Medium) -> Section | None:
    """The same run by other tools' definitions, where that was asked for: a row a metric and tool, ours first."""
    if not result.definitions:
        return None
    rows, groups = list[Row](), set[int]()
    for metric in ("ttft", "itl", "icl", "tpot", "e2e"):
        told: list[Row] = []
        if metric in _OURS:
            told.append(_definition("gapmeter", result.metrics[metric], f"metrics.{metric}", _OURS[metric]))
        if metric in ("ttft", "e2e"):
            sent = "the same from when its last byte was sent"
            found = result.metrics_from_sent[metric]
            told.append(_definition("gapmeter, from sent", found, f"metrics_from_sent.{metric}", sent))
        for key, tool in result.definitions.items():
            if theirs := getattr(tool, metric):
                path = f"definitions.{key}.{metric}"
                told.append(_definition(f"{tool.name} {tool.version}", theirs, path, theirs.differs))
        groups.add(len(rows))
        rows += [[metric.upper() if not at else "", *row] for at, row in enumerate(told)]
    differs = Column("what it is there", wraps=True, below=True)
    headers: Headers = ["metric", Column("by", brief="by definition of"), *in_ms("p50", "p99", "mean"), "n", differs]
    table = Table("By other tools' definitions", headers, rows, words=2, groups=frozenset(groups))
    return Section("definitions", table.name, [table], _OTHERS, "other definitions", on)


def _definition(who: str, found: Distribution | PeerFigures, key: str, differs: str) -> Row:
    figures = [Figure(getattr(found, f"{name}_ms"), "ms", f"{key}.{name}_ms") for name in ("p50", "p99", "mean")]
    return [Name(who), *figures, count(found.count), differs]
