"""The run over time: requests by when they were due, and counts, on one axis of seconds.

Second 0 is the first due time. At most some 2,000 dots are drawn: each column of the picture keeps its smallest and
largest request, and every one that failed or broke its limit stays (5,000 at most). Behind each picture is a table of
at most twenty-one stretches of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.numbers import counted, duration, plain, round_step, significant
from gapmeter.analysis.requests.metrics import elapsed_ns, ended_by_us, failures_of, final, issued, succeeded
from gapmeter.analysis.results.latency import Burst
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.report.charts import Axis, Plot, Point, band, limit, line, points, shade, stairs
from gapmeter.report.document import Block, Chart, Column, Figure, Headers, Heading, Row, Section, Table
from gapmeter.report.percentiles import main_slo
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.scale import Scale
from gapmeter.report.svg import NOTHING, Fragment, el, group, percent

_DOTS, _COLUMNS, _FAILED = 2000, 500, 5000
_ROWS = 20  # of a table
_STEP_ENDS = ("forward_end_ns", "sampling_end_ns", "update_end_ns")
_SEEN = 0.006  # of the time axis: a mark is at least so wide
FROM_TO = (Column("from", "from (s)"), Column("to", "to (s)"))
_OPEN = "Larger dots open: click one, or reach them with Tab, move with the arrows, and press Enter."


@dataclass(frozen=True, slots=True)
class Span:
    """The time axis: its length, the warm-up at its start, and where the last measured request was due; seconds."""

    length_s: float
    warmup_s: float
    end_s: float

    def axis(self, *, labels: bool = True) -> Axis:
        return Axis(Scale("linear", 0.0, self.length_s), "s", about=8, labels=labels)

    def shades(self, plot: Plot) -> Fragment:
        """The warm-up shaded gray, the part that is measured tinted."""
        words = f"warm-up, the first {self.warmup_s:.1f} s: left out of every figure"
        warmup = shade(plot, 0.0, self.warmup_s, "warmup", words) if self.warmup_s > 0 else NOTHING
        return group([warmup, shade(plot, self.warmup_s, max(self.end_s, self.warmup_s), "measured")])


def span_of(requests: pd.DataFrame, origin_ns: int) -> Span:
    """The span from the first due time to the last answer; ``requests`` with ``measured``."""
    measured = (requests.loc[requests["measured"], "due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    warmup_s, end_s = (float(measured.min()), float(measured.max())) if len(measured) else (0.0, 0.0)
    ends = pd.concat([requests["due_ns"], requests["last_token_ns"].dropna()])
    length = (float(ends.max()) - origin_ns) / 1e9 if len(ends) else 1.0
    return Span(max(length, 1e-3), warmup_s, end_s)


def stretches(length_s: float) -> list[tuple[float, float]]:
    """The time axis cut at round seconds (1, 2 or 5 times a power of ten apart), at most twenty-one stretches."""
    step = round_step(length_s / _ROWS)
    edges = [step * i for i in range(int(np.ceil(length_s / step - 1e-9)))]
    return list(pairwise([*edges, length_s]))


def from_to(low: float, high: float) -> list[Figure]:
    """Where a stretch begins and ends, in two cells."""
    return [Figure(low, text=f"{plain(low, 4)} s"), Figure(high, text=f"{plain(high, 4)} s")]


def exact(value: float) -> Figure:
    """A mean, or a count."""
    return Figure(value, "number", text=significant(value) if value % 1 else f"{value:,.0f}")


def over_time(run: ReportedRun, openable: Collection[str] = ()) -> Section:
    """TTFT and E2E by due time, arrivals, requests in flight, and what the engine held.

    ``openable``: ids of the requests that the page can open.
    """
    requests, origin = final(run.requests), run.origin_ns
    requests = requests[issued(requests)]
    span = span_of(requests, origin)
    blocks: list[Block] = []
    for metric, stamp in (("ttft", "first_token_ns"), ("e2e", "last_token_ns")):
        slo = main_slo(run.result, metric)
        burst = (run.result.bursts or {}).get(metric)
        dots = dots_of(metric.upper(), requests, span, origin, stamp, frozenset(openable), slo, burst)
        table = dots.table()
        notes = [_OPEN] if openable else []
        notes += [f"Marked: when {burst.count} of the {burst.of} slowest were due."] if burst else []
        chart = Chart(f"timeline-{metric}", dots, " ".join(notes), table, "levels")
        blocks += [Heading(table.name), chart]
    for key, counts in _counts(run, requests, span).items():
        blocks += [Heading(counts.title), Chart(f"timeline-{key}", counts, counts.note, counts.table(), "levels")]
    failed, ours = (int(which(requests).sum()) for which in (failures_of, ended_by_us))
    lead = f"Seconds from the first due time; {counted(len(requests), 'request')} issued"
    lead += f", {failed:,} of them failed (✕ along the top)." if failed else ", none failed."
    lead += f" The load tester stopped before {ours:,} of them ended." if ours else ""
    if span.warmup_s > 0:
        lead += f" Gray: the warm-up, {span.warmup_s:.1f} s, left out of every figure."
    lead += " Tinted: what was measured. Every value axis starts at zero."
    return Section("time", "Over time", blocks, lead, "over time")


def _counts(run: ReportedRun, requests: pd.DataFrame, span: Span) -> dict[str, Counts]:
    found = {
        "arrivals": arrivals(requests, span, run.origin_ns),
        "in-flight": Counts("Requests in flight", "req", span, *in_flight(run.requests, run.origin_ns)),
    }
    if not len(run.steps):
        return found
    at = (run.steps["schedule_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9
    begins = np.flatnonzero(np.diff(run.engine_of_step, prepend=-1))
    order, each = np.argsort(at, kind="stable"), np.diff(begins, append=len(at))

    def of(column: str) -> Floats:
        return np.asarray(run.steps[column].to_numpy(dtype=np.float64, na_value=0.0))

    def counts(title: str, unit: str, value: Floats, note: str = "") -> Counts:
        """Of all engines together."""
        change = np.diff(value, prepend=0.0)
        change[begins] = value[begins]
        return Counts(title, unit, span, at[order], np.cumsum(change[order]), note)

    found["waiting"] = counts("Waiting in the scheduler's queue", "req", of("waiting"))
    found["running"] = Counts("Batch: requests in a step", "req", span, *_in_steps(run, at, of("running"), begins))
    if "free_blocks" in run.steps and of("free_blocks").any():
        most = np.maximum.reduceat(of("free_blocks"), begins)
        note = f"of {most.sum():,.0f} that were ever free at once"
        found["kv"] = counts("KV cache: blocks in use", "blocks", np.repeat(most, each) - of("free_blocks"), note)
    return found


def _in_steps(run: ReportedRun, at: Floats, running: Floats, begins: Ints) -> tuple[Floats, Floats]:
    """Seconds and the requests in steps from then on, of all engines together: none while an engine has no step.

    An engine is between two steps, not without one, for as long as the step before took, and where no step tells its
    end. ``at``: when steps begin; ``begins``: each engine's first.
    """
    end = np.full(len(at), np.nan)
    for name in (name for name in _STEP_ENDS if name in run.steps):
        end = np.fmax(end, (run.steps[name].to_numpy(dtype=np.float64, na_value=np.nan) - run.origin_ns) / 1e9)
    after = np.append(at[1:], np.inf)
    after[begins[1:] - 1] = np.inf
    idle = after - end > end - at
    before = np.roll(np.where(idle, 0.0, running), 1)
    before[begins] = 0.0
    times, change = np.concatenate([at, end[idle]]), np.concatenate([running - before, -running[idle]])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(change[order])


# --- requests


@dataclass(frozen=True, slots=True)
class Dots:
    """Each request's latency by when it was due. ``open``: ids of those that can be opened; they are buttons.

    ``burst``: where the slowest came together.
    """

    metric: str
    span: Span
    at_s: Floats
    ms: Floats
    good: Bools
    failed: Bools
    outcome: Sequence[str]
    ids: Sequence[str]
    open: frozenset[str]
    slo: SloAnswer | None = None
    burst: Burst | None = None

    def draw(self, name: str) -> Fragment:
        answered = self.ms[self.good]
        largest = float(answered.max(initial=0.0))
        near = [self.slo.limit] if self.slo and self.slo.limit <= 1.5 * largest else []
        plot = Plot(self.span.axis(), Axis(Scale.linear([largest, *near], room=0.06), "ms", about=5), height=170)
        dots = [self._dot(row) for row in self._drawn().tolist()]
        failed = np.flatnonzero(self.failed)
        crosses = [  # a mark and its word, never by color alone
            el("text", el("title", f"{self.outcome[i]} at {at:.2f} s"), "✕", x=percent(plot.across(at)), y=-5,
               class_="failed middle")
            for i, at in ((i, float(self.at_s[i])) for i in failed.tolist()[:_FAILED])
        ]  # fmt: skip
        objective = NOTHING
        if self.slo is not None:
            ms, words = self.slo.limit, self.slo.text
            objective = limit(plot, f"SLO {words}", y=ms, near=dots[:400])
            if len(failed) and not plot.y.scale.holds(ms):  # inside, since failed requests are marked above
                objective = el("text", f"SLO {words}, above this axis ↑", x="100%", y=14, class_="limit end halo")
        none = el("text", "no request was answered", x="50%", y=plot.height / 2, class_="faint middle")
        said = (
            f"{self.metric} of {len(answered):,} requests over time, largest {duration(largest)}; {len(failed)} failed."
        )
        return plot.chart(
            name, f"{self.metric} over time", said, self.span.shades(plot), self._marked(plot),
            NOTHING if len(answered) else none,
            objective,
            el("g", points(plot, dots), class_="dots"), *crosses,
        )  # fmt: skip

    def _marked(self, plot: Plot) -> Fragment:
        """The burst, wide enough to be seen."""
        if self.burst is None:
            return NOTHING
        more = max(_SEEN * self.span.length_s - (self.burst.to_s - self.burst.from_s), 0.0) / 2
        words = f"{self.burst.count} of the {self.burst.of} slowest"
        return shade(plot, max(self.burst.from_s - more, 0.0), self.burst.to_s + more, "gap", words)

    def _drawn(self) -> Ints:
        rows = np.flatnonzero(self.good)
        kept = rows[thin(self.at_s[rows], self.ms[rows], self.span.length_s)]
        over = rows[self.ms[rows] > self.slo.limit][:_FAILED] if self.slo else rows[:0]
        openable = np.array([i for i in rows.tolist() if self.ids[i] in self.open], dtype=np.int64)
        return np.unique(np.concatenate([kept, over, openable]))

    def _dot(self, row: int) -> Point:
        at, ms, name = float(self.at_s[row]), float(self.ms[row]), self.ids[row]
        css = "dot over" if self.slo and ms > self.slo.limit else "dot"
        if name not in self.open:
            return Point(at, ms, css=css, size=2)
        words = f"{name}: {duration(ms)}, due at {at:.2f} s"
        data = {"data_request": name, "role": "button", "tabindex": -1, "aria_label": f"open {words}"}
        return Point(at, ms, css=f"{css} open", size=3, title=words, data=data)

    def table(self) -> Table:
        """For each stretch: how many were due, how many failed; least, median and largest of those answered."""
        rows = list[Row]()
        for low, high in stretches(self.span.length_s):
            inside = (self.at_s >= low) & ((self.at_s < high) | (high >= self.span.length_s))
            ms = self.ms[inside & self.good]
            known = [float(ms.min()), float(np.median(ms)), float(ms.max())] if len(ms) else [None] * 3
            due, lost = int(inside.sum()), int((inside & self.failed).sum())
            rows.append([*from_to(low, high), f"{due:,}", f"{lost:,}", *map(Figure, known)])
        figures = [Column(word, f"{self.metric} {word} (ms)") for word in ("least", "median", "largest")]
        headers: Headers = [Column("due from", "from (s)"), FROM_TO[1], "due", "failed", *figures]
        return Table(f"{self.metric} by the time it was due", headers, rows, words=0)


def dots_of(
    metric: str, requests: pd.DataFrame, span: Span, origin_ns: int, column: str, openable: frozenset[str],
    slo: SloAnswer | None = None, burst: Burst | None = None,
) -> Dots:  # fmt: skip
    """``column``: the stamp that ends the latency."""
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    ms = elapsed_ns(requests, "due_ns", column) / 1e6
    good = succeeded(requests) & np.isfinite(ms)
    # As objects: one by one, a column of texts takes a hundred times as long.
    outcomes, ids = (list(map(str, requests[name].to_numpy(object))) for name in ("outcome", "request_id"))
    return Dots(metric, span, at, ms, good, failures_of(requests), outcomes, ids, openable, slo, burst)


def thin(at: Floats, value: Floats, length: float) -> Ints:
    """Rows to draw: all when few, else the first, last, smallest and largest of each of 500 columns of time."""
    if len(at) <= _DOTS:
        return np.arange(len(at))
    column = np.minimum((at / length * _COLUMNS).astype(np.int64), _COLUMNS - 1)
    by_value, by_time = np.lexsort((value, column)), np.lexsort((at, column))
    edges = np.flatnonzero(np.diff(column[by_value], prepend=-1))
    ends = np.append(edges[1:], len(at)) - 1
    return np.unique(np.concatenate([by_value[edges], by_value[ends], by_time[edges], by_time[ends]]))


# --- counts: step functions that are 0 before their first change


@dataclass(frozen=True, slots=True)
class Counts:
    """A count over time that changes at ``at_s``: the range between its extremes in each column of the picture."""

    title: str
    unit: str
    span: Span
    at_s: Floats
    value: Floats
    note: str = ""

    def draw(self, name: str) -> Fragment:
        edges = np.linspace(0.0, self.span.length_s, _COLUMNS + 1)
        low, high = envelope(self.at_s, self.value, edges)
        largest = float(high.max(initial=0.0))
        plot = Plot(self.span.axis(), Axis(Scale.linear([largest or 1.0], room=0.12), self.unit, about=2), height=74)
        upper, lower = (stairs(edges.tolist(), values.tolist()) for values in (high, low))
        return plot.chart(
            name, f"{self.title} over time", f"{self.title} over time, at most {largest:g} {self.unit}.",
            self.span.shades(plot), band(plot, [(x, 0.0, value) for x, value in upper], "area"),
            line(plot, upper, "curve thin"), line(plot, lower, "curve faint"),
        )  # fmt: skip

    def table(self) -> Table:
        """For each stretch: least, mean over the time, and most."""
        between = stretches(self.span.length_s)
        edges = np.asarray([between[0][0], *(high for _, high in between)])
        low, high = envelope(self.at_s, self.value, edges)
        mean = _means(self.at_s, self.value, edges)
        rows: list[Row] = [
            [*from_to(*ends), *(exact(float(v)) for v in figures)]
            for ends, figures in zip(between, zip(low, mean, high, strict=True), strict=True)
        ]
        figures = [Column(word, f"{word} ({self.unit})") for word in ("least", "mean", "most")]
        return Table(f"{self.title} over time", [*FROM_TO, *figures], rows, words=0)


def in_flight(requests: pd.DataFrame, origin_ns: int) -> tuple[Floats, Floats]:
    """Seconds and the number of requests sent and not yet ended from then on."""
    sent = requests.dropna(subset=["sent_ns"])
    start = sent["sent_ns"].to_numpy(dtype=np.float64)
    stop = sent["end_ns"].dropna().to_numpy(dtype=np.float64)
    at = np.concatenate([start, stop])
    change = np.concatenate([np.ones(len(start)), -np.ones(len(stop))])
    order = np.argsort(at, kind="stable")
    return (at[order] - origin_ns) / 1e9, np.cumsum(change[order])


def arrivals(requests: pd.DataFrame, span: Span, origin_ns: int) -> Counts:
    """Requests due per second, counted in bins that are a 1, 2 or 5 long, about a hundred of them."""
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - origin_ns) / 1e9
    width = round_step(span.length_s / 100)
    edges = np.arange(0.0, span.length_s + width, width)
    counts, _ = np.histogram(at, edges)
    return Counts("Arrivals", "req/s", span, edges, np.append(counts / width, 0.0), f"counted in bins of {width:g} s")


def envelope(at: Floats, value: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Least and greatest value of a step function between neighboring edges."""
    changes = np.searchsorted(at, edges, side="right")
    before = np.concatenate([[0.0], value])
    pieces = [before[first : after + 1] for first, after in pairwise(changes)]
    return np.array([piece.min() for piece in pieces]), np.array([piece.max() for piece in pieces])


def _means(at: Floats, value: Floats, edges: Floats) -> Floats:
    """Means of a step function over each stretch; it holds after its last change."""
    if not len(at):
        return np.zeros(len(edges) - 1)
    knots = np.concatenate([[min(0.0, at[0])], at, [max(edges[-1], at[-1])]])
    area = np.concatenate([[0.0], np.cumsum(np.diff(knots) * np.concatenate([[0.0], value]))])
    return np.asarray(np.diff(np.interp(edges, knots, area)) / np.diff(edges))
