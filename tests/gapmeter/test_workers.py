"""A run from three workers through the whole command, one of them killed on the way."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.kit.command import Command, crew, settings

RUN = ("run", "smoke", "--engine", "simulated", *settings(
    "load.generator=locust", "load.arrivals=constant", "load.rate=30", "load.requests=360", "load.warmup=0",
    "workload.output_tokens=4",
), "--workers", "3", "--listen", "127.0.0.1:0", "--patience", "6s")  # fmt: skip


@pytest.mark.whole_run
def test_a_worker_killed_on_the_way_is_named_its_share_unissued_and_the_run_invalid_but_readable(
    tmp_path: Path,
) -> None:
    command = Command(RUN, tmp_path)
    with crew(command) as workers:
        time.sleep(max(0.0, (command.await_start() - time.monotonic_ns()) / 1e9 + 5))
        workers[1].kill()
        done = command.done()
        ends = [process.wait(30) for process in workers]
    assert sorted(ends) == [-9, 0, 0]
    assert done.code == 98
    told = done.manifest["workers"]["workers"]
    (dead,) = [worker for worker in told if worker["state"] != "handed in"]
    assert dead["pid"] == workers[1].pid
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
