"""The sampler beside a run: started before its load, off the generator's cores, ended after it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence

from gapmeter.attach import listeners
from gapmeter.options import Options, silent, tell
from recording import RunFolder
from scenarios.model import Telemetry
from servers.launch import ServerProcess
from servers.telemetry.journal import Journal
from servers.telemetry.sampler import API_KEY, Spec

_READY_S = 20.0
_GRACE_S = 3.0


@contextlib.contextmanager
def sampling(
    folder: RunFolder, asked: Telemetry, process: ServerProcess | None, url: str, generator: Sequence[int],
    options: Options,
) -> Iterator[None]:  # fmt: skip
    """Sample into the run's folder for as long as the block lasts; nothing when ``asked.hz`` is 0.

    ``process`` is the server that we launched (None: the one that listens at ``url``), ``generator`` the cores to keep
    off. A sampler that cannot start, or dies, is told and never ends the run.
    """
    if not asked.hz:
        yield
        return
    pids = listeners(url) if process is None else (process.pid,)
    spec = Spec(str(folder.telemetry), asked.hz, asked.metrics_every_ns, url, tuple(pids), _cores(generator))
    with _process(spec, options.api_key, folder) as sampler:
        if not _is_ready(sampler):
            Journal(folder.telemetry).note("absent", source="sampler", why="it did not start; see logs/sampler.log")
            say = silent if options.quiet else tell
            say(f"no telemetry: the sampler did not start (log: {folder.logs / 'sampler.log'})")
        yield


def _cores(generator: Sequence[int]) -> tuple[int, ...]:
    """All that this process may use but the generator's; all of them where it has every one."""
    usable = os.sched_getaffinity(0)
    return tuple(sorted(usable - set(generator) or usable))


@contextlib.contextmanager
def _process(spec: Spec, api_key: str | None, folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a session of its own, so that Ctrl-C is for the run; none is left when the block ends."""
    environment = {**os.environ, API_KEY: api_key} if api_key else None
    with (folder.logs / "sampler.log").open("wb") as log:
        sampler = subprocess.Popen(
            [sys.executable, "-m", "servers.telemetry", spec.to_json()], env=environment, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert sampler.stdin is not None and sampler.stdout is not None
    try:
        yield sampler
    finally:
        sampler.stdin.close()
        try:
            sampler.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            sampler.kill()
            sampler.wait()
        sampler.stdout.close()


def _is_ready(sampler: subprocess.Popen[bytes]) -> bool:
    assert sampler.stdout is not None
    readable, _, _ = select.select([sampler.stdout], [], [], _READY_S)
    return bool(readable) and sampler.stdout.readline() == b"ready\n"
