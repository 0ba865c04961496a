"""Did the server fail from a moment on, or for a time? A finding that is no matter of how many requests failed.

Failures in a row are worth few independent ones, so a share of failures says little of a server that died: half of a
run failed, and the interval reaches from 4 % to 96 %. What settles it is the row itself. Were the run's failures
spread over it at random, a row of m somewhere would have a chance of at most (n - m + 1) · h!/(h - m)! · (n - m)!/n!
for h failures of n requests (a union bound over the places where it may begin). Below ``CHANCE`` it is no accident.

A row that lasts to the end of the run is a server that failed from then on; one before the end counts only where
connections were refused in it, which is a server that was not there. Others may be bursts of a server under load.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import ended_by_us, failures_of, outcomes_of, stamps_ns
from gapmeter.analysis.results.requests import Outage

CHANCE = 1e-3  # of calling random failures a row, at most
_FEWEST = 3


def outage_of(row: Outage | None) -> Outage | None:
    """A row of failures, as from ``find_row``; None where it may have been a passing overload."""
    return row if row is not None and (row.until_s is None or "refused" in row.failed) else None


def find_row(requests: pd.DataFrame, zero_ns: int) -> Outage | None:
    """The longest row of failures, by due time, from ``zero_ns``; of several, one that is an outage.

    ``requests`` as from ``measured_requests``; those that we ended before a token came say nothing. None where there is
    none that is beyond chance, or where nothing ever succeeded: then there was no moment.
    """
    requests = requests[~ended_by_us(requests) | (stamps_ns(requests, "first_token_ns") >= 0)]
    failed = failures_of(requests)  # what it was answering, it served
    edges = np.flatnonzero(np.diff(np.concatenate([[0], failed.astype(np.int8), [0]])))
    if not len(edges) or failed.all():
        return None
    due, failures = stamps_ns(requests, "due_ns"), int(failed.sum())

    def row(start: int, end: int) -> Outage:
        return Outage(
            from_s=float(due[start] - zero_ns) / 1e9,
            until_s=None if end == len(failed) else float(due[end] - zero_ns) / 1e9,
            requests=end - start,
            failed=outcomes_of(requests.iloc[start:end]),
        )

    rows = [
        row(start, end)
        for start, end in edges.reshape(-1, 2).tolist()
        if end - start >= _FEWEST and _chance_of_row(end - start, failures, len(failed)) <= CHANCE
    ]
    return max(rows, key=lambda each: (outage_of(each) is not None, each.requests), default=None)


def _chance_of_row(length: int, failures: int, count: int) -> float:
    """An upper bound of the chance that so many failures in a row stand anywhere, if they are spread at random."""
    log = math.lgamma(failures + 1) - math.lgamma(failures - length + 1)
    log += math.lgamma(count - length + 1) - math.lgamma(count + 1)
    return min(1.0, (count - length + 1) * math.exp(log))
