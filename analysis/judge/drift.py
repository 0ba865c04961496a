"""The first seconds against the rest: what a short test would have told, and how fast the machine was meanwhile.

For TTFT and TPOT the ratio of the geometric means of what was due in the first ten seconds to that of what was due
later, its interval by Welch's t on logarithms with the later part's autocorrelation time; for tokens the ratio of mean
rates a second (successes' tokens as they arrived), by the delta method (Cochran 1977, section 6.3). The whole run
counts, warm-up included, since the warm-up is what may differ.

The canary is the fixed piece of CPU work that each generator process times once a second: its ratio says whether the
machine itself slowed down. Why it did is said only where telemetry recorded a reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from gapmeter.analysis.requests.metrics import issued, request_values_ns, stamps_ns, succeeded
from gapmeter.analysis.results.device import Telemetry
from gapmeter.analysis.results.run import Drift, Ratio
from gapmeter.analysis.stats import quantiles
from gapmeter.analysis.stats.quantiles import TAIL, Floats

FIRST_S = 10.0
FEWEST = 8  # values on either side


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


def ratio_of_means(first: Floats, rest: Floats) -> Ratio | None:
    """Of two series of logarithms: exp of the difference of their means with its interval; None where either is short.

    Welch's degrees of freedom, on what each part is worth.
    """
    if min(len(first), len(rest)) < FEWEST:
        return None
    time = quantiles.autocorrelation_time(rest)
    parts = [(part.var(ddof=1), max(len(part) / time, 2.0)) for part in (first, rest)]
    errors = [variance / worth for variance, worth in parts]
    difference, total = float(first.mean() - rest.mean()), sum(errors)
    if total <= 0:
        return _ratio(math.exp(difference), math.exp(difference), math.exp(difference))
    freedom = total**2 / sum(e**2 / (worth - 1) for e, (_, worth) in zip(errors, parts, strict=True))
    half = float(special.stdtrit(freedom, 1 - TAIL)) * math.sqrt(total)
    return _ratio(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def _ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(ratio=float(value), ratio_ci=(float(low), float(high)))


def _latency(sent: pd.DataFrame, metric: str, first: NDArray[np.bool_]) -> Ratio | None:
    values = request_values_ns(sent, metric)
    known = succeeded(sent) & ~np.isnan(values)
    logs = np.log(np.maximum(values, 1.0))
    return ratio_of_means(logs[known & first], logs[known & ~first])


def _tokens(sent: pd.DataFrame) -> Ratio | None:
    """Tokens that arrived in each second while requests were issued."""
    if "token_ns" not in sent or not len(sent):
        return None
    arrived = [np.asarray(stamps, np.int64) for stamps in sent["token_ns"][succeeded(sent)] if np.ndim(stamps)]
    due = stamps_ns(sent, "due_ns")
    seconds = int((due.max() - due.min()) // 1_000_000_000)
    if seconds < FIRST_S + FEWEST or not arrived:
        return None
    at = (np.concatenate(arrived) - due.min()) // 1_000_000_000
    rates = np.bincount(at[(at >= 0) & (at < seconds)], minlength=seconds).astype(np.float64)
    head, rest = rates[: int(FIRST_S)], rates[int(FIRST_S) :]
    if not rest.mean() or not head.mean():
        return None
    time = quantiles.autocorrelation_time(rest)
    relative = [part.var(ddof=1) * time / len(part) / part.mean() ** 2 for part in (head, rest)]
    half = float(special.stdtrit(max(FIRST_S / time - 1, 1.0), 1 - TAIL)) * math.sqrt(sum(relative))
    ratio = float(head.mean() / rest.mean())
    return _ratio(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def _machine(canaries: Sequence[NDArray[np.int64]]) -> Ratio | None:
    """Each process's durations against its own later ones, pooled."""
    split = int(FIRST_S)
    logs = [np.log(np.maximum(each, 1)) for each in canaries if len(each) >= split + FEWEST]
    if not logs:
        return None
    centred = [each - each[split:].mean() for each in logs]
    return ratio_of_means(np.concatenate([c[:split] for c in centred]), np.concatenate([c[split:] for c in centred]))
