"""Workers whose clock is another one: in time namespaces of their own, set ahead by known amounts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gapmeter.loadgen.cluster import Workers, make_cluster
from gapmeter.loadgen.worker import Exit
from gapmeter.records.request import on_clock
from tests.kit.command import ROOT
from tests.kit.loads import plan, records_of
from tests.loadgen.test_cluster import Crew, told

MS = 1_000_000
AHEAD_S = (5000, 0, 77)


class Shifted(Crew):
    """Each worker's CLOCK_MONOTONIC is ahead of ours by so many seconds."""

    def join(self) -> subprocess.Popen[str]:
        ahead = str(AHEAD_S[len(self.processes)])
        inside = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", ahead, "--boottime", ahead]
        command = [*inside, sys.executable, "-P", "-m", "gapmeter", "worker", "--master", self.address]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def say(self, text: str) -> None:
        if "listens" in text and not self.address:
            self.address = text.split("; ")[1].split(" ")[0]
            for _ in AHEAD_S:
                self.processes.append(self.join())


def _may() -> bool:
    words = ["unshare", "--time", "--fork", "--monotonic", "9", "true"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.whole_run
def test_workers_with_clocks_of_their_own_issue_at_the_common_start_and_their_offsets_are_known(
    tmp_path: Path, null: str
) -> None:
    if not _may():
        pytest.skip("a time namespace needs Linux 5.6, root and the program unshare")
    what = plan([index * 20 * MS for index in range(90)])
    crew = Shifted(len(AHEAD_S))
    try:
        with make_cluster(
            what, null, tmp_path, Workers(3, listen_port=0), generator="locust", say=crew.say
        ) as fleet:  # fmt: skip
            t0 = fleet.start()
            assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
            ended = time.monotonic_ns()
        assert crew.ends() == [0, 0, 0]
    finally:
        for process in crew.processes:
            process.kill()
            process.communicate()
    workers = {worker["worker"]: worker for worker in told(tmp_path)["workers"]}
    known = sorted(worker["clock_offset_ns"] for worker in workers.values())
    widths = {worker["clock_half_width_ns"] for worker in workers.values()}
    assert [round(offset / 1e9) for offset in known] == sorted(AHEAD_S)
    for offset, ahead_s in zip(known, sorted(AHEAD_S), strict=True):
        assert abs(offset - ahead_s * 1_000 * MS) <= max(widths) < 100 * MS
    assert [worker["same_clock"] for worker in workers.values()] == [False] * 3, "a namespace is a clock of its own"
    found = records_of(tmp_path)
    assert [record.index for record in found] == list(range(90))
    for record in found:
        worker = workers[record.worker]
        moved = on_clock(record, worker["clock_offset_ns"])
        assert abs(moved.due_ns - t0 - what.due_ns[record.index]) <= 2 * worker["clock_half_width_ns"]
        assert t0 - 2 * worker["clock_half_width_ns"] <= moved.sent_ns <= moved.end_ns <= ended + 100 * MS
        assert moved.end_ns - moved.due_ns == record.end_ns - record.due_ns
