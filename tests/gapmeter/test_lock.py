"""A folder that a gapmeter is at work in is kept from others, for as long as that goes on and no longer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gapmeter.errors import UserError
from gapmeter.options import Options
from gapmeter.runs.listing import list_known
from gapmeter.runs.lock import ask_to_stop, is_asked_to_stop, is_locked, locked
from gapmeter.study.capacities import find_capacities
from gapmeter.study.capacity import find_capacity
from gapmeter.study.sweep import run_sweep
from tests.kit.command import SIMULATED, Command

NOBODY = ("server.engine=attach", "server.url=http://127.0.0.1:9")  # every load of these fails
SWEEP = f"sweep={json.dumps({'load.rate': [30, 40]})}"
Study = Callable[[Options, Path | None], object]
STUDIES: dict[str, Study] = {
    "sweep": lambda options, resume: run_sweep("smoke", (*NOBODY, SWEEP), options, resume),
    "search": lambda options, resume: find_capacity("smoke", NOBODY, options, resume=resume),
    "searches": lambda options, resume: find_capacities(
        "smoke", (*NOBODY, f"sweep={json.dumps({'workload.output_tokens': [4, 8]})}"), options,
        resume=[resume] if resume else [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("study", STUDIES)
def test_a_studys_folder_is_free_once_it_is_over_however_it_ended(study: str, tmp_path: Path) -> None:
    """Also in a process that goes on, such as a notebook's."""
    options, resume = Options(runs=tmp_path, quiet=True), None
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.suppress(UserError):
            STUDIES[study](options, resume)
        folders = [path for path in tmp_path.iterdir() if (path / "manifest.json").exists()]
        assert folders and not any(map(is_locked, folders))
        assert len(os.listdir("/proc/self/fd")) == before
        resume = folders[0]


def test_who_is_asked_to_stop_when_its_load_is_over_leaves_no_trace_of_it(tmp_path: Path) -> None:
    with locked(tmp_path):
        ask_to_stop(tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_is_refused_a_folder_leaves_its_owner_asked_to_stop(tmp_path: Path) -> None:
    owner = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        ask_to_stop(tmp_path)
        with pytest.raises(UserError, match="at work in"), locked(tmp_path):
            pass
        assert is_asked_to_stop(tmp_path)
    finally:
        os.close(owner)


@pytest.mark.whole_run
def test_a_runs_folder_is_held_from_before_its_server_starts_until_its_report_is_there(tmp_path: Path) -> None:
    command = Command(SIMULATED, tmp_path)
    seen = set()
    while command.process.poll() is None:
        for folder in [path for path in tmp_path.iterdir() if (path / "manifest.json").exists()]:
            state = is_locked(folder), list_known(tmp_path)[0].state
            if not (folder / "report.html").exists():
                seen.add(state)
    assert command.done().code in (0, 98, 99)
    assert (True, "running") in seen and not any(held is False for held, _ in seen)


def test_who_only_asks_whether_a_folder_is_held_keeps_nobody_from_it(tmp_path: Path) -> None:
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.0005):
            is_locked(tmp_path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(1000):
            with locked(tmp_path):
                pass
    finally:
        over.set()
        asking.join()
