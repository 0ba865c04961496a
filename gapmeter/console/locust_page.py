"""``--ui``: Locust's own web page beside a run, in a process of its own that issues nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.loadgen.fleet import end_processes
from gapmeter.scenarios.durations import read_duration
from gapmeter.scenarios.errors import BadValue

_LOOK_S = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ui:
    """Where the page listens on 127.0.0.1 (port 0: any), and how long it stays after the run; None: until Ctrl-C."""

    port: int = 8089
    keep_ns: int | None = None


def ui(port: int, keep: str | None) -> Ui:
    """What ``--ui-port`` and ``--ui-keep`` ask for. Raises UserError."""
    if not 0 <= port < 65536:
        raise UserError(f"--ui-port {port} is not a port; write for instance --ui-port 8089", errors.USAGE)
    try:
        return Ui(port, None if keep is None else read_duration(keep))
    except BadValue as error:
        raise UserError(f"--ui-keep {error}", errors.USAGE) from error


class Page:
    """The page's process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, keep_ns: int | None, say: Say) -> None:
        self._process, self._keep_ns, self._say = process, keep_ns, say
        self.address = f"http://127.0.0.1:{port}"
        self._stop = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def show(self, folder: Path, name: str, url: str) -> None:
        """Begin to show this run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a page that is gone is no reason to end a run
            self._process.stdin.write(json.dumps({"folder": str(folder), "name": name, "url": url}).encode() + b"\n")
            self._process.stdin.flush()
        self._stop.clear()

    def asked_to_stop(self) -> bool:
        """Whether somebody has pressed Stop since the run began."""
        return self._stop.is_set()

    def keep(self) -> None:
        """Let it be looked at for as long as asked, or until Ctrl-C, which only ends this."""
        sys.stdout.flush()  # whoever waits for the run's folder need not wait for the page
        until = "until Ctrl-C" if self._keep_ns is None else f"for {self._keep_ns / 1e9:g} s"
        end = None if self._keep_ns is None else time.monotonic() + self._keep_ns / 1e9
        with contextlib.suppress(KeyboardInterrupt):  # also one that comes as soon as the sentence is read
            self._say(f"the page with the result stays at {self.address} {until}")
            while self._process.poll() is None and (end is None or time.monotonic() < end):
                time.sleep(_LOOK_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == b"stop\n":
                self._stop.set()


@contextlib.contextmanager
def opened(asked: Ui | None, say: Say) -> Iterator[Page | None]:
    """The page, listening, before anything is launched; gone when the block ends. Raises UserError."""
    if asked is None:
        yield None
        return
    with tempfile.TemporaryFile() as said:
        process = _start(asked.port, said)
        try:
            assert process.stdout is not None
            word, _, port = process.stdout.readline().decode().partition(" ")
            if word != "ready":
                process.wait()
                raise UserError(f"--ui: {_last(said)}", errors.USAGE)
            page = Page(process, int(port), asked.keep_ns, say)
            say(f"Locust's page shows this run at {page.address}")
            yield page
        finally:
            end_processes([process])


def _start(port: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gapmeter.loadgen.locust.page", str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=said, process_group=0, env={**os.environ, "LOCUST_SKIP_MONKEY_PATCH": "1"},
    )  # fmt: skip


def _last(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines() or ["it ended without a word"]
    missing = "No module named" in lines[-1]
    return f"{lines[-1]}: pip install 'gapmeter[locust]'" if missing else lines[-1]
