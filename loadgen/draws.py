"""Where randomness comes from, and the token counts and think times that are drawn with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.shapes import (
    Constant,
    ExponentialPause,
    FixedPause,
    Lengths,
    Lognormal,
    LognormalPause,
    Pause,
    Sampled,
    Uniform,
    UniformPause,
)

Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution


class Stream(IntEnum):
    """One stream of randomness for each thing that is drawn, so that drawing more of one changes no other."""

    ARRIVALS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    CONTENTS = 3
    SAMPLING = 4
    GROUPS = 5
    SHARED = 6
    TURNS = 7
    THINKING = 8


@dataclass(frozen=True, slots=True)
class Seeds:
    """Where randomness comes from. A repeat has arrivals and lengths in common with the first run, texts of its own."""

    seed: int
    repeat: int = 0

    def rng(self, stream: Stream) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    def fresh(self, stream: Stream) -> np.random.Generator:
        """A different one in every repeat."""
        return np.random.default_rng([self.seed, stream, self.repeat])

    def text(self, index: int) -> np.random.Generator:
        """Of request ``index``'s own text."""
        return np.random.default_rng([self.seed, Stream.CONTENTS, self.repeat, index + 1])

    def shared_text(self, number: int) -> np.random.Generator:
        """Of a text that several requests have; number 0 is the one that there is where they all have one."""
        stream = Stream.SHARED if number else Stream.CONTENTS  # 0 is no request's own: those begin at 1
        return np.random.default_rng([self.seed, stream, self.repeat, number])


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` token counts, int64, each at least 1.

    A log-normal with median m and 95th percentile q is exp(N(ln m, s)) with s = ln(q / m) / z95, rounded.
    """
    match lengths:
        case Constant(root=tokens):
            return np.full(count, tokens, np.int64)
        case Uniform(range=(low, high)):
            return rng.integers(low, high, count, np.int64, endpoint=True)
        case Lognormal(shape=shape):
            drawn = np.rint(rng.lognormal(math.log(shape.median), _spread(shape.median, shape.p95), count))
            return np.clip(drawn, 1, shape.max or 10_000_000).astype(np.int64)
        case Sampled(values=values):
            return rng.choice(np.array(values, np.int64), count)


def draw_pauses(pause: Pause, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` think times in ns, int64, none below 0.

    A log-normal with median m and 95th percentile q is exp(N(ln m, s)) with s = ln(q / m) / z95.
    """
    match pause:
        case FixedPause(root=ns):
            return np.full(count, ns, np.int64)
        case ExponentialPause(mean_ns=mean_ns):
            return np.rint(rng.exponential(mean_ns, count)).astype(np.int64)
        case UniformPause(range_ns=(low_ns, high_ns)):
            return rng.integers(low_ns, high_ns, count, np.int64, endpoint=True)
        case LognormalPause(shape=shape):
            drawn = rng.lognormal(math.log(shape.median_ns), _spread(shape.median_ns, shape.p95_ns), count)
            return np.rint(np.minimum(drawn, shape.max_ns or 2**62)).astype(np.int64)


def mean_pause_ns(pause: Pause) -> int:
    """The distribution's mean; that of a log-normal, exp(ln m + s² / 2), without its cap."""
    match pause:
        case FixedPause(root=ns) | ExponentialPause(mean_ns=ns):
            return ns
        case UniformPause(range_ns=(low_ns, high_ns)):
            return (low_ns + high_ns) // 2
        case LognormalPause(shape=shape):
            mean = shape.median_ns * math.exp(_spread(shape.median_ns, shape.p95_ns) ** 2 / 2)
            return round(min(mean, shape.max_ns or mean))


def _spread(median: float, p95: float) -> float:
    """Of a log-normal: the standard deviation of the logarithm."""
    return math.log(p95 / median) / Z95
