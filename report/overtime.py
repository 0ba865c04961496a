"""The run over time: latencies by due time, what was in flight, what the engine held, on one time axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from gapmeter.analysis.requests.attempts import final
from gapmeter.report import head, timeline
from gapmeter.report.figure import Table, figure
from gapmeter.report.picked import picked
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.tables import METRICS
from gapmeter.report.time_tables import count_table, latency_table

_DOTS = "Larger dots open: click one, or reach them with Tab, move with the arrows, and press Enter."


def time_section(run: Run) -> Section:
    """TTFT and E2E by due time, arrivals, requests in flight, and what the engine held."""
    requests, origin = final(run.requests), run.origin_ns
    span = timeline.extent(requests, origin)
    openable = frozenset(picked(run))
    drawn = []
    for name, column in (("ttft", "first_token_ns"), ("e2e", "last_token_ns")):
        dots = timeline.dots_of(requests, origin, column, openable)
        limit = head.main_limit(run.summary, name)
        picture = timeline.latency_panel(dots, span, METRICS[name], limit, run.stamp)
        table = latency_table(METRICS[name], dots, span.length_s)
        drawn.append(_panel(run, table, picture, _DOTS if openable else ""))
    for series in _series(run, span.length_s):
        picture = timeline.count_panel(series, span, run.stamp)
        drawn.append(_panel(run, count_table(series, span.length_s), picture, series.note, series.title))
    return Section("time", "Over time", group(drawn), _lead(requests, span), "over time")


def _panel(run: Run, table: Table, picture: Fragment, note: str, title: str = "") -> Fragment:
    return group([el("h3", title or table.name), figure(picture, table, run.provenance, note, "levels")])


def _lead(requests: Any, span: timeline.Span) -> str:
    failed = int((~requests["outcome"].isin(("ok", "unsent", "abandoned"))).sum())
    lead = f"Seconds from the first due time; {len(requests):,} requests were issued"
    lead += f", {failed:,} of them failed (✕ along the top)." if failed else ", none failed."
    if span.warmup_s > 0:
        lead += f" Gray: the warm-up, {span.warmup_s:.1f} s, left out of every figure."
    return lead + " Tinted: what was measured. Every value axis starts at zero."


def _series(run: Run, length_s: float) -> list[timeline.Series]:
    requests = final(run.requests)
    found = [
        timeline.arrivals(requests, run.origin_ns, length_s),
        timeline.Series("in-flight", "Requests in flight", "req", *timeline.in_flight(run.requests, run.origin_ns)),
    ]
    if not len(run.steps):
        return found
    at = (run.steps["schedule_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9

    def of(column: str) -> timeline.Floats:
        return np.asarray(run.steps[column].to_numpy(dtype=np.float64, na_value=0.0))

    found.append(timeline.Series("waiting", "Waiting in the scheduler's queue", "req", at, of("waiting")))
    found.append(timeline.Series("running", "Batch: requests in a step", "req", at, of("running")))
    if "free_blocks" in run.steps and (most := of("free_blocks").max(initial=0)) > 0:
        note = f"of {most:,.0f} that were ever free at once"
        found.append(timeline.Series("kv", "KV cache: blocks in use", "blocks", at, most - of("free_blocks"), note))
    return found
