"""The sampler beside a run: started before its load, off the generator's cores, ended after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from gapmeter.options import Options, silent, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios.model import Telemetry
from gapmeter.servers.launch import ServerProcess
from gapmeter.servers.telemetry.journal import Journal
from gapmeter.servers.telemetry.sampler import API_KEY, SamplerSettings
from gapmeter.study.attach import listeners
from gapmeter.study.beside import beside, cores_off, first_line

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
    settings = SamplerSettings(
        str(folder.telemetry), asked.hz, asked.metrics_every_ns, url, tuple(pids), cores_off(generator)
    )
    environment = {**os.environ, API_KEY: options.api_key} if options.api_key else None
    log = folder.logs / "sampler.log"
    with beside(
        "gapmeter.servers.telemetry.sampler", settings.to_json(), log, grace_s=_GRACE_S, environment=environment
    ) as sampler:
        if first_line(sampler, _READY_S) != "ready":
            Journal(folder.telemetry).note("absent", source="sampler", why="it did not start; see logs/sampler.log")
            say = silent if options.quiet else tell
            say(f"no telemetry: the sampler did not start (log: {log})")
        yield
