"""The first seconds against the rest: what a short test would have told, and how fast the machine was meanwhile.

For TTFT and TPOT the ratio of the geometric means of what was due in the first ten seconds to that of what was due
later; for tokens the ratio of mean rates a second, of successes' tokens as they arrived (stats.series has both
intervals). The whole run counts, warm-up included, since the warm-up is what may differ.

The canary is the fixed piece of CPU work that each generator process times once a second: its ratio says whether the
machine itself slowed down. Why it did is said only where telemetry recorded a reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.requests.metrics import issued, request_values_ns, stamps_ns, succeeded
from gapmeter.analysis.results.device import Telemetry
from gapmeter.analysis.results.trust import Drift, Ratio
from gapmeter.analysis.stats.estimate import Estimate
from gapmeter.analysis.stats.series import FEWEST_OF_RATIO, ratio_of_geometric_means, ratio_of_means

FIRST_S = 10.0


def describe_drift(
    requests: pd.DataFrame, canaries: Sequence[NDArray[np.int64]] = (), reason: str | None = None
) -> Drift:
    """Each ratio of the first seconds to the rest, with its 95 % interval.

    ``requests``: all of the run; ``canaries``: of each generator process the durations, one a second; ``reason``: why
    the machine slowed down, where telemetry says so. A ratio that nothing supports is None.
    """
    sent = requests[issued(requests)].sort_values("due_ns", kind="stable")
    due = stamps_ns(sent, "due_ns")
    first = due < (due.min() if len(due) else 0) + int(FIRST_S * 1e9)
    return Drift(
        first_s=FIRST_S,
        ttft=_latency(sent, "ttft", first),
        tpot=_latency(sent, "tpot", first),
        output_tokens_per_s=_tokens(sent),
        machine_time=_machine(canaries),
        reason=reason,
    )


def throttled(telemetry: Telemetry | None) -> str | None:
    """What slowed the server's GPUs down, in telemetry's own words; None where nothing did, or nobody looked."""
    gpus = telemetry.gpus if telemetry else ()
    reasons = dict.fromkeys(words for gpu in gpus if gpu.server for words in gpu.throttled or ())
    return f"a GPU was throttled meanwhile: {', '.join(reasons)}" if reasons else None


def _latency(sent: pd.DataFrame, metric: str, first: NDArray[np.bool_]) -> Ratio | None:
    values = request_values_ns(sent, metric)
    known = succeeded(sent) & ~np.isnan(values)
    logs = np.log(np.maximum(values, 1.0))
    return _ratio(ratio_of_geometric_means(logs[known & first], logs[known & ~first]))


def _tokens(sent: pd.DataFrame) -> Ratio | None:
    """Tokens that arrived in each second while requests were issued."""
    if "token_ns" not in sent or not len(sent):
        return None
    arrived = [np.asarray(stamps, np.int64) for stamps in sent["token_ns"][succeeded(sent)] if np.ndim(stamps)]
    due = stamps_ns(sent, "due_ns")
    seconds = int((due.max() - due.min()) // 1_000_000_000)
    if seconds < FIRST_S + FEWEST_OF_RATIO or not arrived:
        return None
    at = (np.concatenate(arrived) - due.min()) // 1_000_000_000
    rates = np.bincount(at[(at >= 0) & (at < seconds)], minlength=seconds).astype(np.float64)
    return _ratio(ratio_of_means(rates[: int(FIRST_S)], rates[int(FIRST_S) :]))


def _machine(canaries: Sequence[NDArray[np.int64]]) -> Ratio | None:
    """Each process's durations against its own later ones, pooled."""
    split = int(FIRST_S)
    logs = [np.log(np.maximum(each, 1)) for each in canaries if len(each) >= split + FEWEST_OF_RATIO]
    if not logs:
        return None
    centred = [each - each[split:].mean() for each in logs]
    first, rest = (np.concatenate([each[part] for each in centred]) for part in (slice(split), slice(split, None)))
    return _ratio(ratio_of_geometric_means(first, rest))


def _ratio(found: Estimate | None) -> Ratio | None:
    return None if found is None else Ratio(ratio=found.known[0], ratio_ci=found.ends)
