"""Did the run have a steady state at all? Three looks that fail in different ways.

- MSER-5 (``steady.py``) looks for a start that differs, in TTFT and TPOT.
- PELT looks for a change of level anywhere, on the logarithms. It is a cross-check: it never changes the state, it says
  when it disagrees.
- The slope of the number of requests in flight at 40 moments of the measured window. Where it rises by more than a
  steady queue does, more was offered than served, and any latency depends on how long one looked.

stats.changes has the methods and their sources. A closed loop cannot outgrow its users, so its slope is not asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.steady import Warmup, detect_warmup
from gapmeter.analysis.requests.attempts import final
from gapmeter.analysis.requests.metrics import issued, request_values_ns, stamps_ns, succeeded
from gapmeter.analysis.results.trust import LevelChange, Mser5, Pelt, QueueSlope, RunWarning, Steady, SteadyMethods
from gapmeter.analysis.stats.changes import BATCH, FEWEST_BATCHES, Slope, slope_of, strongest_change
from gapmeter.analysis.stats.estimate import CONFIDENCE, Floats

MOMENTS = 40
FEWEST_REQUESTS = BATCH * FEWEST_BATCHES


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level that PELT found: the first request after it, when it was due, ratio of after to before.

    ``certain``: more than a long burst of a steady queue.
    """

    request: int
    at_ns: int
    metric: str
    ratio: float
    certain: bool


def describe_steady(requests: pd.DataFrame, warmup: Warmup | None, *, loop: str, searched: bool) -> Steady:
    """The state, what each method says, whether the figures may stand for capacity.

    ``requests``: all, with ``measured`` as it is after the warm-up was left out; ``warmup`` what MSER-5 had left out,
    None where the scenario fixes the warm-up (then MSER-5 is asked here, and what it would leave out is only said);
    ``searched``: whether the load is meant to be steady at all. The state is unknown with fewer than 50 requests, or
    where none succeeded.
    """
    unasked = SteadyMethods(mser5=None, pelt=None, queue_slope=None)
    if not searched:
        return Steady(state="not_applicable", methods=unasked, valid_for_capacity=False)
    window = requests[requests["measured"].to_numpy(bool) & issued(requests)]
    if len(window) < FEWEST_REQUESTS or not (window["outcome"] == "ok").any():
        return Steady(state="unknown", methods=unasked, valid_for_capacity=False)
    slope = queue_slope(requests) if loop == "open" else None
    seen = detect_warmup(window) if warmup is None else warmup
    changes = level_changes(window if warmup is None else requests[issued(requests)])
    methods = SteadyMethods(
        mser5=Mser5(
            state=seen.state, excluded_requests=seen.excluded, metric=seen.metric, ratio=seen.ratio,
            applied=warmup is not None,
        ),
        pelt=_describe_pelt(changes, seen),
        queue_slope=None if slope is None else _describe_slope(slope, _served_per_s(requests)),
    )  # fmt: skip
    unsteady = (slope is not None and slope.grows) or seen.state == "unsteady"
    return Steady(state="unsteady" if unsteady else "steady", methods=methods, valid_for_capacity=not unsteady)


def queue_slope(requests: pd.DataFrame) -> Slope | None:
    """How fast the number of requests in flight grows over the measured window; None for a window without a span."""
    sent = final(requests[issued(requests)])
    due = stamps_ns(sent, "due_ns")
    inside = due[sent["measured"].to_numpy(bool)]
    if len(inside) < FEWEST_REQUESTS or inside.max() == inside.min():
        return None
    edges = np.linspace(float(inside.min()), float(inside.max()), MOMENTS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    seconds, level = (middle - middle[0]) / 1e9, _in_flight(sent, edges)
    return slope_of(level, seconds, len(inside) / MOMENTS)


def _in_flight(sent: pd.DataFrame, edges: Floats) -> Floats:
    """The mean number of requests that were due and had not ended, between each two edges; exact, not sampled."""
    due = stamps_ns(sent, "due_ns").astype(np.float64)
    ended = stamps_ns(sent, "end_ns" if "end_ns" in sent else "last_token_ns").astype(np.float64)
    ended = np.where(ended < 0, np.inf, ended)  # never, as far as anybody saw
    width = edges[1] - edges[0]
    in_time = np.clip(edges[1:, None] - due, 0, width) - np.clip(edges[1:, None] - ended, 0, width)
    return np.asarray(in_time.sum(axis=1) / width)


def level_changes(requests: pd.DataFrame) -> list[Change]:
    """The strongest change of level in TTFT and in TPOT, in the order of time."""
    ordered = requests.sort_values("due_ns", kind="stable")
    good, due = succeeded(ordered), stamps_ns(ordered, "due_ns")
    found = []
    for metric in ("ttft", "tpot"):
        values = request_values_ns(ordered, metric)
        known = np.flatnonzero(good & ~np.isnan(values))
        series = values[known]
        if (change := strongest_change(np.log(np.maximum(series, 1.0)))) is not None:
            cut, ratio, certain = change
            found.append(Change(int(known[cut]), int(due[known[cut]]), metric, ratio, certain))
    return sorted(found, key=lambda change: change.at_ns)


def growth_warning(steady: Steady) -> list[RunWarning]:
    """A warning where the queue grew through the run."""
    slope = steady.methods.queue_slope
    if slope is None or not slope.grows:
        return []
    cause = "more was offered than the server can do, so that latency depends on how long one looks"
    return [
        RunWarning(
            code="overload",
            text=growth_text(slope),
            cause=cause,
            flag="a lower load.rate",
            touches=("ttft", "e2e", "capacity"),
        )
    ]


def growth_text(slope: QueueSlope) -> str:
    """By how much a queue grew, and a steady one does not."""
    low, high = slope.per_s_ci
    first, last = slope.in_flight
    return (
        f"no steady state: requests in flight grew by {slope.per_s:.2g} a second "
        f"({100 * slope.confidence:.0f} % interval {low:.2g} .. {high:.2g}), from about {first:.0f} to {last:.0f}, "
        f"where a steady queue seldom grows by more than {slope.steady_most:.0f}"
    )


def _describe_pelt(changes: list[Change], warmup: Warmup) -> Pelt:
    """The changes, and whether they tell the same story: none that is certain but where MSER-5 cut (a tenth later).

    Where MSER-5 gave up, any change supports it: latency that climbs all the time has no two levels.
    """
    later = [change for change in changes if change.certain and change.request > 1.1 * warmup.excluded + 5]
    agrees = bool(changes) if warmup.state == "unsteady" else not later
    seen = [LevelChange(request=c.request, metric=c.metric, ratio=c.ratio, certain=c.certain) for c in changes]
    return Pelt(changes=tuple(seen), agrees=agrees)


def _describe_slope(slope: Slope, served_per_s: float | None) -> QueueSlope:
    return QueueSlope(
        per_s=slope.per_s.known[0],
        per_s_ci=slope.per_s.ends,
        confidence=CONFIDENCE,
        in_flight=(max(slope.first, 0.0), max(slope.last, 0.0)),
        grows=slope.grows,
        steady_most=slope.steady_most,
        served_per_s=served_per_s,
    )


def _served_per_s(requests: pd.DataFrame) -> float | None:
    """Answers a second that ended within the measured window."""
    sent = final(requests[issued(requests)])
    due = stamps_ns(sent, "due_ns")[sent["measured"].to_numpy(bool)]
    ended = stamps_ns(sent, "end_ns" if "end_ns" in sent else "last_token_ns")[succeeded(sent)]
    span = (due.max() - due.min()) / 1e9
    return float(((ended >= due.min()) & (ended <= due.max())).sum() / span) if span > 0 else None
