"""One plan on several machines: a master and three workers, processes of their own; killed, late, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.loadgen.fleet import Fleet, NotStarted, Workers, make_cluster
from gapmeter.loadgen.generator import Exit
from gapmeter.loadgen.locust.protocol import SECRET, Seal
from gapmeter.loadgen.locust.slice_run import Call, SliceRun
from gapmeter.loadgen.plan import Plan
from gapmeter.records import Outcome, read_records
from gapmeter.records.request import ISSUED, on_clock
from gapmeter.records.stream import parse_answer
from gapmeter.records.workers import LocustWorker, LocustWorkers
from gapmeter.servers.launch import free_port
from tests.kit.command import ROOT, hears
from tests.kit.loads import ids, plan, records_of
from tests.kit.wait import until

pytestmark = pytest.mark.whole_run  # seconds each: workers come, are given up, hand in

MS = 1_000_000


def worker(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "gapmeter", "worker", *words]


class Crew:
    """Worker processes, which start once the master says where it listens."""

    def __init__(self, count: int) -> None:
        self._count, self.address = count, ""
        self.processes: list[subprocess.Popen[str]] = []

    def say(self, text: str) -> None:
        found = re.search(r"(\S+:\d+) listens", text)
        if found and not self.address:
            self.address = found.group(1)
            for _ in range(self._count):
                self.processes.append(self.join())

    def join(self) -> subprocess.Popen[str]:
        return self.started(worker("--master", self.address))

    def started(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def ends(self) -> list[int]:
        return [process.wait(30) for process in self.processes]

    @contextlib.contextmanager
    def at_work(self, what: Plan, url: str, folder: Path, patience_s: float = 30) -> Iterator[Fleet]:
        """All are armed and wait for the start; none is left when the block ends."""
        workers = Workers(self._count, listen_port=0, patience_s=patience_s)
        try:
            with make_cluster(what, url, folder, workers, generator="locust", say=self.say) as fleet:
                yield fleet
        finally:
            for process in self.processes:
                process.kill()
                process.communicate()


@contextlib.contextmanager
def cluster(
    what: Plan, url: str, folder: Path, *, count: int = 3, patience_s: float = 30
) -> Iterator[tuple[Fleet, Crew]]:
    crew = Crew(count)
    with crew.at_work(what, url, folder, patience_s) as fleet:
        yield fleet, crew


def test_three_workers_issue_one_plan_by_clocks_that_are_estimated_and_their_histograms_add_up(
    tmp_path: Path, null: str
) -> None:
    what = plan([index * 10 * MS for index in range(150)])
    with cluster(what, null, tmp_path) as (fleet, crew):
        t0 = fleet.start()
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
        assert crew.ends() == [0, 0, 0]
    found = records_of(tmp_path)
    assert [record.request_id for record in found] == ids(what)
    assert [record.due_ns - t0 for record in found] == what.due_ns.tolist()
    assert {record.outcome for record in found} == {Outcome.OK}
    report = LocustWorkers.read(tmp_path)
    assert [(worker.state, worker.planned, worker.issued) for worker in report.workers] == [("handed in", 50, 50)] * 3
    assert report.plan == what.digest()
    assert all(map(clock_is_within_its_half_width, report.workers)), report.workers
    expected = sorted(int(parse_answer(record).token_ns[0]) - record.due_ns for record in found)
    merged = HdrHistogram.decode(report.histograms["ttft"])
    assert merged.get_total_count() == 150
    assert merged.values_are_equivalent(merged.get_max_value(), expected[-1])
    gaps = sum(len(set(parse_answer(record).token_ns)) - 1 for record in found)  # tokens read at once have none
    assert HdrHistogram.decode(report.histograms["itl"]).get_total_count() == gaps > 0


def clock_is_within_its_half_width(worker: LocustWorker) -> bool:
    """On one machine the truth is known: it is one clock."""
    near = abs(worker.estimated_offset_ns) <= worker.estimated_half_width_ns < 100 * MS
    return bool(worker.same_clock and near and worker.clock_offset_ns == 0 and worker.round_trips >= 10)


def test_a_worker_that_is_killed_is_named_and_nobody_issues_its_slice_again(tmp_path: Path, null: str) -> None:
    what = plan([index * 20 * MS for index in range(450)])
    with cluster(what, null, tmp_path, patience_s=6) as (fleet, crew):
        t0 = fleet.start()
        time.sleep((t0 - time.monotonic_ns()) / 1e9 + 4)
        crew.processes[1].kill()
        assert fleet.wait(lambda: None, 0.05) == [Exit.BAD_SPEC]
        (trouble,) = fleet.troubles()
        crew.ends()
    report = LocustWorkers.read(tmp_path)
    (dead,) = [worker for worker in report.workers if worker.state != "handed in"]
    assert dead.pid == crew.processes[1].pid
    assert dead.state == "lost"
    assert 0 < dead.issued < dead.planned == 150
    assert f"worker {dead.worker} (" in trouble
    assert f"was not heard for 6 s; it had issued {dead.issued} of 150 requests" in trouble
    found = records_of(tmp_path)
    others = [index for index in range(450) if index % 3 != dead.worker]
    assert [record.index for record in found] == others
    assert [record.index for record in records_of(tmp_path, ISSUED)] == others
    # What the dead worker had told of its answers by then is in the merged histograms.
    assert HdrHistogram.decode(report.histograms["ttft"]).get_total_count() == 300 + dead.finished


def test_a_generator_that_is_killed_under_its_worker_is_told_and_its_records_are_handed_in(
    tmp_path: Path, null: str
) -> None:
    what = plan([*[index * MS for index in range(30)], *[5_000 * MS + index for index in range(30)]])
    with cluster(what, null, tmp_path) as (fleet, crew):
        t0 = fleet.start()
        time.sleep((t0 - time.monotonic_ns()) / 1e9 + 2)
        children = subprocess.run(
            ["pgrep", "-P", str(crew.processes[0].pid)], capture_output=True, text=True, check=True
        )
        subprocess.run(["kill", "-9", *children.stdout.split()], check=True)
        assert fleet.wait(lambda: None, 0.05) == [Exit.BAD_SPEC]
        (trouble,) = fleet.troubles()
    assert "was killed by SIGKILL; it had issued 10 of 20 requests" in trouble
    assert len(records_of(tmp_path)) == 50


def test_who_comes_late_is_refused_and_changes_nothing(tmp_path: Path, null: str) -> None:
    what = plan([index * 10 * MS for index in range(300)])
    with cluster(what, null, tmp_path) as (fleet, crew):
        fleet.start()
        late = crew.join()
        _, said = late.communicate(timeout=30)
        assert late.returncode == 98
        assert "this run has all its workers already" in said
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
    assert [record.index for record in records_of(tmp_path, ISSUED)] == list(range(300))


def test_stopping_the_master_stops_all_and_what_was_recorded_is_handed_in(tmp_path: Path, null: str) -> None:
    what = plan([*range(0, 30 * MS, MS), 3_600_000 * MS, 3_600_001 * MS, 3_600_002 * MS])
    with cluster(what, null, tmp_path) as (fleet, _):
        t0 = fleet.start()
        time.sleep((t0 - time.monotonic_ns()) / 1e9 + 1)
        fleet.processes[0].send_signal(signal.SIGINT)
        assert fleet.wait(lambda: None, 0.05) == [Exit.STOPPED]
    assert len(records_of(tmp_path)) == 30


def test_a_run_that_is_given_up_while_workers_are_awaited_lets_those_go_that_came(tmp_path: Path, null: str) -> None:
    crew = Crew(1)

    def say(text: str) -> None:
        crew.say(text)
        if "1 of 2" in text:
            raise ZeroDivisionError

    try:
        workers = Workers(2, listen_port=0)
        with (
            pytest.raises(ZeroDivisionError),
            make_cluster(plan([0, 1]), null, tmp_path, workers, generator="locust", say=say),
        ):
            pass
        _, said = crew.processes[0].communicate(timeout=10)
    finally:
        for process in crew.processes:
            process.kill()
            process.wait()
    assert "the master is gone" in said


def test_a_worker_whose_master_is_gone_stops_within_a_minute_and_names_where_it_keeps_its_records(
    tmp_path: Path, null: str
) -> None:
    what = plan([*range(0, 30 * MS, MS), 3_600_000 * MS])
    with cluster(what, null, tmp_path, count=1) as (fleet, crew):
        t0 = fleet.start()
        time.sleep((t0 - time.monotonic_ns()) / 1e9 + 1)
        fleet.processes[0].kill()
        (alone,) = crew.processes
        _, said = alone.communicate(timeout=100)
    assert alone.returncode == 98
    kept = re.search(r"the master is gone; its records are in (\S+)", said)
    assert kept, said
    folder = Path(kept[1]).parent
    try:
        assert read_records(kept[1]).complete
        assert [record.outcome for record in records_of(folder)] == [Outcome.OK] * 30
    finally:
        shutil.rmtree(folder)


SOON = """
import runpy, sys
import locust.runners
locust.runners.MASTER_HEARTBEAT_TIMEOUT = 3
runpy.run_module("gapmeter", run_name="__main__")
"""


class Impatient(Crew):
    """They take a master for gone that they have not heard for 3 s."""

    def started(self, command: list[str]) -> subprocess.Popen[str]:
        words = command[command.index("worker") :]
        env = os.environ | {"LOCUST_SKIP_MONKEY_PATCH": "1"}
        program = [sys.executable, "-P", "-c", SOON, *words]
        return subprocess.Popen(program, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kind", "told", "why"), [(Impatient, False, "the master is gone"), (Crew, True, "it was stopped by a signal")]
)
def test_a_worker_that_leaves_while_it_hands_in_names_where_it_keeps_its_records(
    tmp_path: Path, null: str, monkeypatch: pytest.MonkeyPatch, kind: type[Crew], told: bool, why: str
) -> None:
    """A master that stands still takes connections and never answers. Who is told to leave is told twice."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    crew = kind(1)
    with crew.at_work(plan([*range(0, 30 * MS, MS), 2_000 * MS]), null, tmp_path) as fleet:
        t0 = fleet.start()
        time.sleep((t0 - time.monotonic_ns()) / 1e9 + 1)
        (alone,) = crew.processes
        process = psutil.Process(alone.pid)
        fleet.processes[0].send_signal(signal.SIGSTOP)
        try:
            if told:
                process.terminate()
            until(lambda: len(process.net_connections()) == 2)  # for messages, and for its records
            if told:
                process.terminate()
            _, said = alone.communicate(timeout=30)
        finally:
            fleet.processes[0].kill()
    assert alone.returncode == 98
    kept = re.search(rf"{why}; its records are in (\S+)", said)
    assert kept, said
    assert read_records(kept[1]).complete
    assert len(records_of(Path(kept[1]).parent)) == (30 if told else 31)


def test_workers_that_cannot_reach_the_target_are_named_before_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(NotStarted, match=r"worker \d .*could not begin: Connection refused"),
        cluster(plan([0, 1, 2]), "http://127.0.0.1:9", tmp_path),
    ):
        pass


def test_workers_without_locust_here_are_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapmeter.loadgen.fleet.find_spec", lambda name: None)
    with pytest.raises(NotStarted, match="pip install locust"), cluster(plan([0]), "http://127.0.0.1:9", tmp_path):
        pass


def test_a_slice_whose_process_is_stopped_and_not_continued_ends_with_what_it_has(tmp_path: Path, null: str) -> None:
    run = SliceRun(plan([0, 3_600_000 * MS]), null, "asyncio", Call("", 0, (), None), tmp_path)
    assert run.ready.wait(20)
    run.begin(time.monotonic_ns())
    until(lambda: run.report().finished == 1)
    (pid,) = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(pid), signal.SIGSTOP)
    assert run.over.wait(30)
    assert run.troubles == ["generator process 0 was stopped (SIGSTOP) for 5 s"]
    assert len(records_of(tmp_path)) == 1


def test_a_slice_begins_only_once_however_often_locust_starts_the_test(tmp_path: Path, null: str) -> None:
    run = SliceRun(plan([index * MS for index in range(20)]), null, "locust", Call("", 0, (), None), tmp_path)
    assert run.ready.wait(20)
    t0 = time.monotonic_ns() + 200 * MS
    assert [run.begin(t0), run.begin(t0), run.begin(t0 + MS)] == [True, False, False]
    assert run.over.wait(20)
    assert [record.index for record in records_of(tmp_path, ISSUED)] == list(range(20))


AHEAD_S = (5000, 0, 77)


class Shifted(Crew):
    """Each worker's CLOCK_MONOTONIC is ahead of ours by so many seconds."""

    def started(self, command: list[str]) -> subprocess.Popen[str]:
        ahead = str(AHEAD_S[len(self.processes)])
        inside = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", ahead, "--boottime", ahead]
        return super().started([*inside, *command])


def _may() -> bool:
    words = ["unshare", "--time", "--fork", "--monotonic", "9", "true"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_workers_with_clocks_of_their_own_issue_at_the_common_start_and_their_offsets_are_known(
    tmp_path: Path, null: str
) -> None:
    if not _may():
        pytest.skip("a time namespace needs Linux 5.6, root and the program unshare")
    what = plan([index * 20 * MS for index in range(90)])
    crew = Shifted(len(AHEAD_S))
    with crew.at_work(what, null, tmp_path) as fleet:
        t0 = fleet.start()
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
        ended = time.monotonic_ns()
        assert crew.ends() == [0, 0, 0]
    workers = {worker.worker: worker for worker in LocustWorkers.read(tmp_path).workers}
    known = sorted(worker.clock_offset_ns for worker in workers.values())
    widths = {worker.clock_half_width_ns for worker in workers.values()}
    assert [round(offset / 1e9) for offset in known] == sorted(AHEAD_S)
    for offset, ahead_s in zip(known, sorted(AHEAD_S), strict=True):
        assert abs(offset - ahead_s * 1_000 * MS) <= max(widths) < 100 * MS
    assert [worker.same_clock for worker in workers.values()] == [False] * 3, "a namespace is a clock of its own"
    found = records_of(tmp_path)
    assert [record.index for record in found] == list(range(90))
    for record in found:
        worker = workers[record.worker]
        moved = on_clock(record, worker.clock_offset_ns)
        assert abs(moved.due_ns - t0 - what.due_ns[record.index]) <= 2 * worker.clock_half_width_ns
        assert t0 - 2 * worker.clock_half_width_ns <= moved.sent_ns <= moved.end_ns <= ended + 100 * MS
        assert moved.end_ns - moved.due_ns == record.end_ns - record.due_ns


class Strangers(Crew):
    """Before the worker comes one with these variables and flags, which must leave."""

    def __init__(self, *words: str, **variables: str) -> None:
        super().__init__(1)
        self._words, self._variables = words, variables
        self.code, self.said = 0, ""

    def join(self) -> subprocess.Popen[str]:
        command, env = worker("--master", self.address, *self._words), os.environ | self._variables
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
        self.code, self.said = done.returncode, done.stderr
        return super().join()


@pytest.mark.parametrize("secret", ["", "another"])
def test_a_worker_takes_no_orders_from_a_master_with_another_secret_nor_a_master_such_a_worker(
    tmp_path: Path, null: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "the run's own")
    crew = Strangers(**{SECRET: secret})
    with crew.at_work(plan([0]), null, tmp_path) as fleet:
        fleet.start()
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
        assert crew.ends() == [0]
    assert crew.code == 98
    assert "does not share this worker's secret" in crew.said
    assert "armed" not in crew.said
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"the run's own" not in written


def test_a_workers_key_goes_to_the_server_that_it_was_started_for_and_to_no_other(tmp_path: Path, null: str) -> None:
    crew = Strangers("--url", "http://127.0.0.1:9", GAPMETER_API_KEY="sk-secret-0123456789")
    with (
        pytest.raises(NotStarted, match=r"its key is for http://127.0.0.1:9 alone, not for http"),
        crew.at_work(plan([0]), null, tmp_path),
    ):
        pass
    assert crew.code == 98


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.text(), st.text(), st.data())
def test_a_message_with_anything_changed_is_nobodys(
    values: dict[str, int | str | None], secret: str, nonce: str, data: st.DataObject
) -> None:
    message = {"word": "arm", **values}
    marked = Seal(secret, nonce, "master").mark(message)
    assert Seal(secret, nonce, "worker").is_theirs(marked)
    other = data.draw(st.text().filter(lambda text: text not in (secret, nonce)))
    key = data.draw(st.sampled_from(sorted(marked)))
    assert not Seal(other, nonce, "worker").is_theirs(marked)
    assert not Seal(secret, other, "worker").is_theirs(marked)
    assert not Seal(secret, nonce, "master").is_theirs(marked)  # our own, sent back
    assert not Seal(secret, nonce, "worker").is_theirs({k: v for k, v in marked.items() if k != key})
    assert not Seal(secret, nonce, "worker").is_theirs(data.draw(st.none() | st.text() | st.just(message)))


@pytest.mark.parametrize(("ours", "theirs", "may"), [
    ("http://a:1", "http://a:1/v1", True), ("http://a:1", "https://a:1", False), ("http://a:1", "http://a:2", False),
    ("http://a:1", "http://a:1@b:1", False), ("http://a", "http://a.b", False), ("", "http://a", False),
])  # fmt: skip
def test_a_server_is_the_one_of_the_same_scheme_host_and_port(ours: str, theirs: str, may: bool) -> None:
    assert Call("", 0, (), "a key", url=ours).may_ask(theirs) is may
    assert Call("", 0, (), None, url=ours).may_ask(theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_that_finds_no_master_leaves_at_a_signal(number: signal.Signals) -> None:
    command = worker("--master", f"127.0.0.1:{free_port()}")
    heed = partial(signal.signal, number, signal.SIG_DFL)  # a shell's background job is started to ignore SIGINT
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert "calling the master" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(10) == 105
        assert "Traceback" not in process.stderr.read()


def test_a_worker_hears_a_signal_that_comes_within_its_imports() -> None:
    command = worker("--master", f"127.0.0.1:{free_port()}")
    heed = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        until(lambda: hears(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 105
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(("words", "code", "said"), [
    (("--master", "no-such-host.invalid"), 106, "no master at no-such-host.invalid:5557"),
    (("--master", "192.0.2.1"), 2, f"set {SECRET}"),
    (("--master", "127.0.0.1", "--api-key", "k"), 2, "name it with --url"),
])  # fmt: skip
def test_a_worker_that_can_never_begin_says_why_at_once(words: tuple[str, ...], code: int, said: str) -> None:
    done = subprocess.run(worker(*words), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert said in done.stderr
