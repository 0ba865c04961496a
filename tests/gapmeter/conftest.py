"""One short simulated run, made once and copied by those who change it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.command import SIMULATED, gapmeter


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of thirty requests against the simulated engine; nobody may change it."""
    return gapmeter(*SIMULATED, "--quiet", runs=tmp_path_factory.mktemp("finished") / "runs").folder.path


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Callable[[], Path]:
    """A callable that gives a copy of that folder, of the same name, to do with as one likes."""

    def copy() -> Path:
        target = tmp_path / "copies" / str(len(list(tmp_path.glob("copies/*")))) / finished_run.name
        shutil.copytree(finished_run, target)
        return target

    return copy
