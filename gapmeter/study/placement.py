"""Which cores the load generator and the server get when they share a machine."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Placement:
    """Core numbers. Empty server cores mean that the server is not ours to place."""

    generator: tuple[int, ...]
    server: tuple[int, ...]
    shared: bool

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def place(processes: int, *, local_server: bool, share: bool = False) -> Placement:
    """Give the generator's processes the last cores of this process's affinity, the server the others.

    With too few cores for both, or where the user wants it (``share``), both get all of them and ``shared`` says so:
    the report warns.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if not local_server:
        return Placement(cores[-processes:], (), shared=len(cores) < processes)
    if share or len(cores) <= processes:
        return Placement(cores, cores, shared=True)
    return Placement(cores[-processes:], cores[:-processes], shared=False)
