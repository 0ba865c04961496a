"""What a run says of itself so that it can be repeated, and two runs judged comparable: described, kept up to date."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from gapmeter.analysis.command import Command
from gapmeter.analysis.results.manifest import Manifest, Slo
from gapmeter.machine.hardware import describe_hardware, describe_versions, output_of
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.study.keys import Keys


def describe(scenario: Scenario, command: Command, keys: Keys) -> dict[str, Any]:
    """What every manifest says before anything has run: the fields of ``ManifestBase``.

    Without anybody's key: not in the scenario, nor in the command that repeats it.
    """
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    return {
        "status": "running",  # until the end is written
        "scenario": keys.out_of_value(scenario.to_dict()),
        "scenario_digest": scenario.digest(),
        "command": str(keys.out_of_command(command)),
        "started_wall": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(wall_ns / 1e9)),
        "started_wall_ns": wall_ns,
        "started_ns": monotonic_ns,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "git": _git_state(),
    }


def slos_of(scenario: Scenario) -> tuple[Slo, ...]:
    """Its limits as manifests have them."""
    return tuple(Slo(**asdict(slo)) for slo in scenario.slo)


class OpenManifest:
    """The manifest of a run that goes on: what is known so far, and what of it is on disk."""

    def __init__(self, folder: RunFolder, value: Manifest) -> None:
        self.folder, self.value = folder, value
        self._written: Manifest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the load has."""
        return self.value.plan.t0_ns is not None

    def note(self, **fields: Any) -> None:
        """What is known now, or is known better."""
        self.value = self.value.model_copy(update=fields)

    def note_plan(self, **fields: Any) -> None:
        """The same of the plan."""
        self.note(plan=self.value.plan.model_copy(update=fields))

    def note_early_end(self, why: str) -> None:
        """Why the run ended early, unless its load is over already, or an earlier reason is there."""
        if self.value.status == "running":
            self.note(status="incomplete", ended_because=self.value.ended_because or why)

    def write(self) -> None:
        """Raises OSError."""
        self.value.write(self.folder.path)
        self._written = self.value

    def write_unless_over(self) -> None:
        """Once a load that is over is on disk, that stays. Raises OSError."""
        if self._written is None or self._written.status == "running":
            self.write()


def _git_state() -> dict[str, Any] | None:
    """Commit of the scenario author's checkout, and whether it was changed; None outside one."""
    commit = output_of(["git", "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit, "changed": bool(output_of(["git", "status", "--porcelain", "--untracked-files=no"]))}
