"""A run's records are repeated into a longer run, on which each command is timed in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from bench.growth import commands_on, commands_table, repeat, timed
from gapmeter.records import RunFolder
from tests.kit.command import SIMULATED, gapmeter

pytestmark = pytest.mark.whole_run


def test_other_commands_are_timed_on_a_run_that_was_made_longer(tmp_path: Path) -> None:
    source = gapmeter(*SIMULATED, "--quiet", runs=tmp_path / "runs").folder
    longer = RunFolder.at(tmp_path / "longer")
    repeat(source, longer, 100)
    took, _ = timed("report", str(longer.path))
    assert len(pd.read_parquet(longer.path / "requests.parquet")) == 100
    rows = commands_on(longer.path, tmp_path)
    assert [row["command"] for row in rows] == ["verify", "compare", "explain", "runs"]
    assert [row["of"] for row in rows] == 3 * ["400 tokens"] + ["1,000 folders"]
    assert all(row["wall_s"] > 0 and row["cpu_s"] > 0 and row["peak_gb"] > 0 for row in (took, *rows))
    assert len(commands_table(rows)) == 2 + len(rows)


def test_why_a_command_failed_is_told(tmp_path: Path) -> None:
    _, why = timed("report", str(tmp_path))
    assert why.startswith("exit code 2: ") and str(tmp_path) in why
