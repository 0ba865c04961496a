"""Processes of ours beside a run: the telemetry sampler, the runs page, Locust's page. None of them issues load."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.machine.hardware import cores_except
from gapmeter.options import LocustPageOptions, Say
from gapmeter.records import RunFolder
from gapmeter.scenarios.model import Telemetry
from gapmeter.servers.telemetry import Journal
from gapmeter.servers.telemetry.sampler import API_KEY, SamplerSettings

_READY_S = 20.0
_SAMPLER_LEAVES_S, _PAGE_LEAVES_S = 3.0, 8.0
_CHECK_EVERY_S = 0.2


@contextlib.contextmanager
def companion(
    module: str, *arguments: str, stderr: IO[bytes], grace_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m MODULE ARGUMENT…`` for as long as the block lasts.

    It is in a session of its own, so that Ctrl-C is for the run. Its standard input ends with the block; a process that
    has not ended ``grace_s`` later is killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env=None if environment is None else {**os.environ, **environment},
        bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """What it prints first, without the line's end; "" when it ends or the time is over before."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _READY_S)
    return process.stdout.readline().decode().strip() if readable else ""


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a word"


@contextlib.contextmanager
def telemetry(
    folder: RunFolder, asked: Telemetry, pids: Sequence[int], url: str, server_here: bool, generator: Sequence[int],
    api_key: str | None, say: Say,
) -> Iterator[None]:  # fmt: skip
    """Sample into the run's folder for as long as the block lasts; nothing when ``asked.hz`` is 0.

    ``pids`` are the roots of the server's process trees; ``server_here``: it is on this machine. ``generator``: the
    cores to keep off. A sampler that cannot start, or dies, is reported and never ends the run.
    """
    if not asked.hz:
        yield
        return
    where, cores = str(folder.telemetry), cores_except(generator)
    settings = SamplerSettings(where, asked.hz, asked.metrics_every_ns, url, server_here, pids, (os.getpid(),), cores)
    path = folder.logs / "sampler.log"
    with path.open("wb") as log, companion(
        "gapmeter.servers.telemetry.sampler", settings.to_json(), stderr=log, grace_s=_SAMPLER_LEAVES_S,
        environment={API_KEY: api_key} if api_key else None,
    ) as sampler:  # fmt: skip
        if _first_line(sampler) != "ready":
            Journal(folder.telemetry).note("absent", source="sampler", why="it did not start; see logs/sampler.log")
            say(f"no telemetry: the sampler did not start (log: {path})")
        yield


@contextlib.contextmanager
def runs_page(runs: Path, port: int | None, generator: Sequence[int], say: Say) -> Iterator[str]:
    """Serve the page over the runs folder while the block lasts; its address, "" for none.

    ``port`` None: no page, 0: any free port. ``generator``: the cores to keep off. A page that cannot be served is
    reported, and never ends a run.
    """
    if port is None:
        yield ""
        return
    settings = (str(runs.resolve()), str(port), *map(str, cores_except(generator)))
    with (
        tempfile.TemporaryFile() as log,
        companion("gapmeter.web.server", *settings, stderr=log, grace_s=_PAGE_LEAVES_S) as process,
    ):
        address = _first_line(process)
        if not address:
            say(f"no live page: {_last_words(log)}")
        yield address


class LocustPage:
    """Locust's own web page in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.address = f"http://127.0.0.1:{port}"
        self._stop = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def show(self, folder: Path, name: str, url: str) -> None:
        """Begin to show this run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a page that is gone is no reason to end a run
            self._process.stdin.write(json.dumps({"folder": str(folder), "name": name, "url": url}).encode() + b"\n")
        self._stop.clear()

    def asked_to_stop(self) -> bool:
        """Whether somebody has pressed Stop since the run began."""
        return self._stop.is_set()

    def keep(self, keep_ns: int | None, say: Say) -> None:
        """Leave it up for as long as asked, or until Ctrl-C, which ends only this."""
        sys.stdout.flush()  # a program that waits for the run's folder need not wait for the page
        until = "until Ctrl-C" if keep_ns is None else f"for {keep_ns / 1e9:g} s"
        end = None if keep_ns is None else time.monotonic() + keep_ns / 1e9
        with contextlib.suppress(KeyboardInterrupt):  # also one that comes as soon as the sentence is read
            say(f"the page with the result stays at {self.address} {until}")
            while self._process.poll() is None and (end is None or time.monotonic() < end):
                time.sleep(_CHECK_EVERY_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == b"stop\n":
                self._stop.set()


@contextlib.contextmanager
def locust_page(asked: LocustPageOptions | None, say: Say) -> Iterator[LocustPage | None]:
    """Locust's page, listening, before anything is launched; gone when the block ends. Raises UserError."""
    if asked is None:
        yield None
        return
    with tempfile.TemporaryFile() as log:
        environment = {"LOCUST_SKIP_MONKEY_PATCH": "1"}
        with companion(
            "gapmeter.web.locust_page", str(asked.port), stderr=log, grace_s=_PAGE_LEAVES_S, environment=environment
        ) as process:
            word, _, port = _first_line(process).partition(" ")
            if word != "ready":
                why = _last_words(log)
                missing = ": make setup in a checkout, or pip install locust" if "No module named" in why else ""
                raise UserError(f"--ui: {why}{missing}", errors.USAGE)
            page = LocustPage(process, int(port))
            say(f"Locust's page shows this run at {page.address}")
            yield page
