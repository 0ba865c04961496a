"""What calibration has found on this machine, kept between runs: values, their place on disk, and whose they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapmeter.study.manifest import describe_hardware, describe_versions

VERSION = 1
COMMAND = "gapmeter calibrate"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a calibration holds for: another of any of these measures differently."""

    cpu: str
    cores: int
    system: str
    python: str
    gapmeter: str

    @property
    def key(self) -> str:
        return " | ".join((self.cpu, f"{self.cores} cores", self.system, f"python {self.python}", self.gapmeter))


@dataclass(frozen=True, slots=True)
class Limit:
    """The highest rate of one process whose p99 error stayed within ``MOST_ERROR_MS``.

    ``ended_by``: ``client`` (a higher rate passed it), ``server`` (the null server could not send faster), or
    ``search`` (the highest rate that was tried): with the last two the client's own limit is higher.
    """

    per_s: float
    ended_by: str


@dataclass(frozen=True, slots=True)
class Floor:
    """One generator's own error and cost, medians of the rounds, in ms and µs.

    The errors are the client's figure minus the null server's log, over requests (``ttft``, ``e2e``, ``lag``) or gaps.
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    chunk_us: float
    tokens: Limit
    requests: Limit


def fingerprint() -> Fingerprint:
    """This machine's."""
    hardware, versions = describe_hardware(), describe_versions()
    return Fingerprint(
        cpu=hardware["cpu"],
        cores=len(hardware["affinity"]),
        system=hardware["system"],
        python=versions["python"],
        gapmeter=versions.get("gapmeter", "unknown"),
    )


def cache_file() -> Path:
    """Where calibrations are kept: under XDG_CACHE_HOME, by default ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gapmeter" / "calibration.json"


def load_calibration(path: Path | None = None) -> dict[str, Any] | None:
    """What a run's manifest keeps: this machine's calibration, or None when it has none that can be read."""
    kept = _read(path or cache_file())
    found = kept.get(fingerprint().key)
    return found if isinstance(found, dict) else None


def save_calibration(calibration: Mapping[str, Any], path: Path | None = None) -> Path:
    """Keep it; other machines' stay, and what it does not hold of this machine's other generators. Raises OSError."""
    path = path or cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    generators = (load_calibration(path) or {}).get("generators", {}) | calibration["generators"]
    kept = _read(path) | {fingerprint().key: {**calibration, "generators": generators}}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"schema_version": VERSION, "machines": kept}, indent=1, allow_nan=False) + "\n")
    os.replace(part, path)
    return path


def _read(path: Path) -> dict[str, Any]:
    """Calibrations by machine; none where the file is missing, torn, or of another version."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict) or kept.get("schema_version") != VERSION:
        return {}
    machines = kept.get("machines")
    return machines if isinstance(machines, dict) else {}
