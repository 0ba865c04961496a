"""Appends records to a memory-mapped file: no system call per record, nothing lost when the process is killed.

A record costs a fraction of a microsecond, less where the C module was built (``NATIVE``). The kernel owns the mapped
pages, so what was written survives ``kill -9`` of every process; only a power cut can lose it. The file grows in
chunks that are reserved on the disk first: a full disk stops recording (records are counted as dropped), never the
process.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gapmeter_probe.appender import aligned
from gapmeter_probe.records import (
    BLOB,
    COUNTS,
    DEVICE,
    FILE_HEADER,
    HEAD,
    JSON,
    MAGIC,
    REQUEST,
    SCHEMA_VERSION,
    Kind,
    Outcome,
)

if TYPE_CHECKING:
    from gapmeter_probe.appender import Appender
else:
    try:
        from gapmeter_probe._native import Appender
    except ImportError:  # there was no compiler where it was installed
        from gapmeter_probe.appender import Appender

NATIVE = Appender.__module__ == "gapmeter_probe._native"
CHUNK_BYTES = 4 << 20
PROBE_DIR = "GAPMETER_PROBE_DIR"
_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE
_LOOK_S = 0.5  # with a chunk each 8 MB/s: some 1,000 requests at 10 tokens a second each


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Once a process: each one is a cycle of references, which a process without a collector would keep for good."""
    return ctypes.CDLL(None)


class RecordWriter(Appender):
    """One process's record file. Safe to call from any thread; never raises after construction.

    Raises OSError from the constructor if the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], describe: Mapping[str, object]) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.dropped = 0
        self._ready = 0  # pages up to here have been readied
        self._refs = 0
        self._lock = threading.RLock()  # a signal handler may close the file in the middle of a record
        self._owner = os.getpid()
        self._closed = False
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.posix_fallocate(self._fd, 0, CHUNK_BYTES)
        self._map(self._fd, CHUNK_BYTES)
        self._write(0, FILE_HEADER.pack(MAGIC, SCHEMA_VERSION, 0))
        self._pos = FILE_HEADER.size
        about = {"type": "process", "pid": self._owner, "wall_ns": time.time_ns(), "native": NATIVE}
        self.json({**about, **describe})

    def request(self, engine_id: str, client_id: str = "") -> int:
        """Name a request and return its ref: a small number, from 1, that this file's other records use."""
        engine = engine_id.encode()
        body = engine + client_id.encode()
        with self._lock:
            self._refs += 1
            ref = self._refs
        self._append(REQUEST, Kind.REQUEST, -len(body) & 7, ref, len(engine), body=body)
        return ref

    def counts(self, outcome: Outcome, ref: int, prompt: int, output: int, cached: int, at_ns: int) -> None:
        """How a request ended: its tokens, and whether it was complete."""
        self._append(COUNTS, Kind.COUNTS, outcome, ref, prompt, output, cached, at_ns)

    def device(self, seq: int, anchor: int, marks: Sequence[int]) -> None:
        """When a device was where in step ``seq``: for each of DEVICE_PARTS host_ns (0: not marked) and device_ns."""
        self._append(DEVICE, Kind.DEVICE, 0, seq, anchor, *marks)

    def json(self, value: Mapping[str, object]) -> None:
        """A rare record of any shape; it carries a ``type``."""
        body = json.dumps(value).encode()
        self._append(JSON, Kind.JSON, -len(body) & 7, time.monotonic_ns(), body=body)

    def blob(self, code: int, parts: Iterable[bytes]) -> None:
        """A payload whose layout belongs to its writer."""
        body = b"".join(parts)
        self._append(BLOB, Kind.BLOB, code, len(body), body=body)

    def _append(self, head: struct.Struct, kind: Kind, code: int, *fields: int, body: bytes = b"") -> None:
        """A record whose size, kind and code come first in its head, which is written last: before, it is not there."""
        size = aligned(head.size + len(body))
        packed = head.pack(size, kind, code, *fields)  # before there is a place: a hole would end the file
        at = self._reserve(size)
        if at:
            self._write(at + head.size, body)
            self._write(at, packed)

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
            address = self._address()
        # Should the map move meanwhile, the call fails or readies something else: it changes no byte anywhere.
        _libc().madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), _POPULATE_WRITE)

    def keep_room(self, ahead: int, every_s: float, first: Callable[[], object] = bool) -> None:
        """From now on a thread, which calls ``first``, sees to it that records find room and pages that are there.

        It looks every ``every_s``, ``ahead`` bytes ahead, until the file is closed.
        """

        def keep() -> None:
            first()
            while not self._closed:
                self.reserve(ahead)
                self.prefault(ahead)
                time.sleep(every_s)

        threading.Thread(target=keep, name="gapmeter records", daemon=True).start()

    def close(self) -> None:
        """Mark the file complete and cut it to its length. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        self._append(HEAD, Kind.END, 0)
        with self._lock:
            self._closed = True
            self._size = 0  # every later record finds no room; the map stays open for one that is being written
            os.ftruncate(self._fd, self._pos)

    def _grow(self, size: int) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._pos + size + HEAD.size <= self._size:
                return True  # another thread was here first
            try:
                self._extend(size)
            except OSError:
                self.dropped += 1
                self._write(12, struct.pack("<I", self.dropped))
                return False
            return True

    def _extend(self, size: int) -> None:
        more = max(CHUNK_BYTES, (size + CHUNK_BYTES) & ~(CHUNK_BYTES - 1))
        os.posix_fallocate(self._fd, self._size, more)
        self._map(self._fd, self._size + more)


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
    writer.keep_room(CHUNK_BYTES, _LOOK_S)
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
