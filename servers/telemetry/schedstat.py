"""How long each thread has run and waited for a core so far, as the kernel adds it up (/proc/PID/task/TID/schedstat).

For where the kernel refuses its records of switches (``switches.py``): sums tell how much a thread waited between two
samples, not when, nor for whom. Nothing is asked of the threads that are watched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from gapmeter.servers.telemetry import NO_PROCESSES, About, Absent, ReadFailed, Row

_LOOK_AGAIN_NS = 1_000_000_000  # for new processes and threads


class Schedstat:
    """A row a thread of some process trees that has run or waited since its last row; all are sums since it began.

    A thread's first row has its name. Raises Absent where the kernel does not count, or nobody is there.
    """

    name = "schedstat"

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = list(pids)
        self._files: dict[int, tuple[int, int]] = {}  # thread -> its process, the open file
        self._last: dict[int, tuple[int, int]] = {}  # thread -> what it had run, and waited
        self._looked_ns = 0
        if not _counted():
            raise Absent("this kernel does not count how long threads wait for a core")
        self._look()
        if not self._files:
            raise Absent(NO_PROCESSES)
        self.about: About = {"pids": self._roots, "threads": len(self._files)}

    def read(self) -> list[Row]:
        if time.monotonic_ns() - self._looked_ns >= _LOOK_AGAIN_NS:
            self._look()
        rows: list[Row] = []
        for tid, (pid, file) in list(self._files.items()):
            try:
                ran, waited, _ = map(int, os.pread(file, 64, 0).split())
            except OSError:  # the thread has ended
                os.close(file)
                del self._files[tid]
                continue
            known = self._last.get(tid)
            if (ran, waited) == known:
                continue
            self._last[tid] = ran, waited
            row: Row = {"pid": pid, "tid": tid, "ran_ns": ran, "waited_ns": waited}
            rows.append(row if known else {**row, "name": _name(pid, tid)})
        if not self._files:
            raise ReadFailed("no process of the server is there any more")
        return rows

    def _look(self) -> None:
        self._looked_ns = time.monotonic_ns()
        for root in self._roots:
            try:
                process = psutil.Process(root)
                pids = [root, *(child.pid for child in process.children(recursive=True))]
            except psutil.Error:
                continue
            for pid in pids:
                try:
                    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                        if tid not in self._files:
                            flags = os.O_RDONLY | os.O_CLOEXEC
                            self._files[tid] = pid, os.open(f"/proc/{pid}/task/{tid}/schedstat", flags)
                            self._last.pop(tid, None)
                except OSError:  # it ended meanwhile, or may not be seen
                    continue


def _counted() -> bool:
    """Whether this kernel counts: a thread that has run was given a core at least once."""
    try:
        return any(map(int, Path("/proc/thread-self/schedstat").read_text().split()))
    except (OSError, ValueError):
        return False


def _name(pid: int, tid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{tid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
