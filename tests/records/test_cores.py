"""A thread's wait for a core is what the kernel counted between its own work and its waking."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gapmeter_probe.vitals import CoreWaits, countable, threads_named

from gapmeter.records import CoreThread, RecordWriter, Span, read_records

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
        until, long = time.monotonic() + 20, 0
        while long < 5 and time.monotonic() < until:  # often a woken thread is let in at once
            waits.mark()
            before, asleep = _run_queue_ns(), time.monotonic_ns()
            time.sleep(0.003)
            woken = time.monotonic_ns()
            waits.woken(CoreThread.POOL, woken)
            waits.woken(CoreThread.POOL, woken)  # the same moment counts once
            long += _run_queue_ns() - before > 100_000
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
    ends = {woken: asleep for asleep, woken in stamps}
    waited = [(start, end) for who, start, end in found if who == CoreThread.POOL and end in ends]
    assert waited
    assert len(waited) == len(found)  # nothing else is recorded: what is lost in the middle of work is left where it is
    assert all(ends[end] - 1_000_000 <= start < end for start, end in waited)


def test_a_core_that_was_lost_in_the_middle_of_work_is_no_wait_of_a_woken_thread(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x.gap", {"role": "api"})
    waits = CoreWaits(writer)
    core, allowed = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)  # it must run beside us, not start
        waits.mark()
        before = _run_queue_ns()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass
        lost = _run_queue_ns() - before
        waits.woken(CoreThread.LOOP, time.monotonic_ns())
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, allowed)
    writer.close()
    assert lost > 1_000_000
    assert _waits(tmp_path / "x.gap") == []


def test_the_first_look_of_a_thread_records_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x.gap", {"role": "api"})
    waits = CoreWaits(writer)
    waits.woken(CoreThread.LOOP, time.monotonic_ns())
    writer.close()
    assert _waits(tmp_path / "x.gap") == []
    assert any(note["type"] == "core_waits" for note in read_records(tmp_path / "x.gap").notes)


def test_without_a_writer_nothing_is_read() -> None:
    before = _open_counters()
    waits = CoreWaits(None)
    waits.helped(before=[0])
    waits.mark()
    waits.done(time.monotonic_ns())
    waits.woken(CoreThread.LOOP, time.monotonic_ns())
    assert _open_counters() == before


def _open_counters() -> int:
    """How many of the kernel's counts this process holds open."""
    return sum("schedstat" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_what_a_helping_thread_waited_counts_before_or_after_the_one_it_helps(tmp_path: Path) -> None:
    """The helper's own sums are read, whichever thread asks: here it is the main thread that helps."""
    writer = RecordWriter(tmp_path / "x.gap", {"role": "core"})
    waits = CoreWaits(writer)
    core = min(os.sched_getaffinity(0))
    mine = threading.get_native_id()
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        waits.helped(after=[mine])
        waits.mark()
        marked = time.monotonic_ns()
        before, until = _run_queue_ns(), time.monotonic() + 20
        while (waited := _run_queue_ns() - before) < 1_000_000 and time.monotonic() < until:
            time.sleep(0.003)
        waits.woken(CoreThread.OUTPUT, time.monotonic_ns())
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, allowed)
    writer.close()
    first = _waits(tmp_path / "x.gap")[0]
    assert first[0] == CoreThread.OUTPUT
    assert abs(first[1] - marked) < 5_000_000  # laid directly after the last look
    assert first[2] - first[1] >= waited > 1_000_000


def _run_queue_ns() -> int:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def test_the_threads_of_a_name_are_found_among_ones_own() -> None:
    own = threading.get_native_id()
    name = Path("/proc/thread-self/comm").read_text().strip()
    assert own in threads_named(name)
    assert threads_named("no thread is called so") == set()
