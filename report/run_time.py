"""A run over time: requests and counts by due time, and whether there was a steady state."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gapmeter.analysis.numbers import DASH, significant
from gapmeter.analysis.requests.metrics import final
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.results.trust import Drift, Mser5, Pelt, QueueSlope
from gapmeter.report.document import Block, Chart, Columns, Figure, Heading, Name, Paragraph, Row, Section, Table
from gapmeter.report.requests import picked
from gapmeter.report.run_folder import Run
from gapmeter.report.run_percentiles import METRICS, main_limit
from gapmeter.report.timeline import Counts, Floats, Span, arrivals, dots_of, in_flight, span_of

_DOTS = "Larger dots open: click one, or reach them with Tab, move with the arrows, and press Enter."


def over_time(run: Run) -> Section:
    """TTFT and E2E by due time, arrivals, requests in flight, and what the engine held."""
    requests, origin = final(run.requests), run.origin_ns
    span = span_of(requests, origin)
    openable = frozenset(picked(run)) if run.result.stages else frozenset()
    blocks: list[Block] = []
    for metric, stamp in (("ttft", "first_token_ns"), ("e2e", "last_token_ns")):
        limit = main_limit(run.result, metric)
        dots = dots_of(METRICS[metric], requests, span, origin, stamp, openable, limit)
        table = dots.table()
        chart = Chart(f"timeline-{metric}", dots, _DOTS if openable else "", table, "levels")
        blocks += [Heading(table.name), chart]
    for key, counts in _counts(run, requests, span).items():
        blocks += [Heading(counts.title), Chart(f"timeline-{key}", counts, counts.note, counts.table(), "levels")]
    failed = int((~requests["outcome"].isin(("ok", "unsent", "abandoned"))).sum())
    lead = f"Seconds from the first due time; {len(requests):,} requests were issued"
    lead += f", {failed:,} of them failed (✕ along the top)." if failed else ", none failed."
    if span.warmup_s > 0:
        lead += f" Gray: the warm-up, {span.warmup_s:.1f} s, left out of every figure."
    lead += " Tinted: what was measured. Every value axis starts at zero."
    return Section("time", "Over time", blocks, lead, "over time")


def _counts(run: Run, requests: pd.DataFrame, span: Span) -> dict[str, Counts]:
    flying = in_flight(run.requests, run.origin_ns)
    found = {
        "arrivals": arrivals(requests, span, run.origin_ns),
        "in-flight": Counts("Requests in flight", "req", span, *flying),
    }
    if not len(run.steps):
        return found
    at = (run.steps["schedule_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9

    def of(column: str) -> Floats:
        return np.asarray(run.steps[column].to_numpy(dtype=np.float64, na_value=0.0))

    found["waiting"] = Counts("Waiting in the scheduler's queue", "req", span, at, of("waiting"))
    found["running"] = Counts("Batch: requests in a step", "req", span, at, of("running"))
    if "free_blocks" in run.steps and (most := of("free_blocks").max(initial=0)) > 0:
        note = f"of {most:,.0f} that were ever free at once"
        found["kv"] = Counts("KV cache: blocks in use", "blocks", span, at, most - of("free_blocks"), note)
    return found


# --- was there a steady state, and what would the first seconds alone have told?

_STATES = {"steady": "Steady", "unsteady": "No steady state", "unknown": "Too short to tell"}
_RATIOS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "output_tokens_per_s": "output tokens a second",
    "machine_time": "a fixed piece of CPU work: its time",
}
_RATIO_LEAD = (
    "A ratio of 1 means that the first seconds were like the rest. For times above 1 they were slower, for tokens a "
    "second below 1."
)


def sustained(result: RunResult) -> Section | None:
    """The methods' answers and the first seconds over the rest; None for a load that changes."""
    steady = result.steady
    if steady.state == "not_applicable":
        return None
    told = (("MSER-5", _mser(steady.methods.mser5)), ("PELT", _pelt(steady.methods.pelt)),
            ("queue's slope", _slope(steady.methods.queue_slope)))  # fmt: skip
    rows: list[Row] = [[Name(name), words] for name, words in told]
    methods = Table("Steady state", ["method", "what it found"], rows, words=2)
    headers = ["of the run", f"first {result.drift.first_s:.0f} s over the rest", "95 % interval"]
    ratios = Table("First seconds over the rest", headers, _ratio_rows(result.drift))
    columns = Columns([
        [Heading("Was there a steady state?"), methods],
        [Heading("First seconds against sustained"), ratios, Paragraph(_RATIO_LEAD, "quiet")],
    ])  # fmt: skip
    usable = "may stand for capacity" if steady.valid_for_capacity else "must not be taken for capacity"
    return Section("steady", "Sustained", [columns], f"{_STATES[steady.state]}: these figures {usable}.", "sustained")


def _ratio_rows(drift: Drift) -> list[Row]:
    """A row a ratio; a dash where the run is too short for it."""
    rows: list[Row] = []
    for key, name in _RATIOS.items():
        found = getattr(drift, key)
        if found is None:
            rows.append([name, DASH, "not estimable"])
        else:
            low, high = found.ratio_ci
            ratio = Figure(found.ratio, "number", f"drift.{key}.ratio")
            rows.append([name, ratio, f"{significant(low)} .. {significant(high)}"])
    return rows


def _mser(found: Mser5 | None) -> str:
    if found is None:
        return "not asked"
    if found.state == "unsteady":
        return f"{found.metric.upper()} kept changing"
    if not found.excluded_requests:
        return "no start that differs"
    done = "left out" if found.applied else "kept, as the scenario fixes its warm-up"
    times = f"{found.metric.upper()} {found.ratio:.2g} times the rest"
    return f"the first {found.excluded_requests} requests differ ({times}); {done}"


def _pelt(found: Pelt | None) -> str:
    if found is None:
        return "not asked"
    seen = [
        f"{one.metric.upper()} {one.ratio:.2g} times its level from request {one.request} on"
        for one in found.changes
        if one.certain
    ]
    return f"{'; '.join(seen) or 'no certain change of level'} ({'agrees' if found.agrees else 'disagrees'})"


def _slope(found: QueueSlope | None) -> str:
    if found is None:
        return "not asked: the loop is closed"
    low, high = found.per_s_ci
    grew = "grew" if found.grows else "did not grow beyond what a steady queue does"
    interval = f"95 % interval {low:.2g} .. {high:.2g}"
    return f"requests in flight {grew}: {found.per_s:+.2g} a second ({interval})"
