"""What a closed loop leaves out: the requests that its users would have sent while they waited for an answer.

A user who asks every T and once waits v > T for an answer has omitted the requests due T, 2T, … into that wait, which
would have waited v − T, v − 2T, …. HdrHistogram's correction for coordinated omission adds these, as long as they are
at least T (Tene, HdrHistogram's ``recordValueWithExpectedInterval`` and ``copyCorrectedForCoordinatedOmission``).

Here T is the users' own pace: median E2E plus mean think time. The assumption is that users go on asking at that pace
whatever happens, and that the server, once it has recovered, answers what piled up as fast as usual. So it holds for
short stalls of a server that is not saturated; it says nothing of a rate that the server could not sustain, where an
open population would wait longer and longer. Where no answer took twice T there is nothing to correct.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.validity import percentile_of
from gapmeter.analysis.numbers import count, duration
from gapmeter.analysis.requests.figures import percentile_key, plain_percentile
from gapmeter.analysis.requests.metrics import request_values_ns, succeeded
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series

LABEL = (
    "closed loop: each user waited for an answer before asking again, so these latencies are not what an open "
    "population would feel at this rate"
)
_METRICS = ("ttft", "e2e")


def corrected(values_ns: Floats, interval_ns: float) -> Floats:
    """The values, and for each v the omitted v − T, v − 2T, … that are at least T; ascending."""
    more = np.maximum(np.floor(values_ns / interval_ns).astype(np.int64) - 1, 0)
    index = np.repeat(np.arange(len(values_ns)), more)
    step = np.arange(len(index)) - np.repeat(np.cumsum(more) - more, more) + 1
    return np.sort(np.concatenate([values_ns, values_ns[index] - step * interval_ns]))


def describe_closed_loop(measured: pd.DataFrame, evidence: Evidence) -> dict[str, Any] | None:
    """What a closed loop's figures are, and corrected estimates of TTFT and E2E; None for an open loop.

    ``corrected`` is null where the correction does not apply: nobody's pace is known, or no answer took so long that
    anything was omitted. A percentile is there where the sample itself supports it.
    """
    if evidence.loop != "closed":
        return None
    pace_ns = _pace_ns(measured, evidence)
    found = {} if pace_ns is None else {m: _estimate(measured, m, pace_ns) for m in _METRICS}
    if pace_ns is None or not any(found[m]["added"] for m in _METRICS):
        return {"sentence": LABEL, "corrected": None}
    corrections = {"expected_interval_ms": pace_ns / 1e6, **found}
    return {"sentence": f"{LABEL}; {_told(corrections)}", "corrected": corrections}


def _pace_ns(measured: pd.DataFrame, evidence: Evidence) -> float | None:
    usual = percentile_of(request_values_ns(measured, "e2e")[succeeded(measured)], 50)
    return None if usual is None or evidence.concurrency is None else usual + evidence.think_time_ns


def _estimate(measured: pd.DataFrame, metric: str, pace_ns: float) -> dict[str, Any]:
    values = request_values_ns(measured, metric)[succeeded(measured)]
    values = values[~np.isnan(values)]
    whole, series = corrected(values, pace_ns), Series(values)
    out: dict[str, Any] = {"added": len(whole) - len(values)}
    for percentile in PERCENTILES:
        supported = series.percentile(percentile).supported
        out[f"{percentile_key(percentile)}_ms"] = (
            plain_percentile(percentile_of(whole, percentile)) if supported else None
        )
    return out


def _told(corrections: dict[str, Any]) -> str:
    told = []
    for metric in _METRICS:
        known = [key for key in ("p50_ms", "p99_ms", "p95_ms", "p90_ms") if corrections[metric][key] is not None]
        shown = [f"{key.removesuffix('_ms')} {duration(corrections[metric][key])}" for key in known[:2]]
        if shown and corrections[metric]["added"]:
            told.append(f"{metric.upper()} {', '.join(shown)}")
    added = max(corrections[metric]["added"] for metric in _METRICS)
    pace = duration(corrections["expected_interval_ms"])
    figures = f": {'; '.join(told)}" if told else ""
    return (
        f"corrected for {count(added)} requests that users at their pace of {pace} would have sent meanwhile{figures}"
    )
