"""Where does the steady part of a run begin? MSER-5, with a guard against leaving out mere bad luck.

Latencies are skewed, so MSER-5 (stats.changes) is run on their logarithms. A cut is kept only when the part left out
differs from the rest by more than chance. On stationary M/M/1 queues of 1,000 requests this objects wrongly in 1.5 %
(load 0.3), 6 % (load 0.85) and 9 % (load 0.9) of 1,000 runs (bench/false_alarms.py, docs/results), where MSER alone
does in more than a quarter; the price is that a slow start inside heavy queueing may stay in, which makes figures
worse, never better. A cut that would leave out more than a fifth of the requests is no start any more but a change in
the middle: nothing is left out then, and the run is called unsteady.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import issued, request_values_ns, succeeded
from gapmeter.analysis.stats.changes import differs, mser5

MOST_LEFT_OUT = 0.2


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
