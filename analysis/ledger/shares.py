"""From classes to stages: each stretch that a class owns, less what its thread was kept from, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Ints, distinct
from gapmeter.analysis.ledger.classes import CLASSES, DEVICE_CLASSES, FORWARD_CLASSES, HOST_CLASSES, Class
from gapmeter.analysis.ledger.cores import CORE, LOCK, NOTHING_KNOWN, WORK, Culprit, Reason, Stretches
from gapmeter.analysis.ledger.critical_path import FAR, Intervals, native, overlaps, pieces, sweep
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.stages import STAGES

_STAGE = {stage.name: number for number, stage in enumerate(STAGES)}
_KINDS = (CORE, LOCK, WORK)
_KNOWN = np.array([cls.stage in _STAGE for cls in CLASSES])  # what is not is nobody's: unexplained
_BUSY = np.array([bool(cls.busy) for cls in CLASSES])
_TRANSIT, _ENCLOSING = (np.array([getattr(cls, name) for cls in CLASSES]) for name in ("transit", "enclosing"))
SHARES = len(STAGES) + 3  # columns of Shares.ns


class Processes(NamedTuple):
    """Of each event, the ids of the API server and of the engine that served it; ``MISSING`` where unknown."""

    api: Ints
    engine: Ints


@dataclass(frozen=True, slots=True)
class Shares:
    """Whose the events' time is: ``ns``, a row an event, a column a stage and three more.

    ``core_holders``: who had the core while the events that are counted waited for it, over all of them, ns.
    """

    ns: Ints
    core_holders: Mapping[Culprit, int]

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
        return Shares(self.ns + other.ns, Counter(self.core_holders) + Counter(other.core_holders))


class Sharer:
    """Gives what classes own to stages, by what a trace knows of the server's threads."""

    def __init__(self, trace: Trace | None) -> None:
        self._use = trace.cores if trace is not None else NOTHING_KNOWN
        exempt = DEVICE_CLASSES if trace is not None and trace.on_device else frozenset()
        self._kinds = np.array([_KINDS.index(why.what) for why in self._use.reasons], np.uint8)
        self._threads = np.array([cls.thread if cls.name not in exempt else "" for cls in CLASSES])
        # Of each class and reason (the last: none), whose time it is: twice the stage's number, one more in transit.
        self._code = np.array([[_code(cls, why) for why in (*self._use.reasons, None)] for cls in CLASSES])

    def shares(self, intervals: Intervals, processes: Processes, counted: Bools | Ints) -> Shares:
        """``intervals``: rows of a class of ``CLASSES`` each. ``counted``: how often each event is in the holders."""
        events, counted = len(counted), counted.astype(np.int64)
        owned, hidden = sweep(intervals, events, len(CLASSES), over=FORWARD_CLASSES, under=HOST_CLASSES)
        owned = _known(owned)
        own, busy = self._code[:, -1] // 2, np.array([_code(cls, Reason(WORK)) // 2 for cls in CLASSES])
        left = owned.end - owned.start  # of each row, what nothing kept its thread from
        keys, lengths = list[Ints](), list[Ints]()
        by_reason = np.zeros(len(self._use.reasons), np.int64)
        for key, mine in self._by_thread(processes, owned):
            stretches = self._use.of[key].near(owned.start[mine], owned.end[mine])
            kept, reasons = _kept(stretches, self._kinds, owned, mine, counted)
            by_reason += reasons
            for what, ns in zip(_KINDS, kept, strict=True):
                some = np.flatnonzero(ns)
                if what == WORK:
                    some = some[_BUSY[owned.cls[mine[some]]]]
                rows = mine[some]
                left[rows] -= ns[some]
                keys.append(owned.event[rows] * len(STAGES) + (busy[owned.cls[rows]] if what == WORK else _STAGE[what]))
                lengths.append(ns[some])
        keys.append(owned.event * len(STAGES) + own[owned.cls])
        lengths.append(left)
        sums = np.bincount(np.concatenate(keys), np.concatenate(lengths), events * len(STAGES)).astype(np.int64)
        transit, unstamped = (
            np.bincount(owned.event[those], left[those], events).astype(np.int64)
            for those in (np.flatnonzero(kind[owned.cls]) for kind in (_TRANSIT, _ENCLOSING))
        )
        core_holders: dict[Culprit, int] = {}
        for why, total in zip(self._use.reasons, by_reason.tolist(), strict=True):
            if why.culprit is not None and total:
                core_holders[why.culprit] = core_holders.get(why.culprit, 0) + total
        by_stage = sums.reshape(events, len(STAGES))
        return Shares(np.column_stack([by_stage, transit, unstamped, hidden]), core_holders)

    def cut(self, intervals: Intervals, processes: Processes) -> Intervals:
        """The same row by row, cut where a reason begins or ends; ``cls``: twice the stage, and one more in transit."""
        owned = _known(pieces(intervals, len(processes.engine), len(CLASSES)))
        alone = np.ones(len(owned.event), np.bool_)
        parts = list[Intervals]()  # of rows in place of events, by reasons in place of classes, -1 where none
        for key, at in self._by_thread(processes, owned):
            stretches = self._use.of[key].near(owned.start[at], owned.end[at])
            alone[at] = False
            near = distinct(overlaps(owned.start[at], owned.end[at], stretches.start, stretches.end)[1])
            turns = np.stack([stretches.start[near], stretches.end[near]], axis=1).ravel()  # also what lies between
            of, one, low, high = overlaps(owned.start[at], owned.end[at], np.append(-FAR, turns), np.append(turns, FAR))
            why = np.where(one % 2 == 1, np.append(stretches.reason[near], -1)[one // 2], -1)
            parts.append(Intervals(at[of], low, high, why))
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
            rows, here = order[ends[at] : ends[at + 1]], whose == pid
            yield (kind, pid), rows if here.all() else rows[here[owned.event[rows]]]


def _kept(
    stretches: Stretches, kinds: NDArray[np.uint8], owned: Intervals, rows: Ints, counted: Ints
) -> tuple[Ints, Ints]:
    """What kept a thread within some rows: a row each of ``_KINDS``, a column each of theirs; and each reason over all.

    ns; ``kinds``: of each reason; ``counted``: how often each event is in the latter.
    """
    ns, by_reason = np.zeros((len(_KINDS), len(rows)), np.int64), np.zeros(len(kinds), np.int64)
    begun, ended, reason = stretches.start, stretches.end, np.ascontiguousarray(stretches.reason, np.int16)
    if native is not None:
        columns = owned.event, owned.start, owned.end, rows, counted, begun, ended
        native.kept(*map(np.ascontiguousarray, columns), reason, kinds, by_reason, ns)
    elif len(begun):
        length, sides = ended - begun, list[tuple[Ints, Ints]]()
        for moment in (owned.start[rows], owned.end[rows]):
            last = np.maximum(np.searchsorted(begun, moment, side="right") - 1, 0)  # that had begun by then
            sides.append((last, np.clip(moment - begun[last], 0, length[last])))
        for kind in range(len(_KINDS)):
            of_it = kinds[reason] == kind
            before = np.cumsum(length * of_it) - length * of_it
            first, last = (before[at] + passed * of_it[at] for at, passed in sides)
            ns[kind] = last - first
        under_way = np.zeros(len(begun), np.int64)
        for (at, passed), sign in zip(sides, (-1, 1), strict=True):
            often = sign * counted[owned.event[rows]]
            np.subtract.at(under_way, at, often)
            np.add.at(by_reason, reason[at], passed * often)
        np.add.at(by_reason, reason, np.cumsum(under_way) * length)
    return ns, by_reason


def _known(owned: Intervals) -> Intervals:
    known = _KNOWN[owned.cls]
    return owned if known.all() else owned.rows(known)


def _code(cls: Class, why: Reason | None) -> int:
    if why is None or (why.what == WORK and not cls.busy):
        return 2 * _STAGE.get(cls.stage, 0) + cls.transit
    return 2 * _STAGE[cls.busy if why.what == WORK else "lock_wait" if why.what == LOCK else "core_wait"]
