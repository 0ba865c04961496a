"""Did the run have a steady state at all? Three looks that fail in different ways.

- MSER-5 (``steady.py``) looks for a start that differs, in TTFT and TPOT.
- PELT looks for a change of level anywhere, on the logarithms. It is a cross-check: it never changes the state, it says
  when it disagrees.
- The slope of the number of requests in flight at 40 moments of the measured window. Where it rises by more than a
  steady queue does, more was offered than served, and any latency depends on how long one looked.

stats.changes has the methods and their sources. A closed loop cannot outgrow its users, so its slope is not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.evidence import RunWarning
from gapmeter.analysis.judge.steady import Warmup, detect_warmup
from gapmeter.analysis.requests.attempts import final
from gapmeter.analysis.requests.metrics import issued, request_values_ns, stamps_ns, succeeded
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


def describe_steady(
    requests: pd.DataFrame, warmup: Warmup | None, *, loop: str, searched: bool, offered: float | None = None
) -> dict[str, Any]:
    """``summary["steady"]``: the state, what each method says, whether the figures may stand for capacity.

    ``requests``: all, with ``measured`` as it is after the warm-up was left out; ``warmup`` what MSER-5 had left out,
    None where the scenario fixes the warm-up (then MSER-5 is asked here, and what it would leave out is only said);
    ``searched``: whether the load is meant to be steady at all; ``offered`` requests a second.
    """
    if not searched:
        return _told("not_applicable", {}, "the load was meant to change, so there is no steady state to look for")
    window = requests[requests["measured"].to_numpy(bool) & issued(requests)]
    if len(window) < FEWEST_REQUESTS:
        were = "request was" if len(window) == 1 else "requests were"
        text = f"too short to tell: {len(window)} {were} measured, a steady state takes {FEWEST_REQUESTS} to see"
        return _told("unknown", {}, text)
    if not (window["outcome"] == "ok").any():
        return _told("unknown", {}, "no request succeeded, so there is no latency that could be steady")
    slope = queue_slope(requests) if loop == "open" else None
    seen = detect_warmup(window) if warmup is None else warmup
    changes = level_changes(window if warmup is None else requests[issued(requests)])
    methods = {
        "mser5": {**_mser_part(seen), "applied": warmup is not None},
        "pelt": _pelt_part(changes, seen),
        "queue_slope": None if slope is None else _slope_part(slope),
    }
    grows, moved = slope is not None and slope.grows, seen.state == "unsteady"
    said = _sentences(requests, slope, seen, methods, offered)
    return _told("unsteady" if grows or moved else "steady", methods, "; ".join(said))


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


def growth_warning(told: Mapping[str, Any]) -> list[RunWarning]:
    """A warning where the queue grew through the run."""
    slope = told["methods"]["queue_slope"]
    if not (slope and slope["grows"]):
        return []
    text = told["sentence"].split("; more was")[0]
    cause = "more was offered than the server can do, so that latency depends on how long one looks"
    touches = ("ttft", "e2e", "capacity")
    return [RunWarning("overload", text, cause, "a lower load.rate", touches)]


def _told(state: str, methods: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    named = {name: methods.get(name) for name in ("mser5", "pelt", "queue_slope")}
    return {"state": state, "methods": named, "valid_for_capacity": state == "steady", "sentence": sentence}


def _mser_part(warmup: Warmup) -> dict[str, Any]:
    return {
        "state": warmup.state, "excluded_requests": warmup.excluded, "metric": warmup.metric, "ratio": warmup.ratio,
    }  # fmt: skip


def _pelt_part(changes: list[Change], warmup: Warmup) -> dict[str, Any]:
    """The changes, and whether they tell the same story: none that is certain but where MSER-5 cut (a tenth later).

    Where MSER-5 gave up, any change supports it: latency that climbs all the time has no two levels.
    """
    later = [change for change in changes if change.certain and change.request > 1.1 * warmup.excluded + 5]
    agrees = bool(changes) if warmup.state == "unsteady" else not later
    told = [{"request": c.request, "metric": c.metric, "ratio": c.ratio, "certain": c.certain} for c in changes]
    return {"changes": told, "agrees": agrees}


def _slope_part(slope: Slope) -> dict[str, Any]:
    return {
        "per_s": slope.per_s.value, "per_s_ci": list(slope.per_s.ends), "confidence": CONFIDENCE,
        "in_flight": [max(slope.first, 0.0), max(slope.last, 0.0)], "grows": slope.grows,
        "steady_most": slope.steady_most,
    }  # fmt: skip


def _sentences(
    requests: pd.DataFrame, slope: Slope | None, seen: Warmup, methods: Mapping[str, Any], offered: float | None
) -> list[str]:
    said = []
    if slope is not None and slope.grows:
        said.append(
            f"no steady state: requests in flight grew by {slope.per_s.value:.2g} a second "
            f"({100 * CONFIDENCE:.0f} % interval {slope.per_s.low:.2g} .. {slope.per_s.high:.2g}), "
            f"from about {max(slope.first, 0):.0f} to {slope.last:.0f}, "
            f"where a steady queue seldom grows by more than {slope.steady_most:.0f}; "
            f"more was offered{_rate(offered)} than served{_rate(_served(requests))}"
        )
    if seen.state == "unsteady":
        said.append(f"no steady state: {seen.metric.upper()} kept changing through the run (MSER-5)")
    if not said:
        said.append(_steady(seen, applied=methods["mser5"]["applied"]))
    if not methods["pelt"]["agrees"]:
        said.append(_disagreement(methods["pelt"]))
    return said


def _steady(seen: Warmup, *, applied: bool) -> str:
    if not seen.excluded:
        return "steady"
    if applied:
        return f"steady after the first {seen.excluded} requests"
    return f"steady, but the first {seen.excluded} measured requests differ and are kept, as load.warmup says (MSER-5)"


def _disagreement(pelt: Mapping[str, Any]) -> str:
    certain = [change for change in pelt["changes"] if change["certain"]]
    if not certain:
        return "PELT disagrees: it sees no change of level"
    last = certain[-1]
    return (
        f"PELT disagrees: it sees {last['metric'].upper()} at {last['ratio']:.2g} times its level from request "
        f"{last['request']} on"
    )


def _served(requests: pd.DataFrame) -> float | None:
    """Answers a second that ended within the measured window."""
    sent = final(requests[issued(requests)])
    due = stamps_ns(sent, "due_ns")[sent["measured"].to_numpy(bool)]
    ended = stamps_ns(sent, "end_ns" if "end_ns" in sent else "last_token_ns")[succeeded(sent)]
    span = (due.max() - due.min()) / 1e9
    return float(((ended >= due.min()) & (ended <= due.max())).sum() / span) if span > 0 else None


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else f" ({per_s:.3g}/s)"
