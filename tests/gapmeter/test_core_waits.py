"""A neighbor on the server's core: what it takes away is nobody's stage, and the report says who had the core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from gapmeter.servers.telemetry.journal import Absent
from gapmeter.servers.telemetry.switches import open_switches
from tests.gapmeter.command import gapmeter

BUSY = "import os; os.sched_setaffinity(0, [int(__import__('sys').argv[1])])\nwhile True: pass"
ASKED = (
    "--set",
    "load.rate=8",
    "--set",
    "load.duration=8s",
    "--set",
    "load.warmup=0",
    "--set",
    "server.args.forward_ms=4",
)


@pytest.fixture(scope="module", autouse=True)
def _kernel_tells(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        open_switches(tmp_path_factory.mktemp("switches"), [os.getpid()], [])
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.mark.whole_run
@pytest.mark.alone
def test_what_a_neighbor_on_its_core_takes_is_a_wait_for_the_core_that_names_it(tmp_path: Path) -> None:
    quiet = gapmeter("run", "smoke", "--engine", "simulated", *ASKED, runs=tmp_path / "quiet")
    core = json.loads((quiet.folder.path / "manifest.json").read_text())["placement"]["server"][0]
    neighbor = subprocess.Popen([sys.executable, "-c", BUSY, str(core)])
    try:
        busy = gapmeter("run", "smoke", "--engine", "simulated", *ASKED, runs=tmp_path / "busy")
    finally:
        neighbor.kill()
        neighbor.wait()
    before, after = (_means(done.folder.path) for done in (quiet, busy))
    added = after - before
    taken = {name: ms for name, ms in added.items() if name not in ("core_wait_ns", "queue_ns", "engine_wait_ns")}
    assert added["core_wait_ns"] > 5
    assert max(taken.values()) < 0.2 * added["core_wait_ns"], taken
    first, *_ = busy.summary["ledger"]["core_held"]
    assert (first["process"], first["stage"]) == ("another program", "")
    assert first["share"] > 0.8


def _means(folder: Path) -> pd.Series:
    """Every stage's mean to the last token, ms."""
    rows = pd.read_parquet(folder / "ledger.parquet").query("event == 'last_token'")
    stages = [name for name in rows if name.endswith("_ns") and name not in ("total_ns", "strict_ns", "transit_ns")]
    return rows[stages].fillna(0).mean() / 1e6
