"""From classes to stages: each stretch that a class owns, cut by what its thread was kept from, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.ledger.cores import LOCK, WORK, CoreUse, Culprit, Reason
from gapmeter.analysis.ledger.critical_path import FAR, Intervals, overlaps
from gapmeter.analysis.ledger.intervals import CLASSES, DEVICE_CLASSES, Causes, Class
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.stages import STAGES

_STAGE = {stage.name: number for number, stage in enumerate(STAGES)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Whose every nanosecond is.

    ``rows``: by event and time, none overlapping; ``cls`` is twice the stage's number, and one more in transit.
    ``transit`` and ``unstamped``: ns an event. ``held``: who had the core while the events waited for it, in ns over
    all of them, the most first.
    """

    rows: Intervals
    transit: Ints
    unstamped: Ints
    held: Mapping[Culprit, int]

    def sums(self, events: int) -> Ints:
        """Shape (events, stages), ns."""
        key = self.rows.event * len(STAGES) + self.rows.cls // 2
        sums = np.bincount(key, self.rows.end - self.rows.start, events * len(STAGES))
        return sums.astype(np.int64).reshape(events, len(STAGES))


def share_out(trace: Trace | None, causes: Causes, owned: Intervals) -> Shares:
    """``owned``: rows of a class of ``CLASSES`` each, none overlapping."""
    use = trace.cores if trace is not None and trace.cores is not None else CoreUse((), {}, "spans")
    exempt = DEVICE_CLASSES if trace is not None and trace.on_device else frozenset()
    known = np.array([cls.stage in _STAGE for cls in CLASSES])[owned.cls]  # what is not is nobody's: unexplained
    owned = Intervals(owned.event[known], owned.start[known], owned.end[known], owned.cls[known])
    part, reason = _reasons(use, causes, owned, exempt)
    # Of each class and reason (the last: none), whose time it is.
    table = np.array([[_code(cls, why) for why in (*use.reasons, None)] for cls in CLASSES])
    code = table[part.cls, reason]
    length, events = part.end - part.start, len(causes.api)
    enclosing = np.array([cls.enclosing for cls in CLASSES])[part.cls] & (reason == -1)
    waited = np.bincount(reason[reason >= 0], length[reason >= 0], len(use.reasons)).astype(np.int64)
    held: dict[Culprit, int] = {}
    for why, ns in zip(use.reasons, waited.tolist(), strict=True):
        if why.culprit is not None and ns:
            held[why.culprit] = held.get(why.culprit, 0) + ns
    return Shares(
        rows=Intervals(part.event, part.start, part.end, code),
        transit=np.bincount(part.event, length * (code % 2), events).astype(np.int64),
        unstamped=np.bincount(part.event, length * enclosing, events).astype(np.int64),
        held=dict(sorted(held.items(), key=lambda each: -each[1])),
    )


def _code(cls: Class, why: Reason | None) -> int:
    if why is None or (why.what == WORK and not cls.busy):
        return 2 * _STAGE.get(cls.stage, 0) + cls.transit
    return 2 * _STAGE[cls.busy if why.what == WORK else "lock_wait" if why.what == LOCK else "core_wait"]


def _reasons(use: CoreUse, causes: Causes, owned: Intervals, exempt: frozenset[str]) -> tuple[Intervals, Ints]:
    """The rows, cut where a reason begins or ends, and each one's reason (-1: none); in order as before."""
    process = {"engine": causes.engine, "api": causes.api}
    threads = np.array([cls.thread if cls.name not in exempt else "" for cls in CLASSES])
    left = np.ones(len(owned.event), np.bool_)
    row, start, end, why = [], [], [], []
    for (kind, pid), stretches in use.of.items():
        whose = process["api" if kind.startswith(("loop", "pool")) else "engine"]
        at = np.flatnonzero((threads == kind)[owned.cls])
        at = at[whose[owned.event[at]] == pid]
        left[at] = False
        turns = np.stack([stretches.start, stretches.end], axis=1).ravel()  # of stretches and what lies between them
        of, one, low, high = overlaps(owned.start[at], owned.end[at], np.append(-FAR, turns), np.append(turns, FAR))
        kept = high > low
        row.append(at[of[kept]])
        start.append(low[kept])
        end.append(high[kept])
        inside = one[kept] % 2 == 1
        why.append(np.where(inside, np.append(stretches.reason, -1)[one[kept] // 2], -1))
    rest = np.flatnonzero(left)
    rows, begun = np.concatenate([rest, *row]), np.concatenate([owned.start[rest], *start])
    ended, reason = np.concatenate([owned.end[rest], *end]), np.concatenate([np.full(len(rest), -1), *why])
    order = np.argsort(rows, kind="stable")  # each row's are in order
    rows = rows[order]
    return Intervals(owned.event[rows], begun[order], ended[order], owned.cls[rows]), reason[order]
