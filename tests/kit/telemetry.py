"""What a sampler left in a run's folder."""

from __future__ import annotations

from pathlib import Path

from gapmeter.analysis.device.telemetry import Samples, read_telemetry
from gapmeter.records import RunFolder


def read(folder: Path) -> Samples | None:
    """All its samples; None where there are none."""
    return read_telemetry(RunFolder(folder))
