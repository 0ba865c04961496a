"""``--live``: the process that serves the live page, for as long as a run lasts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from gapmeter.options import tell
from gapmeter.web.live import Spec
from recording import RunFolder

_READY_S = 20.0
_LEAVE_S = 8.0


@contextlib.contextmanager
def live_page(folder: RunFolder, port: int | None, generator: Sequence[int]) -> Iterator[None]:
    """Serve the run in ``folder`` while the block lasts; nothing when ``port`` is None, any free one when it is 0.

    ``generator``: the cores to keep off. A page that cannot be served is told, and never ends the run.
    """
    if port is None:
        yield
        return
    usable = os.sched_getaffinity(0)
    cores = tuple(sorted(usable - set(generator) or usable))
    spec = json.dumps(asdict(Spec(str(folder.path.resolve()), port, cores)))
    with (folder.logs / "live.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gapmeter.web.live", spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, bufsize=0, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _READY_S)
        address = process.stdout.readline().decode().strip() if readable else ""
        tell(f"live: {address}" if address else f"no live page: see {folder.logs / 'live.log'}")
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
