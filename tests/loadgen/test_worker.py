"""Generator processes: the real ones, started, stopped, killed, orphaned, and without room on the disk."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapmeter.loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.generator import Exit
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.records import Outcome, read_records
from gapmeter.records.follow import RecordTail
from gapmeter.records.reader import dropped_records
from gapmeter.records.request import ISSUED
from gapmeter.records.stream import parse_answer
from tests.kit.command import ROOT
from tests.kit.loads import ids, plan, records_of
from tests.kit.servers import Certificate
from tests.kit.streams import chat, sse
from tests.kit.wait import limited, until

MS = 1_000_000
ANSWER = b"".join(sse(chat("a", finish_reason="stop"), "[DONE]"))


@pytest.fixture(params=sorted(GENERATORS))
def generator(request: pytest.FixtureRequest) -> str:
    """Each in turn: what holds for one must hold for the other."""
    return str(request.param)


def run(fleet: Fleet, look: Callable[[], None] = lambda: None) -> list[int]:
    fleet.start()
    return fleet.wait(look, 0.02)


def same(one: Plan, other: Plan) -> bool:
    def values(plan: Plan) -> list[Any]:
        found = [getattr(plan, f.name) for f in fields(Plan) if f.name != "swaps"] + [plan.swaps.at, plan.swaps.words]
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in found]

    return values(one) == values(other)


@pytest.mark.parametrize("whole", [plan([1, 5, 9, 12, 40]), plan([-1] * 5, users=4, end_ns=9, think_ns=3), plan([])])
def test_a_share_on_disk_is_the_share(tmp_path: Path, whole: Plan) -> None:
    for share in (whole, whole.slice(1, 3)):
        share.save(tmp_path / "share.npz")
        assert same(Plan.load(tmp_path / "share.npz"), share)


def test_processes_issue_one_plan_between_them_from_one_start(tmp_path: Path, generator: str, null: str) -> None:
    what = plan([index * 2 * MS for index in range(90)])
    with make_fleet(what, null, None, tmp_path, (), 3, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE] * 3
        assert fleet.troubles() == []
    assert not list(tmp_path.glob("*.log"))  # nobody had anything to complain of
    assert not list(tmp_path.glob("*.npz"))  # what was asked is no record
    files = [read_records(path) for path in fleet.record_paths]
    assert all(file.complete for file in files)
    assert [file.process["worker"] for file in files] == [0, 1, 2]
    (t0,) = {note["t0_ns"] for file in files for note in file.notes if note["type"] == "window"}
    found = records_of(tmp_path)
    assert [record.request_id for record in found] == ids(what)
    assert [record.due_ns - t0 for record in found] == what.due_ns.tolist()
    assert {record.outcome for record in found} == {Outcome.OK}
    assert all(len(parse_answer(record).token_ns) == 4 for record in found)


def test_a_closed_loop_gets_no_more_processes_than_users(tmp_path: Path, generator: str, null: str) -> None:
    with make_fleet(plan([-1] * 12, users=2), null, None, tmp_path, (), 4, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE] * 2
    assert sum(len(records_of(read_records(path))) for path in fleet.record_paths) == 12


def test_connections_are_opened_ahead_for_users_that_have_a_request(tmp_path: Path, generator: str, null: str) -> None:
    for requests, users, ahead in ((2, 50, 2), (90, 50, 50)):
        folder = tmp_path / f"{requests}"
        folder.mkdir()
        with make_fleet(plan([-1] * requests, users=users), null, None, folder, (), 1, generator=generator) as fleet:
            assert json.loads(fleet.record_paths[0].with_suffix(".json").read_text())["warm"] == ahead


def test_a_slice_without_users_has_a_process_that_sends_nothing(tmp_path: Path, generator: str, null: str) -> None:
    """A worker hands in its records, whatever is in them."""
    slice_ = plan([-1] * 4, users=1).slice(1, 2)
    with make_fleet(slice_, null, None, tmp_path, (), 1, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE]
    (path,) = fleet.record_paths
    assert not records_of(read_records(path))


def test_each_process_runs_on_a_core_of_its_own(tmp_path: Path, generator: str, null: str) -> None:
    core = max(os.sched_getaffinity(0))
    with make_fleet(plan([0]), null, None, tmp_path, (core,), 1, generator=generator) as fleet:
        assert os.sched_getaffinity(fleet.processes[0].pid) == {core}
        assert run(fleet) == [Exit.DONE]


def test_what_a_killed_process_had_finished_can_be_read_and_what_was_in_flight_is_known(
    tmp_path: Path, generator: str, misbehaving: str
) -> None:
    due = [*range(0, 20 * MS, MS), 300 * MS, 301 * MS, 3_600_000 * MS]
    what = plan(due, tokens=4)
    what.bodies[20] = what.bodies[21] = what.bodies[0].replace(b'"model"', b'"fault": "stall", "model"')
    with make_fleet(what, misbehaving, None, tmp_path, (), 1, generator=generator) as fleet:
        tail, seen = RecordTail(fleet.record_paths[0]), []
        fleet.start()
        until(lambda: (seen.extend(tail.poll()), len(seen))[1] == 42)
        fleet.processes[0].kill()
        assert fleet.wait(lambda: None, 0.02) == [-signal.SIGKILL]
        assert fleet.troubles() == ["generator process 0 was killed by SIGKILL"]
    file = read_records(fleet.record_paths[0])
    assert not file.complete
    assert [record.outcome for record in records_of(file)] == [Outcome.OK] * 20
    assert all(len(parse_answer(record).token_ns) == 4 for record in records_of(file))
    in_flight = {record.index for record in records_of(file, ISSUED)} - {record.index for record in records_of(file)}
    assert in_flight == {20, 21}
    assert {record.outcome for record in records_of(file, ISSUED)} == {Outcome.LOST}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_stopped_records_what_is_in_flight_as_aborted(
    tmp_path: Path, generator: str, misbehaving: str, signum: signal.Signals
) -> None:
    what = plan([0, 0, 3_600_000 * MS])
    what.bodies[1] = what.bodies[1].replace(b'"model"', b'"fault": "stall", "model"')
    with make_fleet(what, misbehaving, None, tmp_path, (), 1, generator=generator) as fleet:
        tail, seen = RecordTail(fleet.record_paths[0]), []
        fleet.start()
        until(lambda: (seen.extend(tail.poll()), len(seen))[1] == 3)
        fleet.processes[0].send_signal(signum)
        assert fleet.wait(lambda: None, 0.02) == [Exit.STOPPED]
        assert fleet.troubles() == ["generator process 0 was told to end (SIGTERM or SIGINT)"]
    file = read_records(fleet.record_paths[0])
    assert file.complete
    assert [(record.index, record.outcome) for record in records_of(file)] == [(0, Outcome.OK), (1, Outcome.ABORTED)]


def test_a_process_that_is_stopped_before_the_start_leaves(tmp_path: Path, generator: str, null: str) -> None:
    with make_fleet(plan([0]), null, None, tmp_path, (), 2, generator=generator) as fleet:
        fleet.stop()
        assert fleet.wait(lambda: None, 0.02) == [Exit.STOPPED] * 2
        assert fleet.troubles() == []


def test_leaving_the_block_ends_every_process(tmp_path: Path, generator: str, null: str) -> None:
    with (
        contextlib.suppress(ZeroDivisionError),
        make_fleet(plan([10_000 * MS]), null, None, tmp_path, (), 2, generator=generator) as fleet,
    ):
        fleet.start()
        raise ZeroDivisionError
    assert [process.poll() for process in fleet.processes] == [Exit.STOPPED] * 2


ORPHAN = """
import sys, time
from pathlib import Path
from gapmeter.loadgen.fleet import make_fleet
from tests.kit.loads import plan
what = plan([0, 3_600_000_000_000])
what.bodies[0] = what.bodies[0].replace(b'"model"', b'"fault": "stall", "model"')
with make_fleet(what, sys.argv[1], None, Path(sys.argv[2]), (), 1, generator=sys.argv[4]) as fleet:
    if sys.argv[3] == "start":
        fleet.start()
    print(fleet.processes[0].pid, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["start", "before the start"])
def test_a_process_whose_parent_is_killed_leaves_by_itself(
    tmp_path: Path, generator: str, misbehaving: str, when: str
) -> None:
    command = [sys.executable, "-c", ORPHAN, misbehaving, str(tmp_path), when, generator]
    path = tmp_path / "worker-0.gap"
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        worker = int(parent.stdout.readline())
        if when == "start":
            until(lambda: bool(RecordTail(path).poll()))
        parent.kill()
    until(lambda: not Path(f"/proc/{worker}").exists())
    file = read_records(path)
    assert file.complete
    assert [record.outcome for record in records_of(file)] == ([Outcome.ABORTED] if when == "start" else [])


def test_a_target_where_nobody_listens_is_said_before_the_start(tmp_path: Path, generator: str) -> None:
    with (
        pytest.raises(Unreachable, match="Connection refused"),
        make_fleet(plan([0]), "http://127.0.0.1:9", None, tmp_path, (), 2, generator=generator),
    ):
        pass


@pytest.mark.whole_run
def test_a_server_that_never_shakes_hands_is_given_up_before_the_start(tmp_path: Path, generator: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Unreachable, match="timed out"),
        make_fleet(
            plan([0]), f"https://127.0.0.1:{silent.getsockname()[1]}", None, tmp_path, (), 1, generator=generator
        ),
    ):
        pass


@pytest.mark.whole_run
def test_a_process_that_is_stopped_before_it_is_ready_is_said(
    tmp_path: Path, generator: str, null: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[subprocess.Popen[bytes]] = []

    class Held(subprocess.Popen):
        """Stopped as soon as it is there."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.send_signal(signal.SIGSTOP)
            held.append(self)

    monkeypatch.setattr(subprocess, "Popen", Held)
    with (
        pytest.raises(NotStarted, match=r"process 0 was stopped \(SIGSTOP\) for 5 s"),
        make_fleet(plan([0]), null, None, tmp_path, (), 1, generator=generator),
    ):
        pass
    assert [process.poll() is None for process in held] == [False]


def shake_hands(certificate: Certificate, sock: socket.socket) -> None:
    """Answer whatever is asked on a connection, until it is closed."""
    with contextlib.suppress(OSError), certificate.serving.wrap_socket(sock, server_side=True) as secure:
        while secure.recv(1 << 16):
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))


def test_a_server_that_shakes_hands_on_one_connection_at_a_time_is_not_waited_for(
    tmp_path: Path, generator: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                shake_hands(certificate, listener.accept()[0])

    threading.Thread(target=serve, daemon=True).start()
    what, url = plan([0, 100 * MS, 200 * MS]), f"https://localhost:{listener.getsockname()[1]}"
    with listener, make_fleet(what, url, None, tmp_path, (), 1, warm=3, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE], fleet.troubles()
    records = records_of(fleet.record_paths[0])
    assert [(record.outcome, record.connection) for record in records] == [(Outcome.OK, 1)] * 3


def test_connections_ahead_that_a_server_does_not_take_are_missing_to_the_requests_that_need_them(
    tmp_path: Path, generator: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shakes hands on two, and resets all others."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            for _ in range(2):
                threading.Thread(target=shake_hands, args=(certificate, listener.accept()[0]), daemon=True).start()
            while True:
                with listener.accept()[0] as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    threading.Thread(target=serve, daemon=True).start()
    what, url = plan([0] * 4), f"https://localhost:{listener.getsockname()[1]}"
    with listener, make_fleet(what, url, None, tmp_path, (), 1, warm=4, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE], fleet.troubles()
    records = records_of(fleet.record_paths[0])
    assert [record.outcome for record in records] == [Outcome.OK] * 2 + [Outcome.TLS] * 2


def test_a_full_disk_ends_the_run_and_is_said(tmp_path: Path, generator: str, null: str) -> None:
    what = plan([*[index * MS for index in range(300)], 3_600_000 * MS], tokens=4096)
    what.bodies[:] = [body.replace(b'"stream": true', b'"stream": false') for body in what.bodies]
    full = limited(resource.RLIMIT_FSIZE, 5 << 20)
    with full, make_fleet(what, null, None, tmp_path, (), 1, generator=generator) as fleet:
        assert run(fleet) == [Exit.DISK_FULL]
        (trouble,) = fleet.troubles()
        assert dropped_records(fleet.record_paths[0]) > 0
    assert "the disk is full" in trouble
    assert str(fleet.record_paths[0]) in trouble


def test_a_generator_that_may_open_no_more_files_ends_the_run_and_blames_no_server(
    tmp_path: Path, generator: str, null: str
) -> None:
    what = plan([*[0] * 60, 3_600_000 * MS])
    with make_fleet(what, null, None, tmp_path, (), 1, warm=1, generator=generator) as fleet:
        (process,) = fleet.processes
        most = max(int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd")) + 8
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        assert run(fleet) == [Exit.NO_CONNECTION]
        (trouble,) = fleet.troubles()
    assert "may open no more files" in trouble
    (lack,) = [note for note in read_records(fleet.record_paths[0]).notes if note["type"] == "lack"]
    assert trouble.endswith(lack["what"])
    outcomes = {record.outcome for record in records_of(fleet.record_paths[0])}
    assert {Outcome.ABORTED} <= outcomes <= {Outcome.OK, Outcome.ABORTED}


def test_a_disk_that_is_full_from_the_beginning_is_said_before_the_start(
    tmp_path: Path, generator: str, null: str
) -> None:
    with (
        limited(resource.RLIMIT_FSIZE, 1 << 20),
        pytest.raises(NotStarted, match="cannot be written"),
        make_fleet(plan([0]), null, None, tmp_path, (), 1, generator=generator),
    ):
        pass


def test_a_bug_ends_the_run_with_its_traceback(tmp_path: Path, generator: str, null: str) -> None:
    what = replace(plan([0, MS, 3_600_000 * MS]), timeout_ns="a word")
    with make_fleet(what, null, None, tmp_path, (), 1, generator=generator) as fleet:
        assert run(fleet) == [1]
        (trouble,) = fleet.troubles()
    assert "TypeError" in trouble
    assert "Traceback" in fleet.log_paths[0].read_text()
    assert read_records(fleet.record_paths[0]).complete


STOPPED_AT_ITS_END = """
import os, signal, sys
from gapmeter.loadgen.worker import main
class Late:
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.SIGINT):
        kill(own, number)
sys.late = Late()  # it goes with the interpreter, which has given up its handlers by then
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_that_is_stopped_when_all_is_answered_has_done_its_part(
    tmp_path: Path, generator: str, null: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(subprocess.Popen):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-P", "-c", STOPPED_AT_ITS_END, command[-1]], **options)

    monkeypatch.setattr(subprocess, "Popen", Stopped)
    with make_fleet(plan([0]), null, None, tmp_path, (), 1, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE]
    assert read_records(fleet.record_paths[0]).complete


def test_a_key_is_sent_but_never_written(tmp_path: Path, generator: str, null: str) -> None:
    with make_fleet(plan([0]), null, "sk-very-secret", tmp_path, (), 1, generator=generator) as fleet:
        assert run(fleet) == [Exit.DONE]
        environment = f"/proc/{fleet.processes[0].pid}/cmdline"
    assert not Path(environment).exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-very-secret" in path.read_bytes()]


@pytest.mark.parametrize("spec", [None, "", "{}", '{"url": 3}', "[1]"])
def test_a_spec_that_is_none_is_refused(tmp_path: Path, spec: str | None) -> None:
    path = tmp_path / "spec.json"
    if spec is not None:
        path.write_text(spec)
    command = [sys.executable, "-P", "-m", "gapmeter.loadgen.worker", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == Exit.BAD_SPEC
    assert done.stderr.startswith("not a generator's spec")
    assert done.stderr.count("\n") == 1
