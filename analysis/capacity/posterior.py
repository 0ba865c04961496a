"""Where the capacity lies, as a density over the logarithm of the rate: probabilistic bisection.

A trial at rate x that says "holds" with confidence p multiplies the density above x by 2p and that below by 2(1 - p);
one that says "fails", the other way round (Horstein 1963; Waeber, Frazier and Henderson 2013, Bisection search with
noisy responses, SIAM J. Control Optim. 51). The prior is uniform over the logarithm, from one doubling below the
lowest rate tried to one above the highest. Such a density is constant between neighbouring rates that were tried, so
it is kept exactly: its steps and their masses, no grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.capacity.result import HOLDS, INVALID
from gapmeter.analysis.capacity.trial import Trial
from gapmeter.analysis.stats.estimate import Floats

REACH = math.log(2)


@dataclass(frozen=True, slots=True)
class Posterior:
    """``edges``: logarithms of rates, shape (k + 1,), increasing; ``masses``: probability between them, shape (k,)."""

    edges: Floats
    masses: Floats

    def quantile(self, q: float) -> float:
        """The rate below which the capacity lies with probability ``q``."""
        below = np.concatenate([[0.0], np.cumsum(self.masses)])
        return float(np.exp(np.interp(q, below / below[-1], self.edges)))

    def interval(self, confidence: float) -> tuple[float, float]:
        """The central interval that holds the capacity with this probability."""
        tail = (1 - confidence) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def mass(self, low: float, high: float) -> float:
        """The probability that the capacity lies between two rates."""
        below = np.concatenate([[0.0], np.cumsum(self.masses)])
        ends = np.interp(np.log([low, high]), self.edges, below)
        return float(ends[1] - ends[0])


def posterior(trials: Sequence[Trial]) -> Posterior:
    """The density after ``trials``; those that are invalid say nothing. Raises ValueError without a valid one."""
    told = [trial for trial in trials if trial.verdict != INVALID]
    if not told:
        raise ValueError("no trial has said anything yet")
    tried = np.unique(np.log([trial.rate for trial in told]))
    edges = np.concatenate([[tried[0] - REACH], tried, [tried[-1] + REACH]])
    middles = (edges[:-1] + edges[1:]) / 2
    weights = np.log(np.diff(edges))
    for trial in told:
        sure = trial.finding.confidence
        above = sure if trial.finding.leaning == HOLDS else 1 - sure
        weights += np.where(middles > math.log(trial.rate), math.log(above), math.log(1 - above))
    masses = np.exp(weights - weights.max())
    return Posterior(edges, masses / masses.sum())
