"""Processes of ours beside a run: the telemetry sampler and the runs page. Neither issues load."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from gapmeter.loadgen.fleet import last_line
from gapmeter.machine.hardware import cores_except
from gapmeter.options import Say, tell
from gapmeter.records import RunFolder
from gapmeter.records.process import API_KEY
from gapmeter.scenarios.model import Telemetry
from gapmeter.servers.telemetry import Journal
from gapmeter.servers.telemetry.sampler import SamplerSettings

_READY_S = 20.0
_SAMPLER_LEAVES_S, _PAGE_LEAVES_S = 3.0, 8.0


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
def page_server(runs: Path, port: int | None, generator: Sequence[int]) -> Iterator[str]:
    """Serve the page over the runs folder while the block lasts; its address, "" for none.

    ``port`` None: no page, 0: any free port. ``generator``: the cores to keep off. A page that cannot be served is
    reported, and never ends a run.
    """
    if port is None:
        yield ""
        return
    settings = (str(runs.resolve()), str(port), *map(str, cores_except(generator)))
    with (
        tempfile.NamedTemporaryFile() as log,
        companion("gapmeter.web.server", *settings, stderr=log, grace_s=_PAGE_LEAVES_S) as process,
    ):
        address = _first_line(process)
        if not address:
            tell(f"no live page: {last_line(Path(log.name)) or 'it ended without a word'}")
        yield address
