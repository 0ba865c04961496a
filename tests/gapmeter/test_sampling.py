"""Telemetry in whole runs: in the folder, in its hashes, in the summary; and off when asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.command import SIMULATED, gapmeter

pytestmark = pytest.mark.whole_run


def test_a_run_is_sampled_beside_its_load_and_says_what_is_not_here(tmp_path: Path) -> None:
    done = gapmeter(*SIMULATED, "--set", "load.requests=90", "-v", runs=tmp_path)
    told = done.summary["telemetry"]
    names = {process["name"] for process in told["processes"]}
    assert "api (gapmeter.servers.simulated)" in names
    assert told["sampler"]["complete"] and 0 < told["sampler"]["cpu_share"] < 0.5
    assert told["utilisation"]["forward_share_of_window"] > 0
    files = done.manifest["files"]
    assert {"telemetry/sampler.jsonl", "telemetry/processes.jsonl"} <= set(files)
    assert done.summary["roofline"]["why"] == "the simulated engine computes nothing"
    assert " device  " in done.err
    assert 'id="device"' in done.folder.report.read_text()
    assert not done.left


def test_telemetry_that_is_switched_off_leaves_no_file_and_no_figure(tmp_path: Path) -> None:
    done = gapmeter(*SIMULATED, "--set", "telemetry.hz=0", runs=tmp_path)
    assert not list(done.folder.telemetry.iterdir())
    assert done.summary["telemetry"] is None
    assert 'id="device"' not in done.folder.report.read_text()
