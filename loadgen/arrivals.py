"""When requests are due: offsets from the start of the run, fixed before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen.curve import Source, count_dispersion, source
from gapmeter.loadgen.errors import PlanError
from gapmeter.scenarios.model import MOST_REQUESTS, Load
from gapmeter.scenarios.trace import Trace

Floats = NDArray[np.floating[Any]]

_CHUNK = 4096  # gaps drawn at a time, whatever the length of the run: a longer run begins with the same arrivals
_SHORTEST_WARMUP_NS = 2_000_000_000
_LONGEST_WARMUP_NS = 30_000_000_000
_MOST_DRAWN = 10 * MOST_REQUESTS  # what a number of requests asks for, and what lies beyond it
_NEVER_NS = 2.0**62  # later than any run lasts, and still a 64-bit number


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """When requests are due, and what that was drawn from.

    ``due_ns``: int64, ascending, from the start of the run. ``knots``: the rate that they were drawn at as
    (ns, requests per second), straight lines between, two at once where it jumps; empty where it is the same
    throughout, or no rate at all (a trace). ``dispersion``: variance over mean of the number of measured requests.
    """

    due_ns: NDArray[np.int64]
    knots: tuple[tuple[int, float], ...]
    dispersion: float


def draw_arrivals(load: Load, rng: np.random.Generator, warmup_ns: int = 0) -> Arrivals:
    """An open loop's arrivals: the warm-up's first, then the measured ones.

    They fill [0, warmup + duration), or [0, warmup) and then as many as ``load.requests`` says. Nothing is scaled or
    moved to meet the rate, so the count over a duration varies as it does in life.

    constant: k / rate. poisson: independent exponential gaps, mean 1 / rate. gamma: independent gaps of mean 1 / rate
    with shape 1 / burstiness, so that their squared coefficient of variation is the burstiness. onoff, ramp, steps,
    diurnal: a Poisson process whose rate λ(t) changes; with Λ(t) the integral of λ from 0 to t, arrival k is at
    Λ⁻¹(E₁ + … + E_k), E independent exponential with mean 1 (inversion: Çinlar 1975; Lewis and Shedler 1979). trace:
    its own times, divided by its speed. Raises ValueError for a closed loop.
    """
    if load.loop == "closed":
        raise ValueError("a closed loop has no due times of its own")
    gaps_rng, curve_rng = rng.spawn(2)
    curve = source(load, warmup_ns, curve_rng)
    knots: list[tuple[int, float]] = []
    if load.trace is not None:
        due = _replayed(load, load.trace, warmup_ns)
    elif curve is not None:
        due, knots = _inverted(load, curve, gaps_rng, warmup_ns)
    elif load.arrivals == "constant":
        due = _constant(load, load.rate or 0.0, warmup_ns)
    else:
        due = _renewal(load, _gaps(load, load.rate or 0.0, rng), warmup_ns)
    window_ns = load.duration_ns or (int(due[-1]) - warmup_ns if len(due) else 0)
    return Arrivals(due, tuple(knots), count_dispersion(load, max(window_ns, 1) / 1e9))


def due_offsets(load: Load, rng: np.random.Generator, warmup_ns: int = 0) -> NDArray[np.int64]:
    """The due times of ``draw_arrivals`` alone."""
    return draw_arrivals(load, rng, warmup_ns).due_ns


def warmup_span(load: Load) -> tuple[int, int]:
    """The warm-up as (ns from the start, requests); a request is measured when it lies beyond both."""
    if load.warmup_ns is not None:
        return load.warmup_ns, 0
    if load.duration_ns is not None:
        measured = load.duration_ns
    elif load.requests is not None and (rate := _about(load)):
        measured = round(load.requests / rate * 1e9)
    else:
        return 0, 2 * (load.concurrency or 0)
    return min(max(measured // 10, _SHORTEST_WARMUP_NS), _LONGEST_WARMUP_NS), 0


def _gaps(load: Load, rate: float, rng: np.random.Generator) -> Callable[[], Floats]:
    mean_ns = 1e9 / rate
    if load.arrivals == "poisson":
        return lambda: rng.exponential(mean_ns, _CHUNK)
    burstiness = load.burstiness or 1.0
    return lambda: rng.gamma(1 / burstiness, mean_ns * burstiness, _CHUNK)


def _about(load: Load) -> float:
    """How many requests a second there will be, about; 0 where nobody knows beforehand."""
    if load.ramp is not None:
        return (load.ramp.start + load.ramp.end) / 2
    if load.steps is not None:
        return max(step.rate for step in load.steps)
    if load.trace is not None:
        return len(load.trace.recorded.at_ns) / max(load.trace.span_ns / 1e9, 1e-3)
    return load.rate or 0.0


def _replayed(load: Load, trace: Trace, warmup_ns: int) -> NDArray[np.int64]:
    return _cut(load, np.array(trace.recorded.at_ns, np.float64) / trace.speed, warmup_ns)


def _inverted(
    load: Load, curve: Source, rng: np.random.Generator, warmup_ns: int
) -> tuple[NDArray[np.int64], list[tuple[int, float]]]:
    """Arrivals and the rate they were drawn at; further and further where a number of requests is to be reached."""
    horizon_s = (warmup_ns + (load.duration_ns or 1_000_000_000)) / 1e9
    chunks: list[Floats] = []
    reached = 0.0
    while True:
        found = curve(horizon_s)
        most = found.expected_by(horizon_s)
        if most > _MOST_DRAWN:
            text = f"{load.requests:,} requests are reached after {horizon_s / 7200:,.0f} hours or later"
            raise PlanError(f"{text} with this load.{load.arrivals}; write load.duration instead of load.requests")
        while not chunks or reached <= most:
            chunks.append(reached + np.cumsum(rng.exponential(1.0, _CHUNK)))
            reached = float(chunks[-1][-1])
        units = np.concatenate(chunks)
        at_ns = found.invert(units[units <= most]) * 1e9
        enough = int(np.count_nonzero((at_ns >= warmup_ns) & (at_ns < horizon_s * 1e9))) >= (load.requests or 0)
        if load.duration_ns is not None or enough:
            due = _cut(load, at_ns, warmup_ns)
            return due, found.knots(horizon_s if load.duration_ns is not None or not len(due) else float(due[-1]) / 1e9)
        horizon_s *= 2


def _constant(load: Load, rate: float, warmup_ns: int) -> NDArray[np.int64]:
    span_s = (warmup_ns + (load.duration_ns or 0)) / 1e9
    count = int(np.ceil(span_s * rate)) + 1 + (load.requests or 0)
    return _cut(load, np.arange(count) * (1e9 / rate), warmup_ns)


def _renewal(load: Load, draw: Callable[[], Floats], warmup_ns: int) -> NDArray[np.int64]:
    end_ns = warmup_ns + (load.duration_ns or 0)
    chunks: list[Floats] = []
    reached, beyond = 0.0, 0
    while reached < end_ns or beyond < (load.requests or 1):
        chunks.append(reached + np.cumsum(draw()))
        reached = float(chunks[-1][-1])
        beyond += int(np.count_nonzero(chunks[-1] >= end_ns))
    return _cut(load, np.concatenate(chunks), warmup_ns)


def _cut(load: Load, at_ns: Floats, warmup_ns: int) -> NDArray[np.int64]:
    """Keep what the duration or the number of requests asks for."""
    due = np.rint(np.minimum(at_ns, _NEVER_NS)).astype(np.int64)
    if load.duration_ns is not None:
        return due[: np.searchsorted(due, warmup_ns + load.duration_ns)]
    return due[: int(np.searchsorted(due, warmup_ns)) + (load.requests or 0)]
