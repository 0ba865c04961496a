"""Where a curve of a few points turns: the knee, and whether the uncertainty of its points supports one.

Two rules, each for a curve of known points; a knee is one of the points, never one between them.

- *Throughput stops to grow*: the first point from which on doubling the load brings less than 15 % more (to any later
  point), while up to it every doubling had brought at least 32 % on average.
- *Latency begins to climb*: Kneedle (Satopää, Albrecht, Irwin, Raghavan 2011, "Finding a 'Kneedle' in a Haystack"), for
  a curve that rises and bends upwards: load and latency are each scaled to 0..1, and the knee is where the curve lies
  furthest below the straight line from its first point to its last.

The points are known only so well, so the rule is asked 1,000 times, of points drawn from what is known of each (fixed
seed). What at least 95 % of the draws say is said; otherwise the answer is that the points do not tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL, Floats
from gapmeter.analysis.stats.means import Level

FEWEST = 4
LEAST_BEND = 0.1  # of the box that the curve fills; less is a straight line, or the noise of one
LEAST_RISE = 1.25  # last over first latency
FLAT = math.log2(1.15)  # elasticity: growth of the logarithm of throughput over that of the load
GROWING = math.log2(1.32)
DRAWS = 1000

KNEE, NONE, UNDECIDED = "knee", "none", "undecided"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rule says of one curve without uncertainty: the knee's place (None: none), the reason, the bend."""

    at: int | None
    why: str
    bend: float | None = None


@dataclass(frozen=True, slots=True)
class Knee:
    """What the points support. ``state``: a knee, none, or undecided.

    ``at`` is the likeliest place, ``low`` and ``high`` the places that hold it in 95 % of draws, ``certainty`` the
    share of draws that say what is said (for undecided: that there is a knee at all).
    """

    state: str
    why: str
    certainty: float
    at: int | None = None
    low: int | None = None
    high: int | None = None
    bend: float | None = None


def throughput_turn(load: Sequence[float], rate: Sequence[float]) -> Turn:
    """Where throughput stops to grow; ``load`` and ``rate`` positive, the former rising strictly."""
    x, y = np.log(load), np.log(rate)
    for k in range(len(x) - 1):
        if np.all((y[k + 1 :] - y[k]) < FLAT * (x[k + 1 :] - x[k])):
            if k == 0:
                return Turn(None, "throughput does not grow from the first point on: the knee lies before it")
            if (y[k] - y[0]) >= GROWING * (x[k] - x[0]):
                return Turn(k, "throughput stops to grow there")
            return Turn(None, "throughput grows ever more slowly and has no place where it turns")
    return Turn(None, "throughput still grows at the last point: the knee lies beyond it")


def latency_turn(load: Sequence[float], latency: Sequence[float]) -> Turn:
    """Where latency begins to climb; ``load`` rises strictly, any units."""
    low, high = min(latency), max(latency)
    if latency[-1] < LEAST_RISE * latency[0] or high <= low:
        return Turn(None, "latency hardly rises over this range: the knee lies beyond its last point")
    span = load[-1] - load[0]
    below = [
        (at - load[0]) / span - (value - low) / (high - low) for at, value in zip(load, latency, strict=True)
    ]  # fmt: skip
    best = max(range(len(below)), key=lambda at: below[at])
    if below[best] < LEAST_BEND or best in (0, len(load) - 1):
        text = "latency rises about in proportion to the load from the first point on: the knee lies before it"
        return Turn(None, text, below[best])
    return Turn(best, "latency begins to climb there", below[best])


def find_knee(
    load: Sequence[float], levels: Sequence[Level], rule: Callable[[Sequence[float], Sequence[float]], Turn]
) -> Knee:
    """What ``rule`` says of points that are known only so well."""
    if len(load) < FEWEST:
        return Knee(UNDECIDED, f"{len(load)} points are too few to find a knee in; it takes {FEWEST}", 0.0)
    rng = np.random.default_rng(0)
    drawn = np.stack([level.drawn(rng, DRAWS) for level in levels], axis=1)
    turns = [rule(load, row.tolist()) for row in drawn]
    places = np.array([turn.at for turn in turns if turn.at is not None], dtype=np.float64)
    share = len(places) / DRAWS
    if share >= CONFIDENCE:
        return _found(places, share, next(turn for turn in turns if turn.at == _likeliest(places)))
    reason, times = Counter(turn.why for turn in turns if turn.at is None).most_common(1)[0]
    if times >= CONFIDENCE * DRAWS:
        return Knee(NONE, reason, times / DRAWS)
    return Knee(UNDECIDED, "what is known of the points allows for a knee and for none", share)


def _found(places: Floats, share: float, turn: Turn) -> Knee:
    low, high = (int(end) for end in np.quantile(places, [TAIL, 1 - TAIL], method="nearest"))
    return Knee(KNEE, turn.why, share, turn.at, low, high, turn.bend)


def _likeliest(places: Floats) -> int:
    return int(Counter(places.tolist()).most_common(1)[0][0])
