"""The folder of what consists of many runs, a sweep or a capacity search: made, taken up again, told from a run's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario

SWEEP, SEARCH = "sweep", "capacity"  # as manifest.json and summary.json have them
NAMES: Mapping[str, str] = {SWEEP: "a sweep", SEARCH: "a capacity search"}


def make_parent(runs: Path, scenario: Scenario, kind: str) -> RunFolder:
    """A fresh folder. Raises UserError when it cannot be made."""
    try:
        return RunFolder.create(runs, f"{scenario.name}-{kind}", scenario.digest(), parts=())
    except OSError as error:
        raise UserError(f"no folder can be made in {runs}: {reason_of(error)}", errors.USAGE) from error


def take_up(path: Path, scenario: Scenario, kind: str) -> tuple[RunFolder, dict[str, Any]]:
    """A folder that was begun earlier, with its manifest. Raises UserError for any other."""
    folder, what = RunFolder(path), NAMES[kind]
    try:
        manifest = folder.read_manifest()
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} is not the folder of {what}: {error}", errors.USAGE) from error
    if manifest.get("kind") != kind:
        raise UserError(f"--resume: {path} is not the folder of {what}", errors.USAGE)
    if manifest.get("scenario_digest") != scenario.digest():
        text = f"--resume: {path} is {what} of another scenario; begun with: {manifest.get('command', 'nobody knows')}"
        raise UserError(text, errors.USAGE)
    manifest["status"] = "running"
    return folder, manifest
