"""When requests are due: offsets from the start of the run, fixed before it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.model import Load

Floats = NDArray[np.floating[Any]]

_CHUNK = 4096  # gaps drawn at a time, whatever the length of the run: a longer run begins with the same arrivals
_SHORTEST_WARMUP_NS = 2_000_000_000
_LONGEST_WARMUP_NS = 30_000_000_000


def due_offsets(load: Load, rng: np.random.Generator, warmup_ns: int = 0) -> NDArray[np.int64]:
    """Due times of an open loop in ns from the start, int64, ascending: the warm-up's first, then the measured ones.

    Arrivals fill [0, warmup + duration), or [0, warmup) and then as many as ``load.requests`` says. Gaps are
    independent; nothing is scaled or moved to meet the rate, so the count over a duration varies as it does in life.

    constant: k / rate. poisson: exponential gaps, mean 1 / rate. gamma: gaps of mean 1 / rate with shape
    1 / burstiness, so that their squared coefficient of variation is the burstiness.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no due times of its own")
    if load.arrivals == "constant":
        return _constant(load, load.rate, warmup_ns)
    return _renewal(load, _gaps(load, load.rate, rng), warmup_ns)


def warmup_span(load: Load) -> tuple[int, int]:
    """The warm-up as (ns from the start, requests); a request is measured when it lies beyond both."""
    if load.warmup_ns is not None:
        return load.warmup_ns, 0
    if load.duration_ns is not None:
        measured = load.duration_ns
    elif load.rate is not None and load.requests is not None:
        measured = round(load.requests / load.rate * 1e9)
    else:
        return 0, 2 * (load.concurrency or 0)
    return min(max(measured // 10, _SHORTEST_WARMUP_NS), _LONGEST_WARMUP_NS), 0


def _gaps(load: Load, rate: float, rng: np.random.Generator) -> Callable[[], Floats]:
    mean_ns = 1e9 / rate
    if load.arrivals == "poisson":
        return lambda: rng.exponential(mean_ns, _CHUNK)
    burstiness = load.burstiness or 1.0
    return lambda: rng.gamma(1 / burstiness, mean_ns * burstiness, _CHUNK)


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
    due = np.rint(at_ns).astype(np.int64)
    if load.duration_ns is not None:
        return due[: np.searchsorted(due, warmup_ns + load.duration_ns)]
    return due[: int(np.searchsorted(due, warmup_ns)) + (load.requests or 0)]
