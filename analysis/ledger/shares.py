"""From classes to stages: each stretch that a class owns, less what its thread was kept from, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, distinct
from gapmeter.analysis.ledger.classes import CLASSES, DEVICE_CLASSES, FORWARD_CLASSES, HOST_CLASSES, Class
from gapmeter.analysis.ledger.cores import CORE, LOCK, WORK, CoreUse, Culprit, Reason, Stretches
from gapmeter.analysis.ledger.critical_path import FAR, Intervals, overlaps, pieces, sweep
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.stages import STAGES

_STAGE = {stage.name: number for number, stage in enumerate(STAGES)}
_KNOWN = np.array([cls.stage in _STAGE for cls in CLASSES])  # what is not is nobody's: unexplained
_BUSY = np.array([bool(cls.busy) for cls in CLASSES])
_TRANSIT, _ENCLOSING = (np.array([getattr(cls, name) for cls in CLASSES]) for name in ("transit", "enclosing"))
SHARES = len(STAGES) + 3  # columns of Shares.ns


class _Moments(NamedTuple):
    """Of each of some intervals a moment, ns, and the stretch that had last begun by then (before any the first)."""

    at: Ints
    stretch: Ints

    def rows(self, which: Ints) -> _Moments:
        """Some of them."""
        return _Moments(self.at[which], self.stretch[which])


class Processes(NamedTuple):
    """Of each event, the ids of the API server and of the engine that served it; ``MISSING`` where unknown."""

    api: Ints
    engine: Ints


@dataclass(frozen=True, slots=True)
class Shares:
    """Whose the events' time is: ``ns``, a row an event, a column a stage and three more.

    ``held``: who had the core while the events that are counted waited for it, over all of them, ns.
    """

    ns: Ints
    held: Mapping[Culprit, int]

    @property
    def by_stage(self) -> Ints:
        return self.ns[:, : len(STAGES)]

    @property
    def transit(self) -> Ints:
        """Of all stages, what lay between two stamps with nothing stamped between."""
        return self.ns[:, -3]

    @property
    def unstamped(self) -> Ints:
        """Of all stages, what lay in a stamped call that no stamp within it tells."""
        return self.ns[:, -2]

    @property
    def hidden(self) -> Ints:
        """The host's work beneath a forward, which that one owns."""
        return self.ns[:, -1]

    def __add__(self, other: Shares) -> Shares:
        """Of the same events, both."""
        return Shares(self.ns + other.ns, Counter(self.held) + Counter(other.held))


class Sharer:
    """Gives what classes own to stages, by what a trace knows of the server's threads."""

    def __init__(self, trace: Trace | None) -> None:
        self._use = trace.cores if trace is not None and trace.cores is not None else CoreUse((), {}, "spans")
        exempt = DEVICE_CLASSES if trace is not None and trace.on_device else frozenset()
        self._threads = np.array([cls.thread if cls.name not in exempt else "" for cls in CLASSES])
        # Of each class and reason (the last: none), whose time it is: twice the stage's number, one more in transit.
        self._code = np.array([[_code(cls, why) for why in (*self._use.reasons, None)] for cls in CLASSES])

    def shares(self, intervals: Intervals, processes: Processes, counted: Bools | Ints) -> Shares:
        """``intervals``: rows of a class of ``CLASSES`` each. ``counted``: how often each event is in ``held``."""
        events = len(counted)
        owned, hidden = sweep(intervals, events, len(CLASSES), over=FORWARD_CLASSES, under=HOST_CLASSES)
        owned = _known(owned)
        own, busy = self._code[:, -1] // 2, np.array([_code(cls, Reason(WORK)) // 2 for cls in CLASSES])
        left = owned.end - owned.start  # of each row, what nothing kept its thread from
        keys, lengths = list[Ints](), list[Ints]()
        by_reason = np.zeros(len(self._use.reasons), np.int64)
        since, until = owned.start.min(initial=FAR), owned.end.max(initial=-FAR)
        for key, mine in self._by_thread(processes, owned):
            kept = _Kept(self._use.of[key].within(since, until), self._use.reasons)
            met, begin, end = kept.met(owned.start[mine], owned.end[mine])
            if not len(met):
                continue
            rows = mine[met]
            often = counted[owned.event[rows]]
            of_it = np.flatnonzero(often)
            if len(of_it):
                by_reason += kept.by_reason(begin.rows(of_it), end.rows(of_it), often[of_it])
            cls, first = owned.cls[rows], owned.event[rows] * len(STAGES)
            waited = ((CORE, first + _STAGE["core_wait"]), (LOCK, first + _STAGE["lock_wait"]))
            for what, stage in (*waited, (WORK, first + busy[cls])):
                if (ns := kept.between(what, begin, end)) is None:
                    continue
                ns = ns * _BUSY[cls] if what == WORK else ns
                left[rows] -= ns
                keys.append(stage)
                lengths.append(ns)
        keys.append(owned.event * len(STAGES) + own[owned.cls])
        lengths.append(left)
        sums = np.bincount(np.concatenate(keys), np.concatenate(lengths), events * len(STAGES)).astype(np.int64)
        transit, unstamped = (
            np.bincount(owned.event[those], left[those], events).astype(np.int64)
            for those in (np.flatnonzero(kind[owned.cls]) for kind in (_TRANSIT, _ENCLOSING))
        )
        held: dict[Culprit, int] = {}
        for why, total in zip(self._use.reasons, by_reason.tolist(), strict=True):
            if why.culprit is not None and total:
                held[why.culprit] = held.get(why.culprit, 0) + total
        by_stage = sums.reshape(events, len(STAGES))
        return Shares(np.column_stack([by_stage, transit, unstamped, hidden]), held)

    def cut(self, intervals: Intervals, processes: Processes) -> Intervals:
        """The same row by row, cut where a reason begins or ends; ``cls``: twice the stage, and one more in transit."""
        owned = _known(pieces(intervals, len(processes.engine), len(CLASSES)))
        alone = np.ones(len(owned.event), np.bool_)
        parts = list[Intervals]()  # of rows in place of events, by reasons in place of classes, -1 where none
        for key, at in self._by_thread(processes, owned):
            stretches = self._use.of[key]
            alone[at] = False
            near = distinct(overlaps(owned.start[at], owned.end[at], stretches.start, stretches.end)[1])
            turns = np.stack([stretches.start[near], stretches.end[near]], axis=1).ravel()  # also what lies between
            of, one, low, high = overlaps(owned.start[at], owned.end[at], np.append(-FAR, turns), np.append(turns, FAR))
            why = np.where(one % 2 == 1, np.append(stretches.reason[near], -1)[one // 2], -1)
            parts.append(Intervals(at[of], low, high, why).rows(high > low))
        rest = np.flatnonzero(alone)
        parts.append(Intervals(rest, owned.start[rest], owned.end[rest], np.full(len(rest), -1)))
        whole = Intervals.join(parts)
        whole = whole.rows(np.argsort(whole.event, kind="stable"))  # each row's are in order
        code = self._code[owned.cls[whole.event], whole.cls]
        return Intervals(owned.event[whole.event], whole.start, whole.end, code)

    def _by_thread(self, processes: Processes, owned: Intervals) -> Iterator[tuple[tuple[str, int], Ints]]:
        """Whose stretches may have kept which rows' threads."""
        kinds, number = np.unique(self._threads, return_inverse=True)
        thread = number.astype(np.int8)[owned.cls]  # which numpy sorts by radix
        order = np.argsort(thread, kind="stable")
        ends = np.searchsorted(thread[order], np.arange(len(kinds) + 1))
        for kind, pid in self._use.of:
            if kind not in kinds:
                continue
            whose = processes.api if kind.startswith(("loop", "pool")) else processes.engine
            at = int(np.searchsorted(kinds, kind))
            rows = order[ends[at] : ends[at + 1]]
            yield (kind, pid), rows[whose[owned.event[rows]] == pid]


class _Kept:
    """How long each reason had kept a thread until any moment: how long between two is a difference."""

    def __init__(self, stretches: Stretches, reasons: tuple[Reason, ...]) -> None:
        self._start, self._end, self._reason = stretches.start, stretches.end, stretches.reason
        self._reasons = len(reasons)
        self._of = {what: np.array([why.what == what for why in reasons], np.bool_) for what in (CORE, LOCK, WORK)}
        length, there = self._end - self._start, np.bincount(self._reason, minlength=len(reasons)) > 0
        kinds = [what for what, of in self._of.items() if of[there].any()]
        # How long those up to each stretch were, with it.
        self._so_far = {what: np.cumsum(length * self._of[what][self._reason]) for what in kinds}

    def met(self, start: Ints, end: Ints) -> tuple[Ints, _Moments, _Moments]:
        """Of intervals those that a stretch meets, and their starts and ends."""
        if not len(self._start):
            return (none := np.empty(0, np.int64)), _Moments(none, none), _Moments(none, none)
        first, last = (np.maximum(np.searchsorted(self._start, at, side="right") - 1, 0) for at in (start, end))
        met = np.flatnonzero((first < last) | ((self._end[first] > start) & (self._start[first] < end)))
        return met, _Moments(start, first).rows(met), _Moments(end, last).rows(met)

    def between(self, what: str, begin: _Moments, end: _Moments) -> Ints | None:
        """For how many ns a kind of reason kept it; None: never did."""
        if what not in self._so_far:
            return None
        so_far, of = self._so_far[what], self._of[what]

        def until(when: _Moments) -> Ints:
            return np.asarray(so_far[when.stretch] - of[self._reason[when.stretch]] * self._left(when), np.int64)

        return until(end) - until(begin)

    def by_reason(self, begin: _Moments, end: _Moments, often: Bools | Ints) -> Ints:
        """Over all intervals, each counted so often, for how many ns each reason kept it."""
        low, high = int(begin.stretch.min()), int(end.stretch.max()) + 1
        begun, ended = (np.bincount(when.stretch - low, often, high - low) for when in (begin, end))
        whole = np.cumsum(begun - ended) * (self._end[low:high] - self._start[low:high])
        ns = np.bincount(self._reason[low:high], whole, self._reasons)
        for when, sign in ((end, 1), (begin, -1)):
            ns += sign * np.bincount(self._reason[when.stretch], self._passed(when) * often, self._reasons)
        return ns.astype(np.int64)

    def _passed(self, when: _Moments) -> Ints:
        """How much of the last stretch."""
        start, end = self._start[when.stretch], self._end[when.stretch]
        return np.asarray(np.maximum(np.minimum(when.at, end) - start, 0), np.int64)

    def _left(self, when: _Moments) -> Ints:
        """How much of it is to come."""
        start, end = self._start[when.stretch], self._end[when.stretch]
        return np.asarray(np.maximum(end - np.maximum(when.at, start), 0), np.int64)


def _known(owned: Intervals) -> Intervals:
    known = _KNOWN[owned.cls]
    return owned if known.all() else owned.rows(known)


def _code(cls: Class, why: Reason | None) -> int:
    if why is None or (why.what == WORK and not cls.busy):
        return 2 * _STAGE.get(cls.stage, 0) + cls.transit
    return 2 * _STAGE[cls.busy if why.what == WORK else "lock_wait" if why.what == LOCK else "core_wait"]
