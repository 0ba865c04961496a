"""Why a thread did not go on: who had the cores, who held its interpreter, what an event loop was at instead.

What the kernel recorded, laid beside the probes' spans, tells what took the time of a stage from it:

- its own thread was off its core and would have gone on: a wait for the core (``core_wait``), whatever the stage;
- its own thread slept in the middle of Python code while another thread of the process ran Python: a wait for the
  interpreter's lock (``lock_wait``);
- a message was there, and the thread that should take it had no core, as all were held by others (``core_wait``), had
  to wait for the interpreter that another thread of its process held (``lock_wait``), or was an event loop at work.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal

import numpy as np

from gapmeter.analysis.arrays import Ints, distinct, ranges
from gapmeter.analysis.ledger.critical_path import FAR, overlaps
from gapmeter.records.reader import Table

CORE, LOCK, WORK = "core_wait", "lock_wait", "at work"  # what a Reason may be
LIMIT, STOPPED, NOBODY, UNKNOWN = "CPU limit", "stopped", "nobody", "unknown"
_FEW = 1_000_000  # stretches
_ROOM = 1 << 30  # bytes of a disk that are others'
KnownFrom = Literal["switches", "sums", "spans"]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who ran instead, and the stage that it was at ("" where it was at none of its stages).

    ``process``: ``api``, ``engine``, ``server`` (another of its processes), ``load tester``, ``another program`` (its
    name is ``program``, where known), ``CPU limit`` (the control group's share was used up), ``stopped`` (a signal or a
    debugger kept it from running), ``nobody`` (it was about to run), or ``unknown``.
    """

    process: str
    stage: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """``what``: CORE with its ``culprit``, LOCK, or WORK: the thread was at work, if not at this."""

    what: str
    culprit: Culprit | None = None


@dataclass(frozen=True, slots=True)
class Stretches:
    """In order, none overlapping; ``reason``: a number in a CoreUse."""

    start: Ints
    end: Ints
    reason: Ints

    def within(self, low: int, high: int) -> Stretches:
        """Those that meet a stretch of time."""
        near = slice(np.searchsorted(self.end, low, side="right"), np.searchsorted(self.start, high))
        return Stretches(self.start[near], self.end[near], self.reason[near])

    def meeting(self, start: Ints, end: Ints) -> Stretches:
        """Those that meet any of these stretches of time, in order, none overlapping."""
        met = distinct(overlaps(start, end, self.start, self.end)[1])
        return Stretches(self.start[met], self.end[met], self.reason[met])

    def packed(self) -> list[Packed]:
        """The same, some seconds at a time."""
        parts, cuts = [], np.flatnonzero(np.diff(self.start >> 31)) + 1  # 2^31 ns are 2.1 s
        for start, end, reason in zip(*(np.split(c, cuts) for c in (self.start, self.end, self.reason)), strict=True):
            if len(start):
                origin = int(start[0])
                least = np.uint32 if end[-1] - origin < 1 << 32 else np.int64
                rows = np.empty(
                    len(start), [("start", least), ("end", least), ("reason", np.min_scalar_type(reason.max()))]
                )
                rows["start"], rows["end"], rows["reason"] = start - origin, end - origin, reason
                parts.append(Packed(origin, int(end[-1]), len(rows), rows))
        return parts


@dataclass(frozen=True, slots=True)
class Packed:
    """``many`` stretches of some seconds; the times in ``rows`` count from when the first one began: half the bytes."""

    begun: int
    ended: int
    many: int
    rows: Table | Callable[[], Table]

    def unpacked(self) -> Stretches:
        """As they were."""
        rows = self.rows() if callable(self.rows) else self.rows
        return Stretches(rows["start"] + np.int64(self.begun), rows["end"] + np.int64(self.begun), rows["reason"])


class Aside:
    """Keeps what is packed in a file without a name in a folder, in place of memory, while its disk has much room."""

    def __init__(self, folder: Path) -> None:
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  (it lives as long as what it keeps)
            weakref.finalize(self, self._file.close)
        self._has_room = self._file is not None

    def kept(self, part: Packed) -> Packed:
        """The same, whose rows are read when they are asked for."""
        if self._file is None or not self._has_room or callable(part.rows):
            return part
        at, size, layout = self._file.tell(), part.rows.nbytes, part.rows.dtype
        with contextlib.suppress(OSError):
            disk = os.fstatvfs(self._file.fileno())
            self._has_room = disk.f_bavail * disk.f_frsize >= _ROOM and self._file.write(part.rows.data) == size
            if self._has_room:
                return replace(part, rows=lambda: np.frombuffer(self._read(at, size), layout))
        self._has_room = False
        self._file.truncate(at)
        return part

    def _read(self, at: int, size: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), size, at)


class ManyStretches:
    """Those of a whole run, in order. A few are kept as they were before they were packed."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self._few = None
        if sum(part.many for part in parts) <= _FEW:
            self._few = _one_after_the_other([part.unpacked() for part in parts])
            return
        self._parts = parts
        self._begun, self._ended = np.array([(part.begun, part.ended) for part in parts], np.int64).T

    def near(self, start: Ints, end: Ints) -> Stretches:
        """All that meet any of these stretches of time, and perhaps others."""
        if self._few is not None:
            return self._few.within(start.min(initial=FAR), end.max(initial=-FAR))
        _, met = ranges(np.searchsorted(self._ended, start, side="right"), np.searchsorted(self._begun, end))
        return _one_after_the_other([self._parts[number].unpacked() for number in distinct(met).tolist()])


def _one_after_the_other(parts: Sequence[Stretches]) -> Stretches:
    """As one: what the end of a part has cut in two is whole again."""
    if not parts:
        return Stretches(*np.empty((3, 0), np.int64))
    goes_on = [
        int(one.end[-1] == other.start[0] and one.reason[-1] == other.reason[0])
        for one, other in itertools.pairwise(parts)
    ]
    begun, ends = [0, *goes_on], [len(part.end) - cut for part, cut in zip(parts, [*goes_on, 0], strict=True)]
    return Stretches(
        np.concatenate([part.start[first:] for part, first in zip(parts, begun, strict=True)]),
        np.concatenate([part.end[:last] for part, last in zip(parts, ends, strict=True)]),
        np.concatenate([part.reason[first:] for part, first in zip(parts, begun, strict=True)]),
    )


@dataclass(frozen=True, slots=True)
class CoreUse:
    """By kind of thread and process id: what kept it, and when.

    Kinds within a stage: of an API server ``loop``, ``loop turn`` (where a request may be waiting for its turn on the
    loop) and ``pool``; of an engine ``engine`` (the thread that steps it),
    ``receiver`` and ``sender`` (beside it), ``worker`` (the stepping thread or a worker process's, at Python code) and
    ``forward`` (the same at computing). Between two threads' stamps, by who should take the message: ``loop woken``,
    ``pool woken``, ``engine woken`` (its receiver or sender), ``executor`` (a worker process, or the stepping thread).

    ``known_from``: the kernel's switches; its sums of waits (no culprits, no locks, and between stamps only what
    ``executor`` has); or the probes' spans alone (only what an event loop was at). ``lost_share``: of the time, where
    too many of the switches were lost to be used.
    """

    reasons: tuple[Reason, ...]
    of: Mapping[tuple[str, int], ManyStretches]
    known_from: KnownFrom
    lost_share: float = 0.0


NOTHING_KNOWN = CoreUse((), {}, "spans")
