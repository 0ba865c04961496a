"""Divides a stretch of time among activities that overlap: every nanosecond goes to the one of highest priority."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Ints, changes, ranges, runs

_CHUNK = 25_000  # intervals that are sorted at once: what the processor's caches hold
_BITS = 62  # of a number in which each stands for a class
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
    row, at = ranges(np.searchsorted(stretch_end, start, side="right"), np.searchsorted(stretch_start, end))
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
    first, last = runs(np.append(True, start[1:] > end[:-1]))
    return start[first], end[last]


def at_least(count: int, start: Ints, end: Ints) -> Times:
    """When ``count`` or more of these intervals were going on at once."""
    moments, going_on = np.concatenate([start, end]), np.repeat([1, -1], [len(start), len(end)])
    order = np.argsort(moments, kind="stable")  # in order but for a few, mostly
    moments = moments[order]
    _, last = runs(changes(moments))
    enough = np.cumsum(going_on[order])[last] >= count
    turns = moments[last[np.diff(enough, prepend=False)]]
    return turns[::2], turns[1::2]


def sweep(
    intervals: Intervals, events: int, classes: int, *, over: Ints | None = None, under: Ints | None = None
) -> tuple[Intervals, Ints]:
    """Who owns which stretch, in order of event and time: rows that never overlap, neighbors of one class joined.

    Time in which nothing was active is in none. Also, shape (events,), ns: the time in which a class of ``over`` owns
    and a class of ``under`` was active beneath, which is work that the former hid.
    """
    parts = []
    hidden = np.zeros(events, dtype=np.int64)
    beneath = np.isin(np.arange(classes), () if under is None else under)
    for event, start, length, owner, covers in _moments(intervals, events, classes, beneath):
        end = start + length
        new = changes(event, owner)
        new[1:] |= start[1:] > end[:-1]
        first, last = runs(new)
        parts.append(Intervals(event[first], start[first], end[last], owner[first]))
        if over is not None:
            hid = np.isin(owner, over) & covers
            hidden += np.bincount(event[hid], length[hid], events).astype(np.int64)
    return Intervals.join(parts), hidden


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


def _moments(
    intervals: Intervals, events: int, classes: int, beneath: Bools
) -> Iterator[tuple[Ints, Ints, Ints, Ints, Bools]]:
    """Stretches between two neighboring ends of an event's intervals in which something was active.

    Each stretch's event, start, length, the class that owns it, and whether a class of ``beneath`` was active in it.
    They come in order, whole events at a time, or of a single one what lies between two moments of rest.
    """
    if events == 1:
        in_order = np.argsort(intervals.start, kind="stable")
        begun, until = intervals.start[in_order], np.maximum.accumulate(intervals.end[in_order])
        if (begun[1:] >= until[:-1]).all():  # one after the other
            if (some := until > begun).any():
                rows, owner = in_order[some], intervals.cls[in_order[some]]
                yield intervals.event[rows], begun[some], until[some] - begun[some], owner, beneath[owner]
            return
        rests = np.flatnonzero(begun[1:] > until[:-1]) + 1
        bounds = np.concatenate([[0], rests, [len(in_order)]])
    else:
        in_order = np.argsort(intervals.event, kind="stable")
        bounds = np.searchsorted(intervals.event[in_order], np.arange(events + 1))
    done = 0
    while done < len(bounds) - 1:
        low = bounds[done]
        done = max(done + 1, int(np.searchsorted(bounds, low + _CHUNK, side="right")) - 1)
        rows = in_order[low : bounds[done]]
        if not len(rows):
            continue
        event = np.concatenate([intervals.event[rows]] * 2)
        time = np.concatenate([intervals.start[rows], intervals.end[rows]])
        order = _in_order(event, time)
        begins = order < len(rows)
        event, time = event[order], time[order]
        cls = np.tile(intervals.cls[rows].astype(np.int16), 2)[order]
        owner, covers = _active(cls, begins, classes, beneath)
        length = np.diff(time, append=time[-1])
        length[:-1][np.diff(event) != 0] = 0
        kept = np.flatnonzero((owner < classes) & (length > 0))
        if len(kept):
            yield event[kept], time[kept], length[kept], owner[kept], covers[kept]


def _active(cls: NDArray[np.int16], begins: Bools, classes: int, beneath: Bools) -> tuple[Ints, Bools]:
    """From each moment on, the class that owns (``classes``, where none is active), and whether one of ``beneath`` is.

    The moments are in order; at each an interval of a class begins or ends.
    """
    # Of each class alone: from which to which moment it was active. All that it began it has ended by its last.
    place = np.argsort(cls, kind="stable")
    active = np.flatnonzero(np.cumsum(2 * begins[place].view(np.int8) - 1, dtype=np.int32) > 0)
    since, until, whose = place[active], place[active + 1], cls[place[active]]
    owner, covers = np.full(len(cls), classes), np.zeros(len(cls), np.bool_)
    for first in range(0, classes, _BITS):
        mine = slice(*np.searchsorted(whose, (first, first + _BITS)))
        bit = 1 << (whose[mine] - first).astype(np.int64)
        change = np.zeros(len(cls), np.int64)
        change[since[mine]] = bit
        change[until[mine]] -= bit
        at_work = np.cumsum(change)  # the classes that are active from each moment on, a bit each
        lowest = np.frexp((at_work & -at_work).astype(np.float64))[1] - 1
        np.copyto(owner, first + lowest, where=(owner == classes) & (at_work != 0))
        covers |= (at_work & sum(1 << bit for bit in np.flatnonzero(beneath[first : first + _BITS]).tolist())) != 0
    return owner, covers


def _in_order(event: Ints, time: Ints) -> Ints:
    """``lexsort`` by both, four times as fast: one key of them where it fits."""
    first, after = int(event.min()), int(time.min())
    span = int(time.max()) - after + 1
    if (int(event.max()) - first + 1) * span > FAR:
        return np.lexsort((time, event))
    return np.argsort((event - first) * span + (time - after), kind="stable")
