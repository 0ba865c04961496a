"""What ends a command from outside, at any moment of it, ends it as documented."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gapmeter.records import RunFolder
from tests.kit.command import MARK, ROOT, SIMULATED, Command, await_gone, hear_signals, hears
from tests.kit.wait import until

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A module whose import takes a second, and a program that hears a signal in the middle of it.
SLOW = "import sys, time\nprint('began', flush=True)\ntime.sleep(0.5)\nprint('whole', flush=True)\n"
IMPORTS = """
import sys
from gapmeter.signals import interrupt_on_signals
interrupt_on_signals()
try:
    import slow
    import time
    time.sleep(9)
except KeyboardInterrupt:
    print("interrupted", "slow" in sys.modules)
"""
# The same where a model is made, on its first use.
MODELS = """
import time
from pydantic import BaseModel, ConfigDict
from pydantic_core import core_schema
from gapmeter.signals import interrupt_on_signals

class Slow:
    def __get_pydantic_core_schema__(source, handler):
        print("began", flush=True)
        time.sleep(0.5)
        print("whole", flush=True)
        return core_schema.any_schema()

class Model(BaseModel):
    model_config = ConfigDict(defer_build=True)
    value: Slow

interrupt_on_signals()
try:
    Model(value=1)
    time.sleep(9)
except KeyboardInterrupt:
    print("interrupted", Model(value=2).value == 2)
"""


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("words", [IMPORTS, MODELS], ids=["an import", "the making of a model"])
def test_a_signal_in_the_middle_of_what_must_not_break_is_heard_when_it_is_over(
    words: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-c", words], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, preexec_fn=hear_signals,
    ) as program:  # fmt: skip
        assert program.stdout.readline() == "began\n"
        program.send_signal(number)
        assert program.stdout.read() == "whole\ninterrupted True\n"


# A command that waits, and hears Ctrl-C again and again as it leaves.
WAITS = """
import os, signal, sys, time
import gapmeter.cli
from gapmeter.__main__ import program

def press_and_set(number, handler, set=signal.signal):
    if handler is signal.SIG_IGN:
        os.kill(os.getpid(), signal.SIGINT)
    return set(number, handler)

signal.signal = press_and_set
gapmeter.cli.main = lambda *_: print("began", flush=True) or time.sleep(9)
sys.exit(program())
"""


def test_signals_at_every_moment_of_its_leaving_change_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_signals,
    ) as command:  # fmt: skip
        assert command.stdout.readline() == "began\n"
        while command.poll() is None:
            command.send_signal(signal.SIGINT)
        assert (command.returncode, command.stderr.read()) == (105, "gapmeter: interrupted\nexit=105 interrupted\n")


def test_a_command_without_a_run_ends_with_105_too(tmp_path: Path) -> None:
    command = Command(("calibrate", "--quick"), tmp_path, {"XDG_CACHE_HOME": str(tmp_path)})
    assert "error and cost" in command.process.stderr.readline()
    command.process.send_signal(signal.SIGHUP)
    done = command.done()
    assert (done.code, done.last_line, done.left) == (105, "exit=105 interrupted", [])
    assert "Traceback" not in done.err


@pytest.mark.whole_run
def test_a_command_hears_a_signal_before_it_has_read_its_words(tmp_path: Path) -> None:
    command = Command(SIMULATED, tmp_path)
    until(lambda: hears(command.process.pid, signal.SIGTERM))
    command.process.send_signal(signal.SIGTERM)
    done = command.done()
    assert (done.code, done.out) == (105, "")
    assert done.err.endswith("gapmeter: interrupted\nexit=105 interrupted\n")
    assert "Traceback" not in done.err


def at_a_terminal() -> None:
    hear_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.whole_run
def test_a_run_whose_terminal_is_closed_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """The terminal says so twice (the kernel and the shell), and nothing can be written to it any more."""
    mark = f"{os.getpid()}-{tmp_path.name}"
    words = [sys.executable, "-P", "-m", "gapmeter", *SIMULATED, "--set", "load.requests=900", "--runs", str(tmp_path)]
    ours, theirs = os.openpty()
    command = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, MARK: mark}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=at_a_terminal,
    )  # fmt: skip
    os.close(theirs)
    heard = b""
    while b"in flight" not in heard:
        heard += os.read(ours, 4096)
    os.close(ours)
    with contextlib.suppress(ProcessLookupError):
        os.kill(command.pid, signal.SIGHUP)
    assert command.wait() == 105
    assert await_gone(mark) == []
    (folder,) = tmp_path.iterdir()
    assert json.loads(RunFolder(folder).manifest.read_text())["ended_because"] == "interrupted"
    assert RunFolder(folder).report.exists()


@pytest.mark.whole_run
def test_a_run_to_whom_nobody_listens_any_more_goes_to_its_end(tmp_path: Path) -> None:
    command = Command(SIMULATED, tmp_path)
    assert command.process.stderr is not None and command.process.stdout is not None
    command.process.stderr.readline()
    command.process.stderr.close()
    with command.process.stdout as said:
        folder = RunFolder(Path(said.read().strip()))
    assert command.process.wait() in (0, 98, 99)
    assert folder.report.exists()
    assert json.loads(folder.manifest.read_text())["status"] == "complete"


@pytest.mark.whole_run
@pytest.mark.parametrize("number", ENDING[:2])
def test_a_signal_at_a_random_moment_ends_a_run_with_105_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The same moment again: ``--hypothesis-seed`` with what was printed."""
    seed = pytestconfig.getoption("hypothesis_seed", None) or random.randrange(1 << 32)
    moment_s = random.Random(int(seed)).uniform(0.0, 5.5)  # from the imports to the load
    print(f"seed {seed}: the signal comes {moment_s:.3f} s after the command can hear it")
    command = Command((*SIMULATED, "--set", "load.requests=900"), tmp_path)
    until(lambda: hears(command.process.pid, signal.SIGTERM))
    time.sleep(moment_s)
    command.process.send_signal(number)
    done = command.done()
    assert (done.code, done.last_line, done.left) == (105, "exit=105 interrupted", []), (moment_s, done.err)
    assert "Traceback" not in done.err, moment_s
