"""The server's processes: CPU time, memory, threads and context switches, from psutil, counted since each began."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from gapmeter.servers.telemetry.source import Absent, ReadFailed, Row

_LOOK_AGAIN_NS = 1_000_000_000  # for new children: walking the tree costs more than a sample


class Processes:
    """The trees below some processes, whoever joins or leaves them meanwhile. CPU time is in steps of 10 ms."""

    name = "processes"

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._tree: list[tuple[psutil.Process, str]] = []
        self._looked_ns = 0
        self.about: Row = {"pids": [process.pid for process in self._roots]}

    def read(self) -> list[Row]:
        now = time.monotonic_ns()
        if now - self._looked_ns >= _LOOK_AGAIN_NS:
            self._tree, self._looked_ns = self._look(), now
        rows = [row for process, name in self._tree if (row := _sample(process, name)) is not None]
        if not rows:
            raise ReadFailed("no process of the server is there any more")
        return rows

    def _look(self) -> list[tuple[psutil.Process, str]]:
        known = dict(self._tree)
        found: dict[psutil.Process, str] = {}
        for root in self._roots:
            try:
                tree = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            found |= {process: known.get(process) or label(process) for process in tree}
        return list(found.items())


def open_processes(pids: Iterable[int]) -> Processes:
    """Raises Absent when nobody said which processes are the server's, or they are gone or somebody else's."""
    pids = list(pids)
    if not pids:
        raise Absent("the server's processes are not on this machine, or may not be seen by this user")
    try:
        return Processes(pids)
    except psutil.Error as error:
        raise Absent(f"the server's processes cannot be looked at: {error}") from error


def label(process: psutil.Process) -> str:
    """A name that tells processes of one program apart: its module or script, or the title that it gave itself."""
    try:
        words = process.cmdline()
        name: str = process.name()
    except psutil.Error:
        return "?"
    if len(words) < 2:  # a title replaces the command line
        return words[0].strip() if words else name
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    if "multiprocessing" in " ".join(words):
        return "multiprocessing"
    script = next((word for word in words[1:] if not word.startswith("-")), name)
    return Path(script).name


def _sample(process: psutil.Process, name: str) -> Row | None:
    try:
        with process.oneshot():
            times, memory, switches = process.cpu_times(), process.memory_info(), process.num_ctx_switches()
            return {
                "pid": process.pid,
                "name": name,
                "cpu_ns": round((times.user + times.system) * 1e9),
                "rss_bytes": memory.rss,
                "threads": process.num_threads(),
                "voluntary": switches.voluntary,
                "involuntary": switches.involuntary,
            }
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # it has ended since the last look
