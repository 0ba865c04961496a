"""``gapmeter ui``, from its flags to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.options import tell
from gapmeter.web.ui import serve


def serve_ui(runs: Path, port: int) -> int:
    """Serve until Ctrl-C; the address is on standard output. Raises UserError when the port is taken."""
    if not 0 <= port < 65536:
        raise UserError(f"--port {port} is not a port; write one from 1 to 65535, or 0 for any", errors.USAGE)
    if not runs.is_dir():
        raise UserError(f"{runs} is no folder; name another with --runs", errors.USAGE)
    tell(f"the runs in {runs}, for this machine only; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(serve(runs, port, _compare, lambda address: print(address, flush=True)))
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror or error}", errors.USAGE) from error
    return errors.OK


def _compare(chosen: Sequence[Path], runs: Path) -> Path:
    """Each ticked run is a side of its own; what may not be compared is a page that says so."""
    from gapmeter.compare import compare_folders

    return compare_folders([[path] for path in chosen], runs=runs).folder
