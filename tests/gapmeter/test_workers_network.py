"""A run whose workers have addresses and networks of their own: one is cut off for ten seconds, and healed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.command import Command, crew, settings
from tests.kit.servers import null_process

# Of this process alone: another test run on the same machine, or what a killed one left, has another.
NETWORK = f"10.{231 + os.getpid() // 250 % 20}.{os.getpid() % 250}"
GATE, GUESTS = f"{NETWORK}.1", tuple(f"{NETWORK}.{k}" for k in (2, 3, 4))
REQUESTS, CUT_AFTER_S, CUT_S = 400, 3, 10


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def rooms() -> Iterator[list[str]]:
    """Three network namespaces on one bridge, with the master's address on it."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    mark = f"g{os.getpid() % 100_000}"
    names = [f"{mark}-{k}" for k in range(3)]
    try:
        try:
            ip("link", "add", mark, "type", "bridge")
        except subprocess.CalledProcessError:
            pytest.skip("this system makes no bridge")
        ip("addr", "add", f"{GATE}/24", "dev", mark)
        ip("link", "set", mark, "up")
        for name, address in zip(names, GUESTS, strict=True):
            ip("netns", "add", name)
            ip("link", "add", f"{name}o", "type", "veth", "peer", "name", f"{name}i", "netns", name)
            ip("link", "set", f"{name}o", "master", mark, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}i")
            ip("-n", name, "link", "set", f"{name}i", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", mark)


@pytest.fixture
def target() -> Iterator[str]:
    """A null server on the bridge, 20 ms to the first token; its address."""
    with null_process("--host", GATE, "--first-ms", "20") as (_, port):
        yield f"http://{GATE}:{port}"


@pytest.mark.whole_run
def test_a_network_that_is_cut_for_ten_seconds_loses_nothing_and_issues_nothing_twice(
    tmp_path: Path, rooms: list[str], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPMETER_WORKER_SECRET", "no room without it")
    words = settings(
        "load.generator=locust", "load.arrivals=constant", "load.rate=25", f"load.requests={REQUESTS}", "load.warmup=0",
        "workload.prompt_tokens=16", "workload.output_tokens=4", "load.timeout=60s", "slo=[]",
    )  # fmt: skip
    command = Command(
        ("run", "smoke", "--url", target, "--model", "null-server", *words, "--workers", "3", "--listen", f"{GATE}:0"),
        tmp_path,
    )
    with crew(command, [("ip", "netns", "exec", room) for room in rooms]) as workers:
        cut_ns = command.await_start() + CUT_AFTER_S * 1_000_000_000
        time.sleep(max(0.0, (cut_ns - time.monotonic_ns()) / 1e9))
        ip("link", "set", f"{rooms[1]}o", "down")
        time.sleep(CUT_S)
        ip("link", "set", f"{rooms[1]}o", "up")
        done = command.done()
        ends = [process.wait(30) for process in workers]
    assert ends == [0, 0, 0], done.err
    assert done.code in (0, 98), done.err  # what was due behind the cut may have been sent late
    assert [worker["state"] for worker in done.manifest["workers"]["workers"]] == ["handed in"] * 3
    requests, counts = done.requests, done.summary["counts"]
    assert sorted(requests.index) == list(range(REQUESTS))
    assert (counts["planned"], counts["issued"], counts["unissued"]) == (REQUESTS, REQUESTS, 0)
    assert ((requests["end_ns"] - requests["due_ns"]) / 1e9).max() > 1, "the cut was not felt"
    # The way to the target was cut as well: only who was due meanwhile, behind that link, may have failed.
    failed = requests[requests["outcome"] != "ok"]
    assert failed["worker"].nunique() <= 1
    assert failed["due_ns"].between(cut_ns - 1_000_000_000, cut_ns + (CUT_S + 1) * 1_000_000_000).all()
    assert done.folder.report.exists()
