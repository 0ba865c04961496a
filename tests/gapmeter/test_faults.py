from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gapmeter.runs.lock import is_locked
from gapmeter.servers.null.server import Schedule
from tests.kit.command import SHORT, SIMULATED, Command, Done, Scenes, at_once, gapmeter, settings
from tests.kit.servers import faulty

pytestmark = pytest.mark.whole_run

# What the server does to request k, and the outcome that is recorded for it.
WIRE = {
    "none": "ok",
    "status_500": "http_5xx",
    "cut": "cut",
    "reset": "cut",
    "half_event": "malformed",
    "garbage": "malformed",
    "error_event": "malformed",
    "stall": "timeout",
    "silent": "timeout",
    "split": "ok",
    "not_http": "malformed",
    "close_unanswered": "cut",
    "plain": "ok",
    "close_delimited": "ok",
    "status_404": "http_4xx",
}
# Only what is never answered runs into it: a good answer may take its time on a busy machine.
PATIENCE = settings("load.timeout=5s")
LONG = settings("load.requests=400", "load.rate=20")
SLOW_START = ("--set", "server.args.fault_start_s=60")


def never_ready(runs: Path) -> Done:
    fault = ("--set", "server.args.fault_never_ready=true", "--set", "server.ready_timeout=2s")
    return gapmeter(*SIMULATED, *fault, runs=runs)


def wrong_flag(runs: Path) -> Done:
    return gapmeter(*SIMULATED, "--set", "server.args.forward_mss=5", runs=runs)


def dies(runs: Path) -> Done:
    """At a rate that lets it answer some before the ninth."""
    return gapmeter(*SIMULATED, *settings("server.args.fault_die_at=9", "load.rate=6"), runs=runs)


def wire(runs: Path) -> Done:
    with faulty(tuple(WIRE)) as url:
        return gapmeter("run", "smoke", *SHORT, *PATIENCE, "--url", url, runs=runs)


def only_errors(runs: Path) -> Done:
    with faulty(("status_500",)) as url:
        return gapmeter("run", "smoke", *SHORT, "--url", url, runs=runs)


def pressed_once(runs: Path) -> Done:
    command = Command((*SIMULATED, *LONG), runs)
    command.await_load(answered=5)
    command.process.send_signal(signal.SIGINT)
    return command.done()


def told_to_end(runs: Path) -> Done:
    command = Command((*SIMULATED, *SLOW_START), runs)
    command.await_log()
    command.process.terminate()
    return command.done()


def pressed_twice(runs: Path) -> Done:
    command = Command((*SIMULATED, *LONG), runs)
    command.await_load(answered=5)
    (generator,) = command.children("gapmeter.loadgen.worker")
    os.kill(generator, signal.SIGSTOP)  # it will not stop when asked to
    command.process.send_signal(signal.SIGINT)
    for line in command.process.stderr or ():
        if "stopping" in line:
            break
    command.process.send_signal(signal.SIGINT)
    return command.done()


def killed(runs: Path) -> Done:
    command = Command((*SIMULATED, *LONG), runs)
    command.await_load(answered=5)
    command.process.kill()
    return command.done()


def generator_killed(runs: Path) -> Done:
    command = Command((*SIMULATED, *LONG), runs)
    command.await_load(answered=5)
    for pid in command.children("gapmeter.loadgen.worker"):
        os.kill(pid, signal.SIGKILL)
    return command.done()


def generator_ended(runs: Path) -> Done:
    """One of two generator processes is told to end, as by a daemon that wants its memory."""
    command = Command((*SIMULATED, *LONG, "--set", "load.processes=2"), runs)
    command.await_load(answered=5)
    os.kill(command.children("gapmeter.loadgen.worker")[0], signal.SIGTERM)
    return command.done()


def held(runs: Path) -> Done:
    """One of two generator processes is stopped, and nobody lets it go on."""
    command = Command((*SIMULATED, *LONG, "--set", "load.processes=2"), runs)
    command.await_load(answered=5)
    os.kill(command.children("gapmeter.loadgen.worker")[0], signal.SIGSTOP)
    return command.done()


SCENES: dict[str, Callable[[Path], Done]] = {
    scene.__name__: scene
    for scene in (
        pressed_twice, never_ready, wrong_flag, dies, wire, only_errors, pressed_once, told_to_end, killed,
        generator_killed, generator_ended, held,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Scenes]:
    """All that goes wrong."""
    tmp = tmp_path_factory.mktemp("faults")
    with at_once({name: partial(scene, tmp / name) for name, scene in SCENES.items()}, request) as futures:
        yield futures


@pytest.mark.parametrize("name", SCENES)
def test_no_process_is_left_and_no_traceback_shown(name: str, scenes: Scenes) -> None:
    done = scenes[name].result()
    assert done.left == []
    assert "Traceback" not in done.err


def test_a_server_that_is_never_ready_is_106_and_its_folder_says_why(scenes: Scenes) -> None:
    done = scenes["never_ready"].result()
    assert (done.code, done.out, done.last_line) == (106, "", "exit=106 target unreachable or never ready")
    assert "the server was not ready within 2 s: GET http://127.0.0.1:" in done.err
    assert "not ready within 2 s" in done.manifest["ended_because"]
    assert done.manifest["status"] == "incomplete"


def test_a_server_that_cannot_start_is_106_with_the_reason_from_its_log(scenes: Scenes) -> None:
    done = scenes["wrong_flag"].result()
    assert done.code == 106
    assert "exit code 2: " in done.err
    assert "unrecognized arguments: --forward-mss" in done.err
    assert "unrecognized arguments" in (done.folder.logs / "server.log").read_text()


def test_a_run_that_never_began_cannot_be_reported_and_the_reason_is_said(scenes: Scenes, tmp_path: Path) -> None:
    folder = scenes["never_ready"].result().folder
    again = gapmeter("report", str(folder.path), runs=tmp_path)
    assert again.code == 98
    assert "no request was recorded: the server was not ready within 2 s" in again.err


def test_a_server_that_dies_makes_the_run_invalid_and_what_was_answered_is_kept(scenes: Scenes) -> None:
    done = scenes["dies"].result()
    assert done.code == 98
    assert "the server ended with " in done.manifest["ended_because"]
    assert done.summary["verdict"] == "INVALID"
    assert any("the server ended with" in reason for reason in done.summary["invalid_reasons"])
    assert "the server ended with" in " ".join(done.err.split())
    assert done.requests["outcome"][8] != "ok"  # the ninth is the one that killed it
    assert (done.requests["outcome"] == "ok").any()


@pytest.mark.parametrize(("number", "fault"), list(enumerate(WIRE)))
def test_what_a_server_does_to_a_request_is_recorded_as_its_outcome(number: int, fault: str, scenes: Scenes) -> None:
    requests = scenes["wire"].result().requests
    for row in (requests.loc[number], requests.loc[number + len(WIRE)]):
        assert row["outcome"] == WIRE[fault], row["error"]
        assert bool(row["error"]) == (WIRE[fault] != "ok")


def test_requests_beside_bad_ones_are_measured_as_ever(scenes: Scenes) -> None:
    done = scenes["wire"].result()
    good = done.requests[done.requests["outcome"] == "ok"]
    assert len(good) == 8
    assert (good["output_tokens"] == 4).all()
    assert [len(tokens) for tokens in good["token_ns"]] == [4] * 8
    assert done.summary["counts"]["succeeded"] == 8
    assert done.code != 0
    assert done.manifest["status"] == "complete"


def test_a_run_without_a_single_success_is_reported(scenes: Scenes) -> None:
    done = scenes["only_errors"].result()
    assert done.code in (98, 99), done.err
    assert [row["status"] for row in done.summary["slo"]] == ["FAIL"]
    assert done.summary["counts"]["succeeded"] == 0
    assert set(done.requests["status"]) == {500}
    assert done.folder.report.stat().st_size


def test_ctrl_c_reports_what_there_is_and_aborts_what_was_in_flight(scenes: Scenes) -> None:
    done = scenes["pressed_once"].result()
    assert (done.code, done.last_line) == (105, "exit=105 interrupted")
    assert done.out == f"{done.folder.path}\n"
    assert "Ctrl-C again quits at once" in done.err
    assert done.manifest["ended_because"] == "interrupted"
    assert 5 <= len(done.requests) < 400
    assert set(done.requests["outcome"]) <= {"ok", "aborted"}
    assert done.summary["verdict"] == "INVALID"


def test_ctrl_c_twice_leaves_at_once_and_says_how_to_report_the_run_later(scenes: Scenes) -> None:
    done = scenes["pressed_twice"].result()
    assert (done.code, done.out, done.last_line) == (105, "", "exit=105 interrupted")
    assert f"gapmeter report {done.folder.path}" in done.err
    assert not done.folder.summary.exists()
    assert done.manifest["ended_because"] == "interrupted"
    assert len(list(done.folder.requests.glob("*.gap"))) == 1


def test_a_signal_while_the_server_starts_ends_it(scenes: Scenes) -> None:
    done = scenes["told_to_end"].result()
    assert (done.code, done.out) == (105, "")
    assert "interrupted before the load had begun" in done.err
    assert done.manifest["ended_because"] == "interrupted"


def test_a_run_that_was_killed_is_reported_with_what_had_happened_by_then(scenes: Scenes, tmp_path: Path) -> None:
    done = scenes["killed"].result()
    assert done.code == -signal.SIGKILL
    assert done.manifest["status"] == "running"
    assert not is_locked(done.folder.path)
    again = gapmeter("report", str(done.folder.path), runs=tmp_path)
    assert (again.code, again.out) == (98, f"{done.folder.path}\n")
    assert "the run was killed; this is what had happened by then" in " ".join(again.err.split())
    assert (done.requests["outcome"] == "ok").sum() >= 5
    assert done.summary["stages"], "the ledger of what was answered is missing"


def test_a_generator_process_that_was_killed_is_named(scenes: Scenes) -> None:
    done = scenes["generator_killed"].result()
    assert done.code == 98
    assert done.manifest["ended_because"].startswith("generator process 0 ")
    assert len(done.requests) >= 5


def test_a_run_ends_with_a_generator_process_that_somebody_else_told_to_end(scenes: Scenes) -> None:
    done = scenes["generator_ended"].result()
    assert done.code == 98
    assert done.manifest["ended_because"].endswith("was told to end (SIGTERM or SIGINT)")
    assert len(done.requests) < 400
    assert set(done.requests["worker"]) == {0, 1}


def test_a_generator_process_that_is_held_does_not_hold_the_run(scenes: Scenes) -> None:
    done = scenes["held"].result()
    assert done.code == 98
    assert "was stopped (SIGSTOP) for 5 s" in done.manifest["ended_because"]
    assert len(done.requests) < 400
    assert set(done.requests["worker"]) == {0, 1}, "also what it had measured is kept"


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own, full soon."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def fill(runs: Path) -> Done:
    """A hundred and fifty answers of fifty kilobytes each: more than the four megabytes that are reserved first."""
    answers = ("--set", "workload.output_tokens=200", "--set", "load.requests=150", "--set", "load.rate=300")
    with faulty(schedule=Schedule(first_ns=1_000_000, gap_ns=0)) as url:
        done = gapmeter("run", "smoke", *SHORT, *answers, "--url", url, runs=runs)
    assert (done.code, done.left) == (98, []), done.err
    assert "Traceback" not in done.err
    return done


def test_a_disk_that_is_full_from_the_start_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "2m"):
        done = fill(tmp_path / "small")
        assert "the load could not begin: " in done.err
        assert "No space left on device" in done.err


def test_a_disk_that_fills_up_makes_the_run_invalid_and_its_results_can_be_had_later(tmp_path: Path) -> None:
    room = tmp_path / "room"
    with small_disk(tmp_path / "small", "5m"):
        done = fill(tmp_path / "small")
        assert "records were dropped because the disk was full" in " ".join(done.err.split())
        path = done.folder.path
        for name in ("requests.parquet", "summary.json", "report.html"):
            (path / name).unlink()
        with contextlib.suppress(OSError), (tmp_path / "small" / "ballast").open("wb") as ballast:
            ballast.write(bytes(5 << 20))
        full = gapmeter("report", str(path), runs=room)
        assert full.code == 98
        assert re.search("the results cannot be written: .*No space left on device; the records are kept", full.err)
        shutil.copytree(path, room / "run")
    again = gapmeter("report", str(room / "run"), runs=room)
    assert again.code == 98
    assert any("records were dropped because the disk was full" in why for why in again.summary["invalid_reasons"])
    assert (again.requests["outcome"] == "ok").any()


def test_a_disk_that_is_full_before_the_load_is_no_server_that_cannot_be_reached(tmp_path: Path) -> None:
    """The server's own record does not fit."""
    with small_disk(tmp_path / "small", "600k"):
        done = gapmeter(*SIMULATED, runs=tmp_path / "small")
    assert (done.code, done.out) == (98, ""), done.err
    assert "No space left on device" in done.err
