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

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.validity import percentile_of
from gapmeter.analysis.requests.figures import plain_percentile
from gapmeter.analysis.requests.metrics import request_values_ns, succeeded
from gapmeter.analysis.results.requests import ClosedLoop, Corrected, Omission
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.series import Series


def corrected(values_ns: Floats, interval_ns: float) -> Floats:
    """The values, and for each v the omitted v − T, v − 2T, … that are at least T; ascending."""
    more = np.maximum(np.floor(values_ns / interval_ns).astype(np.int64) - 1, 0)
    index = np.repeat(np.arange(len(values_ns)), more)
    step = np.arange(len(index)) - np.repeat(np.cumsum(more) - more, more) + 1
    return np.sort(np.concatenate([values_ns, values_ns[index] - step * interval_ns]))


def describe_closed_loop(measured: pd.DataFrame, evidence: Evidence) -> ClosedLoop | None:
    """Corrected estimates of a closed loop's TTFT and E2E; None for an open loop.

    ``corrected`` is None where the correction does not apply: nobody's pace is known, or no answer took so long that
    anything was omitted. A percentile is there where the sample itself supports it.
    """
    if evidence.loop != "closed":
        return None
    pace_ns = _pace_ns(measured, evidence)
    if pace_ns is None:
        return ClosedLoop(corrected=None)
    ttft, e2e = (_estimate(measured, metric, pace_ns) for metric in ("ttft", "e2e"))
    if not (ttft.added or e2e.added):
        return ClosedLoop(corrected=None)
    return ClosedLoop(corrected=Omission(expected_interval_ms=pace_ns / 1e6, ttft=ttft, e2e=e2e))


def _pace_ns(measured: pd.DataFrame, evidence: Evidence) -> float | None:
    usual = percentile_of(request_values_ns(measured, "e2e")[succeeded(measured)], 50)
    return None if usual is None or evidence.concurrency is None else usual + evidence.think_time_ns


def _estimate(measured: pd.DataFrame, metric: str, pace_ns: float) -> Corrected:
    values = request_values_ns(measured, metric)[succeeded(measured)]
    values = values[~np.isnan(values)]
    whole, sample = corrected(values, pace_ns), Series(values)

    def ms(percentile: float) -> float | None:
        supported = sample.percentile(percentile).supported
        return plain_percentile(percentile_of(whole, percentile)) if supported else None

    return Corrected(
        added=len(whole) - len(values), p50_ms=ms(50.0), p90_ms=ms(90.0), p95_ms=ms(95.0), p99_ms=ms(99.0),
        p999_ms=ms(99.9),
    )  # fmt: skip
