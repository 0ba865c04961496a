"""A run from three workers through the whole command, one of them killed on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gapmeter.records import RunFolder
from tests.kit.command import ROOT, Command

RUN = (
    "run", "smoke", "--engine", "simulated", "--set", "load.generator=locust", "--set", "load.arrivals=constant",
    "--set", "load.rate=30", "--set", "load.requests=360", "--set", "load.warmup=0",
    "--set", "workload.output_tokens=4", "--workers", "3", "--listen", "127.0.0.1:0", "--patience", "6s",
)  # fmt: skip


@pytest.mark.whole_run
def test_a_worker_killed_on_the_way_is_named_its_share_unissued_and_the_run_invalid_but_readable(
    tmp_path: Path,
) -> None:
    command = Command(RUN, tmp_path)
    crew: list[subprocess.Popen[bytes]] = []
    try:
        master = command.master()
        words = [sys.executable, "-P", "-m", "gapmeter", "worker", "--master", master]
        quiet = subprocess.DEVNULL
        crew += [subprocess.Popen(words, cwd=ROOT, env={**os.environ}, stderr=quiet) for _ in range(3)]
        time.sleep(max(0.0, (start_ns(tmp_path) - time.monotonic_ns()) / 1e9 + 5))
        crew[1].kill()
        done = command.done()
        ends = [process.wait(30) for process in crew]
    finally:
        for process in (*crew, command.process):
            process.kill()
            process.wait()
    assert sorted(ends) == [-9, 0, 0]
    assert done.code == 98
    told = done.manifest["workers"]["workers"]
    (dead,) = [worker for worker in told if worker["state"] != "handed in"]
    assert dead["pid"] == crew[1].pid
    assert f"worker {dead['worker']} ({dead['host']}, process {dead['pid']}) was not heard for 6 s" in " ".join(
        done.summary["invalid_reasons"]
    )
    counts = done.summary["counts"]
    assert (counts["planned"], counts["issued"], counts["unissued"]) == (360, 240, 120)
    assert done.summary["verdict"] == "INVALID"
    assert done.summary["metrics"]["ttft"]["max_ms"] > 0
    assert set(done.requests["worker"]) == {0, 1, 2} - {dead["worker"]}
    assert done.folder.report.exists()
    progress = re.search(r"p99 TTFT ([\d.]+) ms .*? ([\d,]+) of ([\d,]+) done", done.err)
    assert progress, "workers' histograms make the progress line"
    assert 0 < int(progress[2].replace(",", "")) <= 360


def start_ns(runs: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for path in runs.iterdir():
            try:
                plan = RunFolder(path).read_manifest()["plan"]
            except (OSError, KeyError):
                continue
            if "t0_ns" in plan:
                return int(plan["t0_ns"])
        time.sleep(0.1)
    raise AssertionError("the load did not begin")
