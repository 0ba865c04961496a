"""``gapmeter worker``, and the words by which a run is told to use workers."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.scenarios.durations import read_duration
from gapmeter.scenarios.errors import BadValue

if TYPE_CHECKING:
    from gapmeter.loadgen.cluster import Workers

PORT = 5557
_LOOPBACK = "127.0.0.1"


def serve(master: str, cores: str, api_key: str | None) -> int:
    """Be one worker of a run, to its end. Raises UserError when that cannot be."""
    host, port = address(master, "--master")
    os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # the generator is a process of its own; threads here must be threads
    try:
        from gapmeter.loadgen.locust import slice_run, worker
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install 'gapmeter[locust]'", errors.USAGE) from error
    call = slice_run.Call(host, port, _cores(cores), api_key)
    try:
        worker.serve(call, lambda text: print(f"gapmeter: {text}", file=sys.stderr, flush=True))
    except worker.Refused as error:
        raise UserError(str(error), errors.NOT_VALID) from error
    except ConnectionError as error:
        raise UserError(f"no master answers at {host}:{port}", errors.UNREACHABLE) from error
    return errors.OK


def workers(count: int, listen: str, patience: str) -> Workers | None:
    """What ``--workers``, ``--listen`` and ``--patience`` ask for; None without. Raises UserError."""
    if not count and not listen:
        return None
    if count < 1:
        raise UserError(f"--workers {count} is not a number of workers; write for instance --workers 3", errors.USAGE)
    from gapmeter.loadgen.cluster import Workers

    host, port = address(listen, "--listen") if listen else (_LOOPBACK, PORT)
    try:
        return Workers(count, host, port, read_duration(patience, least_ns=5_000_000_000) / 1e9)
    except BadValue as error:
        raise UserError(f"--patience {error}", errors.USAGE) from error


def address(text: str, flag: str) -> tuple[str, int]:
    """HOST, or HOST:PORT. Raises UserError."""
    host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if not host or (colon and not (port.isdecimal() and int(port[:9]) < 65536)):
        raise UserError(
            f"{flag} {text} is not an address; write HOST or HOST:PORT, for instance 10.0.0.5:{PORT}", errors.USAGE
        )
    return host, int(port) if port else PORT


def _cores(text: str) -> tuple[int, ...]:
    here = os.sched_getaffinity(0)
    if not all(part.isdecimal() and int(part[:9]) in here for part in text.split(",") if text):
        raise UserError(f"--cores {text}: this machine has cores {', '.join(map(str, sorted(here)))}", errors.USAGE)
    return tuple(int(part) for part in text.split(",") if text)
