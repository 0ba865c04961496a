"""Divides a stretch of time among activities that overlap: every nanosecond goes to the one of highest priority."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_CHUNK = 400_000


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
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts]) if parts else np.empty(0, np.int64)
                for name in ("event", "start", "end", "cls")
            )
        )

    def clip(self, low: Ints, high: Ints) -> Intervals:
        """Cut every row to its event's window ``[low[event], high[event]]`` and drop what is left with nothing."""
        start = np.maximum(self.start, low[self.event])
        end = np.minimum(self.end, high[self.event])
        kept = end > start
        return Intervals(self.event[kept], start[kept], end[kept], self.cls[kept])

    def within(self, start: Ints, end: Ints, cls: int) -> Intervals:
        """The parts of these rows that lie in given stretches (in order, none overlapping), as rows of ``cls``."""
        row, _, low, high = overlaps(self.start, self.end, start, end)
        return Intervals(self.event[row], low, high, np.full(len(row), cls))


def overlaps(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Where intervals and stretches (in order, none overlapping) meet: which interval, which stretch, from, to."""
    low = np.searchsorted(stretch_end, start, side="right")
    count = np.maximum(np.searchsorted(stretch_start, end) - low, 0)
    row = np.repeat(np.arange(len(start)), count)
    at = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + low[row]
    return row, at, np.maximum(start[row], stretch_start[at]), np.minimum(end[row], stretch_end[at])


def covered(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints) -> Ints:
    """How much of each interval given stretches (in order, none overlapping) cover, ns."""
    row, _, low, high = overlaps(start, end, stretch_start, stretch_end)
    return np.bincount(row, high - low, len(start)).astype(np.int64)


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Starts and ends of the stretches that intervals cover together, in order, none overlapping or touching."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.flatnonzero(np.concatenate([[True], start[1:] > end[:-1]])) if len(start) else np.empty(0, np.int64)
    return start[first], end[np.append(first[1:] - 1, len(end) - 1)] if len(start) else end


def sweep(
    intervals: Intervals, events: int, classes: int, *, over: Ints | None = None, under: Ints | None = None
) -> tuple[Ints, Ints]:
    """Time of each event that each class owns, shape (events, classes), in ns; the classes never overlap.

    Also, shape (events,): the time in which a class of ``over`` owns and a class of ``under`` was active beneath,
    which is work that the former hid. Time in which nothing was active is in neither.
    """
    owned = np.zeros(events * classes, dtype=np.int64)
    hidden = np.zeros(events, dtype=np.int64)
    for rows in _chunks(intervals, events):
        event, _, length, running = _moments(intervals, rows, classes)
        top = np.argmax(running, axis=1)
        kept = running.any(axis=1) & (length > 0)
        np.add.at(owned, event[kept] * classes + top[kept], length[kept])
        if over is not None and under is not None:
            covers = kept & np.isin(top, over) & running[:, under].any(axis=1)
            np.add.at(hidden, event[covers], length[covers])
    return owned.reshape(events, classes), hidden


def pieces(intervals: Intervals, events: int, classes: int) -> Intervals:
    """Who owns which stretch, in order of event and time: rows that never overlap, neighbors of one class joined.

    Their lengths by event and class are what ``sweep`` returns.
    """
    parts = [Intervals.join([])]
    for rows in _chunks(intervals, events):
        event, time, length, running = _moments(intervals, rows, classes)
        kept = running.any(axis=1) & (length > 0)
        event, start, length, top = event[kept], time[kept], length[kept], np.argmax(running, axis=1)[kept]
        end = start + length
        new = (np.diff(event, prepend=-1) != 0) | (np.diff(top, prepend=-1) != 0)
        new[1:] |= start[1:] > end[:-1]
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(event)) - 1
        parts.append(Intervals(event[first], start[first], end[last], top[first]))
    return Intervals.join(parts)


def with_holes(owned: Intervals, low: Ints, high: Ints) -> Intervals:
    """``pieces`` and, as rows of class -1, what they leave open of each event's window, ``low`` to ``high``."""
    everyone = np.arange(len(low))
    event = np.concatenate([owned.event, everyone, everyone])
    begins = np.concatenate([owned.start, low, high])
    ends = np.concatenate([owned.end, low, high])
    order = np.lexsort((ends, begins, event))
    event, begins, ends = event[order], begins[order], ends[order]
    open_after = np.flatnonzero((event[1:] == event[:-1]) & (begins[1:] > ends[:-1]))
    holes = Intervals(
        event[open_after], ends[open_after], begins[open_after + 1], np.full(len(open_after), -1, np.int64)
    )
    whole = Intervals.join([owned, holes])
    order = np.lexsort((whole.start, whole.event))
    return Intervals(whole.event[order], whole.start[order], whole.end[order], whole.cls[order])


def _chunks(intervals: Intervals, events: int) -> Iterator[Ints]:
    """Rows of whole events, so many at a time that the work on them fits into memory."""
    order = np.argsort(intervals.event, kind="stable")
    bounds = np.searchsorted(intervals.event[order], np.arange(events + 1))
    first = 0
    while first < events:
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + _CHUNK, side="right")) - 1)
        if bounds[first] < bounds[last]:
            yield order[bounds[first] : bounds[last]]
        first = last


def _moments(intervals: Intervals, rows: Ints, classes: int) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Every moment at which something begins or ends: its event, its time, how long until the event's next one.

    Also, shape (moments, classes): which classes are active from then on.
    """
    event = np.concatenate([intervals.event[rows]] * 2)
    time = np.concatenate([intervals.start[rows], intervals.end[rows]])
    cls = np.concatenate([intervals.cls[rows]] * 2)
    order = np.lexsort((time, event))
    event, time, cls = event[order], time[order], cls[order]
    active = np.zeros((len(order), classes), dtype=np.int16)
    active[np.arange(len(order)), cls] = np.where(order < len(rows), 1, -1)
    np.cumsum(active, axis=0, out=active)
    length = np.diff(time, append=time[-1])
    length[:-1][np.diff(event) != 0] = 0
    return event, time, length, active > 0
