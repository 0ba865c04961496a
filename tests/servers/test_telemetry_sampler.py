"""The sampler as its own process beside a real server: deadlines, gaps, and what a killed one leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.samples import read_rows
from gapmeter.servers.telemetry import Journal
from gapmeter.servers.telemetry.sampler import SamplerSettings
from tests.kit.servers import answering
from tests.kit.simulated import Server, simulated
from tests.kit.telemetry import read
from tests.kit.wait import limited, until

EVERY_NS = 50_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with simulated(tmp_path_factory.mktemp("watched")) as running:
        yield running


@contextlib.contextmanager
def sampler(folder: Path, url: str, pids: tuple[int, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """A sampler that samples already; it is ended by closing its standard input."""
    (folder / "telemetry").mkdir()
    settings = SamplerSettings(str(folder / "telemetry"), 1e9 / EVERY_NS, 100_000_000, url, True, pids, (), ())
    command = [sys.executable, "-P", "-m", "gapmeter.servers.telemetry.sampler", settings.to_json()]
    # In a session of its own, as a run starts it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(60)


def await_rows(folder: Path, source: str, rows: int) -> None:
    until(lambda: len(read(folder).tables.get(source, ())) >= rows, 120)


def test_processes_and_metrics_are_sampled_and_what_is_not_here_is_told_once(server: Server, tmp_path: Path) -> None:
    with sampler(tmp_path, server.url, (server.process.pid,)):
        await_rows(tmp_path, "engine", 2)
        await_rows(tmp_path, "processes", 8)
    found = read(tmp_path)
    assert found.ended and found.broken_lines == 0
    rows = found.tables["processes"]
    assert {"gapmeter.servers.simulated", "gapmeter.servers.simulated.engine"} <= set(rows["name"])
    assert (rows["rss_bytes"] > 1 << 20).all() and (rows["threads"] >= 1).all()
    for _, mine in rows.groupby("pid"):
        assert mine["cpu_ns"].is_monotonic_increasing and mine["at_ns"].is_monotonic_increasing
    assert (found.tables["engine"]["running"] == 0).all()
    assert {"gpu", "rapl", "pcie"} - set(found.absent) <= set(found.tables)
    absent = [note["source"] for note in found.notes if note["type"] == "absent"]
    assert len(absent) == len(set(absent))
    share = found.cpu_share()
    assert share is not None and 0 < share < 1


def test_samples_and_missed_deadlines_together_are_all_deadlines(server: Server, tmp_path: Path) -> None:
    with sampler(tmp_path, server.url, (server.process.pid,)):
        await_rows(tmp_path, "processes", 8)
    found = read(tmp_path)
    at = sorted(set(found.tables["processes"]["at_ns"]))
    missed = sum(note["count"] for note in found.notes if note["type"] == "missed" and note["lane"] == "fast")
    deadlines = (at[-1] - at[0]) / EVERY_NS
    assert abs(len(at) - 1 + missed - deadlines) <= 2


def test_a_sampler_that_was_stopped_says_which_deadlines_it_missed(server: Server, tmp_path: Path) -> None:
    with sampler(tmp_path, server.url, (server.process.pid,)) as process:
        await_rows(tmp_path, "processes", 5)
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.monotonic_ns()
        time.sleep(1.0)
        woken = time.monotonic_ns()
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: bool((read(tmp_path).tables["processes"]["at_ns"] > woken).any()))
    found = read(tmp_path)
    at = found.tables["processes"]["at_ns"]
    assert not ((at > stopped + EVERY_NS) & (at < woken)).any()
    gaps = [gap for gap in found.gaps if gap.source == "processes" and gap.until_ns > stopped and gap.since_ns < woken]
    assert sum(gap.missed for gap in gaps) >= (woken - stopped) // EVERY_NS - 2


def test_a_samplers_session_has_the_weight_that_every_session_has(tmp_path: Path) -> None:
    """With less, programs that keep its core busy let it in too rarely to empty the ring of switches in time."""
    with sampler(tmp_path, "http://127.0.0.1:9", (os.getpid(),)) as process:
        weight = Path(f"/proc/{process.pid}/autogroup")
        if not weight.exists():
            pytest.skip("the kernel does not group processes by session")
        assert weight.read_text().endswith(" nice 0\n")


def test_a_process_that_begins_just_before_the_end_is_known_too(tmp_path: Path) -> None:
    with (
        sampler(tmp_path, "http://127.0.0.1:9", (os.getpid(),)) as process,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as late,
    ):
        process.stdin.close()
        process.wait(60)
        late.kill()
    if "switches" in (found := read(tmp_path)).absent:
        pytest.skip(found.absent["switches"])
    assert late.pid in {row["pid"] for row in read_rows(tmp_path / "telemetry" / "switches.jsonl")[0]}


def test_a_server_that_is_stopped_is_seen_to_be(tmp_path: Path) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stopped,
        sampler(tmp_path, "http://127.0.0.1:9", (stopped.pid,)),
    ):
        await_rows(tmp_path, "processes", 3)
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: "stopped" in read(tmp_path).tables["processes"])
        os.kill(stopped.pid, signal.SIGCONT)
        until(lambda: not read(tmp_path).tables["processes"]["stopped"].notna().iloc[-1])
        stopped.kill()
    rows = read(tmp_path).tables["processes"]
    seen = rows["stopped"].notna().to_numpy()
    assert seen.any() and not seen[0]


def test_a_killed_sampler_leaves_all_that_it_had_seen(server: Server, tmp_path: Path) -> None:
    with sampler(tmp_path, server.url, (server.process.pid,)) as process:
        await_rows(tmp_path, "processes", 8)
        process.kill()
        process.wait()
    found = read(tmp_path)
    assert len(found.tables["processes"]) >= 8
    assert not found.ended
    assert found.start["hz"] == 1e9 / EVERY_NS
    assert found.broken_lines <= 1


def test_a_server_that_dies_leaves_failed_reads_not_old_values(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with simulated(tmp_path / "server") as running, sampler(tmp_path, running.url, (running.process.pid,)):
        await_rows(tmp_path, "engine", 2)
        running.process.stop()
        died = time.monotonic_ns()
        until(lambda: {"processes", "engine"} <= {g.source for g in read(tmp_path).gaps if g.since_ns > died})
    for source in ("processes", "engine"):
        late = [at for at in read(tmp_path).tables[source]["at_ns"] if at > died]
        assert not late


def test_a_server_without_metrics_is_told_once_and_asked_no_more(tmp_path: Path) -> None:
    with (
        answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url,
        sampler(tmp_path, url, (os.getpid(),)),
    ):
        await_rows(tmp_path, "processes", 8)
        until(lambda: "engine" in read(tmp_path).absent)
    found = read(tmp_path)
    assert "answered 404" in found.absent["engine"]
    assert "engine" not in found.tables
    assert len([note for note in found.notes if note.get("source") == "engine"]) == 1


def test_a_line_that_fits_the_disk_only_in_part_is_dropped_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with limited(resource.RLIMIT_FSIZE, 100):
        journal.write("cpu", [{"busy": 0.5}] * 9, 1_000_000)
    journal.write("cpu", [{"busy": 0.75}], 2_000_000)
    lines = (tmp_path / "cpu.jsonl").read_text().splitlines()
    assert (journal.lines, journal.dropped) == (len(lines), 10 - len(lines))
    assert [json.loads(line)["busy"] for line in lines] == [0.5] * (len(lines) - 1) + [0.75]
    assert 1 < len(lines) < 9
