"""Who had the cores: from the kernel's records of switches to whose wait it was, and who ran instead."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from gapmeter.analysis.ledger.cores import CoreUse, core_use, read_core_use, read_switches
from gapmeter.records import RecordWriter, Span, read_records

API, ENGINE, TESTER = 10, 20, 30
MS = 1_000_000


def _switches(path: Path, *rows: tuple[int, int, str], torn: bytes = b"") -> None:
    """Records of one core as the kernel writes them: (ms, thread, what) with in, out (it sleeps) or off (preempted)."""
    misc = {"in": 0, "out": 0x2000, "off": 0x6000}
    records = [struct.pack("<IHHiiqII", 14, misc[what], 32, tid, tid, ms * MS, 0, 0) for ms, tid, what in rows]
    path.write_bytes(b"".join(records) + torn)


def _probe(folder: Path, role: str, pid: int, *spans: tuple[Span, int, int]) -> Path:
    """A process's record file: (span, start ms, end ms)."""
    path = folder / f"{role}.gap"
    writer = RecordWriter(str(path), {"role": role, "pid": pid})
    for code, start, end in spans:
        writer.span(code, 1, start * MS, end * MS)
    writer.close()
    return path


def _use(tmp_path: Path, *rows: tuple[int, int, str]) -> CoreUse:
    _switches(tmp_path / "switches-0.bin", *rows)
    files = [
        read_records(_probe(tmp_path, "api", API, (Span.EGRESS, 20, 30))),
        read_records(_probe(tmp_path, "core", ENGINE, (Span.LOOP, 0, 100), (Span.FORWARD, 10, 60))),
    ]
    return core_use(read_switches(tmp_path), files, [0], {TESTER})


def _said(use: CoreUse, thread: str) -> list[tuple[int, int, str, str]]:
    waits = use.waits[thread]
    who = [use.culprits[number] for number in waits.culprit]
    return [
        (int(start) // MS, int(end) // MS, one.process, one.stage)
        for start, end, one in zip(waits.start, waits.end, who, strict=True)
    ]


def test_who_is_put_off_its_core_waits_for_whoever_runs_there_at_what_he_was_doing(tmp_path: Path) -> None:
    use = _use(
        tmp_path,
        (0, ENGINE, "in"), (15, ENGINE, "off"),
        (16, API, "in"), (35, API, "out"), (36, TESTER, "in"), (38, TESTER, "out"),
        (40, ENGINE, "in"), (60, ENGINE, "out"), (80, ENGINE, "in"), (90, ENGINE, "out"),
    )  # fmt: skip
    assert _said(use, "engine") == [
        (15, 16, "another program", ""),
        (16, 20, "api", ""),
        (20, 30, "api", "egress"),
        (30, 35, "api", ""),
        (35, 36, "another program", ""),
        (36, 38, "load tester", ""),
        (38, 40, "another program", ""),
    ]


def test_who_sleeps_waits_for_nothing_but_may_be_kept_from_waking(tmp_path: Path) -> None:
    use = _use(
        tmp_path,
        (0, API, "in"),
        (5, API, "out"),
        (5, ENGINE, "in"),
        (25, ENGINE, "out"),
        (25, API, "in"),
        (30, API, "out"),
    )
    assert _said(use, "loop") == []
    assert _said(use, "loop woken") == [(5, 10, "engine", "scheduling"), (10, 25, "engine", "forward")]
    assert [(start, end) for start, end, *_ in _said(use, "engine woken")] == [(0, 5), (25, 30)]


def test_a_core_that_is_free_keeps_nobody_waiting(tmp_path: Path) -> None:
    _switches(tmp_path / "switches-0.bin", (0, ENGINE, "in"), (50, ENGINE, "out"))
    files = [read_records(_probe(tmp_path, "api", API)), read_records(_probe(tmp_path, "core", ENGINE))]
    use = core_use(read_switches(tmp_path), files, [0, 1], set())
    assert _said(use, "loop woken") == []


def test_of_two_api_servers_it_is_not_known_whose_wait_it_was(tmp_path: Path) -> None:
    _switches(tmp_path / "switches-0.bin", (0, API, "in"), (5, API, "off"), (9, API, "in"), (12, API, "out"))
    (tmp_path / "other").mkdir()
    files = [
        read_records(_probe(tmp_path, "api", API)),
        read_records(_probe(tmp_path / "other", "api", API + 1)),
        read_records(_probe(tmp_path, "core", ENGINE)),
    ]
    use = core_use(read_switches(tmp_path), files, [0], set())
    assert (_said(use, "loop"), _said(use, "loop woken")) == ([], [])


LOST = struct.pack("<IHHQQ", 2, 0, 48, 0, 7) + bytes(24)
OTHER = struct.pack("<IHHQQ", 5, 0, 48, 0, 7) + bytes(24)


@pytest.mark.parametrize(
    "torn", [b"", b"\0" * 12, struct.pack("<IHH", 14, 0, 32), OTHER, struct.pack("<IHH", 14, 0, 0)]
)
def test_a_file_that_breaks_off_or_holds_other_records_gives_what_is_whole(tmp_path: Path, torn: bytes) -> None:
    _switches(tmp_path / "switches-0.bin", (1, API, "in"), (3, API, "out"), torn=torn)
    assert [(int(run["start"]), int(run["end"])) for run in read_switches(tmp_path)] == [(1 * MS, 3 * MS)]


def test_without_the_kernels_records_nobody_is_known(tmp_path: Path) -> None:
    assert read_core_use(tmp_path, [], []) is None
    _switches(tmp_path / "switches-0.bin", (1, API, "in"), (3, API, "out"))
    assert read_core_use(tmp_path, [], []) is None
    (tmp_path / "processes.jsonl").write_text(json.dumps({"pid": API}) + "\n{\n")
    use = read_core_use(tmp_path, [], [])
    assert use is not None
    assert all(len(waits.start) == 0 for waits in use.waits.values())
    assert np.array_equal(use.waits["loop"].culprit, [])


def test_where_the_kernel_lost_records_nobody_is_known(tmp_path: Path) -> None:
    """The thread may have left its core, and come back, in what is missing."""
    _switches(tmp_path / "switches-0.bin", (1, API, "in"), (3, API, "out"), torn=LOST)
    assert len(read_switches(tmp_path)) == 0
