"""Token counts drawn from a scenario's distributions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.distributions import Constant, Lengths, Lognormal, Sampled, Uniform

Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution


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
            drawn = np.rint(rng.lognormal(math.log(shape.median), math.log(shape.p95 / shape.median) / Z95, count))
            return np.clip(drawn, 1, shape.max or 10_000_000).astype(np.int64)
        case Sampled(values=values):
            return rng.choice(np.array(values, np.int64), count)
