"""Divides a stretch of time among activities that overlap: every nanosecond goes to the one of highest priority."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Ints, changes, distinct, ranges, runs

native: ModuleType | None = None
with contextlib.suppress(ImportError):  # it was built where a compiler was
    from gapmeter.analysis.ledger import _intervals as native

_OVER, _UNDER = 1, 2  # marks of classes
FAR = np.iinfo(np.int64).max // 2
Times = tuple[Ints, Ints]  # starts and ends, in order, none overlapping, ns


@dataclass(frozen=True, slots=True)
class Intervals:
    """Activities of many events, one row each: which event, from when to when, of which class.

    A class is a small number; 0 has the highest priority. Times are ns; rows with ``end <= start`` count nothing.
    """

    event: Ints
    start: Ints
    end: Ints
    cls: Ints

    @classmethod
    def join(cls, parts: list[Intervals]) -> Intervals:
        """All rows of several tables."""
        names = ("event", "start", "end", "cls")
        return cls(*(np.concatenate([np.empty(0, np.int64), *(getattr(part, n) for part in parts)]) for n in names))

    @classmethod
    def of_one(cls, which: Ints | int, start: Ints, end: Ints) -> Intervals:
        """Rows of a single event, 0, of one class or of each its own."""
        return cls(np.zeros(len(start), np.int64), start, end, np.broadcast_to(which, len(start)))

    def rows(self, which: Bools | Ints) -> Intervals:
        """Some of them, or in another order."""
        return Intervals(self.event[which], self.start[which], self.end[which], self.cls[which])

    def outside(self, start: Ints, end: Ints) -> Intervals:
        """The parts of these rows that lie in none of given stretches (in order, none overlapping)."""
        row, low, high = outside(self.start, self.end, start, end)
        return Intervals(self.event[row], low, high, self.cls[row])


def overlaps(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where intervals and stretches (in order, none overlapping) meet: which interval, which stretch, from, to."""
    if native is not None:
        return _columns(native.meet(*map(_plain, (start, end, stretch_start, stretch_end)), False))
    row, at = ranges(np.searchsorted(stretch_end, start, side="right"), np.searchsorted(stretch_start, end))
    low, high = np.maximum(start[row], stretch_start[at]), np.minimum(end[row], stretch_end[at])
    kept = high > low
    return row[kept], at[kept], low[kept], high[kept]


def outside(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> tuple[Ints, Ints, Ints]:
    """What stretches (in order, none overlapping) leave of intervals: which interval, from, to."""
    if native is not None:
        row, _, low, high = _columns(native.meet(*map(_plain, (start, end, stretch_start, stretch_end)), True))
    else:
        row, _, low, high = overlaps(start, end, np.append(-FAR, stretch_end), np.append(stretch_start, FAR))
    return row, low, high


def covered(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> Ints:
    """How much of each interval given stretches (in order, none overlapping) cover, ns."""
    row, _, low, high = overlaps(start, end, stretch_start, stretch_end)
    return np.bincount(row, high - low, len(start)).astype(np.int64)


def union(start: Ints, end: Ints) -> Times:
    """Starts and ends of the stretches that intervals cover together, in order, none overlapping or touching."""
    return at_least(1, start, end)


def at_least(count: int, start: Ints, end: Ints) -> Times:
    """When ``count`` or more of these intervals were going on at once.

    For any i: when i + ``count`` have begun, while no more than i have ended.
    """
    some = end > start
    begun, ended = (np.sort(at[some], kind="stable") for at in (start, end))  # in order but for a few, mostly
    begun, ended = begun[count - 1 :], ended[: max(len(ended) - count + 1, 0)]
    enough = begun < ended
    begun, ended = begun[enough], ended[enough]
    first, last = runs(np.append(True, begun[1:] > ended[:-1])[: len(begun)])
    return begun[first], ended[last]


def sweep(
    intervals: Intervals, events: int, classes: int, *, over: Ints | None = None, under: Ints | None = None
) -> tuple[Intervals, Ints]:
    """Who owns which stretch, in order of event and time: rows that never overlap, neighbors of one class joined.

    Time in which nothing was active is in none. Also, shape (events,), ns: the time in which a class of ``over`` owns
    and a class of ``under`` was active beneath, which is work that the former hid.
    """
    marks, hidden = np.zeros(classes, np.uint8), np.zeros(events, np.int64)
    for mark, marked in ((_OVER, over), (_UNDER, under)):
        if marked is not None:
            marks[marked] |= mark
    if native is not None:
        columns = intervals.event, intervals.start, intervals.end, intervals.cls
        return Intervals(*_columns(native.sweep(*map(_plain, columns), marks, hidden))), hidden
    event, start, length, owner, covers = _moments(intervals, marks)
    end = start + length
    new = changes(event, owner)
    new[1:] |= start[1:] > end[:-1]
    first, last = runs(new)
    hid = (marks[owner] & _OVER > 0) & covers
    np.add.at(hidden, event[hid], length[hid])
    return Intervals(event[first], start[first], end[last], owner[first]), hidden


def pieces(intervals: Intervals, events: int, classes: int) -> Intervals:
    """The stretches of ``sweep``."""
    return sweep(intervals, events, classes)[0]


def with_holes(owned: Intervals, low: Ints, high: Ints) -> Intervals:
    """``pieces`` and, as rows of class -1, what they leave open of each event's window, ``low`` to ``high``.

    In order of event and time, as ``owned`` is.
    """
    first, last = (np.searchsorted(owned.event, np.arange(len(low)), side=side) for side in ("left", "right"))
    some = np.flatnonzero(first < last)
    since, until = np.append(0, owned.end[:-1]), low.copy()  # until when all is told, before each row and at last
    since[first[some]], until[some] = low[some], owned.end[last[some] - 1]
    inner, outer = np.flatnonzero(owned.start > since), np.flatnonzero(high > until)
    at = np.concatenate([last[outer], inner])  # where two come before one row, the end of an event is first
    return Intervals(
        np.insert(owned.event, at, np.concatenate([outer, owned.event[inner]])),
        np.insert(owned.start, at, np.concatenate([until[outer], since[inner]])),
        np.insert(owned.end, at, np.concatenate([high[outer], owned.start[inner]])),
        np.insert(owned.cls, at, -1),
    )


def _moments(intervals: Intervals, marks: NDArray[np.uint8]) -> tuple[Ints, Ints, Ints, Ints, Bools]:
    """Stretches between two neighboring ends of an event's intervals in which something was active, in order.

    Each stretch's event, start, length, the class that owns it, and whether a class marked as under is active in it.
    """
    some = intervals.rows(intervals.end > intervals.start)
    event, time, cls = np.tile(some.event, 2), np.concatenate([some.start, some.end]), np.tile(some.cls, 2)
    order = np.lexsort((time, event))
    event, time, cls = event[order], time[order], cls[order]
    turn = np.where(order < len(some.event), 1, -1)
    owner, covers = np.full(len(order), -1), np.zeros(len(order), np.bool_)
    for one in distinct(cls)[::-1]:  # the highest priority last
        active = np.cumsum(np.where(cls == one, turn, 0)) > 0
        owner[active] = one
        if marks[one] & _UNDER:
            covers |= active
    length = np.diff(time, append=time[-1:])
    kept = np.flatnonzero((owner >= 0) & (length > 0))
    return event[kept], time[kept], length[kept], owner[kept], covers[kept]


def _plain(column: Ints) -> Ints:
    """As the C module takes it."""
    return np.ascontiguousarray(column, np.int64)


def _columns(found: bytearray) -> tuple[Ints, Ints, Ints, Ints]:
    """As the C module gives them."""
    one, two, three, four = np.frombuffer(found, np.int64).reshape(4, -1)
    return one, two, three, four
