"""The rate that a plan was drawn at, as the manifest tells it: (time, requests per second), straight lines between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.stats.estimate import Floats

Knots = Sequence[tuple[int, float]]

# Arrivals under which the load is meant to change through the run: there is no steady state to look for.
CHANGING = ("ramp", "steps", "diurnal", "trace")


def expected_counts(knots: Knots, at_ns: NDArray[np.int64] | Floats) -> Floats:
    """Requests expected from the first knot to each time: the integral of the rate; constant beyond the last knot.

    A Poisson process with this rate is one of rate 1 on the scale that this gives (time rescaling), so that everything
    known of a constant rate can be asked of it there.
    """
    start, rate = (np.array(column, np.float64) for column in zip(*knots, strict=True))
    spans, middles = np.diff(start) / 1e9, (rate[1:] + rate[:-1]) / 2
    reached = np.concatenate([[0.0], np.cumsum(spans * middles)])
    at = np.clip(np.asarray(at_ns, np.float64), start[0], start[-1])
    piece = np.clip(np.searchsorted(start, at, side="right") - 1, 0, len(spans) - 1)
    inside = (at - start[piece]) / 1e9
    slope = np.divide(np.diff(rate), spans, out=np.zeros_like(spans), where=spans > 0)[piece]
    return np.asarray(reached[piece] + rate[piece] * inside + slope * inside**2 / 2)


def lowest_and_highest(knots: Knots, from_ns: int) -> tuple[float, float]:
    """The rates between which the curve moves from a time on."""
    rates = [rate for at, rate in knots if at >= from_ns] or [knots[-1][1]]
    return min(rates), max(rates)
