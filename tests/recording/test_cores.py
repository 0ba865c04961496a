"""A thread's wait for a core is what the kernel counted between its own work and its waking."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gapmeter_probe.cores import CoreWaits, countable

from recording import CoreThread, RecordWriter, Span, read_records

pytestmark = pytest.mark.skipif(not countable(), reason="this kernel does not count how long threads wait for a core")


def _waits(path: Path) -> list[tuple[int, int, int]]:
    spans = read_records(path).spans
    rows = spans[spans["code"] == Span.CORE_WAIT]
    return [(int(row["n"]), int(row["start_ns"]), int(row["end_ns"])) for row in rows]


def test_a_thread_that_wakes_beside_a_busy_process_on_its_core_has_waited(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x.gap", {"role": "api"})
    waits = CoreWaits(writer)
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    stamps = []

    def sleep_and_wake() -> None:
        os.sched_setaffinity(0, [core])
        for _ in range(40):
            waits.mark()
            asleep = time.monotonic_ns()
            time.sleep(0.003)
            woken = time.monotonic_ns()
            waits.woken(CoreThread.POOL, woken)
            waits.woken(CoreThread.POOL, woken)  # the same moment counts once
            stamps.append((asleep, woken))

    try:
        thread = threading.Thread(target=sleep_and_wake)
        thread.start()
        thread.join()
    finally:
        busy.kill()
        busy.wait()
    writer.close()
    found = _waits(tmp_path / "x.gap")
    assert found
    assert len(found) <= len(stamps)
    for who, start, end in found:
        assert who == CoreThread.POOL
        asleep, woken = next(pair for pair in stamps if pair[1] == end)
        assert asleep - 1_000_000 <= start < end == woken


def test_the_first_look_of_a_thread_records_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x.gap", {"role": "api"})
    waits = CoreWaits(writer)
    waits.woken(CoreThread.LOOP)
    writer.close()
    assert _waits(tmp_path / "x.gap") == []
    assert any(note["type"] == "core_waits" for note in read_records(tmp_path / "x.gap").notes)


def test_without_a_writer_nothing_is_read() -> None:
    waits = CoreWaits(None)
    waits.mark()
    waits.woken(CoreThread.LOOP)
