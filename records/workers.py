"""Workers elsewhere, as their master knows them: ``requests/workers.json``, which the manifest quotes at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gapmeter.records.folder import write_json

_FILE = "workers.json"


@dataclass(frozen=True, slots=True)
class LocustWorker:
    """One worker elsewhere, as the master knew it."""

    worker: int
    host: str
    pid: int
    state: str
    why: str
    planned: int | None
    reports: int
    issued: int
    finished: int
    failed: int
    test_restarts: int
    same_clock: bool
    clock_offset_ns: int
    clock_half_width_ns: int
    estimated_offset_ns: int
    estimated_half_width_ns: int
    round_trips: int


@dataclass(frozen=True, slots=True)
class LocustWorkers:
    """All workers of a run; ``histograms``: theirs merged, by metric, as HdrHistogram encodes them."""

    locust: str
    plan: str
    port: int
    workers: tuple[LocustWorker, ...]
    histograms: Mapping[str, str]

    @classmethod
    def read(cls, requests: Path) -> LocustWorkers | None:
        """From the folder of the record files; None where there is no master, or it has said nothing yet."""
        try:
            value = json.loads((requests / _FILE).read_text())
        except FileNotFoundError:
            return None
        return cls(**value | {"workers": tuple(LocustWorker(**each) for each in value["workers"])})

    def write(self, requests: Path) -> None:
        """Raises OSError."""
        write_json(requests / _FILE, asdict(self))
