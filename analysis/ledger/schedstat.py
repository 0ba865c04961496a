"""Waits for a core from sums: how long each thread ran and waited from sample to sample, where nothing better is known.

The kernel's records of switches say where a wait lies and for whom; these sums (gapmeter.servers.telemetry.schedstat)
say only how much. Of a thread that was at work for L of the time between two samples and ran for R, at most L - R of
what it waited lay in that work; it is spread evenly over it. The rest came before it was woken, and stays in transit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapmeter.analysis.arrays import Ints, each_of
from gapmeter.analysis.ledger.critical_path import Times, covered, overlaps
from gapmeter.analysis.ledger.switches import read_rows

_EVERY_NS = 200_000  # how finely a wait is spread
_LEAST_SHARE = 0.01  # of the work; less is noise of the counters


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one thread: samples in order of time, and what it had run and waited for a core by then, ns."""

    pid: int
    at: Ints
    ran: Ints
    waited: Ints


def read_sums(folder: Path) -> dict[int, Sums]:
    """By thread, from a run's telemetry; empty where none were taken."""
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    for row in read_rows(folder / "schedstat.jsonl"):
        sample = (int(row["pid"]), int(row["at_ns"]), int(row["ran_ns"]), int(row["waited_ns"]))
        rows.setdefault(int(row["tid"]), []).append(sample)
    return {tid: Sums(own[0][0], *np.array(own, np.int64)[:, 1:].T) for tid, own in rows.items()}


def busiest(sums: dict[int, Sums], pid: int) -> int:
    """The thread of a process that ran the longest; the process's first one where none was seen."""
    ran = {tid: int(own.ran[-1] - own.ran[0]) for tid, own in sums.items() if own.pid == pid}
    return max(ran, key=lambda tid: ran[tid], default=pid)


def spread_waits(sums: Sequence[Sums], work: Times) -> Times:
    """The waits of threads (one, or several that take turns) within their ``work``: many short stretches, evenly."""
    start, end = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for own in sums:
        low, high = own.at[:-1], own.at[1:]
        busy = covered(low, high, *work)
        share = np.clip(busy - np.diff(own.ran), 0, np.diff(own.waited)) / np.maximum(busy, 1)
        window, _, begins, ends = overlaps(low, high, *work)
        kept = share[window] >= _LEAST_SHARE
        begins, ends, part = begins[kept], ends[kept], share[window[kept]]
        whose, nth = each_of(-(-(ends - begins) // _EVERY_NS))
        tooth = begins[whose] + nth * _EVERY_NS
        start.append(tooth)
        end.append(tooth + (np.minimum(_EVERY_NS, ends[whose] - tooth) * part[whose]).astype(np.int64))
    begun, ended = np.concatenate(start), np.concatenate(end)
    order = np.argsort(begun, kind="stable")
    return begun[order], ended[order]
