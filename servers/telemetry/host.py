"""What this host's kernel counts: of the server's processes, and of the CPU's energy.

Processes: CPU time, memory, threads and context switches, from psutil, counted since each began. Energy: the kernel's
powercap tree (RAPL), in µJ, wrapping at a range of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from gapmeter.servers.telemetry.journal import About, Absent, ReadFailed, Row

_POWERCAP = Path("/sys/class/powercap")
_LOOK_AGAIN_NS = 1_000_000_000  # for new children: walking the tree costs more than a sample


class Processes:
    """The trees below some processes, whoever joins or leaves them meanwhile. CPU time is in steps of 10 ms."""

    name = "processes"

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._tree: list[tuple[psutil.Process, str]] = []
        self._looked_ns = 0
        self.about: About = {"pids": [process.pid for process in self._roots]}

    def read(self) -> list[Row]:
        now = time.monotonic_ns()
        if now - self._looked_ns >= _LOOK_AGAIN_NS:
            self._tree, self._looked_ns = self._look(), now
        rows = [row for process, name in self._tree if (row := _sample(process, name)) is not None]
        if not rows:
            raise ReadFailed("no process of the server is there any more")
        return rows

    def _look(self) -> list[tuple[psutil.Process, str]]:
        labels = dict(self._tree)
        tree: dict[psutil.Process, str] = {}
        for root in self._roots:
            try:
                processes = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            tree |= {process: labels.get(process) or label(process) for process in processes}
        return list(tree.items())


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


class Rapl:
    """Every domain's counter. ``about`` has each one's name, its parent's, and where it wraps."""

    name = "rapl"

    def __init__(self, domains: dict[str, Path]) -> None:
        self._counters = {domain: path / "energy_uj" for domain, path in domains.items()}
        self.about: About = {
            "domains": [
                {
                    "domain": domain,
                    "name": (path / "name").read_text().strip(),
                    "range_uj": int((path / "max_energy_range_uj").read_text()),
                }
                for domain, path in domains.items()
            ]
        }

    def read(self) -> list[Row]:
        try:
            return [{"domain": d, "energy_uj": int(path.read_text())} for d, path in self._counters.items()]
        except (OSError, ValueError) as error:
            raise ReadFailed(f"RAPL: {error}") from error


def open_rapl(root: Path = _POWERCAP) -> Rapl:
    """The domains ``intel-rapl:N`` (packages) and ``intel-rapl:N:M`` (parts of one); AMD's carry the same name.

    Raises Absent where there are none, or they may not be read.
    """
    domains = {path.name: path for path in sorted(root.glob("intel-rapl:*")) if (path / "energy_uj").exists()}
    if not domains:
        raise Absent("the CPU's energy counter (RAPL) is not there: usual in virtual machines and containers")
    try:
        rapl = Rapl(domains)
        rapl.read()
    except PermissionError:
        raise Absent(f"the CPU's energy counter may not be read: as root, chmod -R a+r {root}") from None
    except (OSError, ValueError, ReadFailed) as error:
        raise Absent(f"the CPU's energy counter cannot be read: {error}") from error
    return rapl
