"""Appends the frequent records to a memory-mapped file: what ``_native.c`` does too, several times faster.

Which of the two runs is decided where it is imported (``gapmeter_probe.writer``); both write the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import threading
from collections.abc import Sequence
from itertools import chain

from gapmeter_probe.records import EMISSION, EMIT, ENTRY, HEAD, SPAN, STEP, Kind

_SPAN_AND_HEAD = SPAN.size + HEAD.size
_SPAN_FIELDS, _ENTRY_FIELDS, _EMISSION_FIELDS = (layout.format[1:] for layout in (SPAN, ENTRY, EMISSION))
_pack_span = SPAN.pack_into
_STEP, _EMIT = int(Kind.STEP), int(Kind.EMIT)  # plain numbers pack three times as fast


def aligned(size: int) -> int:
    """The next multiple of 8: so long is a frame."""
    return (size + 7) & ~7


@functools.lru_cache(maxsize=1024)
def _many(fields: str, count: int) -> struct.Struct:
    """The layout of ``count`` records in a row, none of which needs padding between."""
    return struct.Struct("<" + fields * count)


def span(code: int, ref: int, start_ns: int, end_ns: int, n: int = 0) -> tuple[int, ...]:
    """A span as ``Appender.spans`` takes it, to be written with others.

    A server's own work drives a writer's code out of the processor's caches, and the first record after that costs ten
    times its price: it is better paid once a step than at every stamp.
    """
    return 40, 2, code, ref, n, start_ns, start_ns, end_ns


class Appender:
    """A mapped file that records are appended to. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._data: mmap.mmap = None  # type: ignore[assignment]  # mapped before the first record
        self._pos = self._size = 0

    def span(self, code: int, ref: int, start_ns: int, end_ns: int, n: int = 0, queued_ns: int = 0) -> None:
        """One activity. Stamps are CLOCK_MONOTONIC ns; ``queued_ns`` defaults to ``start_ns``."""
        with self._lock:  # _reserve, written out: this is the hottest path
            at = self._pos
            if at + _SPAN_AND_HEAD > self._size and not self._grow(40):
                return
            self._pos = at + 40
        _pack_span(self._data, at, 40, 2, code, ref, n, queued_ns or start_ns, start_ns, end_ns)

    def spans(self, flat: Sequence[int]) -> None:
        """Several activities at once, at a fifth of the price: for each, the eight numbers that SPAN lays out.

        These are 40, 2, code, ref, n, queued_ns, start_ns, end_ns.
        """
        packed = _many(_SPAN_FIELDS, len(flat) // 8).pack(*flat)
        at = self._reserve(len(packed)) if flat else 0
        if at:
            self._write(at, packed)

    def step(
        self,
        flags: int,
        seq: int,
        entries: Sequence[tuple[int, int, int, int, int]],
        *,
        running: int,
        waiting: int,
        free_blocks: int,
        schedule_ns: int,
        padded: int = 0,
    ) -> None:
        """A scheduling decision; an entry is (ref, tokens, computed before, cached, EntryFlag)."""
        rows = _many(_ENTRY_FIELDS, len(entries)).pack(*chain.from_iterable(entries))
        numbers = seq, running, waiting, free_blocks, padded, len(entries)
        self._frame(STEP, rows, _STEP, flags, *numbers, 0, schedule_ns, 0)

    def emit(self, seq: int, at_ns: int, emissions: Sequence[tuple[int, int]]) -> None:
        """Step ``seq`` gave these requests new tokens: (ref, count) each."""
        rows = _many(_EMISSION_FIELDS, len(emissions)).pack(*chain.from_iterable(emissions))
        self._frame(EMIT, rows, _EMIT, 0, seq, len(emissions), at_ns)

    def _frame(self, head: struct.Struct, rows: bytes, *fields: int) -> None:
        """All is packed before there is a place for it: a hole would end the file for its reader."""
        size = aligned(head.size + len(rows))
        packed = head.pack(size, *fields)
        at = self._reserve(size)
        if at:
            self._write(at + head.size, rows)
            self._write(at, packed)

    def _reserve(self, size: int) -> int:
        """The offset of ``size`` fresh bytes, or 0 when there is no room to record into."""
        with self._lock:
            at = self._pos
            if at + size + HEAD.size > self._size and not self._grow(size):
                return 0
            self._pos = at + size
            return at

    def _map(self, fd: int, size: int) -> None:
        """Map the file, or more of it."""
        if self._data is None:
            self._data = mmap.mmap(fd, size)
        else:
            self._data.resize(size)
        self._size = size

    def _write(self, at: int, data: bytes) -> None:
        self._data[at : at + len(data)] = data

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._data))

    def _grow(self, size: int) -> bool:
        """Make room for ``size`` more bytes; False when there will be none."""
        raise NotImplementedError


class Stamps(list[int]):
    """``count`` stamps, 0 at first, that wrapped calls write."""

    def __init__(self, count: int) -> None:
        super().__init__([0] * count)
