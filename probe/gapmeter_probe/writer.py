"""Appends records to a memory-mapped file: no system call per record, nothing lost when the process is killed.

A record costs a fraction of a microsecond. The kernel owns the mapped pages, so what was written survives
``kill -9`` of every process; only a power cut can lose it. The file grows in chunks that are reserved on the disk
first: a full disk stops recording (records are counted as dropped), never the process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from gapmeter_probe.records import (
    BLOB,
    COUNTS,
    EMISSION,
    EMIT,
    ENTRY,
    FILE_HEADER,
    HEAD,
    JSON,
    MAGIC,
    REQUEST,
    SCHEMA_VERSION,
    SPAN,
    STEP,
    Kind,
    Outcome,
)

CHUNK_BYTES = 4 << 20
PROBE_DIR = "GAPMETER_PROBE_DIR"
_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE


_SPAN_AND_HEAD = SPAN.size + HEAD.size
_SPAN_FIELDS, _ENTRY_FIELDS, _EMISSION_FIELDS = (layout.format[1:] for layout in (SPAN, ENTRY, EMISSION))
_pack_span = SPAN.pack_into
_STEP, _EMIT = int(Kind.STEP), int(Kind.EMIT)  # plain numbers pack three times as fast


def span(code: int, ref: int, start_ns: int, end_ns: int, n: int = 0) -> tuple[int, ...]:
    """A span as ``RecordWriter.spans`` takes it, to be written with others.

    A server's own work drives a writer's code out of the processor's caches, and the first record after that costs ten
    times its price: it is better paid once a step than at every stamp.
    """
    return 40, 2, code, ref, n, start_ns, start_ns, end_ns


def _padded(size: int) -> int:
    return (size + 7) & ~7


@functools.lru_cache(maxsize=1024)
def _many(fields: str, count: int) -> struct.Struct:
    """The layout of ``count`` records in a row, none of which needs padding between."""
    return struct.Struct("<" + fields * count)


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Once a process: each one is a cycle of references, which a process without a collector would keep for good."""
    return ctypes.CDLL(None)


class RecordWriter:
    """One process's record file. Safe to call from any thread; never raises after construction.

    Raises OSError from the constructor if the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], describe: Mapping[str, object]) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.posix_fallocate(self._fd, 0, CHUNK_BYTES)
        self._map = mmap.mmap(self._fd, CHUNK_BYTES)
        self._size = CHUNK_BYTES
        self._pos = FILE_HEADER.size
        self._ready = 0  # pages up to here have been readied
        self._refs = 0
        self._lock = threading.RLock()  # a signal handler may close the file in the middle of a record
        self._owner = os.getpid()
        self._closed = False
        self.dropped = 0
        FILE_HEADER.pack_into(self._map, 0, MAGIC, SCHEMA_VERSION, 0)
        self.json({"type": "process", "pid": self._owner, "wall_ns": time.time_ns(), **describe})

    def request(self, engine_id: str, client_id: str = "") -> int:
        """Name a request and return its ref: a small number, from 1, that this file's other records use."""
        engine, client = engine_id.encode(), client_id.encode()
        with self._lock:
            self._refs += 1
            ref = self._refs
        body = engine + client
        size = _padded(REQUEST.size + len(body))
        at = self._reserve(size)
        if at:
            self._map[at + REQUEST.size : at + REQUEST.size + len(body)] = body
            code = size - REQUEST.size - len(body)
            REQUEST.pack_into(self._map, at, size, Kind.REQUEST, code, ref, len(engine))
        return ref

    def span(self, code: int, ref: int, start_ns: int, end_ns: int, n: int = 0, queued_ns: int = 0) -> None:
        """One activity. Stamps are CLOCK_MONOTONIC ns; ``queued_ns`` defaults to ``start_ns``."""
        with self._lock:  # _reserve, written out: this is the hottest path
            at = self._pos
            if at + _SPAN_AND_HEAD > self._size and not self._grow(40):
                return
            self._pos = at + 40
        _pack_span(self._map, at, 40, 2, code, ref, n, queued_ns or start_ns, start_ns, end_ns)

    def spans(self, flat: Sequence[int]) -> None:
        """Several activities at once, at a fifth of the price: for each, the eight numbers that SPAN lays out.

        These are 40, 2, code, ref, n, queued_ns, start_ns, end_ns.
        """
        at = self._reserve(5 * len(flat)) if flat else 0
        if at:
            _many(_SPAN_FIELDS, len(flat) // 8).pack_into(self._map, at, *flat)

    def counts(self, outcome: Outcome, ref: int, prompt: int, output: int, cached: int, at_ns: int) -> None:
        """How a request ended: its tokens, and whether it was complete."""
        at = self._reserve(COUNTS.size)
        if at:
            COUNTS.pack_into(self._map, at, COUNTS.size, Kind.COUNTS, outcome, ref, prompt, output, cached, at_ns)

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
        cpu_ns: int = 0,
        switches: int = 0,
    ) -> None:
        """A scheduling decision; an entry is (ref, tokens, computed before, cached, EntryFlag)."""
        size = _padded(STEP.size + ENTRY.size * len(entries))
        at = self._reserve(size)
        if not at:
            return
        _many(_ENTRY_FIELDS, len(entries)).pack_into(self._map, at + STEP.size, *chain.from_iterable(entries))
        STEP.pack_into(
            self._map, at, size, _STEP, flags, seq, running, waiting, free_blocks, padded, len(entries),
            cpu_ns, schedule_ns, switches,
        )  # fmt: skip

    def emit(self, seq: int, at_ns: int, emissions: Sequence[tuple[int, int]]) -> None:
        """Step ``seq`` gave these requests new tokens: (ref, count) each."""
        size = _padded(EMIT.size + EMISSION.size * len(emissions))
        at = self._reserve(size)
        if not at:
            return
        _many(_EMISSION_FIELDS, len(emissions)).pack_into(self._map, at + EMIT.size, *chain.from_iterable(emissions))
        EMIT.pack_into(self._map, at, size, _EMIT, 0, seq, len(emissions), at_ns)

    def json(self, value: Mapping[str, object]) -> None:
        """A rare record of any shape; it carries a ``type``."""
        body = json.dumps(value).encode()
        size = _padded(JSON.size + len(body))
        at = self._reserve(size)
        if at:
            self._map[at + JSON.size : at + JSON.size + len(body)] = body
            JSON.pack_into(self._map, at, size, Kind.JSON, size - JSON.size - len(body), time.monotonic_ns())

    def blob(self, code: int, parts: Iterable[bytes]) -> None:
        """A payload whose layout belongs to its writer."""
        pieces = list(parts)
        length = sum(map(len, pieces))
        size = _padded(BLOB.size + length)
        at = self._reserve(size)
        if not at:
            return
        offset = at + BLOB.size
        for piece in pieces:
            self._map[offset : offset + len(piece)] = piece
            offset += len(piece)
        BLOB.pack_into(self._map, at, size, Kind.BLOB, code, length)

    def reserve(self, size: int) -> None:
        """Make room for ``size`` more bytes now, so that no record has to wait for it later.

        It is only a preparation: a disk too full for it is found out by the records.
        """
        with self._lock:
            missing = self._pos + size - self._size
            if missing > 0 and not self._closed:
                try:
                    self._extend(missing)
                except OSError:
                    pass

    def prefault(self, ahead: int) -> None:
        """Have the kernel ready the pages of the next ``ahead`` bytes, so that no record waits for the file system.

        For a thread of the caller's own: it may block for milliseconds, but does not hold the interpreter's lock then.
        Does nothing where the kernel cannot (before Linux 5.14).
        """
        with self._lock:
            start = max(self._pos, self._ready) & -mmap.PAGESIZE
            end = min(self._pos + ahead, self._size) & -mmap.PAGESIZE
            if start >= end:
                return
            self._ready = end
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Should the map move meanwhile, the call fails or readies something else: it changes no byte anywhere.
        _libc().madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), _POPULATE_WRITE)

    def close(self) -> None:
        """Mark the file complete and cut it to its length. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        at = self._reserve(HEAD.size)
        if at:
            HEAD.pack_into(self._map, at, HEAD.size, Kind.END, 0)
        with self._lock:
            self._closed = True
            self._size = 0  # every later record finds no room; the map stays open for one that is being written
            os.ftruncate(self._fd, self._pos)

    def _reserve(self, size: int) -> int:
        """The offset of ``size`` fresh bytes, or 0 when there is no room to record into."""
        with self._lock:
            at = self._pos
            if at + size + HEAD.size > self._size and not self._grow(size):
                return 0
            self._pos = at + size
            return at

    def _grow(self, size: int) -> bool:
        if self._closed:
            return False
        try:
            self._extend(size)
        except OSError:
            self.dropped += 1
            struct.pack_into("<I", self._map, 12, self.dropped)
            return False
        return True

    def _extend(self, size: int) -> None:
        more = max(CHUNK_BYTES, (size + CHUNK_BYTES) & ~(CHUNK_BYTES - 1))
        os.posix_fallocate(self._fd, self._size, more)
        self._map.resize(self._size + more)
        self._size += more


def open_probe(role: str, describe: Mapping[str, object]) -> RecordWriter | None:
    """The record file of this process under ``GAPMETER_PROBE_DIR``, or None when nobody asked for one.

    ``role`` names the process in the file's name and head: api, core, worker or engine. The file is closed at exit
    and on SIGTERM (a handler that was there before still runs).
    """
    folder = os.environ.get(PROBE_DIR)
    if not folder:
        return None
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{role}-{os.getpid()}-{time.monotonic_ns()}.gap")
    writer = RecordWriter(path, {"role": role, **describe})
    atexit.register(writer.close)
    _close_on_sigterm(writer)
    return writer


def _close_on_sigterm(writer: RecordWriter) -> None:
    """Records survive without this (the kernel owns the pages); it only adds the END mark when nobody else would."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return

    def finish(signum: int, frame: object) -> None:
        writer.close()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, finish)
