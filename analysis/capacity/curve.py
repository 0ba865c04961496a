"""Where the capacity lies by the shape of a queue: a percentile against load, with the server's ceiling and speed.

Near its ceiling a server's latencies grow as a queue's do. The curve, for one percentile at rate r:

    q(r) = a + b rho^m / (1 - rho),   rho = r / c

with c the ceiling (the throughput of a saturated server), a what a request takes alone, b the weight of waiting, and m
the number of servers behind the queue: the mean wait of k servers grows with rho^(sqrt(2 (k + 1)) - 1) / (1 - rho)
(Sakasegawa 1977, An approximation formula for the mean waiting time of a G/G/c queue), a percentile's with less. A
trial of n requests meets about v = n (1 - rho)^2 separate spells of waiting. With few of them its percentile lies too
low, and its error is larger than the trial itself can tell. On M/M/1 queues with loads of 0.6 to 0.9, 1,000 and 4,000
requests, p90 to p99, the mean logarithm is too low by 0.2 / (v share + 0.27), on M/G/8 ones with log-normal services by
up to half more; its standard deviation is about 1.1 times what the trial tells, and 0.3 / sqrt(1 + v / 40) beside
that: less on M/D/1 queues, up to a quarter more on M/G/8 ones (80 trials each). Both are allowed for, with 0.32 for the
0.2.

All five are unknown. The posterior is taken over a grid of them; each trial's percentile counts by the error of its
logarithm (Student's t, since that error was estimated) and of the server's speed, which differs between trials by a
share s: a sixth unknown. What the pace of tokens says of s and of each trial (below) moves its percentile by the
curve's slope, and what all trials had in common moves the capacity. So both errors, and what is not known of the shape,
are in the interval. The capacity is where the curve meets the limit; below it, what percentile to expect at a rate has
its interval from the same posterior.

The pace of tokens tells how much slower or faster a server was in one trial than in another. A machine's speed drifts
from trial to trial, and percentiles are too noisy to tell by how much: each of the five or six
of a search met bursts of its own. But a slower server takes longer over every token, and a thousand requests tell that
within a per cent or two. With y the mean logarithm of the time per token after the first, in a trial that was served r
requests per second,

    y = y0 + e log(r / r0) + d + error

where d, by how much the server was slower, is normal with standard deviation s (the drift), and e, how pace grows with
load, is normal with ``_ELASTICITY``. Given s, y0 and every d follow by generalised least squares, and the likelihood of
s by that of the residuals (REML: Patterson and Thompson 1971). What slowed all trials alike shows in no residual: it
stays, as a variance of about s^2 / n that they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from gapmeter.analysis.arrays import Floats

DRIFTS: Final = np.array([0.005, 0.02, 0.04, 0.07, 0.12])  # each as likely as another before any trial
_ELASTICITY = 1.0
_PACE_UNTOLD = 0.02  # of a pace, beside its own error: no server follows the line exactly
_UNKNOWN = 1e3  # the error of a trial without a pace
_BATCHES, _FEWEST = 20, 40
SHAPES: Final = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
_ALONE: Final = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0, 1.1])  # a, as a share of the smallest percentile seen
_LOADS: Final = 1 / (1 + np.exp(np.linspace(-2.5, 4.5, 57)))  # 1 - rho at the limit: flat in its logit, 0.92 to 0.011
_CEILINGS: Final = 33
_LOW, _LOW_AT = 0.32, 0.27  # how much too low a percentile of few spells lies
_UNTOLD, _UNTOLD_AT, _TOLD = 0.3, 40.0, 1.1  # of its error, what the trial cannot tell; and what it tells
_FREEDOM = 5.0  # of Student's t for a percentile's error
_MODEL = 0.05  # of a percentile: no server follows the curve exactly
_DEEP = 0.01  # the chance that an overload served less than the server can, as one that evicts requests does
_DEEPEST = math.log(2.0)
_NODES: Final = special.ndtri((np.arange(7) + 0.5) / 7)
_WRONG = 0.02  # the chance that a verdict is wrong
_DRAWS = 8000
_BINS = 160  # of a posterior
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean logarithm of the time per token after the first, ns, with its standard error."""

    log: float
    error: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the paces of n trials say, for each of ``DRIFTS`` (k).

    ``odds``: log-likelihood, shape (k,). ``slower``: by how much each trial was slower than their mean, a logarithm,
    and ``variance`` of that, shape (k, n). ``common``: variance of what slowed all of them alike, shape (k,).
    """

    odds: Floats
    slower: Floats
    variance: Floats
    common: Floats


def pace_of(times_ns: Floats) -> Pace | None:
    """The pace of times per token, in due order; None of too few. The error is that of batches' means."""
    known = times_ns[times_ns > 0]
    if len(known) < _FEWEST:
        return None
    logs = np.log(known)
    means = np.array([part.mean() for part in np.array_split(logs, _BATCHES)])
    return Pace(float(logs.mean()), float(means.std(ddof=1)) / math.sqrt(_BATCHES))


def speeds_of(paces: Sequence[Pace | None], served: Sequence[float]) -> Speeds:
    """What each trial's pace (None: it has none) says, at the requests per second that it was ``served``."""
    y = np.array([pace.log if pace else 0.0 for pace in paces])
    errors = np.array([math.hypot(pace.error, _PACE_UNTOLD) if pace else _UNKNOWN for pace in paces])
    load = np.log(np.array(served))
    load -= load.mean()
    known = np.diag(errors**2) + _ELASTICITY**2 * np.outer(load, load)
    odds, slower, variance, common = [], [], [], []
    for s in DRIFTS:
        own = s**2 * np.eye(len(y))
        inverse = np.linalg.inv(known + own)
        ones = inverse.sum(axis=1)
        residual = inverse - np.outer(ones, ones) / ones.sum()
        odds.append(0.5 * (np.linalg.slogdet(inverse)[1] - math.log(ones.sum()) - y @ residual @ y))
        slower.append(s**2 * residual @ y)
        covariance = own - s**4 * residual
        weights = 1 / (errors**2 + s**2)
        weights /= weights.sum()
        common.append(weights @ covariance @ weights)
        variance.append(np.maximum(np.diag(covariance) - common[-1], 0.0))
    return Speeds(*(np.array(each) for each in (odds, slower, variance, common)))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Requests per second that a saturated server completed, and the error of the logarithm."""

    rate: float
    error: float
    trial: int | None = None  # its place among the levels


@dataclass(frozen=True, slots=True)
class TrialLevel:
    """One trial's percentile, over its limit: its logarithm with its error, of ``count`` requests at ``rate``.

    Of arrivals in bursts ``count`` is how many Poisson ones meet as many spells. ``error`` infinite: nothing but
    ``side`` is known. ``side``: 1 where the limit surely fails, -1 where it surely holds, else 0.
    """

    rate: float
    log: float
    error: float
    count: float
    side: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Every curve that may be one percentile's, over its limit.

    ``odds``: their log-odds, shape (drifts, ceilings, loads, a, m); ``ceilings``: logarithms of rates; ``alone``: a;
    ``common``: variance of what slowed all trials alike, shape (drifts,).
    """

    odds: Floats
    ceilings: Floats
    alone: Floats
    common: Floats

    def levels(self, rates: Sequence[float], confidence: float) -> Floats:
        """The percentile over its limit at each rate: median, low and high end, shape (3, rates).

        Infinite at a ceiling and beyond. Curves are drawn evenly from the odds, each at a speed that all trials may
        have had in common, so that an end meets 1 where the capacity's interval ends.
        """
        below = np.cumsum(np.exp(self.odds - self.odds.max()))
        places = np.searchsorted(below, (np.arange(_DRAWS) + 0.5) / _DRAWS * below[-1])
        drift, ceiling, load, alone, shape = np.unravel_index(places, self.odds.shape)
        faster = np.sqrt(self.common[drift]) * special.ndtri((np.arange(_DRAWS) + 0.5) * _GOLDEN % 1)
        a, free, m = self.alone[alone], _LOADS[load], SHAPES[shape]
        rho = np.array(rates)[:, None] / np.exp(self.ceilings[ceiling] + faster)
        with np.errstate(divide="ignore"):
            found = a + (1 - a) * free / (1 - free) ** m * rho**m / np.maximum(1 - rho, 0.0)
        tail = (1 - confidence) / 2
        levels: Floats = np.quantile(found, [0.5, tail, 1 - tail], axis=1, method="inverted_cdf")
        return levels


@dataclass(frozen=True, slots=True)
class Posterior:
    """``edges``: logarithms of rates, shape (k + 1,), increasing; ``masses``: probability between them, shape (k,).

    ``drift``: by how much the server's speed differs between trials, as a share (its mean); ``ceiling``: the median.
    ``slo``: whose capacity it is, by number; ``grid``: its curves, where it has some.
    """

    edges: Floats
    masses: Floats
    drift: float
    ceiling: float
    slo: int = 0
    grid: Grid | None = None

    def quantile(self, q: float) -> float:
        """The rate below which the capacity lies with probability ``q``."""
        below = np.concatenate([[0.0], np.cumsum(self.masses)])
        return float(np.exp(np.interp(q, below / below[-1], self.edges)))

    def interval(self, confidence: float) -> tuple[float, float]:
        """The central interval that holds the capacity with this probability."""
        tail = (1 - confidence) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def spread(self, confidence: float) -> float:
        """Half of the interval's width, as a share of the median."""
        low, high = self.interval(confidence)
        return (high - low) / 2 / self.quantile(0.5)


def fit(
    levels: Sequence[TrialLevel], ceilings: Sequence[Ceiling], share: float, most: float, speed: Speeds | None = None
) -> Posterior:
    """The capacity for one percentile. ``levels``: every trial that counts; ``share``: that may exceed the limit.

    ``most``: a rate that the capacity surely is below.

    Without ``ceilings`` nothing is known of the ceiling but ``most``.
    """
    logs = _ceiling_grid(ceilings, levels, most)
    speed = speed or speeds_of([None] * len(levels), [level.rate for level in levels])
    seen = [level for level in levels if math.isfinite(level.error)]
    smallest = min((math.exp(level.log) for level in seen), default=0.5)
    a = _ALONE * min(smallest, 0.9)
    alone = a[None, None, :, None]
    # Axes: ceiling, load at the limit, a, m; the limit is 1.
    c, free, m = np.exp(logs)[:, None, None, None], _LOADS[None, :, None, None], SHAPES[None, None, None, :]
    capacity = logs[:, None] + np.log1p(-_LOADS)[None, :]
    weight = (1 - alone) * free / (1 - free) ** m
    total = np.zeros((len(DRIFTS), *np.broadcast_shapes(c.shape, weight.shape)))
    total += _ceiling_odds(logs, ceilings, speed)[:, :, None, None, None]
    total += speed.odds[:, None, None, None, None]
    for at, level in enumerate(levels):
        if level.side:
            broken = (capacity < math.log(level.rate)) == (level.side < 0)
            total += np.where(broken, math.log(_WRONG), 0.0)[None, :, :, None, None]
        if not math.isfinite(level.error):
            continue
        rho = np.minimum(level.rate / c, 1.2)
        left = np.sqrt(np.maximum(1 - rho, 0.0) ** 2 + 1 / level.count)
        spells = level.count * left**2
        waiting = weight * rho**m / left
        expected = alone + waiting
        waits = waiting / expected
        low = waits * _LOW / (spells * share + _LOW_AT)
        slope = 1 + waits * (m + rho / left)
        told = (_TOLD * level.error) ** 2 + (waits * _UNTOLD) ** 2 / (1 + spells / _UNTOLD_AT) + _MODEL**2
        off = level.log - np.log(expected) + low
        for each, slower, unsure in zip(total, speed.slower[:, at], speed.variance[:, at], strict=True):
            variance = told + unsure * slope**2
            spread = variance + (off - slope * slower) ** 2 / _FREEDOM
            each += _FREEDOM / 2 * np.log(variance) - (_FREEDOM + 1) / 2 * np.log(spread)
    return _posterior(capacity, Grid(total, logs, a, speed.common))


def _posterior(capacity: Floats, grid: Grid) -> Posterior:
    """Where the grid has the capacity. ``capacity``: of each curve, logarithms, shape (ceilings, loads)."""
    mass = np.exp(grid.odds - grid.odds.max())
    drift = float((mass.sum(axis=(1, 2, 3, 4)) * DRIFTS).sum() / mass.sum())
    by_ceiling = np.cumsum(mass.sum(axis=(0, 2, 3, 4)))
    middle = float(np.exp(np.interp(0.5, by_ceiling / by_ceiling[-1], grid.ceilings)))
    shifts = np.sqrt(grid.common)[:, None, None, None] * _NODES
    places = np.broadcast_to(capacity[None, :, :, None] + shifts, (len(DRIFTS), *capacity.shape, len(_NODES)))
    by_drift = np.broadcast_to(mass.sum(axis=(3, 4))[..., None], places.shape)
    edges, masses = _binned(places.ravel(), by_drift.ravel())
    return Posterior(edges, masses, drift, middle, grid=grid)


def least(posteriors: Sequence[Posterior]) -> Posterior:
    """Of the smallest of several capacities that share their errors: its quantiles are the smallest ones.

    Where most of that is one without a curve, there is neither a curve nor a drift to speak of.
    """
    if len(posteriors) == 1:
        return posteriors[0]
    edges = np.unique(np.concatenate([each.edges for each in posteriors]))
    below = np.zeros_like(edges)
    for each in posteriors:
        below = np.maximum(below, np.interp(edges, each.edges, np.concatenate([[0.0], np.cumsum(each.masses)])))
    first = min(posteriors, key=lambda each: each.quantile(0.5))
    drift = max(each.drift for each in posteriors) if first.drift else 0.0
    return Posterior(edges, np.diff(below) / below[-1], drift, first.ceiling, first.slo, first.grid)


def _ceiling_grid(ceilings: Sequence[Ceiling], levels: Sequence[TrialLevel], most: float) -> Floats:
    """Logarithms: dense around what was measured, then up to twice that."""
    if not ceilings:
        lowest = math.log(max((level.rate for level in levels if level.side <= 0), default=most / 4))
        return np.linspace(lowest, max(math.log(most), lowest) + _DEEPEST, _CEILINGS)
    best = max(ceilings, key=lambda each: each.rate)  # a deeper overload may serve less
    top = math.log(best.rate)
    near = top + np.linspace(-4, 4, 2 * _CEILINGS // 3) * math.hypot(best.error, 0.01)
    highest = max(top + _DEEPEST, near[-1] + best.error)
    return np.concatenate([near, np.linspace(near[-1], highest, _CEILINGS // 3 + 1)[1:]])


def _ceiling_odds(logs: Floats, ceilings: Sequence[Ceiling], speed: Speeds) -> Floats:
    """Log-density times cell, shape (drifts, ceilings): each measured with its error and a drift, or far too low."""
    cells = np.gradient(logs)
    odds: Floats = np.log(np.broadcast_to(cells, (len(DRIFTS), len(logs))))
    for each in ceilings:
        slower = 0.0 if each.trial is None else speed.slower[:, each.trial, None]
        variance = DRIFTS**2 if each.trial is None else speed.variance[:, each.trial]
        deviation = np.sqrt(each.error**2 + variance)[:, None]
        z = (logs[None, :] - math.log(each.rate) - slower) / deviation
        deep = np.where(z > 0, _DEEP / _DEEPEST, 0.0)
        odds = odds + np.log((1 - _DEEP) * np.exp(-(z**2) / 2) / deviation / math.sqrt(2 * math.pi) + deep + 1e-9)
    return odds


def _binned(at: Floats, mass: Floats) -> tuple[Floats, Floats]:
    """A density from weighted points: bins between the quantiles that matter."""
    order = np.argsort(at)
    below = np.cumsum(mass[order])
    low, high = np.interp([1e-4, 1 - 1e-4], below / below[-1], at[order])
    edges = np.linspace(low, max(high, low + 1e-3), _BINS + 1)
    masses, _ = np.histogram(np.clip(at, edges[0], edges[-1]), edges, weights=mass)
    return edges, masses / masses.sum()
