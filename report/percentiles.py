"""A run's percentiles: a curve a metric, every metric and stage in a table, and what other tools would report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from gapmeter.analysis.judge.lateness import ReportedLateness
from gapmeter.analysis.judge.words import late_words
from gapmeter.analysis.numbers import count, counted, duration, over, share
from gapmeter.analysis.results.distribution import CensoredDistribution, Distribution, StageDistribution, percentile_key
from gapmeter.analysis.results.requests import PeerFigures
from gapmeter.analysis.results.run import RunResult, SloAnswer
from gapmeter.analysis.stages import STAGES
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.curves import curve_of, named_of
from gapmeter.report.document import Block, Figure, Name, Paragraph, Row, Section, Stage, Table, Words, in_ms
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.words import about_minutes, more_requests
from gapmeter.scenarios.slo import BETWEEN_TOKENS, LATENCIES

_LEAD = (
    "Counted from when a request was due. The axis spaces 90, 99 and 99.9 evenly; a curve ends where the sample can no "
    "longer support a percentile, and is left out where the load tester's lateness refuses one. Shaded: the 95 % "
    "interval. Heavy dashes: the objective."
)
_NOTE = (
    "Over requests that succeeded, unless it says otherwise: with failures at their time-out, each of them counts as "
    "at least that long, and a percentile that falls among them is only known to be longer. ≤: only an upper bound "
    "is known (90 % confidence or more), as the sample is small or the load tester was late; –: no bound; refused: "
    "too much of it may be the load tester's own lateness. How correlated neighbors are is estimated for each "
    "percentile, so a higher one may be known where a lower one is not."
)
_BY_ITSELF = "Percentiles of single stages do not add up; the stacks above do."


def percentiles(run: ReportedRun) -> Section:
    """The metrics' curves, failed requests counted as infinite, and every percentile."""
    result = run.result
    curves: list[list[Block]] = []
    for metric in LATENCIES:
        values = run.tables.series(metric, failures=True)
        known, key = result.metrics[metric], f"metrics.{metric}"
        figures: Distribution = known
        if known.with_failures is not None:
            figures, key = known.with_failures, f"{key}.with_failures"
        sent = None if metric in BETWEEN_TOKENS else run.tables.series(metric, "sent")
        late_ns = partial(ReportedLateness([result]).refused_ns, metric)
        curve = curve_of(metric.upper(), values, named_of(figures, key), slos_of(result, metric), sent, late_ns=late_ns)
        if curve is None:
            few = f"{counted(values.count, 'sample')}: too few for any percentile"
            none = f"{values.percentile(50.0).why or few}."
            if not np.isfinite(values.ordered).any():
                none = "No request succeeded, so there is nothing to draw." if values.count else "Nothing to count."
            if (late := late_ns(50.0)) is not None:
                none = f"Refused: {late_words(late / 1e6)}."
            curves.append([doc.Heading(metric.upper()), Paragraph(none, "quiet")])
        else:
            caption = curve.caption() + ("; thin and dashed: counted from when it was sent" if sent else "")
            curves.append([doc.Heading(metric.upper()), curve.chart(f"curve-{metric}", caption)])
    blocks: list[Block] = [doc.Columns(curves), _metric_table(result), Paragraph(_NOTE, "quiet")]
    return Section("percentiles", "Percentiles", blocks, _LEAD, "percentiles")


def slos_of(result: RunResult, metric: str) -> list[SloAnswer]:
    """The objectives on a latency."""
    return [slo for slo in result.slo if slo.metric == metric]


def main_slo(result: RunResult, metric: str) -> SloAnswer | None:
    """The objective that a picture of slow requests shows: the one on the highest percentile."""
    return max(slos_of(result, metric), key=lambda slo: slo.percentile or 0.0, default=None)


# --- tables


def figure(found: Distribution, percentile: float, key: str) -> Figure:
    """One percentile of a distribution that stands at ``key``, with what it would need if it is not supported."""
    one, name = found.at(percentile), percentile_key(percentile)
    hint = text = ""
    if one.value_ms is None:
        if isinstance(found, CensoredDistribution) and name in found.over_ms:
            hint, text = "so many requests failed", over(found.over_ms[name])
        elif one.late_ms is not None:
            hint, text = late_words(one.late_ms), "refused"
        elif one.infinite:
            hint, text = "so many requests were never answered", "∞"
        elif one.needs:
            span = f", {about}" if (about := about_minutes(one.needs)) else ""
            hint = f"no interval: needs {more_requests(one.needs)}{span}"
        if one.at_most:
            bound = f"≤ {duration(one.at_most.ms)}"
            hint = f"{share(one.at_most.confidence)} sure; {hint}"
            # A bound that lies above a higher percentile is that one's upper end, and would read as a contradiction.
            if any(p > percentile and (found.ms(p) or math.inf) < one.at_most.ms for p in found.percentiles):
                hint = f"{bound}, {hint}"
            else:
                text = bound
    return Figure(one.value_ms, "ms", f"{key}.{name}_ms", hint, text)


def _figures(found: Distribution, percentiles_: Sequence[float], key: str) -> list[Words]:
    return [*(figure(found, p, key) for p in percentiles_), Figure(found.max_ms, "ms", f"{key}.max_ms")]


def _metric_table(result: RunResult) -> Table:
    """Every metric counted from due, with failures at their time-out where there are any, and counted from sent."""
    shown = sorted({*PERCENTILES, *(slo.percentile for slo in result.slo if slo.percentile is not None)})
    rows, groups = list[Row](), set[int]()
    for metric in LATENCIES:
        groups.add(len(rows))
        origin = "token to token" if metric in BETWEEN_TOKENS else "due"
        parts: list[tuple[str, str, Mapping[str, Distribution]]] = [("metrics", origin, result.metrics)]
        if result.counts.failed_by_server:
            parts.append(("metrics_censored", f"{origin}, failures at their time-out", result.metrics_censored))
        if metric not in BETWEEN_TOKENS:
            parts.append(("metrics_from_sent", "sent", result.metrics_from_sent))
        for at, (part, words, found) in enumerate(parts):
            cells = _figures(found[metric], shown, f"{part}.{metric}")
            rows.append([metric.upper() if not at else "", words, *cells, count(found[metric].count)])
    headers: doc.Headers = ["metric", "counted from", *in_ms(*(f"p{p:g}" for p in shown), "max"), "n"]
    return Table("Percentiles of every metric", headers, rows, words=2, groups=frozenset(groups))


def metrics(result: RunResult) -> Section:
    """The percentiles that are always shown, in short."""
    rows: list[Row] = [
        [metric.upper(), *_figures(found, PERCENTILES, f"metrics.{metric}"), count(found.count)]
        for metric, found in result.metrics.items()
    ]
    headers: doc.Headers = [" ", *(f"p{p:g}" for p in PERCENTILES), "max", "n"]
    return Section("metrics", "", [Table("Percentiles", headers, rows)], on=doc.MARKDOWN)


def stages(result: RunResult) -> Section | None:
    """Every stage's percentiles by itself, in the order of the timeline, also those that nobody could stamp."""
    parts = {"stages_to_first_token": result.stages_to_first_token, "stages": result.stages}
    if not any(parts.values()):
        return None
    rows: list[Row] = [
        [Stage(stage.name, stage.meaning), marks.owner(stage.name, result.device), stage.kind,
         *(cell for part, of in parts.items() for cell in _stage(of.get(stage.name), f"{part}.{stage.name}"))]
        for stage in STAGES
    ]  # fmt: skip
    names = [f"{p} to {event} token" for event in ("first", "last") for p in ("p50", "p90", "p99")]
    table = Table("Every stage", ["stage", "owner", "kind", *in_ms(*names)], rows, words=3)
    return Section("stages", "Every stage", [table], _BY_ITSELF, "stages")


def _stage(found: StageDistribution | None, key: str) -> list[Words]:
    if found is None or found.kind == "unmeasured":
        return [doc.Unmeasured()] * 3
    return [figure(found, p, key) for p in (50.0, 90.0, 99.0)]


# --- other tools' definitions

_OTHERS = (
    "The same records by other load testers' definitions and percentile rules, without intervals. The time that their "
    "event loops would add is not included."
)
_OURS = {
    "ttft": "from when it was due to the first chunk that carries a token",
    "itl": "gaps between chunks that carry tokens, pooled",
    "tpot": "(last - first token) / (tokens - 1), one a request",
    "e2e": "from when it was due to the last chunk that carries a token",
}


def definitions(result: RunResult) -> Section | None:
    """The same run by other tools' definitions, where that was asked for: a row a metric and tool, ours first."""
    if not result.definitions:
        return None
    rows, groups = list[Row](), set[int]()
    for metric in ("ttft", "itl", "icl", "tpot", "e2e"):
        by: list[tuple[str, Distribution | PeerFigures, str, str]] = []
        if metric in _OURS:
            by.append(("gapmeter", result.metrics[metric], "metrics", _OURS[metric]))
        if metric in ("ttft", "e2e"):
            sent = "the same from when its last byte was sent"
            by.append(("gapmeter, from sent", result.metrics_from_sent[metric], "metrics_from_sent", sent))
        for key, tool in result.definitions.items():
            if theirs := getattr(tool, metric):
                by.append((f"{tool.name} {tool.version}", theirs, f"definitions.{key}", theirs.differs))
        groups.add(len(rows))
        for at, (who, found, key, differs) in enumerate(by):
            known = {"p50": found.ms(50.0), "p99": found.ms(99.0), "mean": found.mean_ms}
            figures = [Figure(ms, "ms", f"{key}.{metric}.{name}_ms") for name, ms in known.items()]
            rows.append(["" if at else metric.upper(), Name(who), *figures, count(found.count), differs])
    by_whom, what = doc.Column("by", brief="by definition of"), doc.Column("what it is there", wraps=True, below=True)
    headers: doc.Headers = ["metric", by_whom, *in_ms("p50", "p99", "mean"), "n", what]
    table = Table("By other tools' definitions", headers, rows, words=2, groups=frozenset(groups))
    return Section("definitions", table.name, [table], _OTHERS, "other definitions", doc.PAGE | doc.TERMINAL)
