"""What a run must say about itself so that it can be repeated, and two runs judged comparable."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from gapmeter.study.keys import Keys

MANIFEST_VERSION = 1
_SAID_BY_USERS = ("scenario", "target", "points", "sweep", "locustfile")
_PACKAGES = ("gapmeter", "gapmeter-probe", "torch", "transformers", "tokenizers", "uvloop", "httptools", "numpy")


def describe_run(scenario: dict[str, Any], digest: str, command: str) -> dict[str, Any]:
    """The manifest's first form, before anything has run: ``status`` is "running" until the end is written."""
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    return {
        "schema_version": MANIFEST_VERSION,
        "status": "running",
        "scenario": scenario,
        "scenario_digest": digest,
        "command": command,
        "started_wall": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(wall_ns / 1e9)),
        "started_wall_ns": wall_ns,
        "started_ns": monotonic_ns,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "git": _git_state(),
    }


def without_keys(manifest: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """The same without anybody's key: not in the scenario, the server's command line, or the command that repeats it.

    What repeats it then has REDACTED in its place. Packages' versions and digests stay, whatever a key looks like.
    """
    told = {"command": keys.out_of_command(str(manifest["command"]))}
    told |= {name: keys.out_of_value(manifest[name]) for name in _SAID_BY_USERS if name in manifest}
    return manifest | told


def describe_hardware() -> dict[str, Any]:
    """CPU, memory and GPUs, in words."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "affinity": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": _gpus(),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = _output(query)
    return [line.strip() for line in listed.splitlines()] if listed else []


def _git_state() -> dict[str, Any] | None:
    """Commit of the scenario author's checkout, and whether it was changed; None outside one."""
    commit = _output(["git", "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit, "changed": bool(_output(["git", "status", "--porcelain", "--untracked-files=no"]))}


def _output(command: list[str]) -> str:
    """What a command printed, or nothing when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
