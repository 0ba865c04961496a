"""``--live``: the process that serves the live page, for as long as a run lasts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from gapmeter.options import tell
from gapmeter.records import RunFolder
from gapmeter.study.beside import beside, cores_off, first_line

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
    from gapmeter.web.live import Spec  # with a web server and parts of the report, which no other run needs yet

    spec = json.dumps(asdict(Spec(str(folder.path.resolve()), port, cores_off(generator))))
    log = folder.logs / "live.log"
    with beside("gapmeter.web.live", spec, log, grace_s=_LEAVE_S) as process:
        address = first_line(process, _READY_S)
        tell(f"live: {address}" if address else f"no live page: see {log}")
        yield
