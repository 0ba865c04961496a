"""Series whose law is known."""

from __future__ import annotations

import numpy as np

from gapmeter.analysis.arrays import Floats


def ar1(rng: np.random.Generator, phi: float, count: int) -> Floats:
    """A stationary series of variance 1 whose autocorrelation at lag k is phi^k."""
    noise, series = rng.normal(size=count), np.empty(count)
    series[0] = noise[0]
    for i in range(1, count):
        series[i] = phi * series[i - 1] + np.sqrt(1 - phi**2) * noise[i]
    return series


def mm1_sojourns(rng: np.random.Generator, load: float, count: int) -> Floats:
    """Times in a stationary M/M/1 queue with service rate 1, by Lindley's recursion: exponential of rate 1 - load."""
    service, gaps = rng.exponential(1, count), rng.exponential(1 / load, count)
    start = rng.exponential(1 / (1 - load)) if rng.random() < load else 0.0
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    waits = walk - np.minimum(np.minimum.accumulate(walk), -start)
    return np.asarray(waits + service)
