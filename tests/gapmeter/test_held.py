"""A folder that a gapmeter is at work in is kept from others, for as long as that goes on and no longer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gapmeter.errors import UserError
from gapmeter.options import Options
from gapmeter.study.capacity import find_capacity
from gapmeter.study.settings import find_capacities
from gapmeter.study.sweep import run_sweep

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


def is_free(folder: Path) -> bool:
    """Whether another gapmeter could have it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.mark.parametrize("study", STUDIES)
def test_a_studys_folder_is_free_once_it_is_over_however_it_ended(study: str, tmp_path: Path) -> None:
    """Also in a process that goes on, such as a notebook's."""
    options, resume = Options(runs=tmp_path, quiet=True), None
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.suppress(UserError):
            STUDIES[study](options, resume)
        folders = [path for path in tmp_path.iterdir() if (path / "manifest.json").exists()]
        assert folders and all(map(is_free, folders))
        assert len(os.listdir("/proc/self/fd")) == before
        resume = folders[0]
