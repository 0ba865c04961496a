"""What is sampled besides GPUs: the engine's /metrics, the server's processes, threads, CPU limits, the CPU's energy.

Processes: CPU time, memory, threads and context switches, from psutil, counted since each began. Energy: the kernel's
powercap tree (RAPL), in µJ, wrapping at a range of its own. /metrics is made on the API server's event loop, so asking
for it costs what is being measured: it is asked at a gentler rate than the rest, and each row says how long the answer
took.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from gapmeter.records.process import text_of
from gapmeter.servers.http_get import HttpGet, NoAnswer
from gapmeter.servers.telemetry import NO_PROCESSES, About, Absent, ReadFailed, Row

# Our name for a figure, and what engines call it. Those that end in _share lie between 0 and 1.
NAMES = {
    "running": (
        "vllm:num_requests_running", "gapmeter_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size",
    ),
    "waiting": ("vllm:num_requests_waiting", "gapmeter_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size"),
    "kv_used_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "kv_blocks": ("gapmeter_kv_blocks",),
    "kv_blocks_free": ("gapmeter_kv_blocks_free",),
    "preemptions": ("vllm:num_preemptions_total", "gapmeter_engine_preemptions_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}  # fmt: skip
_OURS = {theirs: ours for ours, names in NAMES.items() for theirs in names}
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?[ \t]+(\S+)")
_PATIENCE_S = 2.0
_INTERPRETER = re.compile(r"python|pypy|node|ruby|perl|java|(ba|da|z)?sh$")
_POWERCAP = Path("/sys/class/powercap")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_LOOK_AGAIN_NS = 1_000_000_000  # for new processes and threads: walking the tree costs more than a sample
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # by SIGSTOP, by a debugger


def is_here(url: str) -> bool:
    """Whether an address is one of this machine's own; one that is passed on from here to another looks like it."""
    local = {address.address for all_of in psutil.net_if_addrs().values() for address in all_of}
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(urlsplit(url).hostname, None)}
    except (OSError, UnicodeError):  # the latter for what is no name
        return False
    return any(one in local or ip_address(one).is_loopback or ip_address(one).is_unspecified for one in found)


def parse_metrics(page: str) -> dict[str, float]:
    """The figures that we know, by our names: summed over label sets (several engines), shares averaged."""
    values_of: dict[str, list[float]] = {}
    for line in page.splitlines():
        sample = _LINE.match(line)
        ours = _OURS.get(sample[1]) if sample else None
        if sample and ours:
            try:
                value = float(sample[2])
            except ValueError:
                continue
            if math.isfinite(value):  # by NaN Prometheus says that there is none
                values_of.setdefault(ours, []).append(value)
    row = {name: sum(values) / (len(values) if name.endswith("_share") else 1) for name, values in values_of.items()}
    blocks, free = row.pop("kv_blocks", 0.0), row.pop("kv_blocks_free", None)
    if blocks and free is not None:
        row["kv_used_share"] = 1 - free / blocks
    return row


class EngineMetrics:
    """One kept-alive connection to a server's /metrics. ``key`` is sent as a bearer token, where there is one."""

    name = "engine"

    def __init__(self, url: str, key: str | None = None) -> None:
        self._server = HttpGet(url, key, _PATIENCE_S)
        self.about: About = {"url": f"{url.rstrip('/')}/metrics"}

    def read(self) -> list[Row]:
        try:
            answer = self._server.get("/metrics")
        except NoAnswer as error:
            raise ReadFailed(f"{self.about['url']}: {error}") from error
        if answer.status == 200:
            row = parse_metrics(answer.body.decode("utf-8", "replace"))
            if not row:
                self._server.close()
                raise Absent(f"{self.about['url']} has none of the figures that are known here")
            return [{**row, "took_ns": answer.made_ns}]
        self._server.close()
        if answer.location or answer.status in (401, 403, 404, 405, 501):
            raise Absent(f"the server has no {self.about['url']} for us (it answered {answer})")
        raise ReadFailed(f"{self.about['url']} answered {answer}")


def tree_of(root: psutil.Process | int) -> list[psutil.Process]:
    """A process and all below it; none when it has ended, or may not be seen."""
    try:
        process = psutil.Process(root) if isinstance(root, int) else root
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


class Processes:
    """The trees below some processes, whoever joins or leaves them meanwhile. CPU time is in steps of 10 ms.

    Raises Absent when nobody said which processes are the server's, or they are gone or somebody else's.
    """

    name = "processes"

    def __init__(self, pids: Iterable[int]) -> None:
        try:
            self._roots = [psutil.Process(pid) for pid in pids]
        except psutil.Error as error:
            raise Absent(f"the server's processes cannot be looked at: {error}") from error
        if not self._roots:
            raise Absent(NO_PROCESSES)
        self._tree: dict[psutil.Process, str] = {}
        self._looked_ns = 0
        self.about: About = {"pids": [process.pid for process in self._roots]}

    def read(self) -> list[Row]:
        now = time.monotonic_ns()
        if now - self._looked_ns >= _LOOK_AGAIN_NS:
            labels, self._tree, self._looked_ns = self._tree, {}, now
            for root in self._roots:
                self._tree |= {process: labels.get(process) or label(process) for process in tree_of(root)}
        rows = [row for process, name in self._tree.items() if (row := _sample(process, name)) is not None]
        if not rows:
            raise ReadFailed("no process of the server is there any more")
        return rows


def label(process: psutil.Process) -> str:
    """A name that tells processes of one interpreter apart: module or script; else the program's, or its own title."""
    try:
        words = [word for word in process.cmdline() if word]  # a title leaves empty ones behind it
        name: str = process.name()
    except psutil.Error:
        return "?"
    if len(words) < 2:  # a title replaces the command line
        return words[0].strip() if words else name
    if not _INTERPRETER.match(Path(words[0]).name) or "-c" in words[:-1]:  # what follows may be a key, and is no script
        return name
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
                **({"stopped": True} if process.status() in _STOPPED else {}),
            }
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # it has ended since the last look


class Schedstat:
    """How long each thread has run and waited for a core, as the kernel adds it up (/proc/PID/task/TID/schedstat).

    For where the kernel refuses its records of switches (``switches.py``): sums tell how much a thread waited between
    two samples, not when, nor for whom. Nothing is asked of the threads that are watched. A row a thread that has run
    or waited since its last row; all are sums since it began, and its first has its name. Raises Absent where the
    kernel does not count, or nobody is there.
    """

    name = "schedstat"

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = list(pids)
        self._files: dict[int, tuple[int, int]] = {}  # thread -> its process, the open file
        self._last: dict[int, tuple[int, int]] = {}  # thread -> what it had run, and waited
        self._looked_ns = 0
        # A thread that has run was given a core at least once.
        if not any(map(int, text_of("/proc/thread-self/schedstat").split())):
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
            rows.append(row if known else {**row, "name": text_of(f"/proc/{pid}/task/{tid}/comm")})
        if not self._files:
            raise ReadFailed("no process of the server is there any more")
        return rows

    def _look(self) -> None:
        self._looked_ns = time.monotonic_ns()
        for pid in (process.pid for root in self._roots for process in tree_of(root)):
            try:
                for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                    if tid not in self._files:
                        flags = os.O_RDONLY | os.O_CLOEXEC
                        self._files[tid] = pid, os.open(f"/proc/{pid}/task/{tid}/schedstat", flags)
                        self._last.pop(tid, None)
            except OSError:  # it ended meanwhile, or may not be seen
                continue


class Rapl:
    """The energy counters ``intel-rapl:N`` (packages) and ``intel-rapl:N:M`` (parts of one); AMD's carry the same name.

    ``about`` has each one's name and where it wraps. Raises Absent where there are none, or they may not be read.
    """

    name = "rapl"

    def __init__(self, root: Path = _POWERCAP) -> None:
        domains = {path.name: path for path in sorted(root.glob("intel-rapl:*")) if (path / "energy_uj").exists()}
        if not domains:
            raise Absent("the CPU's energy counter (RAPL) is not there: usual in virtual machines and containers")
        self._counters = {domain: path / "energy_uj" for domain, path in domains.items()}
        try:
            names = {domain: (path / "name").read_text().strip() for domain, path in domains.items()}
            ranges = {domain: int((path / "max_energy_range_uj").read_text()) for domain, path in domains.items()}
            for path in self._counters.values():
                int(path.read_text())
        except PermissionError:
            raise Absent(f"the CPU's energy counter may not be read: as root, chmod -R a+r {root}") from None
        except (OSError, ValueError) as error:
            raise Absent(f"the CPU's energy counter cannot be read: {error}") from error
        self.about: About = {
            "domains": [{"domain": domain, "name": names[domain], "range_uj": ranges[domain]} for domain in domains]
        }

    def read(self) -> list[Row]:
        try:
            return [{"domain": d, "energy_uj": int(path.read_text())} for d, path in self._counters.items()]
        except (OSError, ValueError) as error:
            raise ReadFailed(f"RAPL: {error}") from error


class CpuLimits:
    """How long the server's control groups were kept from running by their CPU limit.

    Rows: ``group``, ``throttled_ns`` and ``throttled_periods`` so far. Raises Absent where no group has a limit.
    """

    name = "limits"

    def __init__(self, pids: Iterable[int]) -> None:
        folders = {folder: limit for pid in pids for folder in _groups(pid) if (limit := cpu_limit(folder))}
        found = {str(folder.relative_to(CONTROL_GROUPS)): limit for folder, limit in folders.items()}
        if not found:
            raise Absent("no control group limits the server's CPU time")
        self._stats = {name: CONTROL_GROUPS / name / "cpu.stat" for name in found}
        self.about: About = {"cores": found}

    def read(self) -> list[Row]:
        try:
            return [{"group": group, **_throttled(path.read_text())} for group, path in self._stats.items()]
        except (OSError, ValueError) as error:
            raise ReadFailed(f"the CPU limit: {error}") from error


def _groups(pid: int) -> list[Path]:
    """The folders of a process's control groups that may limit its CPU time, and of those around them."""
    tops = []
    for _, controllers, path in (line.split(":", 2) for line in text_of(f"/proc/{pid}/cgroup").splitlines()):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = CONTROL_GROUPS / controllers  # of version 2, there is one tree for all of them
        tops += [(top, top / path.strip("/"))]
    folders = [one for top, folder in tops for one in (folder, *folder.parents) if one.is_relative_to(top)]
    return list(dict.fromkeys(folders))


def cpu_limit(folder: Path) -> float | None:
    """The group's limit in cores; None where it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _throttled(stat: str) -> dict[str, int]:
    """How long, and how often, by its cpu.stat: version 2 counts in µs, version 1 in ns."""
    values = {name: int(value) for name, value in (line.split() for line in stat.splitlines())}
    ns = values["throttled_usec"] * 1000 if "throttled_usec" in values else values["throttled_time"]
    return {"throttled_ns": ns, "throttled_periods": values["nr_throttled"]}
