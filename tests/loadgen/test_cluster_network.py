"""Workers with addresses and networks of their own: one is cut off for ten seconds, and healed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.cluster import Workers, make_cluster
from loadgen.worker import Exit
from recording import Outcome
from recording.wire import ISSUED
from tests.loadgen.null import plan
from tests.loadgen.test_cluster import ROOT, Crew, records, told

MS = 1_000_000
GATE, GUESTS = "10.231.7.1", ("10.231.7.2", "10.231.7.3", "10.231.7.4")


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


class Guests(Crew):
    """Workers, each in its own namespace."""

    def __init__(self, rooms: list[str]) -> None:
        super().__init__(len(rooms))
        self._rooms = list(rooms)

    def join(self) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", self._rooms.pop(0)]
        command = [*inside, sys.executable, "-m", "gapmeter", "worker", "--master", self.address]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.whole_run
def test_a_network_that_is_cut_for_ten_seconds_loses_nothing_and_issues_nothing_twice(
    tmp_path: Path, rooms: list[str]
) -> None:
    what = plan([index * 40 * MS for index in range(450)], timeout_s=60)
    command = [sys.executable, "-m", "servers.null", "--with-parent", "--host", GATE, "--first-ms", "20"]
    crew = Guests(rooms)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as null:
        assert null.stdout is not None
        try:
            url = f"http://{GATE}:{int(null.stdout.readline())}"
            with make_cluster(what, url, tmp_path, Workers(3, GATE, 0), generator="locust", say=crew.say) as fleet:
                t0 = fleet.start()
                cut_ns = t0 + 3_000 * MS
                time.sleep((cut_ns - time.monotonic_ns()) / 1e9)
                ip("link", "set", f"{rooms[1]}o", "down")
                time.sleep(10)
                ip("link", "set", f"{rooms[1]}o", "up")
                assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
            assert crew.ends() == [0, 0, 0]
        finally:
            for process in crew.processes:
                process.kill()
                process.communicate()
            null.terminate()
    assert [record.index for record in records(tmp_path, ISSUED)] == list(range(450))
    found = records(tmp_path)
    assert [record.index for record in found] == list(range(450))
    late = max((record.end_ns - record.due_ns) / 1e9 for record in found)
    assert late > 1, "the cut was not felt"
    # The way to the target was cut as well: only who was due meanwhile, behind that link, may have failed.
    failed = [record for record in found if record.outcome is not Outcome.OK]
    assert len({record.worker for record in failed}) <= 1
    assert all(-1_000 * MS < record.due_ns - cut_ns < 11_000 * MS for record in failed)
    assert [worker["state"] for worker in told(tmp_path)["workers"]] == ["handed in"] * 3
