"""Energy of a window, from the samples beside a run: by a device's counter where it has one, else by its power."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.device.telemetry import Samples, servers_gpus
from gapmeter.analysis.results.device import EnergyWindow

_COVERED = 0.9  # of a window by power samples, below which their mean says nothing about the window
_FEWEST_IDLE_S = 0.3


@dataclass(frozen=True, slots=True)
class _Window:
    """From when to when energy is asked for; the load began at ``load_ns``, and what was sampled before is idle."""

    t0_ns: int
    t1_ns: int
    load_ns: int

    @property
    def ns(self) -> int:
        return self.t1_ns - self.t0_ns

    def holds(self, at_ns: Ints) -> Ints:
        """Which of these stamps lie in it, by number."""
        return np.flatnonzero((at_ns >= self.t0_ns) & (at_ns <= self.t1_ns))


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
    window = _Window(t0_ns, t1_ns, load_ns)
    gpus = list(_gpu_parts(telemetry, window))
    if None in gpus:
        return None  # of some of the server's GPUs alone it would flatter
    parts = [part for part in (*gpus, *_rapl_parts(telemetry, window)) if part is not None]
    if not parts:
        return None

    def total(name: str) -> float | None:
        values = [getattr(part, name) for part in parts]
        return None if None in values else float(sum(values))

    joules, seconds, idle_w = sum(part.joules for part in parts), window.ns / 1e9, total("idle_w")
    idle_j = None if idle_w is None else idle_w * seconds
    words = {"counter": "energy counter", "power": "summed power samples (no counter)"}
    names = {method: [part.name for part in parts if part.method == method] for method in words}
    return EnergyWindow(
        joules=joules,
        low_j=total("low_j"),
        high_j=total("high_j"),
        seconds=seconds,
        method="power" if names["power"] else "counter",
        source="; ".join(f"{words[method]} of {', '.join(own)}" for method, own in names.items() if own),
        idle_w=idle_w,
        parts_j={part.name: part.joules for part in parts},
        idle_j=idle_j,
        idle_share=None if idle_j is None or joules <= 0 else min(idle_j / joules, 1.0),
    )


def _gpu_parts(telemetry: Samples, window: _Window) -> Iterator[_Part | None]:
    """The server's GPUs; None for one that nothing tells of."""
    table = telemetry.tables.get("gpu", pd.DataFrame({"gpu": []}))
    for gpu in sorted(servers_gpus(telemetry)):
        rows = table[table["gpu"] == gpu]
        part = None
        if "energy_mj" in rows and rows["energy_mj"].notna().all():
            joules = rows["energy_mj"].to_numpy(np.float64) / 1e3
            part = _counted(f"GPU {gpu}", rows["at_ns"].to_numpy(np.int64), joules, window)
        # The instant's where it was read: the other lags by half of the second that it is the mean of.
        for name in (each for each in ("power_instant_mw", "power_mw") if part is None and each in rows):
            powered = rows.dropna(subset=[name])
            watts = powered[name].to_numpy(np.float64) / 1e3
            part = part or _summed(f"GPU {gpu}", powered["at_ns"].to_numpy(np.int64), watts, window)
        yield part


def _rapl_parts(telemetry: Samples, window: _Window) -> Iterator[_Part | None]:
    """Packages, and memory where it is counted apart; not what is part of a package, nor psys, which holds all."""
    table = telemetry.tables.get("rapl")
    if table is None:
        return
    for domain in telemetry.about("rapl").get("domains", []):
        name = str(domain["name"])
        if name.startswith(("package", "dram")):
            rows = table[table["domain"] == domain["domain"]]
            joules = unwrapped(rows["energy_uj"].to_numpy(np.float64), float(domain["range_uj"])) / 1e6
            yield _counted(f"CPU {name} ({domain['domain']})", rows["at_ns"].to_numpy(np.int64), joules, window)


def unwrapped(values: Floats, wraps_at: float) -> Floats:
    """A counter without its jumps back to 0 at ``wraps_at``; at most one between two samples."""
    if not len(values):
        return values
    steps = np.diff(values)
    return np.asarray(values[0] + np.concatenate([[0.0], np.cumsum(np.where(steps < 0, steps + wraps_at, steps))]))


def _counted(name: str, at_ns: Ints, joules: Floats, window: _Window) -> _Part | None:
    """The counter's difference inside the window, scaled to its whole length; None when it is not covered.

    The bounds are the counter's own: it never falls, so the window's energy lies between the difference of the samples
    inside it and of those around it.
    """
    inside = window.holds(at_ns)
    if len(inside) < 2 or np.any(np.diff(joules) < 0):
        return None
    first, last = int(inside[0]), int(inside[-1])
    seen_ns = int(at_ns[last] - at_ns[first])
    if seen_ns < _COVERED * window.ns:
        return None
    least = float(joules[last] - joules[first])
    around = first > 0 and last < len(at_ns) - 1
    most = float(joules[last + 1] - joules[first - 1]) if around else None
    scaled = min(least * window.ns / seen_ns, np.inf if most is None else most)
    idle, idle_w = np.flatnonzero(at_ns < window.load_ns), None
    if len(idle) >= 2 and (idle_s := float(at_ns[idle[-1]] - at_ns[idle[0]]) / 1e9) >= _FEWEST_IDLE_S:
        idle_w = float(joules[idle[-1]] - joules[idle[0]]) / idle_s
    return _Part(name, float(scaled), least, most, idle_w, "counter")


def _summed(name: str, at_ns: Ints, watts: Floats, window: _Window) -> _Part | None:
    """Mean power of the samples in the window times its length; None when gaps leave too much of it unseen.

    A gap is five times the usual distance between neighboring samples, or more.
    """
    inside = window.holds(at_ns)
    apart = np.diff(at_ns[inside])
    if len(inside) < 2 or int(apart[apart < 5 * np.median(apart)].sum()) < _COVERED * window.ns:
        return None
    before = watts[at_ns < window.load_ns]
    idle_w = float(before.mean()) if len(before) >= 3 else None
    return _Part(name, float(watts[inside].mean()) * window.ns / 1e9, None, None, idle_w, "power")
