"""Where latency begins to climb: the knee of a curve of a few points.

Kneedle (Satopää, Albrecht, Irwin, Raghavan 2011, "Finding a 'Kneedle' in a Haystack"), for a curve that rises and bends
upwards: load and latency are each scaled to 0..1, and the knee is where the curve lies furthest below the straight
line from its first point to its last. It is one of the measured points, never one between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 4
LEAST_BEND = 0.1  # of the box that the curve fills; less is a straight line, or the noise of one
LEAST_RISE = 1.25  # last over first latency


@dataclass(frozen=True, slots=True)
class Knee:
    """Its place among the points (None: there is none), how far below the line it lies, and the reason in words."""

    at: int | None
    bend: float | None
    why: str


def find_knee(load: Sequence[float], latency: Sequence[float]) -> Knee:
    """The knee of latency over load; ``load`` rises strictly, any units."""
    if len(load) < FEWEST:
        return Knee(None, None, f"{len(load)} points are too few to find a knee in; it takes {FEWEST}")
    low, high = min(latency), max(latency)
    if latency[-1] < LEAST_RISE * latency[0] or high <= low:
        return Knee(None, None, "latency hardly rises over this range: the knee lies beyond its last point")
    span = load[-1] - load[0]
    below = [
        (at - load[0]) / span - (value - low) / (high - low) for at, value in zip(load, latency, strict=True)
    ]  # fmt: skip
    best = max(range(len(below)), key=lambda at: below[at])
    if below[best] < LEAST_BEND or best in (0, len(load) - 1):
        text = "latency rises about in proportion to the load from the first point on: the knee lies before it"
        return Knee(None, below[best], text)
    return Knee(best, below[best], "where the curve lies furthest below the line between its ends (Kneedle)")
