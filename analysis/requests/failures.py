"""Requests that failed are data: how many of each class, the first of them to look at, and latency with them in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.figures import plain_percentile
from gapmeter.analysis.requests.metrics import stamps_ns, succeeded
from gapmeter.analysis.results.distribution import CensoredDistribution, Distribution, percentile_key
from gapmeter.analysis.results.requests import FailureClass, FailureExample

EXAMPLES = 3


def describe_failures(measured: pd.DataFrame) -> tuple[FailureClass, ...]:
    """Every class of failure, the most frequent first, each with its first examples by due time.

    ``measured`` as from ``measured_requests``. ``at_s`` counts from the first measured due time; ``status`` is 0 where
    no HTTP answer came; ``tokens`` had arrived before it failed.
    """
    failed = measured[~succeeded(measured)]
    origin_ns = int(measured["due_ns"].min()) if len(measured) else 0
    counts = failed["outcome"].value_counts()
    return tuple(
        FailureClass(
            name=str(name),
            count=int(count),
            share=int(count) / len(measured),
            examples=tuple(
                _example(row, origin_ns) for _, row in failed[failed["outcome"] == name].head(EXAMPLES).iterrows()
            ),
        )
        for name, count in counts.items()
    )


def bound_ns(measured: pd.DataFrame) -> float | None:
    """What every failed request took at least: the time that it was, or would have been, given. None without one."""
    bounds = stamps_ns(measured[~succeeded(measured)], "censored_ns")
    return float(bounds.min()) if len(bounds) else None


def censored(found: Distribution, bound: float | None) -> CensoredDistribution:
    """A sample in which failures are infinite, said as what is known of them: longer than ``bound`` ns.

    A percentile that falls among them stays None, and ``over_ms`` names it with the bound: the percentile of any values
    that the failures may have had is at least that. ``bound`` None: nothing failed, nothing is censored.
    """
    at_ms = plain_percentile(bound)
    among = [percentile_key(percentile) for percentile, each in found.percentiles.items() if each.infinite]
    over = {} if at_ms is None else dict.fromkeys(among, at_ms)
    own = {name: getattr(found, name) for name in Distribution.model_fields}
    return CensoredDistribution(**own, censored_at_ms=at_ms, over_ms=over)


def _example(row: pd.Series[Any], origin_ns: int) -> FailureExample:
    arrived = row["token_ns"]
    return FailureExample(
        request_id=str(row["request_id"]),
        at_s=(int(row["due_ns"]) - origin_ns) / 1e9,
        waited_ms=(int(row["end_ns"]) - int(row["due_ns"])) / 1e6 if pd.notna(row["end_ns"]) else None,
        status=int(row["status"]),
        tokens=int(np.size(arrived)) if arrived is not None else 0,
        error=str(row["error"]),
    )
