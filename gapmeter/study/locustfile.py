"""``--locustfile``: a user's own file says who asks what; the scenario says of whom, and for how long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.loadgen.worker import Locustfile
from gapmeter.records.request import ISSUED
from gapmeter.records.tail import RecordTail
from gapmeter.scenarios import Scenario

_CLOSED = (
    "write --set load.arrivals=closed --set load.rate=null --set load.concurrency=8 (the number of users, unless a "
    "shape in the file says it)"
)


def checked(path: Path | None, scenario: Scenario, workers: int) -> Path | None:
    """The file, absolute; None for none. Raises UserError where it cannot be used with this scenario."""
    if path is None:
        return None
    if not path.is_file():
        raise UserError(f"--locustfile {path}: there is no such file", errors.USAGE)
    load = scenario.load
    if load.loop != "closed":
        raise UserError(
            f"--locustfile: its users wait for answers, {scenario.name} is an open loop; {_CLOSED}", errors.USAGE
        )
    if load.duration_ns is None:
        raise UserError(
            "--locustfile: how many requests there will be is its users' affair; write a time: --set "
            "load.requests=null --set load.duration=60s",
            errors.USAGE,
        )
    if workers or load.processes > 1:
        raise UserError(
            "--locustfile: its users live in one process; leave out --workers and load.processes", errors.USAGE
        )
    return path.resolve()


def own_users(path: Path | None, model: str, dialect: str) -> Locustfile | None:
    """What the generator process needs of it."""
    return None if path is None else Locustfile(str(path), model, dialect)


def ended_ns(records: Iterable[Path]) -> int:
    """When the last request was due; a shape may end before the plan's time does. CLOCK_MONOTONIC."""
    dues = [record.due_ns for path in records for code, record in RecordTail(path).poll() if code == ISSUED]
    return max(dues, default=0)


def note_locustfile(manifest: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The manifest with what the file was; lengths are not enforced, since the file says them."""
    if path is not None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["plan"] |= {"output_enforced": False, "locustfile": {"name": path.name, "sha256": digest}}
    return manifest
