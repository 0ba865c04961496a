"""What the sampler wrote beside a run, read back: tables a source, what failed and was missed, and energy of a window.

Nothing is filled in: a deadline that passed unread and a read that failed stay gaps. Units are in the names, as in
docs/telemetry.md; every stamp is CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.results.device import EnergyWindow
from gapmeter.records import RunFolder

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SOURCES = ("gpu", "pcie", "rapl", "processes", "engine")
_COVERED = 0.9  # of a window by power samples, below which their mean says nothing about the window
_FEWEST_IDLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of time in which ``source`` has no samples though it should have. ``missed`` deadlines, and why."""

    source: str
    since_ns: int
    until_ns: int
    missed: int
    why: str


@dataclass(frozen=True)
class Samples:
    """All samples of a run. ``tables`` has a frame a source, with ``at_ns``; a source that was never read has none.

    ``absent`` says why a source is not there. ``ended``: the sampler closed its files itself.
    """

    tables: Mapping[str, pd.DataFrame]
    notes: tuple[Mapping[str, Any], ...]
    absent: Mapping[str, str]
    broken_lines: int

    @property
    def start(self) -> Mapping[str, Any]:
        """What the sampler said of itself and of its sources, {} when it did not live to."""
        return next((note for note in self.notes if note["type"] == "start"), {})

    @property
    def ended(self) -> bool:
        return any(note["type"] == "end" for note in self.notes)

    def about(self, source: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.start.get("sources", {}).get(source, {})
        return found

    def of(self, source: str, since_ns: int, until_ns: int) -> pd.DataFrame:
        """The source's samples from ``since_ns`` to ``until_ns``, both included."""
        table = self.tables.get(source, pd.DataFrame({"at_ns": np.empty(0, np.int64)}))
        return table[(table["at_ns"] >= since_ns) & (table["at_ns"] <= until_ns)]

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """In the order of time."""
        return tuple(sorted(self._find_gaps(), key=lambda gap: (gap.since_ns, gap.source)))

    def _find_gaps(self) -> Iterator[Gap]:
        for note in self.notes:
            if note["type"] == "missed":
                for source in note["sources"]:
                    yield Gap(source, note["since_ns"], note["until_ns"], note["count"], "no core, or stopped")
            elif note["type"] == "failed":
                every = int(self.about(note["source"]).get("every_ns", 0))
                yield Gap(note["source"], note["at_ns"], note["at_ns"] + every, 1, note["why"])

    def cpu_share(self) -> float | None:
        """What sampling cost: CPU over wall time between the sampler's start and its last word."""
        told = [note for note in self.notes if "cpu_ns" in note]
        if len(told) < 2 or told[-1]["at_ns"] <= told[0]["at_ns"]:
            return None
        return float((told[-1]["cpu_ns"] - told[0]["cpu_ns"]) / (told[-1]["at_ns"] - told[0]["at_ns"]))


def read_telemetry(folder: RunFolder) -> Samples | None:
    """None when nothing was sampled. A line that a kill left half written is counted and passed over."""
    notes, broken = _read_lines(folder.telemetry / "sampler.jsonl")
    if not notes:
        return None
    tables = {}
    for source in SOURCES:
        rows, bad = _read_lines(folder.telemetry / f"{source}.jsonl")
        broken += bad
        if rows:
            tables[source] = pd.DataFrame(rows)
    absent = {str(note["source"]): str(note["why"]) for note in notes if note["type"] == "absent"}
    return Samples(tables, tuple(notes), absent, broken)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    rows: list[dict[str, Any]] = []
    broken = 0
    if not path.exists():
        return rows, broken
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            row["at_ns"] = int(row["at_ns"])
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            broken += 1
    return rows, broken


@dataclass(frozen=True, slots=True)
class _Part:
    """One device over one window: energy and its bounds in J, the idle power in W."""

    name: str
    joules: float
    low_j: float | None
    high_j: float | None
    idle_w: float | None
    method: str


def energy_of(telemetry: Samples, t0_ns: int, t1_ns: int, load_ns: int) -> EnergyWindow | None:
    """Energy from ``t0_ns`` to ``t1_ns`` (CLOCK_MONOTONIC): the server's GPUs, and the CPU where RAPL may be read.

    A device's counter is taken where it has one, its power samples only where it has none. ``load_ns`` is when the load
    began: what was sampled before is idle. None when nothing that measures energy covers the window.
    """
    if t1_ns <= t0_ns:
        return None
    gpus = [_gpu_part(gpu, rows, t0_ns, t1_ns, load_ns) for gpu, rows in _servers_gpus(telemetry)]
    cpu = [_rapl_part(*each, t0_ns, t1_ns, load_ns) for each in _rapl_domains(telemetry)]
    if any(part is None for part in gpus):
        return None  # of some of the server's GPUs alone it would flatter
    parts = [part for part in (*gpus, *cpu) if part is not None]
    if not parts:
        return None
    methods = {part.method for part in parts}
    lows = [part.low_j for part in parts if part.low_j is not None]
    highs = [part.high_j for part in parts if part.high_j is not None]
    idle = [part.idle_w for part in parts if part.idle_w is not None]
    joules, seconds = sum(part.joules for part in parts), (t1_ns - t0_ns) / 1e9
    idle_w = sum(idle) if len(idle) == len(parts) else None
    idle_j = None if idle_w is None else idle_w * seconds
    return EnergyWindow(
        joules=joules,
        low_j=sum(lows) if len(lows) == len(parts) else None,
        high_j=sum(highs) if len(highs) == len(parts) else None,
        seconds=seconds,
        method="power" if "power" in methods else "counter",
        source=_source_words(parts),
        idle_w=idle_w,
        parts_j={part.name: part.joules for part in parts},
        idle_j=idle_j,
        idle_share=None if idle_j is None or joules <= 0 else min(idle_j / joules, 1.0),
    )


def _servers_gpus(telemetry: Samples) -> Iterator[tuple[int, pd.DataFrame]]:
    """Those on which a process of the server computed when sampling began; all of them when that cannot be seen."""
    table = telemetry.tables.get("gpu")
    if table is None:
        return
    own = servers_gpus(telemetry)
    for gpu, rows in table.groupby("gpu"):
        if int(gpu) in own:
            yield int(gpu), rows


def servers_gpus(telemetry: Samples) -> set[int]:
    """Indices of the GPUs that the server uses, or all that were sampled where NVML does not show whose they are."""
    described = telemetry.about("gpu").get("gpus", [])
    processes = telemetry.tables.get("processes")
    pids = set() if processes is None else set(processes["pid"].tolist())
    own = {int(gpu["gpu"]) for gpu in described if pids & set(gpu.get("pids") or ())}
    return own or {int(gpu["gpu"]) for gpu in described}


def _gpu_part(gpu: int, rows: pd.DataFrame, t0_ns: int, t1_ns: int, load_ns: int) -> _Part | None:
    if "energy_mj" in rows and rows["energy_mj"].notna().all():
        joules = rows["energy_mj"].to_numpy(np.float64) / 1e3
        counted = _counted(f"GPU {gpu}", rows["at_ns"].to_numpy(np.int64), joules, t0_ns, t1_ns, load_ns)
        if counted is not None:
            return counted
    if "power_mw" in rows:
        known = rows.dropna(subset=["power_mw"])
        watts = known["power_mw"].to_numpy(np.float64) / 1e3
        return _summed(f"GPU {gpu}", known["at_ns"].to_numpy(np.int64), watts, t0_ns, t1_ns, load_ns)
    return None


def _rapl_domains(telemetry: Samples) -> Iterator[tuple[str, Ints, Floats]]:
    """Packages, and memory where it is counted apart; not what is part of a package, nor psys, which holds all."""
    table = telemetry.tables.get("rapl")
    if table is None:
        return
    for domain in telemetry.about("rapl").get("domains", []):
        name = str(domain["name"])
        if not name.startswith(("package", "dram")):
            continue
        rows = table[table["domain"] == domain["domain"]]
        at, microjoules = rows["at_ns"].to_numpy(np.int64), rows["energy_uj"].to_numpy(np.float64)
        yield f"CPU {name} ({domain['domain']})", at, unwrapped(microjoules, float(domain["range_uj"])) / 1e6


def unwrapped(values: Floats, wraps_at: float) -> Floats:
    """A counter without its jumps back to 0 at ``wraps_at``; at most one between two samples."""
    if not len(values):
        return values
    steps = np.diff(values)
    return np.asarray(values[0] + np.concatenate([[0.0], np.cumsum(np.where(steps < 0, steps + wraps_at, steps))]))


def _rapl_part(name: str, at_ns: Ints, joules: Floats, t0_ns: int, t1_ns: int, load_ns: int) -> _Part | None:
    return _counted(name, at_ns, joules, t0_ns, t1_ns, load_ns)


def _counted(name: str, at_ns: Ints, joules: Floats, t0_ns: int, t1_ns: int, load_ns: int) -> _Part | None:
    """The counter's difference inside the window, scaled to its whole length; None when it is not covered.

    The bounds are the counter's own: it never falls, so the window's energy lies between the difference of the samples
    inside it and of those around it.
    """
    inside = np.flatnonzero((at_ns >= t0_ns) & (at_ns <= t1_ns))
    if len(inside) < 2 or np.any(np.diff(joules) < 0):
        return None
    first, last = int(inside[0]), int(inside[-1])
    seen_ns = int(at_ns[last] - at_ns[first])
    if seen_ns < _COVERED * (t1_ns - t0_ns):
        return None
    least = float(joules[last] - joules[first])
    around = first > 0 and last < len(at_ns) - 1
    most = float(joules[last + 1] - joules[first - 1]) if around else None
    scaled = min(least * (t1_ns - t0_ns) / seen_ns, np.inf if most is None else most)
    return _Part(name, float(scaled), least, most, _idle_counted(at_ns, joules, load_ns), "counter")


def _idle_counted(at_ns: Ints, joules: Floats, load_ns: int) -> float | None:
    before = np.flatnonzero(at_ns < load_ns)
    if len(before) < 2:
        return None
    seconds = float(at_ns[before[-1]] - at_ns[before[0]]) / 1e9
    return float(joules[before[-1]] - joules[before[0]]) / seconds if seconds >= _FEWEST_IDLE_S else None


def _summed(name: str, at_ns: Ints, watts: Floats, t0_ns: int, t1_ns: int, load_ns: int) -> _Part | None:
    """Mean power of the samples in the window times its length; None when gaps leave too much of it unseen."""
    inside = (at_ns >= t0_ns) & (at_ns <= t1_ns)
    if np.count_nonzero(inside) < 2 or _seen_ns(at_ns[inside]) < _COVERED * (t1_ns - t0_ns):
        return None
    before = watts[at_ns < load_ns]
    idle = float(before.mean()) if len(before) >= 3 else None
    return _Part(name, float(watts[inside].mean()) * (t1_ns - t0_ns) / 1e9, None, None, idle, "power")


def _seen_ns(at_ns: Ints) -> int:
    """Time between neighbouring samples, without the gaps (five times the usual distance or more)."""
    apart = np.diff(at_ns)
    return int(apart[apart < 5 * np.median(apart)].sum())


def _source_words(parts: list[_Part]) -> str:
    """What was read, in words: the energy counter of GPU 0, ..."""
    words = {"counter": "energy counter", "power": "summed power samples (no counter)"}
    told = [f"{words[m]} of {', '.join(p.name for p in parts if p.method == m)}" for m in ("counter", "power")
            if any(p.method == m for p in parts)]  # fmt: skip
    return "; ".join(told)


def spans_without(at_ns: Ints, longest_ns: float) -> list[tuple[int, int]]:
    """Stretches between neighbouring samples that are longer than ``longest_ns``: where a line must break."""
    return [(int(a), int(b)) for a, b in pairwise(at_ns.tolist()) if b - a > longest_ns]
