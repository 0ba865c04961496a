"""The run over time: latencies by due time, what was in flight, what the engine held, on one time axis."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from analysis.attempts import final
from analysis.report import head, timeline
from analysis.report.figure import Table, figure, folded
from analysis.report.numbers import duration
from analysis.report.run import Run
from analysis.report.shell import Section
from analysis.report.svg import el, group
from analysis.report.tables import METRICS


def time_section(run: Run) -> Section:
    """TTFT and E2E by due time, requests in flight, and what the engine held."""
    requests, origin = final(run.requests), run.origin_ns
    span = timeline.extent(requests, origin, _warmup_s(run))
    panels = [
        (
            title,
            timeline.latency_panel(
                requests, origin, span, METRICS[name], column, head.main_limit(run.summary, name), run.stamp
            ),
        )
        for name, column, title in (
            ("ttft", "first_token_ns", "TTFT by the time it was due"),
            ("e2e", "last_token_ns", "E2E by the time it was due"),
        )
    ]
    series = _count_series(run)
    for number, (name, title, at, value) in enumerate(series):
        last = number == len(series) - 1
        panels.append((title, timeline.count_panel(name, title, at, value, span, last=last)))
    drawn = [group([el("h3", title), figure(picture, None, run.provenance, css="levels")]) for title, picture in panels]
    table = folded(_by_second(run, span.length_s), run.provenance)
    return Section("time", "Over time", group([*drawn, table]), _lead(requests, span), "over time")


def _lead(requests: Any, span: timeline.Span) -> str:
    failed = int((requests["outcome"] != "ok").sum())
    lead = f"Seconds from the first due time; {len(requests):,} requests were issued"
    lead += f", {failed:,} of them failed (✕ along the top)." if failed else ", none failed."
    if span.warmup_s > 0:
        lead += f" Shaded: the warm-up, {span.warmup_s:.1f} s, left out of every figure."
    return lead


def _warmup_s(run: Run) -> float:
    measured = run.requests.loc[run.requests["measured"], "due_ns"]
    return (float(measured.min()) - run.origin_ns) / 1e9 if len(measured) else 0.0


def _count_series(run: Run) -> list[tuple[str, str, timeline.Floats, timeline.Floats]]:
    found = [("in-flight", "Requests in flight", *timeline.in_flight(run.requests, run.origin_ns))]
    if len(run.steps):
        at = (run.steps["schedule_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9
        for name, title in (("waiting", "Waiting in the scheduler's queue"), ("running", "Batch: requests in a step")):
            found.append((name, title, at, run.steps[name].to_numpy(dtype=np.float64)))
    return found


def _by_second(run: Run, length_s: float) -> Table:
    """The timeline in at most twenty rows of text."""
    requests = final(run.requests)
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9
    good = (requests["outcome"] == "ok").to_numpy()
    edges = np.linspace(0, length_s, 21)
    rows = []
    for low, high in pairwise(edges):
        inside = (at >= low) & (at < high)
        if inside.any():
            rows.append([f"{low:.1f} to {high:.1f} s", f"{int(inside.sum())}", f"{int((inside & ~good).sum())}"])
            rows[-1] += [_middle_and_top(requests, inside & good, c) for c in ("first_token_ns", "last_token_ns")]
    return Table("The run over time", ["due", "issued", "failed", "TTFT p50, max", "E2E p50, max"], rows)


def _middle_and_top(requests: Any, rows: Any, column: str) -> str:
    if not rows.any():
        return ""
    chosen = requests[rows]
    ms = (chosen[column] - chosen["due_ns"]).to_numpy(dtype=np.float64) / 1e6
    return f"{duration(float(np.median(ms)))}, {duration(float(ms.max()))}"
