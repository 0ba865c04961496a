"""Where does the steady part of a run begin? MSER-5, with a guard against leaving out mere bad luck.

MSER-5 (White 1997; Hoad, Robinson and Davies 2010): on means Z of five consecutive requests, leave out the first d
that minimise sum over i > d of (Z_i - mean)^2 / (m - d)^2, d at most m / 2. A minimum at that edge means that no
steady state was reached.

Latencies are skewed, so it is run on their logarithms. On correlated data MSER also cuts off an early burst that
belongs to the steady state. So a cut is kept only when the part left out differs from the rest by more than chance:
the means three standard errors apart (with the rest's autocorrelation time in the standard error), and more extreme
than that of every stretch of the same length later on. On stationary M/M/1 queues of 1,000 requests this objects
wrongly in 1.5 % (load 0.3), 6 % (load 0.85) and 9 % (load 0.9) of 1,000 runs (bench/false_alarms.py, docs/results),
where MSER alone does in more than a quarter; the price is that a slow start inside heavy queueing may stay in, which
makes figures worse, never better. A cut that would leave out more than a fifth of the requests is no start any more but
a change in the middle: nothing is left out then, and the run is called unsteady.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import issued, request_values_ns, succeeded
from gapmeter.analysis.stats import quantiles
from gapmeter.analysis.stats.quantiles import Floats

BATCH = 5
FEWEST_BATCHES = 10
MOST_LEFT_OUT = 0.2
SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Warmup:
    """What to leave out. ``state``: steady (nothing to leave out), warmed (the first ``excluded`` requests), unsteady.

    ``until_ns`` is the due time of the first request that is kept; ``ratio`` the mean of what is left out over the
    mean of what is kept; ``metric`` the one that showed it.
    """

    state: str
    excluded: int
    until_ns: int
    metric: str
    ratio: float


def detect_warmup(requests: pd.DataFrame) -> Warmup:
    """Look for a slow (or fast) start in TTFT and TPOT of all issued requests, in the order they were due.

    Failed requests are passed over here; they stay in every figure. Unsteady in one metric is unsteady.
    """
    ordered = requests[issued(requests)].sort_values("due_ns", kind="stable")
    found = [_of_metric(ordered, metric) for metric in ("ttft", "tpot")]
    unsteady = [each for each in found if each.state == "unsteady"]
    return unsteady[0] if unsteady else max(found, key=lambda each: each.excluded)


def mser5(values: Floats) -> tuple[int, bool]:
    """How many leading values MSER-5 leaves out, and whether its minimum lies at the edge (no steady state)."""
    m = len(values) // BATCH
    if m < FEWEST_BATCHES:
        return 0, False
    means = values[: m * BATCH].reshape(m, BATCH).mean(axis=1)
    kept = m - np.arange(m // 2 + 1)
    tail = np.cumsum(means[::-1])[::-1][: m // 2 + 1]
    squares = np.cumsum((means**2)[::-1])[::-1][: m // 2 + 1]
    spread = np.maximum(squares - tail**2 / kept, 0.0) / kept**2
    d = int(np.argmin(spread))
    return d * BATCH, d == m // 2


def _of_metric(ordered: pd.DataFrame, metric: str) -> Warmup:
    values = request_values_ns(ordered, metric)
    known = np.flatnonzero(succeeded(ordered) & ~np.isnan(values))
    due = ordered["due_ns"].to_numpy(np.int64)
    series = values[known]
    logs = np.log(np.maximum(series, 1.0))
    cut, edge = mser5(logs)
    if not cut or not differs(logs[:cut], logs[cut:]):
        return Warmup("steady", 0, int(due[0]) if len(due) else 0, metric, 1.0)
    ratio = float(series[:cut].mean() / series[cut:].mean())
    first_kept = int(known[cut])
    if edge or cut > MOST_LEFT_OUT * len(series):
        return Warmup("unsteady", 0, int(due[0]), metric, ratio)
    return Warmup("warmed", first_kept, int(due[first_kept]), metric, ratio)


def differs(head: Floats, rest: Floats, sigmas: float = SIGMAS) -> bool:
    """Whether the head lies so many standard errors from the rest, and beyond every stretch of its length in there."""
    tau = quantiles.autocorrelation_time(rest)
    error = np.sqrt(rest.var() * tau * (1 / len(head) + 1 / len(rest)))
    sums = np.concatenate([[0.0], np.cumsum(rest)])
    length = min(len(head), len(rest))
    stretches = (sums[length:] - sums[:-length]) / length
    mean = head.mean()
    extreme = mean > stretches.max() or mean < stretches.min()
    return bool(abs(mean - rest.mean()) > sigmas * error and extreme)
