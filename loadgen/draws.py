"""Token counts and think times drawn from a scenario's distributions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.model import Constant, Lengths, Lognormal, Sampled, Uniform
from gapmeter.scenarios.pauses import ExponentialPause, FixedPause, LognormalPause, Pause, UniformPause

Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` token counts, int64, each at least 1.

    A log-normal with median m and 95th percentile q is exp(N(ln m, s)) with s = ln(q / m) / z95, rounded.
    """
    match lengths:
        case Constant(tokens):
            return np.full(count, tokens, np.int64)
        case Uniform(low, high):
            return rng.integers(low, high, count, np.int64, endpoint=True)
        case Lognormal(median, p95, highest):
            drawn = np.rint(rng.lognormal(math.log(median), math.log(p95 / median) / Z95, count))
            return np.clip(drawn, 1, highest or 10_000_000).astype(np.int64)
        case Sampled(_, values):
            return rng.choice(np.array(values, np.int64), count)


def draw_pauses(pause: Pause, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` think times in ns, int64, none below 0.

    A log-normal with median m and 95th percentile q is exp(N(ln m, s)) with s = ln(q / m) / z95.
    """
    match pause:
        case FixedPause(ns):
            return np.full(count, ns, np.int64)
        case ExponentialPause(mean_ns):
            return np.rint(rng.exponential(mean_ns, count)).astype(np.int64)
        case UniformPause(low_ns, high_ns):
            return rng.integers(low_ns, high_ns, count, np.int64, endpoint=True)
        case LognormalPause(median_ns, p95_ns, max_ns):
            drawn = rng.lognormal(math.log(median_ns), _spread(median_ns, p95_ns), count)
            return np.rint(np.minimum(drawn, max_ns or 2**62)).astype(np.int64)


def mean_pause_ns(pause: Pause) -> int:
    """The distribution's mean; that of a log-normal, exp(ln m + s² / 2), without its cap."""
    match pause:
        case FixedPause(ns) | ExponentialPause(ns):
            return ns
        case UniformPause(low_ns, high_ns):
            return (low_ns + high_ns) // 2
        case LognormalPause(median_ns, p95_ns, max_ns):
            mean = median_ns * math.exp(_spread(median_ns, p95_ns) ** 2 / 2)
            return round(min(mean, max_ns or mean))


def _spread(median_ns: int, p95_ns: int) -> float:
    return math.log(p95_ns / median_ns) / Z95
