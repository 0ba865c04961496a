"""What was served, at a glance: rates, tokens, how much of it was good, and the percentiles of TTFT, ITL and E2E."""

from __future__ import annotations

from gapmeter.analysis.judge.words import speed_words
from gapmeter.analysis.numbers import count, duration, rate, share, significant
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import RunResult
from gapmeter.report import document as doc
from gapmeter.report import why
from gapmeter.report.advice import advice, next_step
from gapmeter.report.document import MARKDOWN, TERMINAL, Block, Facts, Figure, Heading, Row, Section, Table, in_ms
from gapmeter.report.percentiles import figure
from gapmeter.report.words import of_answered

_SHOWN = (50.0, 90.0, 95.0, 99.0)
_METRICS = ("ttft", "itl", "e2e")


def glance(result: RunResult, manifest: Manifest) -> list[Section]:
    """For the terminal in three lines; on the page a table, and beside it why, by owner, with what to try."""
    served = [("served", words)] if (words := _served(result)) else []
    length = [("length", words)] if (words := _length(result, manifest)) else []
    whose = [("latency", of_answered(result))] if result.failures else []
    latencies = [*whose, ("TTFT", _line(result, "ttft")), ("E2E", _line(result, "e2e"))]
    rows: list[Row] = [
        [metric.upper(), *(_figure(result, metric, p) for p in _SHOWN),
         Figure(result.metrics[metric].max_ms, "ms", f"metrics.{metric}.max_ms")]
        for metric in _METRICS
    ]  # fmt: skip
    names = in_ms(*(f"p{p:g}" for p in _SHOWN), "max")
    headers: doc.Headers = [of_answered(result) if result.failures else " ", *names]
    latency: Block = Table("Percentiles at a glance", headers, rows, css="compact")
    if (owners := why.owners(result)) is not None:
        latency = doc.Columns([[Heading("What was served"), latency], [Heading(owners.name), owners]])
    tried = [*advice(result, manifest), *next_step(result, manifest)]
    page: list[Block] = [Facts([*served, *length]), latency, *tried]
    return [
        Section("glance", "", [Facts([*served, *latencies])], on=TERMINAL, joined=True),
        Section("glance", "", [Facts(length)], on=doc.DETAILS, joined=True),
        Section("glance", "", [Facts([*served, *length])], on=MARKDOWN),
        Section("glance", "At a glance", page, short="at a glance"),
    ]


def _served(result: RunResult) -> str:
    """Throughput, goodput and failures in a line; "" where nothing succeeded."""
    through, counts = result.throughput, result.counts
    if through.requests_per_s is None:
        return ""
    tokens = " and ".join(
        f"{significant(per_s)} {name}"
        for name, per_s in (("output", through.output_tokens_per_s), ("prompt", through.prompt_tokens_per_s))
        if per_s is not None
    )
    failed, ended = counts.failed_by_server, counts.ended
    good_per_s = result.goodput.per_s if result.goodput.limits_ms else None
    good = "" if good_per_s is None else f" ({share(good_per_s / through.requests_per_s)} good)"
    errors = f"{count(failed)} of {count(ended)} failed ({share(failed / max(ended, 1))})" if failed else "none failed"
    if any(slo.metric == "errors" for slo in result.slo):  # an objective says it
        errors = ""
    return ", ".join(filter(None, (f"{rate(through.requests_per_s)}{good}", tokens and f"{tokens} tok/s", errors)))


def _length(result: RunResult, manifest: Manifest) -> str:
    """How long it lasted, where that was left open and it took longer than asked at least."""
    load = manifest.asked.load
    if not load.may_last_longer or load.duration_ns is None or load.longest_ns is None:
        return ""
    if result.shortened and result.load.window_s < 1.01 * load.duration_ns / 1e9:
        return ""
    lasted = f"{result.load.window_s:.0f} s (planned: {load.duration_ns / 1e9:g} to {load.longest_ns / 1e9:g} s)"
    if result.shortened or not any(slo.estimable_with for slo in result.slo):
        return lasted
    change = result.drift.machine_change
    why = f"; the machine became {speed_words(change)} at {change.after_s:.0f} s, so repeat the run" if change else ""
    return f"{lasted}: never enough independent requests for every SLO percentile{why}"


def _figure(result: RunResult, metric: str, percentile: float) -> Figure:
    """A percentile, or what is known of it: a bound, else what the sample has where an SLO asks for it.

    An SLO's sample is of all requests: where some failed, it is of others than this line.
    """
    known = result.metrics[metric]
    drawn = figure(known, percentile, f"metrics.{metric}")
    if drawn.value is not None or drawn.text or result.counts.failed_by_server:
        return drawn
    asked = (slo.sample for slo in result.slo if slo.metric == metric and slo.percentile == percentile)
    sample = next((ms for ms in asked if ms is not None), None)
    return Figure(None, "ms", drawn.key, drawn.hint, f"~{duration(sample)}" if sample is not None else "")


def _line(result: RunResult, metric: str) -> str:
    """``p50 11.5 ms, p90 19.2 ms, … max 59.8 ms``."""
    figures = [f"p{p:g} {_figure(result, metric, p)}" for p in _SHOWN]
    return ", ".join([*figures, f"max {duration(result.metrics[metric].max_ms)}"])
