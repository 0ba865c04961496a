"""What a sampler left in a run's folder."""

from __future__ import annotations

from pathlib import Path

from gapmeter.analysis.device.telemetry import Samples, read_telemetry
from gapmeter.records import RunFolder

IDLE = {"name": "server", "cpu_ns": 0, "rss_bytes": 1, "threads": 1, "voluntary": 0, "involuntary": 0}  # of a process


def read(folder: Path) -> Samples | None:
    """All its samples; None where there are none."""
    return read_telemetry(RunFolder(folder))
