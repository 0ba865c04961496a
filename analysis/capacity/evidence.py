"""How sure is a trial that the SLOs hold, or fail, at its rate? Honest although it stops when it likes the answer.

"p99 <= limit" says that at most 1 % of values exceed the limit. Two exact binomial p-values tell how likely the
exceedances found are if the opposite were true, with n_eff in place of n (quantiles.py), since neighbours in a queue
are alike. All promises hold only if each does, so the weakest counts (an intersection-union test, Berger 1982); one
that fails suffices, so the strongest counts, times the number of promises (Bonferroni).

*Optional stopping.* A trial that is looked at K times and stopped when it looks decided would be wrong more often than
a single test. The looks are therefore fixed before it starts, at counts that grow by a constant factor, and each
p-value is multiplied by K: by Bonferroni's inequality, which asks nothing of the dependence between looks, the chance
that *any* look claims a confidence of c for the wrong side is at most 1 - c, whenever the trial is stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from analysis import dependence, quantiles
from analysis.capacity.trial import FAILS, HOLDS, UNDECIDED, Count, Finding, Promise
from analysis.hdr import nearest_rank
from analysis.metrics import Ints
from analysis.quantiles import Floats

FIRST_LOOK = 60
GROWTH = 1.5
SURE = 0.95  # a trial stops at this confidence
MOST_SURE = 0.99  # what no trial may exceed: n_eff is an estimate, and a machine drifts


def look_counts(most: int, first: int = FIRST_LOOK) -> tuple[int, ...]:
    """After how many measured requests a trial is looked at: ``first``, half as many more each time, ``most``."""
    steps = (math.ceil(first * GROWTH**k) for k in itertools.count())
    return (*itertools.takewhile(lambda n: n < most, steps), most)


@dataclass(frozen=True, slots=True)
class Chances:
    """How many of a trial's looks could have claimed that all promises hold, and that one fails."""

    to_hold: int
    to_fail: int


def chances(promises: Sequence[Promise], looks: Sequence[int]) -> Chances:
    """What the p-values of a trial that stops at any of ``looks``, or after its last answers, are multiplied by.

    Below ln(1 - SURE) / ln(1 - share) values not even a trial without one exceedance could claim that a promise holds
    (299 for a p99): such looks are no chance to be wrong in that direction.
    """
    rarest = min(promise.share for promise in promises)
    fewest = math.log(1 - SURE) / math.log(1 - rarest) if 0 < rarest < 1 else 0.0
    return Chances(sum(look >= fewest for look in looks) + 1, len(looks) + 1)


def find(promises: Sequence[Promise], counts: Sequence[Count], looks: Chances) -> Finding:
    """What these counts say, one a promise, for a trial with so many looks."""
    holds = [chance_if_broken(count, promise.share) for promise, count in zip(promises, counts, strict=True)]
    fails = [chance_if_kept(count, promise.share) for promise, count in zip(promises, counts, strict=True)]
    weakest, worst = holds.index(max(holds)), fails.index(min(fails))
    wrong_if_holds = looks.to_hold * holds[weakest]
    wrong_if_fails = looks.to_fail * len(promises) * fails[worst]
    leaning, wrong, promise = (
        (HOLDS, wrong_if_holds, weakest) if wrong_if_holds <= wrong_if_fails else (FAILS, wrong_if_fails, worst)
    )
    confidence = min(max(1 - wrong, 0.5), MOST_SURE)
    return Finding(leaning if confidence >= SURE else UNDECIDED, confidence, leaning, promise)


def chance_if_broken(count: Count, share: float) -> float:
    """P(at most so many exceedances) where the true share is ``share``, the least that breaks the promise.

    The binomial distribution's lower tail in its beta form, which takes real numbers.
    """
    if not count.count or share <= 0:
        return 1.0
    over = count.over * count.n_eff / count.count
    if over >= count.n_eff:
        return 1.0
    return float(special.betainc(count.n_eff - over, over + 1, 1 - share))


def chance_if_kept(count: Count, share: float) -> float:
    """P(at least so many exceedances) where the true share is ``share``, the most that keeps the promise."""
    if not count.count or not count.over or share >= 1:
        return 1.0
    over = count.over * count.n_eff / count.count
    return float(special.betainc(over, count.n_eff - over + 1, share))


def worth(values: Floats, percentile: float, clusters: Sequence[Ints] = ()) -> float:
    """How many independent values these are worth, in time order; for a trial that may be short.

    The lesser of two: n / tau of the indicator above the sample's own 95th and 99th percentile (below p95, above the
    50th, 90th and 95th), and n / tau of the values' ranks. In a short stretch the few values above a high percentile
    come in one or two bursts and say too little about how long bursts are; all ranks together say more. What
    quantiles.py allows beyond that for a single run's own ignorance, a search does not: it has many trials, and pays
    for its looks already (docs/results has the coverage).
    """
    if not len(values):
        return 0.0
    ordered, levels = np.sort(values), (95.0, 99.0) if percentile >= 95 else (50.0, 90.0, 95.0)
    thresholds = [float(ordered[nearest_rank(level, len(values)) - 1]) for level in levels]
    groupings: list[Ints | None] = [*clusters] or [None]
    by_indicator = min(
        dependence.exceedances(values, threshold, grouping).plain()
        for threshold in thresholds
        for grouping in groupings
    )
    if len(clusters):
        return by_indicator
    tau = quantiles.autocorrelation_time(stats.rankdata(values))
    return max(1.0, min(by_indicator, len(values) / tau))
