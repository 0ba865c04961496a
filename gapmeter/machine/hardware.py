"""This machine: its hardware and versions, and which cores the load tester and the server get."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from gapmeter.analysis.results.manifest import Hardware, Placement

CHECKOUT = Path(__file__).resolve().parent.parent.parent  # where the environments of engines lie
_PACKAGES = ("gapmeter", "gapmeter-probe", "torch", "transformers", "tokenizers", "uvloop", "httptools", "numpy")


def place(processes: int, *, local_server: bool, share: bool = False) -> Placement:
    """Give the generator's processes the last cores of this process's affinity, the server the others.

    With too few cores for both, or where the user wants it (``share``), both get all of them and ``shared`` says so:
    the report warns.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if not local_server:
        return Placement(generator=cores[-processes:], server=(), shared=len(cores) < processes)
    if share or len(cores) <= processes:
        return Placement(generator=cores, server=cores, shared=True)
    return Placement(generator=cores[-processes:], server=cores[:-processes], shared=False)


def cores_except(generator: Sequence[int]) -> tuple[int, ...]:
    """All cores that this process may use but the generator's; all of them where it has every one."""
    usable = os.sched_getaffinity(0)
    return tuple(sorted(usable - set(generator) or usable))


def describe_hardware() -> Hardware:
    """This machine's, as a manifest has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Hardware(
        cpu=next(models, platform.machine()),
        cores=psutil.cpu_count(logical=True) or 1,
        affinity=tuple(sorted(os.sched_getaffinity(0))),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        gpus=gpus_here(),
    )


@functools.cache
def gpus_here() -> tuple[str, ...]:
    """As nvidia-smi names them, with memory and driver. It takes up to a second, and they do not change."""
    lines = output_of(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return tuple(line.strip() for line in lines.splitlines())


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def output_of(command: list[str]) -> str:
    """What a command printed, or nothing when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def suspended_ns() -> int:
    """How long the machine was suspended since it was started: one of the clocks goes on meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
