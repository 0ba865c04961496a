"""Neighbors on the server's core: what they take away is nobody's stage, and the run says who had the core."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import psutil
import pytest

from bench.engine import Setting, running
from gapmeter.analysis.ledger.switches import read_watched
from gapmeter.servers.telemetry import Absent
from gapmeter.servers.telemetry.switches import open_switches
from tests.kit.command import gapmeter
from tests.kit.wait import limited

TURN_NS = 3_000_000_000
# Busy in every second turn of the clock that all processes share, asleep in the others.
NEIGHBOR = f"""
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
while True:
    if time.monotonic_ns() // {TURN_NS} % 2 == 0:
        time.sleep(0.001)
"""
NEIGHBORS = 2


def test_a_run_without_the_servers_processes_says_why_nobody_watches_the_cores(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="not on this machine"):
        open_switches(tmp_path, [], [os.getpid()])


def test_a_disk_that_is_full_ends_the_watching_and_tears_no_record(tmp_path: Path) -> None:
    try:
        source = open_switches(tmp_path, [os.getpid()], [])
    except Absent as absent:
        pytest.skip(str(absent))
    for _ in range(10):
        time.sleep(0.001)
    source.read()
    sizes = {path: path.stat().st_size for path in tmp_path.glob("switches-*.bin")}
    assert sum(sizes.values()) > 0
    time.sleep(0.01)
    full = limited(resource.RLIMIT_FSIZE, min(sizes.values()) + 8)  # 8 bytes: part of a record
    with full, pytest.raises(Absent, match="no room"):
        source.read()
    assert all(path.stat().st_size % 8 == 0 for path in sizes)
    assert read_watched(tmp_path) is not None


def test_watching_that_cannot_begin_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Absent):  # where the kernel allows it, the first file cannot be made
        open_switches(tmp_path / "missing", [os.getpid()], [])
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.transformers
@pytest.mark.alone
def test_what_neighbors_take_is_a_wait_for_the_core_that_names_them(tmp_path: Path) -> None:
    try:
        open_switches(tmp_path, [os.getpid()], [])
    except Absent as absent:
        pytest.skip(str(absent))
    core = str(min(os.sched_getaffinity(0)))  # where a launched server is put first
    command = [sys.executable, "-c", NEIGHBOR, core]
    neighbors = [subprocess.Popen(command, start_new_session=True) for _ in range(NEIGHBORS)]
    try:
        done = gapmeter(
            "run", "smoke", "--engine", "transformers", "--set", "load.rate=2", "--set", "load.duration=24s",
            "--set", "load.warmup=0", runs=tmp_path / "runs",
        )  # fmt: skip
    finally:
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()
    quiet, busy = (_means(done.folder.path, turn) for turn in (0, 1))
    added = busy - quiet
    elsewhere = added.drop(["core_wait_ns", "queue_ns"])  # who comes behind those who wait queues
    assert added["core_wait_ns"] > 5, added
    assert elsewhere.abs().max() < 0.2 * added["core_wait_ns"], added
    first, *_ = done.summary["ledger"]["core_held"]
    assert (first["process"], first["stage"]) == ("another program", "")
    assert first["share"] > 0.8


@contextlib.contextmanager
def _limited(pid: int, share: float) -> Iterator[None]:
    """A control group of its own for a process and all below it, with so much of a core. Raises OSError."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if second else "/sys/fs/cgroup/cpu") / f"gapmeter-{pid}"
    group.mkdir()
    try:
        if second:
            (group / "cpu.max").write_text(f"{share * 100_000:.0f} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{share * 100_000:.0f}")
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in tree:
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
        for process in tree:
            (group.parent / "cgroup.procs").write_text(str(process.pid))
    finally:
        group.rmdir()


@pytest.mark.transformers
@pytest.mark.alone
def test_what_a_containers_cpu_limit_takes_is_a_wait_for_the_core_that_names_it(tmp_path: Path) -> None:
    closed = ("load.arrivals=closed", "load.rate=null", "load.duration=null", "load.warmup=0", "load.concurrency=1")
    with running("transformers", tmp_path, Setting()) as engine:
        try:
            with _limited(engine.process.pid, 0.5):
                done = engine.load(tmp_path / "runs", [*closed, "load.requests=120"])
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
    if done.result.ledger.core_held is None:
        pytest.skip("the kernel does not tell who runs on which core")
    # What else runs on this machine takes cores as well.
    held = [each for each in done.result.ledger.core_held if each.process != "another program"]
    assert held[0].process == "CPU limit"
    assert held[0].share > 0.8 * sum(each.share for each in held)
    rows = pd.read_parquet(done.folder / "ledger.parquet").query("event == 'last_token'")
    assert rows["core_wait_ns"].sum() > 0.3 * rows["total_ns"].sum()  # it wants a core and has half of one
    assert any(warning.code == "cores" and "CPU limit" in warning.text for warning in done.result.warnings)


@pytest.mark.transformers
@pytest.mark.alone
def test_a_server_that_is_stopped_waited_for_nobody_while_it_was(tmp_path: Path) -> None:
    stops = list[tuple[int, int]]()

    def stop(tree: list[psutil.Process]) -> None:
        for _ in range(3):
            time.sleep(2)
            begun = time.monotonic_ns()
            for process in tree:
                process.suspend()
            time.sleep(0.5)
            stops.append((begun, time.monotonic_ns()))
            for process in tree:
                process.resume()

    open_loop = ("load.arrivals=poisson", "load.rate=8", "load.duration=9s", "load.warmup=0", "load.requests=null")
    with running("transformers", tmp_path, Setting()) as engine, ThreadPoolExecutor(1) as beside:
        server = psutil.Process(engine.process.pid)
        stopped = beside.submit(stop, [server, *server.children(recursive=True)])
        done = engine.load(tmp_path / "runs", open_loop)
        stopped.result()
    if done.result.ledger.core_held is None:
        pytest.skip("the kernel does not tell who runs on which core")
    requests = pd.read_parquet(done.folder / "requests.parquet")
    took = sum(
        (requests["last_token_ns"].clip(upper=end) - requests["due_ns"].clip(lower=begun)).clip(lower=0).sum()
        for begun, end in stops
    )
    (held,) = (each for each in done.result.ledger.core_held if each.process == "stopped")
    assert held.mean_ms * len(requests) == pytest.approx(took / 1e6, rel=0.25)
    assert any(warning.code == "stopped" for warning in done.result.warnings)


def _means(folder: Path, turn: int) -> pd.Series:
    """Every stage's mean to the last token, ms, of the requests that came and went in turns of one kind."""
    requests = pd.read_parquet(folder / "requests.parquet")
    turns = [requests[stamp] // TURN_NS for stamp in ("due_ns", "last_token_ns")]
    chosen = requests["request_id"][(turns[0] == turns[1]) & (turns[0] % 2 == turn)]
    assert len(chosen) > 5
    rows = pd.read_parquet(folder / "ledger.parquet").query("event == 'last_token' and request_id in @chosen")
    stages = [
        name
        for name in rows
        if name.endswith("_ns") and name not in ("total_ns", "strict_ns", "transit_ns", "unstamped_ns")
    ]
    return rows[stages].fillna(0).mean() / 1e6
