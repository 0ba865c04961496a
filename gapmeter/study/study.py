"""Many loads in one folder: which are run in which order on which server, and what is left to run after an interruption."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario

Visit = tuple[int, int]  # a point and a repeat, both from 0


def visits(servers: Sequence[Hashable], repeats: int, seed: int) -> list[list[Visit]]:
    """Which point is run when: a list for each server that is started. ``servers``: each point's, equal for one.

    A machine's speed drifts: with points in the order of their values the drift would look like an effect. Every
    repeat visits all points of its server in an order of its own before the next one begins; the servers' order is
    drawn too. The same seed gives the same order.
    """
    rng = random.Random(f"sweep {seed}")
    by_server: dict[Hashable, list[int]] = {}
    for point, server in enumerate(servers):
        by_server.setdefault(server, []).append(point)
    groups = list(by_server.values())
    rng.shuffle(groups)
    return [[(point, repeat) for repeat in range(repeats) for point in rng.sample(group, len(group))]
            for group in groups]  # fmt: skip


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
