"""Did the run have a steady state, where does it begin, and what would its first seconds alone have told?

Three looks that fail in different ways; stats.changes has the methods and their sources.

- MSER-5 looks for a start that differs, in TTFT and TPOT. Latencies are skewed, so it is run on their logarithms, and
  with a guard against leaving out mere bad luck: a cut is kept only when the part left out differs from the rest by
  more than chance. On stationary M/M/1 queues of 1,000 requests this objects wrongly in 1.5 % (load 0.3), 6 % (load
  0.85) and 9 % (load 0.9) of 1,000 runs (bench/false_alarms.py, docs/results), where MSER alone does in more than a
  quarter; the price is that a slow start inside heavy queueing may stay in, which makes figures worse, never better. A
  cut that would leave out more than a fifth of the requests is no start any more but a change in the middle: nothing is
  left out then, and the run is called unsteady.
- PELT looks for a change of level anywhere, on the logarithms. It is a cross-check: it never changes the state, it says
  when it disagrees.
- The slope of the number of requests in flight at 40 moments of the measured window. Where it rises by more than a
  steady queue does, more was offered than served, and any latency depends on how long one looked. A closed loop cannot
  outgrow its users, so its slope is not asked for.

*Drift* compares the first ten seconds with the rest: the ratio of the geometric means of TTFT and TPOT, by due time,
and for tokens the ratio of mean rates a second, of successes' tokens as they arrived (stats.series has both intervals).
The whole run counts, warm-up included, since the warm-up is what may differ. The canary is the fixed piece of CPU work
that each generator process times once a second: its ratio says whether the machine itself slowed down. Why it did is
said only where telemetry recorded a reason. PELT also looks for a change of its level: where a machine became slower in
the middle of a run, all slow requests lie on one side of it, and are worth few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.judge.outage import find_row, outage_of
from gapmeter.analysis.requests.metrics import final, flattened, issued, request_values_ns, stamps_ns, succeeded
from gapmeter.analysis.results.device import Telemetry
from gapmeter.analysis.results.trust import (
    Drift,
    LevelChange,
    Mser5,
    Pelt,
    QueueSlope,
    Ratio,
    SpeedChange,
    Steady,
    SteadyMethods,
)
from gapmeter.analysis.stats.changes import BATCH, FEWEST_BATCHES, Slope, differs, mser5, slope_of, strongest_change
from gapmeter.analysis.stats.estimate import CONFIDENCE, Estimate
from gapmeter.analysis.stats.series import FEWEST_OF_RATIO, ratio_of_geometric_means, ratio_of_means

MOST_LEFT_OUT = 0.2
MOMENTS = 40
FEWEST_REQUESTS = BATCH * FEWEST_BATCHES
FIRST_S = 10
_SLIGHT = 1.05  # times as slow: a start that differs by less is not worth being left out
_NOTABLE_CHANGE = 0.15  # of the machine's speed


@dataclass(frozen=True, slots=True)
class Warmup:
    """What to leave out. ``state``: steady (nothing to leave out), warmed (the first ``excluded`` requests), unsteady.

    ``from_ns`` is the due time of the first request that was looked at, ``until_ns`` of the first that is kept;
    ``ratio`` the geometric mean of what is left out over that of what is kept; ``metric`` the one that showed it.
    """

    state: str
    excluded: int
    from_ns: int
    until_ns: int
    metric: str
    ratio: float


def detect_warmup(requests: pd.DataFrame) -> Warmup:
    """Look for a slow (or fast) start in TTFT and TPOT of all issued requests, in the order they were due.

    Failed requests are passed over here; they stay in every figure. Unsteady in one metric is unsteady.
    """
    ordered = requests[issued(requests)].sort_values("due_ns", kind="stable")
    warmups = [_warmup_of(ordered, metric) for metric in ("ttft", "tpot")]
    unsteady = [each for each in warmups if each.state == "unsteady"]
    return unsteady[0] if unsteady else max(warmups, key=lambda each: each.excluded)


def _warmup_of(ordered: pd.DataFrame, metric: str) -> Warmup:
    rows, values, logs = _latencies(ordered, metric)
    due = ordered["due_ns"].to_numpy(np.int64)
    cut, edge = mser5(logs)
    begun = int(due[0]) if len(due) else 0
    slight = cut and abs(float(logs[:cut].mean() - logs[cut:].mean())) < math.log(_SLIGHT)
    if not cut or slight or not differs(logs[:cut], logs[cut:]):
        return Warmup("steady", 0, begun, begun, metric, 1.0)
    ratio = math.exp(float(logs[:cut].mean() - logs[cut:].mean()))
    if edge or cut > MOST_LEFT_OUT * len(values):
        return Warmup("unsteady", 0, begun, begun, metric, ratio)
    first_kept = int(rows[cut])
    return Warmup("warmed", first_kept, begun, int(due[first_kept]), metric, ratio)


def _latencies(requests: pd.DataFrame, metric: str) -> tuple[Ints, Floats, Floats]:
    """Rows, latencies in ns and their logarithms, of the requests that succeeded and have one."""
    values = request_values_ns(requests, metric)
    rows = np.flatnonzero(succeeded(requests) & ~np.isnan(values))
    return rows, values[rows], np.log(np.maximum(values[rows], 1.0))


def describe_steady(requests: pd.DataFrame, warmup: Warmup | None, *, loop: str, searched: bool) -> Steady:
    """The state, what each method says, whether the figures can be used as capacity.

    ``requests``: all, with ``measured`` as it is after the warm-up was left out; ``warmup`` what MSER-5 had left out,
    None where the scenario fixes the warm-up (then MSER-5 is asked here, and what it would leave out is only said);
    ``searched``: whether the load is meant to be steady at all. The state is unknown with fewer than 50 requests, or
    where none succeeded.
    """
    unasked = SteadyMethods(mser5=None, pelt=None, queue_slope=None)
    if not searched:
        return Steady(state="not_applicable", methods=unasked, valid_for_capacity=False)
    sent = requests[issued(requests)]
    window = sent[sent["measured"].to_numpy(bool)]
    if len(window) < FEWEST_REQUESTS or not succeeded(window).any():
        return Steady(state="unknown", methods=unasked, valid_for_capacity=False)
    slope = queue_slope(requests) if loop == "open" else None
    seen = detect_warmup(window) if warmup is None else warmup
    asked = window  # what MSER-5 was asked of
    if warmup is not None:
        asked = final(sent[(sent["due_ns"] >= warmup.from_ns) & (sent["due_ns"] <= window["due_ns"].max())])
    changes = level_changes(asked)
    # They agree where no change is certain but where MSER-5 cut (a tenth later). Where MSER-5 gave up, any change
    # supports it: latency that climbs all the time has no two levels.
    later = [change for change in changes if change.certain and change.request > 1.1 * seen.excluded + 5]
    methods = SteadyMethods(
        mser5=Mser5(
            state=seen.state, excluded_requests=seen.excluded, metric=seen.metric, ratio=seen.ratio,
            applied=warmup is not None,
        ),
        pelt=Pelt(changes=tuple(changes), agrees=bool(changes) if seen.state == "unsteady" else not later),
        queue_slope=None if slope is None else QueueSlope(
            per_s=slope.per_s.known[0], per_s_ci=slope.per_s.ends, confidence=CONFIDENCE,
            in_flight=(max(slope.first, 0.0), max(slope.last, 0.0)), grows=slope.grows, steady_most=slope.steady_most,
            served_per_s=_served_per_s(final(sent)),
        ),
    )  # fmt: skip
    unsteady = (slope is not None and slope.grows) or seen.state == "unsteady"
    lasts = not unsteady and outage_of(find_row(window, 0)) is None  # what was answered may be steady until then
    return Steady(state="unsteady" if unsteady else "steady", methods=methods, valid_for_capacity=lasts)


def queue_slope(requests: pd.DataFrame) -> Slope | None:
    """How fast the number of requests in flight grows over the measured window; None for a window without a span."""
    sent = final(requests[issued(requests)])
    inside = stamps_ns(sent, "due_ns")[sent["measured"].to_numpy(bool)]
    if len(inside) < FEWEST_REQUESTS or inside.max() == inside.min():
        return None
    edges = np.linspace(float(inside.min()), float(inside.max()), MOMENTS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    return slope_of(_in_flight(sent, edges), (middle - middle[0]) / 1e9, len(inside) / MOMENTS)


def _in_flight(sent: pd.DataFrame, edges: Floats) -> Floats:
    """The mean number of requests that were due and had not ended, between each two edges; exact, not sampled."""
    due, ended = stamps_ns(sent, "due_ns").astype(np.float64), stamps_ns(sent, "end_ns").astype(np.float64)
    ended = np.where(ended < 0, np.inf, ended)  # never, as far as anybody saw
    width = edges[1] - edges[0]
    in_time = [(np.clip(end - due, 0, width) - np.clip(end - ended, 0, width)).sum() for end in edges[1:]]
    return np.asarray(np.array(in_time) / width)


def _served_per_s(sent: pd.DataFrame) -> float | None:
    """Answers a second that ended within the measured window."""
    due = stamps_ns(sent, "due_ns")[sent["measured"].to_numpy(bool)]
    ended = stamps_ns(sent, "end_ns")[succeeded(sent)]
    span = (due.max() - due.min()) / 1e9
    return float(((ended >= due.min()) & (ended <= due.max())).sum() / span) if span > 0 else None


def level_changes(requests: pd.DataFrame) -> list[LevelChange]:
    """The strongest change of level that PELT finds in TTFT and in TPOT, in the order of time.

    ``certain``: more than a long burst of a steady queue.
    """
    ordered = requests.sort_values("due_ns", kind="stable")
    changes = []
    for metric in ("ttft", "tpot"):
        rows, _, logs = _latencies(ordered, metric)
        if (change := strongest_change(logs)) is not None:
            cut, ratio, certain = change
            changes.append(LevelChange(request=int(rows[cut]), metric=metric, ratio=ratio, certain=certain))
    return sorted(changes, key=lambda change: change.request)


def describe_drift(
    requests: pd.DataFrame, canaries: Sequence[tuple[Ints, Ints]] = (), reason: str | None = None
) -> Drift:
    """Each ratio of the first seconds to the rest, with its 95 % interval.

    ``requests``: all of the run; ``canaries``: of each generator process when the fixed work began, once a second, and
    how long it took; ``reason``: why the machine slowed down, where telemetry says so. A ratio that nothing supports is
    None.
    """
    sent = requests[issued(requests)].sort_values("due_ns", kind="stable")
    due = stamps_ns(sent, "due_ns")
    first = due - due.min(initial=2**62) < FIRST_S * 10**9

    def latency(metric: str) -> Ratio | None:
        rows, _, logs = _latencies(sent, metric)
        return _ratio(ratio_of_geometric_means(logs[first[rows]], logs[~first[rows]]))

    return Drift(
        first_s=FIRST_S,
        ttft=latency("ttft"),
        tpot=latency("tpot"),
        output_tokens_per_s=_token_drift(sent, due),
        machine_time=_machine_drift([took_ns for _, took_ns in canaries]),
        reason=reason,
        machine_change=_machine_change(canaries, int(due.min())) if len(due) else None,
    )


def throttled(telemetry: Telemetry | None) -> str | None:
    """What slowed the server's GPUs down, in telemetry's own words; None where nothing did, or nobody looked."""
    gpus = telemetry.gpus if telemetry else ()
    reasons = dict.fromkeys(words for gpu in gpus if gpu.server for words in gpu.throttled or ())
    return f"a GPU was throttled during the run: {', '.join(reasons)}" if reasons else None


def _token_drift(sent: pd.DataFrame, due: Ints) -> Ratio | None:
    """Tokens that arrived in each second while requests were issued."""
    if not len(sent):
        return None
    arrived, _ = flattened(sent, "token_ns", succeeded(sent))
    seconds = int((due.max() - due.min()) // 1_000_000_000)
    if seconds < FIRST_S + FEWEST_OF_RATIO or not len(arrived):
        return None
    at = (arrived - due.min()) // 1_000_000_000
    rates = np.bincount(at[(at >= 0) & (at < seconds)], minlength=seconds).astype(np.float64)
    return _ratio(ratio_of_means(rates[:FIRST_S], rates[FIRST_S:]))


def _machine_drift(canaries: Sequence[Ints]) -> Ratio | None:
    """Each process's durations against its own later ones, pooled."""
    logs = [np.log(np.maximum(each, 1)) for each in canaries if len(each) >= FIRST_S + FEWEST_OF_RATIO]
    if not logs:
        return None
    centred = [each - each[FIRST_S:].mean() for each in logs]
    first, rest = np.concatenate([each[:FIRST_S] for each in centred]), np.concatenate([c[FIRST_S:] for c in centred])
    return _ratio(ratio_of_geometric_means(first, rest))


def _machine_change(canaries: Sequence[tuple[Ints, Ints]], start_ns: int) -> SpeedChange | None:
    """The largest that any process saw. No queue is in it, so that it need not exceed a queue's bursts."""
    changes = [
        SpeedChange(after_s=(int(at_ns[found[0]]) - start_ns) / 1e9, ratio=found[1])
        for at_ns, took_ns in canaries
        if (found := strongest_change(np.log(np.maximum(took_ns, 1)))) is not None
    ]
    largest = max(changes, key=lambda change: abs(math.log(change.ratio)), default=None)
    return largest if largest and abs(math.log(largest.ratio)) > math.log1p(_NOTABLE_CHANGE) else None


def _ratio(found: Estimate | None) -> Ratio | None:
    return None if found is None else Ratio(ratio=found.known[0], ratio_ci=found.ends)
