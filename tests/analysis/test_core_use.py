"""Who had the cores: from the kernel's records of switches to what kept each thread, and who ran instead."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from gapmeter.analysis.judge.warnings import lost_switches_warning
from gapmeter.analysis.ledger.core_use import core_use
from gapmeter.analysis.ledger.cores import CORE, CoreUse, ManyStretches, Stretches
from gapmeter.analysis.ledger.critical_path import FAR
from gapmeter.analysis.ledger.processes import RecordedProcess
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.switches import TooManyLost, read_watched
from gapmeter.records import RecordWriter, Span
from tests.kit.telemetry import IDLE
from tests.kit.wait import limited

API, POOL, ENGINE, SENDER, WORKER, TESTER, OTHER_PID = 10, 11, 20, 21, 25, 30, 40
MS = 1_000_000
Row = tuple[int, int, str]
NO_ROWS = (
    '3\n{"pid": 1}\n{"pid": "x", "of": "server", "name": "y"}\n{"at_ns": 1e999, "group": 3, "throttled_ns": 1}\n{"pid":'
)


def _switches(folder: Path, *rows: Row, whole: bool = False, torn: bytes = b"", core: int = 0) -> None:
    """Records of one core as the kernel writes them: (ms, thread, what) with in, out (it sleeps) or off (preempted)."""
    misc = {"in": 0, "out": 0x2000, "off": 0x6000}
    process = {SENDER: ENGINE, POOL: API}
    records = [
        struct.pack("<IHH", 15 if whole else 14, misc[what], 40 if whole else 32)
        + (bytes(8) if whole else b"")
        + struct.pack("<iiqII", process.get(tid, tid), tid, ms * MS, core, 0)
        for ms, tid, what in rows
    ]
    (folder / f"switches-{core}.bin").write_bytes(b"".join(records) + torn)
    named = [
        {"pid": TESTER, "of": "load tester", "name": "python"},
        {"pid": OTHER_PID, "of": "another program", "name": "cc1"},
    ]
    (folder / "switches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named) + NO_ROWS)


def _probe(folder: Path, role: str, pid: int, *spans: tuple[Span, int, int]) -> RecordedProcess:
    """A process's records: (span, start ms, end ms)."""
    path = folder / f"{role}-{pid}.gap"
    writer = RecordWriter(str(path), {"role": role, "pid": pid})
    for code, start, end in spans:
        writer.span(code, 1, start * MS, end * MS)
    writer.close()
    return RecordedProcess.read(path)


def _use(folder: Path, *rows: Row, whole: bool = False) -> CoreUse:
    _switches(folder, *rows, whole=whole)
    files = [
        _probe(folder, "api", API, (Span.EGRESS, 20, 30)),
        _probe(folder, "core", ENGINE, (Span.LOOP, 0, 100), (Span.FORWARD, 10, 60), (Span.OUTPUT_SEND, 62, 70)),
    ]
    return core_use(folder, files, [0])


@pytest.fixture(autouse=True)
def _packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large run, of which what kept the threads is not in memory, and whose switches come in many blocks."""
    monkeypatch.setattr("gapmeter.analysis.ledger.cores._FEW", 0)
    monkeypatch.setattr("gapmeter.analysis.ledger.switches._BLOCK", 100)


def _whole(kept: ManyStretches) -> Stretches:
    return kept.near(np.array([-FAR]), np.array([FAR]))


def _said(use: CoreUse, kind: str, pid: int) -> list[tuple[int, int, str]]:
    """(start ms, end ms, why): who had the core and at which stage, or the reason's own name."""
    if (kind, pid) not in use.of:
        return []
    found = _whole(use.of[kind, pid])
    words = []
    for reason in (use.reasons[number] for number in found.reason):
        who = reason.culprit
        assert (who is not None) == (reason.what == CORE)
        words.append(" ".join(filter(None, (who.process, who.stage, who.program))) if who else reason.what)
    return [(int(a) // MS, int(b) // MS, word) for a, b, word in zip(found.start, found.end, words, strict=True)]


def test_who_is_put_off_its_core_waits_for_whoever_runs_there_at_what_he_was_doing(tmp_path: Path) -> None:
    use = _use(
        tmp_path,
        (0, ENGINE, "in"), (15, ENGINE, "off"),
        (16, API, "in"), (35, API, "out"), (36, TESTER, "in"), (38, TESTER, "out"),
        (40, ENGINE, "in"), (60, ENGINE, "out"), (80, ENGINE, "in"), (90, ENGINE, "out"),
    )  # fmt: skip
    assert _said(use, "engine", ENGINE) == _said(use, "forward", ENGINE) == [
        (15, 16, "another program"),
        (16, 20, "api"),
        (20, 30, "api egress"),
        (30, 35, "api"),
        (35, 36, "another program"),
        (36, 38, "load tester"),
        (38, 40, "another program"),
    ]  # fmt: skip


def test_where_whole_cores_are_watched_other_programs_have_names_and_a_free_core_is_nobodys(tmp_path: Path) -> None:
    rows = ((0, ENGINE, "in"), (15, ENGINE, "off"), (15, OTHER_PID, "in"), (20, OTHER_PID, "out"), (21, ENGINE, "in"))
    use = _use(tmp_path, *rows, (22, ENGINE, "out"), whole=True)
    assert _said(use, "engine", ENGINE) == [(15, 20, "another program cc1"), (20, 21, "nobody")]


def test_at_a_cpu_limit_nobody_had_the_core_and_all_wait(tmp_path: Path) -> None:
    samples = ((10, 0), (110, 0), (210, 60), (310, 60))
    rows = [json.dumps({"group": "a", "at_ns": at * MS, "throttled_ns": ms * MS}) + "\n" for at, ms in samples]
    (tmp_path / "limits.jsonl").write_text("".join(rows) + NO_ROWS)
    switches: list[Row] = [(100, ENGINE, "in"), (140, ENGINE, "off"), (200, ENGINE, "in"), (205, ENGINE, "out")]
    use = _use(tmp_path, *switches, whole=True)
    assert _said(use, "engine", ENGINE) == [(140, 200, "CPU limit")]
    assert (140, 200, "CPU limit") in _said(use, "loop woken", API)


def test_a_process_that_was_stopped_waits_for_nobody_however_busy_the_cores_are(tmp_path: Path) -> None:
    rows = [json.dumps({"at_ns": at * MS, "pid": ENGINE, "stopped": True, **IDLE}) + "\n" for at in (25, 35)]
    (tmp_path / "processes.jsonl").write_text("".join(rows))
    use = _use(
        tmp_path,
        (0, ENGINE, "in"), (20, ENGINE, "out"), (20, OTHER_PID, "in"), (40, OTHER_PID, "out"), (40, ENGINE, "in"),
        (45, ENGINE, "out"), (46, ENGINE, "in"), (50, ENGINE, "off"), (50, API, "in"), (55, API, "out"),
        (55, ENGINE, "in"), (56, ENGINE, "out"),
    )  # fmt: skip
    for kind in ("engine", "forward"):
        assert _said(use, kind, ENGINE) == [(20, 40, "stopped"), (50, 55, "api")]
    assert _said(use, "engine woken", ENGINE)[:1] == [(0, 10, "lock_wait")]
    assert (20, 40, "stopped") in _said(use, "engine woken", ENGINE)
    assert (20, 40, "another program cc1") in _said(use, "loop woken", API)  # which was not stopped


def test_who_sleeps_waits_for_nothing_but_may_be_kept_from_waking(tmp_path: Path) -> None:
    use = _use(
        tmp_path,
        (0, API, "in"), (5, API, "out"), (5, ENGINE, "in"), (25, ENGINE, "out"), (25, API, "in"), (30, API, "out"),
    )  # fmt: skip
    assert _said(use, "loop", API) == []
    assert _said(use, "loop woken", API) == [
        (0, 5, "at work"), (5, 10, "engine scheduling"), (10, 25, "engine forward"), (25, 30, "at work"),
    ]  # fmt: skip
    # The engine's own threads wait for its interpreter, but for a core while it computes.
    assert _said(use, "engine woken", ENGINE) == [
        (0, 5, "api"), (5, 10, "lock_wait"), (10, 25, "engine forward"), (25, 30, "api egress"),
    ]  # fmt: skip


def test_who_sleeps_until_another_thread_of_the_process_lets_go_of_python_waited_for_its_lock(tmp_path: Path) -> None:
    use = _use(
        tmp_path, (50, ENGINE, "in"), (63, ENGINE, "out"), (63, SENDER, "in"), (66, SENDER, "out"), (66, ENGINE, "in"),
        (69, ENGINE, "out"), (69, SENDER, "in"), (70, SENDER, "out"),
    )  # fmt: skip
    assert _said(use, "engine", ENGINE) == [(63, 66, "lock_wait")]
    assert _said(use, "sender", ENGINE) == [(66, 69, "lock_wait")]
    assert _said(use, "forward", ENGINE) == []  # a computation lets others have the interpreter


def test_a_sleep_that_goes_on_when_nobody_has_the_lock_was_no_wait_for_it(tmp_path: Path) -> None:
    use = _use(
        tmp_path, (50, ENGINE, "in"), (63, ENGINE, "out"), (63, SENDER, "in"), (66, SENDER, "out"), (68, ENGINE, "in"),
        (69, ENGINE, "out"),
    )  # fmt: skip
    assert _said(use, "engine", ENGINE) == []


def test_a_lock_whose_holder_is_put_off_its_core_is_still_held(tmp_path: Path) -> None:
    use = _use(
        tmp_path, (50, ENGINE, "in"), (61, ENGINE, "out"), (61, SENDER, "in"), (62, SENDER, "off"),
        (62, OTHER_PID, "in"), (65, OTHER_PID, "out"), (65, SENDER, "in"), (66, SENDER, "out"), (66, ENGINE, "in"),
        (69, ENGINE, "out"),
    )  # fmt: skip
    assert _said(use, "engine", ENGINE) == [(61, 62, "lock_wait"), (65, 66, "lock_wait")]


def test_a_core_that_is_free_keeps_nobody_waiting(tmp_path: Path) -> None:
    _switches(tmp_path, (0, ENGINE, "in"), (50, ENGINE, "out"))
    use = core_use(tmp_path, [_probe(tmp_path, "api", API), _probe(tmp_path, "core", ENGINE)], [0, 1])
    assert _said(use, "loop woken", API) == []


def test_each_of_two_api_servers_has_waits_of_its_own(tmp_path: Path) -> None:
    _switches(
        tmp_path, (0, API, "in"), (5, API, "off"), (5, 11, "in"), (8, 11, "out"), (9, API, "in"), (12, API, "out")
    )
    files = [_probe(tmp_path, "api", API), _probe(tmp_path, "api", 11), _probe(tmp_path, "core", ENGINE)]
    use = core_use(tmp_path, files, [0])
    assert _said(use, "loop", API) == [(5, 8, "api"), (8, 9, "another program")]
    assert _said(use, "loop", 11) == []


def test_a_workers_forward_waits_when_the_worker_does(tmp_path: Path) -> None:
    _switches(
        tmp_path, (0, WORKER, "in"), (5, WORKER, "off"), (5, ENGINE, "in"), (9, ENGINE, "out"), (9, WORKER, "in"),
        (20, WORKER, "out"),
    )  # fmt: skip
    files = [_probe(tmp_path, "core", ENGINE, (Span.LOOP, 0, 9)), _probe(tmp_path, "worker", WORKER)]
    use = core_use(tmp_path, files, [0])
    assert _said(use, "forward", ENGINE) == [(5, 9, "engine scheduling")]
    assert _said(use, "engine", ENGINE) == []


def test_a_message_between_an_engine_and_its_worker_waits_for_a_core_until_whoever_should_take_it_has_one(
    tmp_path: Path,
) -> None:
    _switches(
        tmp_path, (0, ENGINE, "in"), (10, ENGINE, "out"), (10, TESTER, "in"), (14, TESTER, "out"), (14, WORKER, "in"),
        (30, WORKER, "out"), (30, OTHER_PID, "in"), (36, OTHER_PID, "out"), (37, ENGINE, "in"), (40, ENGINE, "off"),
        (40, API, "in"), (42, API, "out"), (42, ENGINE, "in"), (43, ENGINE, "out"),
    )  # fmt: skip
    engine = _probe(tmp_path, "core", ENGINE, (Span.LOOP, 0, 43))
    worker = _probe(tmp_path, "worker", WORKER, (Span.WORKER, 15, 29))
    files = [_probe(tmp_path, "api", API), engine, worker]
    use = core_use(tmp_path, files, [0])
    preempted = [(40, 42, "api")]
    assert _said(use, "executor", ENGINE) == [(10, 14, "load tester"), (30, 36, "another program cc1"), *preempted]
    assert _said(use, "engine", ENGINE) == preempted
    alone = core_use(tmp_path, files[:2], [0])
    assert _said(alone, "executor", ENGINE) == preempted, "in its own process no message is sent"


def test_a_loop_that_runs_does_not_wait_for_the_interpreter_whatever_its_pool_does(tmp_path: Path) -> None:
    process = RecordWriter(str(tmp_path / "api.gap"), {"role": "api", "pid": API})
    process.span(Span.TOKENIZE, 1, 10 * MS, 30 * MS, queued_ns=9 * MS)
    for at in range(12, 28):
        process.span(Span.EGRESS, 1, at * MS, (at + 1) * MS)
    process.close()
    _switches(tmp_path, (5, API, "in"), (40, API, "out"))
    _switches(tmp_path, (10, POOL, "in"), (30, POOL, "out"), core=1)
    use = core_use(tmp_path, [RecordedProcess.read(tmp_path / "api.gap")], [0, 1])
    assert _said(use, "loop woken", API) == [(5, 40, "at work")]


def test_a_thread_that_sleeps_for_long_waits_for_a_core_at_its_end_alone(tmp_path: Path) -> None:
    """What it slept for before is not known; others may have had the cores all the while."""
    _switches(tmp_path, (0, ENGINE, "in"), (10, ENGINE, "out"), (2000, ENGINE, "in"), (2010, ENGINE, "out"))
    _switches(tmp_path, (5, OTHER_PID, "in"), (1990, OTHER_PID, "out"), core=1)
    loops = (Span.LOOP, 0, 10), (Span.LOOP, 2000, 2010)
    files = [_probe(tmp_path, "api", API), _probe(tmp_path, "core", ENGINE, *loops)]
    waits = [wait for wait in _said(core_use(tmp_path, files, [1]), "engine woken", ENGINE) if "another" in wait[2]]
    assert waits == [(5, 10, "another program cc1"), (1900, 1990, "another program cc1")]


def test_threads_that_compute_a_forward_together_hold_their_cores(tmp_path: Path) -> None:
    _switches(tmp_path, (0, ENGINE, "in"), (60, ENGINE, "out"))
    _switches(tmp_path, (20, SENDER, "in"), (50, SENDER, "out"), core=1)
    files = [_probe(tmp_path, "api", API), _probe(tmp_path, "core", ENGINE, (Span.LOOP, 0, 60), (Span.FORWARD, 10, 60))]
    assert _said(core_use(tmp_path, files, [0, 1]), "loop woken", API) == [(20, 50, "engine forward")]


def test_a_watch_that_ended_long_before_the_last_answer_tells_nobodys_waits(tmp_path: Path) -> None:
    _switches(tmp_path, (0, API, "in"), (1000, API, "out"))
    known = [_probe(tmp_path, "api", API, (Span.EGRESS, 10, 20), (Span.EGRESS, 9_990, 10_000))]
    found = core_use(tmp_path, known, [0])
    assert (found.known_from, found.lost_share) == ("spans", 0.9)


def test_from_sums_a_workers_own_process_tells_what_it_waited(tmp_path: Path) -> None:
    sums = ((ENGINE, 0, 0, 0), (WORKER, 0, 0, 0), (ENGINE, 100, 5, 0), (WORKER, 100, 40, 40))
    rows = [
        {"pid": pid, "tid": pid, "at_ns": at * MS, "ran_ns": ran * MS, "waited_ns": waited * MS}
        for pid, at, ran, waited in sums
    ]
    (tmp_path / "schedstat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + NO_ROWS)
    engine = _probe(tmp_path, "core", ENGINE, (Span.LOOP, 10, 95))
    worker = _probe(tmp_path, "worker", WORKER, (Span.WORKER, 12, 92), (Span.FORWARD, 15, 90))
    found = core_use(tmp_path, [engine, worker], [0])
    waited = {
        kind: int((of.end - of.start).sum()) / MS for (kind, _), kept in found.of.items() for of in (_whole(kept),)
    }
    assert (found.known_from, waited["engine"]) == ("sums", 0)
    assert waited["worker"] == waited["forward"] == pytest.approx(40, rel=0.01)


def test_records_of_another_process_with_the_same_number_say_nothing(tmp_path: Path) -> None:
    """A server in a container has other process ids there than here."""
    _switches(
        tmp_path, (0, API, "in"), (1, API, "off"), (3, API, "in"), (4, API, "out"), (200, API, "in"), (201, API, "out")
    )
    spans = [(Span.EGRESS, at, at + 1) for at in (*range(10, 60), *range(10, 60))]
    known = [_probe(tmp_path, "api", API, *spans)]
    assert core_use(tmp_path, known, [0]).known_from == "spans"
    _switches(tmp_path, (0, API, "in"), (1, API, "out"))  # a watch that ended before says nothing of whose it was
    assert core_use(tmp_path, known, [0]).known_from == "switches"
    (tmp_path / "switches-0.bin").unlink()
    row = {"pid": OTHER_PID, "tid": OTHER_PID, "at_ns": MS, "ran_ns": 1, "waited_ns": 1}
    (tmp_path / "schedstat.jsonl").write_text(json.dumps(row) + "\n")
    assert core_use(tmp_path, known, [0]).known_from == "spans"


def test_where_nobody_watched_it_is_known_only_what_the_event_loop_did(tmp_path: Path) -> None:
    use = core_use(tmp_path, [_probe(tmp_path, "api", API, (Span.EGRESS, 20, 30), (Span.INGRESS, 0, 10))], [0])
    assert _said(use, "loop woken", API) == [(20, 30, "at work")]
    assert _said(use, "loop", API) == []
    assert use.known_from == "spans"


def test_from_sums_a_thread_waited_for_what_it_was_at_work_and_did_not_run(tmp_path: Path) -> None:
    """It was at work for 60 of 100 ms, ran for 30 and waited for 40: 30 of these were in that work."""
    samples = [
        {"pid": ENGINE, "tid": tid, "at_ns": at * MS, "ran_ns": ran * MS, "waited_ns": waited * MS}
        for tid, at, ran, waited in (
            (ENGINE, 0, 0, 5), (SENDER, 0, 0, 0), (ENGINE, 100, 30, 45), (SENDER, 100, 1, 90), (ENGINE, 200, 80, 46),
        )
    ]  # fmt: skip
    (tmp_path / "schedstat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    use = core_use(tmp_path, [_probe(tmp_path, "core", ENGINE, (Span.LOOP, 10, 50), (Span.LOOP, 70, 90))], [0])
    assert use.known_from == "sums"
    for kind in ("engine", "forward", "worker"):
        found = _whole(use.of[kind, ENGINE])
        length = found.end - found.start
        assert length.sum() == 30 * MS
        assert length[found.start < 50 * MS].sum() == 20 * MS
        assert found.end.max() <= 90 * MS and (found.start[1:] >= found.end[:-1]).all()


@pytest.mark.parametrize("sampled", [True, False])
def test_what_an_event_loop_waited_is_the_same_in_many_parts_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sampled: bool
) -> None:
    rng = np.random.default_rng(1)
    begun = np.cumsum(rng.integers(2, 12, 300))
    api = _probe(tmp_path, "api", API, *((Span.EGRESS, int(at), int(at + rng.integers(1, 9))) for at in begun))
    rows, ran, waited = list[dict[str, int]](), 0, 0
    for at in range(0, int(begun[-1]) if sampled else 0, 25):
        rows.append({"pid": API, "tid": API, "at_ns": at * MS, "ran_ns": ran * MS, "waited_ns": waited * MS})
        ran, waited = ran + int(rng.integers(0, 20)), waited + int(rng.integers(0, 20))
    (tmp_path / "schedstat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = core_use(tmp_path, [api], [0])
    monkeypatch.setattr("gapmeter.analysis.ledger.core_use._SAMPLES", 3)
    monkeypatch.setattr("gapmeter.analysis.ledger.core_use._WRITES", 7)
    parts = core_use(tmp_path, [api], [0])
    assert parts.known_from == whole.known_from == ("sums" if sampled else "spans")
    for key, kept in whole.of.items():
        assert bool(len(_whole(kept).start)) == (sampled or key[0] != "loop")
        for name in ("start", "end", "reason"):
            np.testing.assert_array_equal(getattr(_whole(parts.of[key]), name), getattr(_whole(kept), name), str(key))


LOST = struct.pack("<IHHQQ", 2, 0, 48, 0, 7) + bytes(24)
OTHER = struct.pack("<IHHQQ", 5, 0, 48, 0, 7) + bytes(24)


@pytest.mark.parametrize(
    "torn", [b"", b"\0" * 12, struct.pack("<IHH", 14, 0, 32), OTHER, struct.pack("<IHH", 14, 0, 0)]
)
def test_a_file_that_breaks_off_or_holds_other_records_gives_what_is_whole(tmp_path: Path, torn: bytes) -> None:
    _switches(tmp_path, (1, API, "in"), (3, API, "out"), torn=torn)
    assert [(int(run["start"]), int(run["end"])) for run in read_watched(tmp_path).runs] == [(1 * MS, 3 * MS)]


def test_without_the_kernels_records_nobody_is_known(tmp_path: Path) -> None:
    assert read_watched(tmp_path) is None
    (tmp_path / "switches-0.bin").write_bytes(b"")
    assert read_watched(tmp_path) is None


def test_through_records_that_the_kernel_lost_nobody_waits(tmp_path: Path) -> None:
    """The thread may have left its core, and come back, in what is missing."""
    _switches(tmp_path, (0, API, "in"), (1, API, "off"))
    before = (tmp_path / "switches-0.bin").read_bytes()
    _switches(tmp_path, (4, API, "in"), (500, API, "off"), (502, API, "in"), (900, API, "out"))
    path = tmp_path / "switches-0.bin"
    path.write_bytes(before + LOST + path.read_bytes())
    watched = read_watched(tmp_path)
    assert np.array_equal(np.transpose(watched.lost), [[1 * MS, 4 * MS]])
    use = core_use(tmp_path, [_probe(tmp_path, "api", API)], [0])
    assert [(a, b) for a, b, _ in _said(use, "loop", API)] == [(500, 502)]


def test_where_the_kernel_lost_many_records_nobody_is_known(tmp_path: Path) -> None:
    _switches(tmp_path, (1, API, "in"), (3, API, "out"))
    path = tmp_path / "switches-0.bin"
    first = path.read_bytes()
    _switches(tmp_path, (90, API, "in"), (100, API, "out"))
    path.write_bytes(first + LOST + path.read_bytes())
    with pytest.raises(TooManyLost) as lost:
        read_watched(tmp_path)
    assert lost.value.share == 87 / 99
    _probe(tmp_path, "api", API)
    trace = read_trace([tmp_path / f"api-{API}.gap"], [], tmp_path, [0])
    assert trace.cores.known_from == "spans"
    (warning,) = lost_switches_warning(trace)
    assert "in 88 % of the time the kernel's records of it were lost" in warning.text


@pytest.mark.parametrize("most", [resource.RLIM_INFINITY, 1000])
def test_a_run_that_is_looked_at_in_many_windows_says_the_same(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    rows: list[list[Row]] = [[], []]
    for core, threads in enumerate(((API, SENDER, OTHER_PID), (ENGINE, TESTER))):
        at = 0
        while at < 3000:
            tid, ran = int(rng.choice(threads)), int(rng.integers(1, 9))
            rows[core] += [(at, tid, "in"), (at + ran, tid, str(rng.choice(["out", "off"])))]
            at += ran + int(rng.choice([0, 1, 30], p=[0.7, 0.25, 0.05]))
        _switches(tmp_path, *rows[core], whole=True, core=core)
    begun = np.cumsum(rng.integers(1, 12, 400)).tolist()
    api = [((Span.EGRESS, Span.OUTPUT_RECEIVE)[at % 2], at, at + int(rng.integers(1, 9))) for at in begun]
    steps = [(code, at, at + 5) for at in begun for code in (Span.LOOP, Span.OUTPUT_SEND, Span.CORE_RECEIVE)]
    forwards = [(Span.FORWARD, at + 1, at + 4) for at in begun]
    files = [_probe(tmp_path, "api", API, *api), _probe(tmp_path, "core", ENGINE, *steps, *forwards)]
    whole = core_use(tmp_path, files, [0, 1])
    monkeypatch.setattr("gapmeter.analysis.ledger.threads._RUNS", 7)
    with limited(resource.RLIMIT_FSIZE, most):  # of the file in which it lies, too
        cut = core_use(tmp_path, files, [0, 1])
    assert cut.reasons == whole.reasons
    assert {key for key, kept in whole.of.items() if len(_whole(kept).start)} >= {
        ("loop", API),
        ("engine woken", ENGINE),
    }
    for key, kept in whole.of.items():
        for name in ("start", "end", "reason"):
            np.testing.assert_array_equal(getattr(_whole(cut.of[key]), name), getattr(_whole(kept), name), str(key))
