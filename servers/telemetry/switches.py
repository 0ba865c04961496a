"""Who ran on which core, exactly: the kernel's own records of every switch of every thread, by ``perf_event_open``.

The kernel writes a record, stamped with CLOCK_MONOTONIC, when a thread is put on a core and when it leaves it, with
whether it would have gone on (it was preempted) or had nothing to do. Where we may (as root, or with CAP_PERFMON), the
server's cores are watched whole, whoever runs there; otherwise every thread of the server and of the load tester, and
whatever it starts (``inherit``). The records of one core share a ring, which is emptied at every look into
``switches-CORE.bin`` as it stands: nothing is asked of the threads that are watched. A row names each process when its
first records come.
The layout is that of perf_event_open(2) and linux/perf_event.h. No privilege is needed for one's own processes where
/proc/sys/kernel/perf_event_paranoid is 2 or less; many containers refuse the system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from gapmeter.records.process import allow_many_files, libc
from gapmeter.servers.telemetry import NO_PROCESSES, About, Absent, Row
from gapmeter.servers.telemetry.sources import tree_of

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_SOFTWARE, _DUMMY = 1, 9  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY: an event that counts nothing itself
_TID, _TIME, _CPU = 1 << 1, 1 << 2, 1 << 7  # PERF_SAMPLE_*: what every record ends with
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_SAMPLE_ID_ALL, _USE_CLOCK, _CONTEXT_SWITCH = 1 << 18, 1 << 25, 1 << 26
_CLOCK_MONOTONIC = 1
_CLOSE_ON_EXEC = 8
_SET_OUTPUT = 0x2405  # PERF_EVENT_IOC_SET_OUTPUT
_HEAD, _TAIL = 1024, 1032  # where a ring's first page has data_head and data_tail
_RING_PAGES = (1024, 64)  # 100,000 or 6,500 switches of a core between two looks: as much as we may have
_OF_THREADS, _OF_CORES = 8, 10  # 32-bit words of a record: PERF_RECORD_SWITCH, PERF_RECORD_SWITCH_CPU_WIDE
_NOT_ALLOWED = (errno.EACCES, errno.EPERM)
SERVER, LOAD_TESTER, OTHER = "server", "load tester", "another program"  # whose process a row names


class Switches:
    """One ring a core, and its file. Rows: ``pid``, ``name`` and ``of`` (whose it is) of processes not seen before."""

    name = "switches"

    def __init__(self, folder: Path, pids: Iterable[int], beside: Iterable[int]) -> None:
        allow_many_files()  # one a thread and core
        self._roots = dict.fromkeys(beside, LOAD_TESTER) | dict.fromkeys(pids, SERVER)
        self._named: set[int] = set()
        servers = sorted({thread for pid in pids for thread in _threads(pid)})
        cores = sorted(_cores(servers))
        if not cores:
            raise Absent("none of the processes is there any more")
        with contextlib.ExitStack() as opened:  # closed where not all can be had: else the kernel goes on recording
            events = {cpu: event for cpu in cores if (event := _open_event(-1, cpu, opened)) is not None}
            if events:
                self._words = _OF_CORES
                self._rings = [_Ring(event, cpu, folder, opened) for cpu, event in events.items()]
            else:
                self._words = _OF_THREADS
                threads = sorted({*servers, *(thread for pid in beside for thread in _threads(pid))})
                shared = (_shared(threads, cpu, folder, opened) for cpu in sorted(_cores(threads)))
                self._rings = [ring for ring in shared if ring]
            opened.pop_all()
        self.about: About = {"cores": cores, "whole": bool(events)}

    def read(self) -> list[Row]:
        seen: set[int] = set()
        for ring in self._rings:
            words = memoryview(ring.drain()).cast("i")
            seen.update(words[self._words - 6 :: self._words])
        seen -= {0, -1}  # a core that idles, a thread that is ending
        rows: list[Row] = [_named(pid, self._roots) for pid in sorted(seen - self._named)]
        self._named |= seen
        return rows


def _largest(event: int) -> mmap.mmap:
    """An event's ring, with a page before it. Raises PermissionError where not even the smallest is allowed."""
    *larger, smallest = _RING_PAGES
    for pages in larger:
        with contextlib.suppress(PermissionError):
            return mmap.mmap(event, (1 + pages) * mmap.PAGESIZE)
    return mmap.mmap(event, (1 + smallest) * mmap.PAGESIZE)


def _shared(threads: Iterable[int], cpu: int, folder: Path, opened: contextlib.ExitStack) -> _Ring | None:
    """A ring for one core, with the records of all these threads; None: they are gone."""
    events = [event for tid in threads if (event := _open_event(tid, cpu, opened)) is not None]
    if not events:
        return None
    ring = _Ring(events[0], cpu, folder, opened)
    for event in events[1:]:
        if libc().ioctl(event, _SET_OUTPUT, events[0]) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return ring


def _named(pid: int, roots: Mapping[int, str]) -> Row:
    """Whose a process is: of the trees below ``roots``, or another program's."""
    try:
        process = psutil.Process(pid)
        family = [pid, *(parent.pid for parent in process.parents())]
        return {"pid": pid, "name": process.name(), "of": next((roots[p] for p in family if p in roots), OTHER)}
    except psutil.Error:  # it has ended, or is out of sight in another namespace
        return {"pid": pid, "name": "", "of": roots.get(pid, OTHER)}


class _Ring:
    """What the kernel writes for one core, and the file that it goes to."""

    def __init__(self, event: int, cpu: int, folder: Path, opened: contextlib.ExitStack) -> None:
        self._map = _largest(event)
        self._data = memoryview(self._map)[mmap.PAGESIZE :]
        path = folder / f"switches-{cpu}.bin"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        opened.callback(os.close, self._file)
        self._written = 0

    def drain(self) -> bytes:
        """What came since the last look, written to the file.

        Raises Absent when there was no room: what comes behind a hole would be misread, so no more is written.
        """
        (head,) = struct.unpack_from("Q", self._map, _HEAD)
        (tail,) = struct.unpack_from("Q", self._map, _TAIL)
        size = len(self._data)
        start, end = tail % size, head % size
        whole = start < end or head == tail
        records = bytes(self._data[start:end]) if whole else b"".join((self._data[start:], self._data[:end]))
        struct.pack_into("Q", self._map, _TAIL, head)
        try:
            written = os.write(self._file, records)
        except OSError:
            written = 0
        if written < len(records):
            os.ftruncate(self._file, self._written)
            raise Absent("there was no room for the switches of the last moment; from then on nobody watches")
        self._written += written
        return records


def open_switches(folder: Path, pids: Sequence[int], beside: Sequence[int]) -> Switches:
    """Watch the server's process trees and those ``beside`` it.

    Raises Absent, with the remedy, where the kernel or a container refuses.
    """
    if not pids:
        raise Absent(NO_PROCESSES)
    if platform.machine() not in _SYSCALL:
        raise Absent(f"switches are not read on {platform.machine()}")
    try:
        return Switches(folder, pids, beside)
    except OSError as error:
        level = Path("/proc/sys/kernel/perf_event_paranoid")
        known = level.read_text().strip() if level.exists() else "not there"
        raise Absent(
            f"the kernel refuses to tell who runs on which core ({error.strerror}; {level} is {known}): "
            "sysctl kernel.perf_event_paranoid=2, and in a container allow perf_event_open"
        ) from error


def _open_event(tid: int, cpu: int, opened: contextlib.ExitStack) -> int | None:
    """The descriptor of an event for one thread on one core, and for what it starts; None: the thread is gone.

    ``tid`` -1: for the core, whoever runs there; None: that is not allowed.
    """
    attributes = bytearray(128)
    flags = _NO_HYPERVISOR | _SAMPLE_ID_ALL | _USE_CLOCK | _CONTEXT_SWITCH
    flags |= 0 if tid < 0 else _INHERIT | _NO_KERNEL
    struct.pack_into("IIQQQQQ", attributes, 0, _SOFTWARE, len(attributes), _DUMMY, 0, _TID | _TIME | _CPU, 0, flags)
    struct.pack_into("i", attributes, 92, _CLOCK_MONOTONIC)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    event: int = libc().syscall(_SYSCALL[platform.machine()], buffer, tid, cpu, -1, _CLOSE_ON_EXEC)
    if event >= 0:
        opened.callback(os.close, event)
        return event
    number = ctypes.get_errno()
    if number == errno.ESRCH or (tid < 0 and number in _NOT_ALLOWED):
        return None
    raise OSError(number, os.strerror(number))


def _threads(pid: int) -> list[int]:
    """All threads of a process and of those below it."""
    try:
        return [thread.id for process in tree_of(pid) for thread in process.threads()]
    except psutil.Error:
        return []


def _cores(threads: Iterable[int]) -> set[int]:
    """Where these threads may run."""
    found: set[int] = set()
    for tid in threads:
        try:
            found |= os.sched_getaffinity(tid)
        except ProcessLookupError:
            continue
    return found
