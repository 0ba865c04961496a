"""Folders, files, names and variables of strangers: a sentence each, never a traceback, a wait or a command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.results import RunResult
from gapmeter.cli import main
from gapmeter.commands.flags import publish
from gapmeter.errors import SLO_MISSED
from gapmeter.report.printable import printable
from gapmeter.report.terminal import print_table
from gapmeter.runs.run import Conclusion
from gapmeter.scenarios.plain_file import check_folder, open_plain
from tests.kit.command import ROOT
from tests.kit.runs import write_run


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)  # no block of it is on the disk


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link out": lambda path: path.symlink_to("/etc/hostname"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a folder": Path.mkdir,
    "a file of 4 TB": _huge,
    "lists without end": lambda path: path.write_text("[" * 1_000_000),
    "no text": lambda path: path.write_bytes(bytes(range(256))),
}


@pytest.fixture
def nearby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a socket's address is short."""
    monkeypatch.chdir(tmp_path)
    return Path()


@pytest.mark.parametrize("command", ["report", "verify", "archive", "export --csv out", "compare {run}", "runs --runs"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_where_a_runs_manifest_should_be_ends_in_a_sentence(
    nearby: Path, kind: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = nearby / "runs" / "20260101-000000-x-abc"
    (run / "requests").mkdir(parents=True)
    KINDS[kind](run / "manifest.json")
    listing = command.startswith("runs")
    name = str(run.parent if listing else run)
    code = main([*command.format(run=f"{run}-other").split(), name])
    out, err = capfd.readouterr()
    assert code in ((0,) if listing else (2, 98)), err
    assert "Traceback" not in err
    assert len(err) < 2_000
    assert not listing or "damaged" in out


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a link to a device", "a link out", "a file of 4 TB"])
@pytest.mark.parametrize("place", ["probe.gap", "requests/worker-0.gap", "points/1/run/manifest.json"])
def test_a_folder_is_looked_through_before_any_of_it_is_opened(nearby: Path, kind: str, place: str) -> None:
    (nearby / place).parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](nearby / place)
    for look in (lambda: check_folder(nearby), lambda: open_plain(nearby / place)):
        with pytest.raises(OSError, match=r"it is a|its 4,398"):
            look()


@pytest.mark.parametrize("words", [
    "{}", "smoke --set workload.kind=file --set workload.file={}",
    "smoke --set load.arrivals=trace --set load.rate=null --set load.trace.file={}",
    "smoke --set workload.prompt_tokens.file={}",
])  # fmt: skip
def test_a_pipe_or_a_device_is_no_file_of_a_scenario(
    nearby: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(nearby / "pipe.yaml")
    for name in ("./pipe.yaml", "/dev/zero"):
        assert main(["config", *words.format(name).split()]) == 104
        assert "not a plain file" in capfd.readouterr().err


@given(st.text(st.characters()))
def test_no_words_are_obeyed_by_a_terminal(words: str) -> None:
    shown = printable(words)
    assert all(char.isprintable() or char.isspace() for char in shown)
    assert not set(shown) & set("\x1b\r\b\x9b\u202e\x85")
    assert printable(shown) == shown
    drawn = io.StringIO()
    with contextlib.redirect_stdout(drawn):
        print_table(["model"], [[words]])
    assert not set(drawn.getvalue()) & set("\x1b\r\b\x9b\u202e\x85")


def test_words_of_a_scenario_and_of_a_run_are_shown_not_obeyed(nearby: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (nearby / "scenarios").mkdir()
    (nearby / "scenarios" / "loud.yaml").write_text(r'summary: "\e[2J"')
    assert main(["scenarios"]) == 0
    folder = write_run(nearby / "run", count=40, slos=("ttft p50 <= 1 ms",))
    found = Conclusion(folder.path, RunResult.read(folder.path).model_copy(update={"name": "\x1b[2J"}), SLO_MISSED)
    publish(Namespace(junit=None, markdown=None, annotations=True, json=False, quiet=True), lambda: [found])
    for said in capfd.readouterr():
        assert "\\x1b[2J" in said and "\x1b" not in said


@pytest.mark.parametrize("words", [("scenarios",), ("config", "smoke")])
def test_an_output_that_has_no_room_or_no_reader_is_said_as_what_it_is(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "gapmeter", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(write)
    assert (done.returncode, "the reader closed it" in done.stderr) == (2, True)


@pytest.mark.whole_run
def test_what_becomes_of_the_output_changes_no_verdict(finished_run: Path, run_copy: Callable[[], Path]) -> None:
    command = [sys.executable, "-P", "-m", "gapmeter", "report", str(run_copy())]
    code = json.loads((finished_run / "summary.json").read_text())["exit_code"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == code != 2
    assert "standard output has not been written: No space left on device" in done.stderr


WORDS = ("$(touch bad)", "`touch bad`", '"; touch bad; "', "'; touch bad; '", "$(shell touch bad)", "x\n\ttouch bad")


@pytest.mark.parametrize("target", ["loadtest", "capacity", "report", "compare", "screenshots", "soak", "fuzz"])
@pytest.mark.parametrize("given_by", ["words", "environment"])
def test_no_variable_of_make_is_a_command(tmp_path: Path, target: str, given_by: str) -> None:
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    (tmp_path / "Makefile").write_text(
        (ROOT / "Makefile")
        .read_text()
        .replace(".venv/bin/python", str(stub))
        .replace(".venv-fuzz/bin/python", str(stub))
    )
    names = ("SCENARIO", "ENGINE", "URL", "GENERATOR", "LOCUSTFILE", "OVER", "LIVE", "RUN", "A", "B", "SOAK", "FUZZ")
    for words in WORDS:
        given_values = dict.fromkeys(names, words)
        own = [f"{name}={value}" for name, value in given_values.items()] if given_by == "words" else []
        env = os.environ | {"PYTHON": str(stub)} | (given_values if given_by == "environment" else {})
        subprocess.run(
            ["make", "-s", target, *own], cwd=tmp_path, env=env, capture_output=True, check=False, timeout=60
        )
        assert not (tmp_path / "bad").exists(), words
