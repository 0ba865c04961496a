"""What a run must say about itself so that it can be repeated, and two runs judged comparable."""

from __future__ import annotations

import time
from typing import Any

from gapmeter.machine.hardware import describe_hardware, describe_versions, output_of
from gapmeter.study.keys import Keys

MANIFEST_VERSION = 1
_SAID_BY_USERS = ("scenario", "target", "points", "sweep", "locustfile")


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










def _git_state() -> dict[str, Any] | None:
    """Commit of the scenario author's checkout, and whether it was changed; None outside one."""
    commit = output_of(["git", "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit, "changed": bool(output_of(["git", "status", "--porcelain", "--untracked-files=no"]))}


