"""Divides a stretch of time among activities that overlap: every nanosecond goes to the one of highest priority."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, each_of

_native: Callable[..., tuple[bytes, bytes]] | None = None
with contextlib.suppress(ImportError):  # it was built where a compiler was
    from gapmeter.analysis.ledger._sweep import sweep as _native
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

    def outside(self, start: Ints, end: Ints) -> Intervals:
        """The parts of these rows that lie in none of given stretches (in order, none overlapping)."""
        row, low, high = outside(self.start, self.end, start, end)
        return Intervals(self.event[row], low, high, self.cls[row])

    def within(self, start: Ints, end: Ints, cls: int) -> Intervals:
        """The parts of these rows that lie in given stretches (in order, none overlapping), as rows of ``cls``."""
        row, _, low, high = overlaps(self.start, self.end, start, end)
        return Intervals(self.event[row], low, high, np.full(len(row), cls))


def overlaps(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where intervals and stretches (in order, none overlapping) meet: which interval, which stretch, from, to."""
    first = np.searchsorted(stretch_end, start, side="right")
    row, nth = each_of(np.maximum(np.searchsorted(stretch_start, end) - first, 0))
    at = nth + first[row]
    return row, at, np.maximum(start[row], stretch_start[at]), np.minimum(end[row], stretch_end[at])


def outside(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> tuple[Ints, Ints, Ints]:
    """What stretches (in order, none overlapping) leave of intervals: which interval, from, to."""
    row, _, low, high = overlaps(start, end, np.append(-FAR, stretch_end), np.append(stretch_start, FAR))
    kept = high > low
    return row[kept], low[kept], high[kept]


def covered(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> Ints:
    """How much of each interval given stretches (in order, none overlapping) cover, ns."""
    row, _, low, high = overlaps(start, end, stretch_start, stretch_end)
    return np.bincount(row, high - low, len(start)).astype(np.int64)


def union(start: Ints, end: Ints) -> Times:
    """Starts and ends of the stretches that intervals cover together, in order, none overlapping or touching."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > end[:-1]]))
    return start[first], end[np.append(first[1:] - 1, len(end) - 1)]


def at_least(count: int, start: Ints, end: Ints) -> Times:
    """When ``count`` or more of these intervals were going on at once."""
    time, step = np.concatenate([start, end]), np.repeat([1, -1], len(start))
    order = np.lexsort((step, time))
    moments, enough = time[order], np.cumsum(step[order]) >= count
    whole = np.flatnonzero(enough[:-1] & (np.diff(moments) > 0))
    return union(moments[whole], moments[whole + 1])


def sweep(
    intervals: Intervals, events: int, classes: int, *, over: Ints | None = None, under: Ints | None = None
) -> tuple[Intervals, Ints]:
    """Who owns which stretch, in order of event and time: rows that never overlap, neighbors of one class joined.

    Time in which nothing was active is in none. Also, shape (events,), ns: the time in which a class of ``over`` owns
    and a class of ``under`` was active beneath, which is work that the former hid.
    """
    hiding, beneath = (np.isin(np.arange(classes), () if some is None else some) for some in (over, under))
    if _native is None:
        return _sweep_in_python(intervals, events, hiding, beneath)
    columns = (intervals.event, intervals.start, intervals.end, intervals.cls)
    given = (np.ascontiguousarray(column, np.int64) for column in columns)
    rows, hidden = _native(*given, events, hiding.view(np.uint8), beneath.view(np.uint8))
    return Intervals(*np.frombuffer(rows, np.int64).reshape(-1, 4).T.copy()), np.frombuffer(hidden, np.int64)


def _sweep_in_python(intervals: Intervals, events: int, hiding: Bools, beneath: Bools) -> tuple[Intervals, Ints]:
    """Between two neighboring ends of an event's intervals the same classes are active."""
    real = np.flatnonzero(intervals.end > intervals.start)
    event, cls = np.tile(intervals.event[real], 2), np.tile(intervals.cls[real], 2)
    time = np.concatenate([intervals.start[real], intervals.end[real]])
    order = np.lexsort((time, event))
    event, cls, time, step = event[order], cls[order], time[order], np.where(order < len(real), 1, -1)
    owner, covers = np.full(len(order), len(hiding)), np.zeros(len(order), np.bool_)
    for one in np.unique(cls)[::-1]:
        active = np.cumsum(step * (cls == one)) > 0
        owner[active] = one
        covers |= active & beneath[one]
    kept = np.flatnonzero((owner[:-1] < len(hiding)) & (np.diff(time) > 0))  # an event's last moment has no owner
    event, owner, start, end = event[kept], owner[kept], time[kept], time[kept + 1]
    hid = hiding[owner] & covers[kept]
    hidden = np.bincount(event[hid], (end - start)[hid], events).astype(np.int64)
    new = (np.diff(event, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0)
    new[1:] |= start[1:] > end[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(event))[: len(first)] - 1
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
