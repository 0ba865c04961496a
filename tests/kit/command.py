"""The real command line as a process of its own, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gapmeter.records import RunFolder
from gapmeter.records.follow import RecordTail
from gapmeter.records.request import FINISHED
from tests.kit.wait import until

ROOT = Path(__file__).resolve().parents[2]
MARK = "GAPMETER_TEST_MARK"
_LONGEST_S = 300  # a hang takes for ever; a busy machine may take long


def settings(*pairs: str) -> tuple[str, ...]:
    """As words of a command line."""
    return tuple(word for pair in pairs for word in ("--set", pair))


# Thirty short requests in half a second.
SHORT = settings(
    "load.arrivals=constant", "load.rate=60", "load.requests=30", "load.warmup=0", "load.timeout=9s",
    "workload.prompt_tokens=16", "workload.output_tokens=4",
)  # fmt: skip
# Answers that take a second, in a window of four: no hiccup of a busy machine is large against either, so that the
# verdict is about the SLOs.
SLOW = settings(
    "load.rate=6", "load.requests=24", "workload.output_tokens=1", "server.max_batch=32",
    "server.args.forward_ms=1000",
)  # fmt: skip
SIMULATED = ("run", "smoke", "--engine", "simulated", *SHORT)


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended. ``left`` are the processes that it left behind, as command lines."""

    code: int
    out: str
    err: str
    left: list[str]
    runs: Path

    @property
    def folder(self) -> RunFolder:
        """The only run's folder."""
        (path,) = self.runs.iterdir()
        return RunFolder(path)

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.folder.manifest.read_text())

    @property
    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.folder.summary.read_text())
        return value

    @property
    def requests(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder.path / "requests.parquet").set_index("index")

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1].strip()


@dataclass(slots=True)
class Command:
    """``gapmeter WORDS…`` under way; ``run`` and what is like it get a runs folder of their own."""

    words: tuple[str, ...]
    runs: Path
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        own = ("--runs", str(self.runs)) if self.words[:1] == ("run",) and "--runs" not in self.words else ()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gapmeter", *self.words, *own], cwd=ROOT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **self.env, MARK: self.mark}, preexec_fn=hear_signals,
        )  # fmt: skip

    def done(self) -> Done:
        """Wait for its end, and for that of what it started."""
        try:
            out, err = self.process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        left = await_gone(self.mark)
        return Done(self.process.returncode, out, err, left, self.runs)

    def master(self) -> str:
        """The address that its master listens on, once it says so."""
        heard = ""
        while (at := re.search(r"(\S+:\d+) listens", heard)) is None:
            heard = self.process.stderr.readline()
            assert heard, "the command ended before its master listened"
        return at[1]

    def await_load(self, answered: int = 1) -> Path:
        """The run's folder, once so many answers are on disk."""
        return self._await(
            lambda: next((f for f in self.runs.glob("*") if answers_in(f / "requests") >= answered), None)
        )

    def await_log(self) -> Path:
        """The run's folder, once its server has been started."""
        return self._await(lambda: next((log.parents[1] for log in self.runs.glob("*/logs/server.log")), None))

    def await_start(self) -> int:
        """When the load begins, in ns of CLOCK_MONOTONIC, once that is known."""

        def planned() -> Path | None:
            return next((run for run in self.runs.glob("*") if _t0_ns(run)), None)

        return _t0_ns(self._await(planned))

    def children(self, part: str) -> list[int]:
        """Ids of this command's processes with ``part`` in their command line."""
        return [pid for pid, line in marked(self.mark).items() if part in line]

    def _await(self, look: Callable[[], Path | None]) -> Path:
        def seen() -> Path | None:
            assert self.process.poll() is None, self.process.communicate()[1]
            return look()

        return until(seen, _LONGEST_S)


def hears(pid: int, number: signal.Signals) -> bool:
    """Whether a process of ours has a handler for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def hear_signals() -> None:
    """What a shell starts in the background, or nohup, ignores signals, and so do its children; not so at a prompt."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def gapmeter(*words: str, runs: Path, env: dict[str, str] | None = None) -> Done:
    """Run a command to its end."""
    return Command(words, runs, env or {}).done()


@contextlib.contextmanager
def crew(command: Command, before: Sequence[Sequence[str]] = ((), (), ())) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A worker for each of what stands before its words; nothing of them nor of the command is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        words = [sys.executable, "-P", "-m", "gapmeter", "worker", "--master", command.master()]
        processes += [subprocess.Popen([*inside, *words], cwd=ROOT, stderr=subprocess.DEVNULL) for inside in before]
        yield processes
    finally:
        for process in (*processes, command.process):
            process.kill()
            process.wait()


class Scenes(dict[str, Future[Done]]):
    """Commands by name, each begun when it is first asked for."""

    def __init__(self, scenes: Mapping[str, Callable[[], Done]], pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._scenes, self._pool = scenes, pool

    def __missing__(self, name: str) -> Future[Done]:
        self.begin(name)
        return self[name]

    def begin(self, name: str) -> None:
        self[name] = self._pool.submit(self._scenes[name])


@contextlib.contextmanager
def at_once(scenes: Mapping[str, Callable[[], Done]], request: pytest.FixtureRequest) -> Iterator[Scenes]:
    """Several commands, three at a time, since most of each is waiting; of a few tests only those that they need."""
    with ThreadPoolExecutor(3) as pool:
        begun = Scenes(scenes, pool)
        if sum(item.path == request.path for item in request.session.items) >= len(scenes):
            for name in scenes:
                begun.begin(name)
        yield begun


def marked(mark: str) -> dict[int, str]:
    """Processes that inherited the mark, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line:  # a zombie has none
                    found[int(folder.name)] = line
        except OSError:
            continue
    return found


def await_gone(mark: str) -> list[str]:
    """What is still there after ten seconds."""
    end = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return list(left.values())


def _t0_ns(run: Path) -> int:
    try:
        return int(json.loads(RunFolder(run).manifest.read_text())["plan"]["t0_ns"])
    except (OSError, KeyError):
        return 0


def answers_in(folder: Path) -> int:
    """How many answers generators have put on disk by now."""
    return sum(code == FINISHED for file in folder.glob("*.gap") for code, _ in RecordTail(file).poll())
