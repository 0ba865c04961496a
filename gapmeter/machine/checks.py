"""Is this machine fit to time anything? Clock, timer, cores, other work, limits, memory: one finding each."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from gapmeter.machine.hardware import place
from gapmeter.records.timer import Timer

_NAME_WIDTH = 17
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    ``seen`` is what is there, in words; ``remedy`` what to do about a miss ("" when ``ok``); ``needed`` marks what no
    run can do without.
    """

    name: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = False


def judged(name: str, ok: bool, seen: str, remedy: str, *, needed: bool = False) -> Finding:
    """A finding that keeps its remedy only for a miss."""
    return Finding(name, ok, seen, "" if ok else remedy, needed)


def render(findings: Sequence[Finding]) -> str:
    """A line a finding: v holds, ! a miss, x a miss without which no run is possible; its remedy beneath."""
    lines = [line for finding in findings for line in _lines(finding)]
    return "\n".join([*lines, "", _total(findings)])


def _lines(finding: Finding) -> list[str]:
    sign = "v" if finding.ok else "x" if finding.needed else "!"
    indent = " " * (_NAME_WIDTH + 4)
    first = f" {sign} {finding.name:<{_NAME_WIDTH}} "
    seen = textwrap.wrap(finding.seen, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    arrow = f"{indent}-> "
    remedy = textwrap.wrap(finding.remedy, _WIDTH, initial_indent=arrow, subsequent_indent=f"{indent}   ")
    return seen + remedy


def _total(findings: Sequence[Finding]) -> str:
    stop = [finding.name for finding in findings if finding.needed and not finding.ok]
    if stop:
        return f"No run can be measured here before this is mended: {', '.join(stop)}."
    misses = sum(not finding.ok for finding in findings)
    if not misses:
        return "Everything that was looked at is as it should be."
    return f"Runs can be measured here; {misses} of {len(findings)} things could be better."


STREAMS = 10_000
_SPARE_FILES = 240  # sockets of the loop, records, logs, libraries
_FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
_WATCH_S = 0.4
_TICK_NS = 5_000_000
_GIB = 2**30


def check_machine() -> list[Finding]:
    """Everything about the machine itself; takes about a second."""
    return [
        clock(),
        timer(),
        cores(),
        governor(),
        other_work(),
        open_files(),
        ports(),
        memory(),
        shared_memory(),
        disk(),
    ]


def clock() -> Finding:
    """The clock that every stamp comes from."""
    info = time.get_clock_info("monotonic")
    began = time.perf_counter_ns()
    for _ in range(10_000):
        time.monotonic_ns()
    cost_ns = (time.perf_counter_ns() - began) / 10_000
    source = _text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    return judge_clock(source, info.resolution * 1e9, cost_ns)


def judge_clock(source: str, resolution_ns: float, cost_ns: float) -> Finding:
    """``source`` is the kernel's clock source, "" where it is hidden; then the cost of a reading decides."""
    ok = resolution_ns <= 1_000 and (source in _FAST_CLOCKS or (not source and cost_ns < 300))
    origin = source or "a hidden source"
    seen = f"CLOCK_MONOTONIC from {origin}, resolution {resolution_ns:.0f} ns, {cost_ns:.0f} ns a read"
    remedy = "every stamp is a slow system call; boot with clocksource=tsc (or move off this hypervisor's hpet/acpi_pm)"
    return judged("clock", ok, seen, remedy, needed=resolution_ns > 1_000_000)


def timer() -> Finding:
    """How late the generator's own timer wakes, over 60 deadlines that are 5 ms apart."""
    try:
        late_ns = uvloop.run(_lateness(60))
    except OSError as error:
        return Finding(
            "timer", False, f"no timerfd: {error}", "run on Linux 2.6.25 or newer, outside a filter", needed=True
        )
    return judge_timer(late_ns)


def judge_timer(late_ns: Sequence[int]) -> Finding:
    """``late_ns`` is how late each deadline was served."""
    median, worst = statistics.median(late_ns) / 1e6, max(late_ns) / 1e6
    seen = f"timerfd late by {median:.2f} ms (median), {worst:.2f} ms (worst of {len(late_ns)})"
    remedy = "something else takes the generator's core (see other work), or the hypervisor is slow to wake it"
    return judged("timer", median < 0.3 and worst < 5, seen, remedy)


async def _lateness(count: int) -> list[int]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    late: list[int] = []
    start = time.monotonic_ns() + _TICK_NS

    def wake() -> None:
        late.append(time.monotonic_ns() - (start + len(late) * _TICK_NS))
        if len(late) < count:
            ticker.arm(start + len(late) * _TICK_NS)
        elif not done.done():
            done.set_result(None)

    ticker = Timer(loop, wake)
    try:
        ticker.arm(start)
        await asyncio.wait_for(done, 10)
    finally:
        ticker.close()
    return late


def cores() -> Finding:
    """Whether load generator and server can each have cores of their own."""
    usable = tuple(sorted(os.sched_getaffinity(0)))
    return judge_cores(usable, _quota(), [_siblings(core) for core in usable])


def judge_cores(usable: Sequence[int], quota: float | None, siblings: Sequence[str]) -> Finding:
    """``quota`` is the container's limit in cores (None: none), ``siblings`` each core's threads."""
    limit = "" if quota is None else f", limited to {quota:g} of them by the container"
    seen = f"{len(usable)} usable{limit}"
    physical = len(set(siblings))
    if len(usable) < 2 or (quota is not None and quota < 2):
        remedy = (
            "generator and server must share a core, whose queue shows up as latency: give 2 or more, or attach (--url)"
        )
        return Finding("cores", False, seen, remedy)
    if physical < 2:
        remedy = "they are two threads of one physical core and slow each other down: give 2 physical cores or more"
        return Finding("cores", False, f"{seen}, on one physical core", remedy)
    if quota is not None and quota < len(usable):
        remedy = (
            "a quota pauses threads for milliseconds when it is used up: pin to whole cores (--cpuset-cpus) instead"
        )
        return Finding("cores", False, seen, remedy)
    return Finding("cores", True, f"{seen}: {_split()}")


def _split() -> str:
    placed = place(1, local_server=True)
    return f"generator on {_listed(placed.generator)}, a launched server on {_listed(placed.server)}"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) if len(numbers) < 5 else f"{numbers[0]}..{numbers[-1]} ({len(numbers)})"


def _quota() -> float | None:
    """CPU limit of this process's cgroup in cores, under version 2 or 1; None without one."""
    limit, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not limit:
        limit = _text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _siblings(core: int) -> str:
    found = _text(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return found or str(core)


def governor() -> Finding:
    """Whether the kernel may slow the cores down between requests."""
    found = {path.read_text().strip() for path in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")}
    seen = ", ".join(sorted(found)) or "not visible from here (usual in a virtual machine)"
    remedy = "cores that clock down between requests make light load look slow: cpupower frequency-set -g performance"
    return judged("frequency", found <= {"performance"}, seen, remedy)


def other_work() -> Finding:
    """What else runs, watched for a moment: it becomes latency in every figure."""
    before = psutil.cpu_times()
    watched = _cpu_by_process()
    time.sleep(_WATCH_S)
    after = psutil.cpu_times()
    used = {
        pid: (seconds - watched[pid][0], name) for pid, (seconds, name) in _cpu_by_process().items() if pid in watched
    }
    idle = (after.idle + after.iowait) - (before.idle + before.iowait)
    stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    busy = max(0.0, (os.cpu_count() or 1) - idle / _WATCH_S)
    busiest = [f"{name} ({pid})" for pid, (_, name) in sorted(used.items(), key=lambda item: -item[1][0])[:3]]
    return judge_other_work(busy, stolen / _WATCH_S, os.getloadavg()[0], busiest)


def judge_other_work(busy: float, stolen: float, load: float, busiest: Sequence[str]) -> Finding:
    """``busy`` and ``stolen`` are in cores, ``load`` is the one-minute load average, ``busiest`` names processes."""
    seen = f"{busy:.1f} cores busy just now, load average {load:.1f}"
    if stolen > 0.05:
        remedy = "other guests of this host take that time away, unseen by any probe here: use a host of your own"
        return Finding("other work", False, f"{seen}, {stolen:.2f} cores stolen by the hypervisor", remedy)
    remedy = f"let it finish, or keep it off these cores. Busiest: {', '.join(busiest)}"
    return judged("other work", busy < 0.25, seen, remedy)


def _cpu_by_process() -> dict[int, tuple[float, str]]:
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        times = process.info["cpu_times"]
        if times and process.pid != os.getpid():
            found[process.pid] = (times.user + times.system, process.info["name"])
    return found


def open_files() -> Finding:
    """One socket a stream, on either side."""
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    """Limits as getrlimit gives them; -1 is unlimited."""
    wanted = STREAMS + _SPARE_FILES
    enough = soft == resource.RLIM_INFINITY or soft >= wanted
    seen = f"{_number(soft)} allowed (hard limit {_number(hard)}); {STREAMS:,} streams at once need {wanted:,}"
    raised = f"ulimit -n {wanted}" if hard == resource.RLIM_INFINITY or hard >= wanted else _raise_hard(wanted)
    return judged("open files", enough, seen, raised)


def _raise_hard(wanted: int) -> str:
    return (
        f"as root: ulimit -n {wanted}; for good: nofile in /etc/security/limits.conf, LimitNOFILE= or --ulimit nofile="
    )


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def ports() -> Finding:
    """Each connection to one server takes a local port, and new ones queue at the listener."""
    low, high = map(int, (_text("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split())
    backlog = int(_text("/proc/sys/net/core/somaxconn") or 4096)
    seen = f"{high - low + 1:,} local ports, listen queue {backlog:,}"
    remedy = "sysctl -w net.ipv4.ip_local_port_range='15000 65000' net.core.somaxconn=4096"
    return judged("connections", high - low + 1 > STREAMS and backlog >= 1024, seen, remedy)


def memory() -> Finding:
    """What is free, or what the container still allows."""
    available = psutil.virtual_memory().available / _GIB
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, (int(limit) - int(used)) / _GIB)
    seen = f"{available:.1f} GiB free"
    return judged("memory", available >= 4, seen, "the built-in tiny model wants 2 GiB with Transformers, 4 with vLLM")


def shared_memory() -> Finding:
    """vLLM's processes talk through /dev/shm; containers give it 64 MiB by default."""
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", False, "not there", "mount a tmpfs of 1 GiB there; vLLM's processes talk through it")
    free = shutil.disk_usage("/dev/shm").free / _GIB
    remedy = "vLLM's processes talk through it: docker run --shm-size=1g (or --ipc=host)"
    return judged("/dev/shm", free >= 0.95, f"{free:.1f} GiB free", remedy)


def disk() -> Finding:
    """Where runs and environments go."""
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    remedy = "2 GiB for .venv, 4 more for vLLM's, 5 to 50 MB a run"
    return judged("disk", free >= 8, f"{free:.0f} GiB free in {Path.cwd()}", remedy, needed=free < 0.2)


def system() -> Finding:
    """The kernel: placement, timers and the guard of launched servers are Linux's."""
    seen = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return judged("system", platform.system() == "Linux", seen, "use Linux (a container or WSL 2 will do)", needed=True)


def _text(path: str) -> str:
    """A kernel file's text, "" where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
