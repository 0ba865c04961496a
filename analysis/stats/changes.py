"""Where a series changes: a start that differs, a level that moves, a queue that grows.

*MSER-5* (White 1997; Hoad, Robinson and Davies 2010): on means Z of five consecutive values, leave out the first d
that minimise sum over i > d of (Z_i - mean)^2 / (m - d)^2, d at most m / 2. A minimum at that edge means that no
steady state was reached. On correlated data it also cuts off an early burst that belongs to the steady state, so
``differs`` guards it: the part left out must differ from the rest by more than chance (the means three standard errors
apart, with the rest's autocorrelation time in the standard error), and be more extreme than every stretch of the same
length later on.

*PELT* (Killick, Fearnhead and Eckley 2012, JASA 107; here without its pruning) looks for a change of level anywhere,
with cost l2 on at most 200 means of neighbors, in units of their own spread between neighbors, penalty 15 ln n. On a
queue it answers every long burst. So only the strongest change counts, and it is certain only when its two sides differ
as MSER-5's guard asks, at six standard errors, and by a fifth.

*The slope* is Theil and Sen's, of the number of requests in flight. What is in flight now is what was before plus what
arrived less what ended, so s^2, the long-run variance of that step (its variance times its autocorrelation time), says
how far a queue wanders. The queue grew when the line rises by more than a steady one does: (a) more than a queue at
90 % load has waiting in 1 % of moments, ln(100) s^2 / (2 d), with d what such a server would gain on the arrivals in a
step (Kingman 1962, On queues in heavy traffic); (b) more than one standard deviation of a walk without drift over the
window, s sqrt(n - 1), since in a long run a queue nearer to its capacity also comes far; (c) a third of what was in
flight on average; and when (d) it did not come back: never in the second half were as few in flight as in the first
quarter on average. The slope's interval is that of a line through a walk, whose variance is 6/5 s^2 / (n h^2) for n
steps h apart (Durlauf and Phillips 1988, Trends versus random walks): wider, as it holds for a queue at its capacity
too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.stats.dependence import autocorrelation_time
from gapmeter.analysis.stats.estimate import Estimate, t_quantile

BATCH = 5
FEWEST_BATCHES = 10
SIGMAS = 3.0
GROWTH = 1 / 3  # of the mean in flight, over the window
STEADY_LOAD = 0.9  # the busiest queue that may still be taken for a steady one
FEWEST_MORE = 2.0  # requests by which a queue must grow
_RARE = 0.01
_POINTS = 200
_PENALTY = 15.0
_APART = 6.0
_NOTABLE = 1.2  # times the level before


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth a second of the number in flight; ``first`` and ``last`` on the fitted line.

    ``steady_most``: the growth over the window that a steady queue seldom exceeds.
    """

    per_s: Estimate
    first: float
    last: float
    steady_most: float
    grows: bool


def mser5(values: Floats) -> tuple[int, bool]:
    """How many leading values MSER-5 leaves out, and whether its minimum lies at the edge (no steady state)."""
    m = len(values) // BATCH
    if m < FEWEST_BATCHES:
        return 0, False
    means = values[: m * BATCH].reshape(m, BATCH).mean(axis=1)
    kept = m - np.arange(m // 2 + 1)
    tail = np.cumsum(means[::-1])[::-1][: m // 2 + 1]
    squares = np.cumsum((means**2)[::-1])[::-1][: m // 2 + 1]
    spread = np.maximum(squares - tail**2 / kept, 0.0) / kept**2
    d = int(np.argmin(spread))
    return d * BATCH, d == m // 2


def differs(head: Floats, rest: Floats, sigmas: float = SIGMAS) -> bool:
    """Whether the head lies so many standard errors from the rest, and beyond every stretch of its length in there."""
    tau = autocorrelation_time(rest)
    error = np.sqrt(rest.var() * tau * (1 / len(head) + 1 / len(rest)))
    sums = np.concatenate([[0.0], np.cumsum(rest)])
    length = min(len(head), len(rest))
    stretches = (sums[length:] - sums[:-length]) / length
    mean = head.mean()
    extreme = mean > stretches.max() or mean < stretches.min()
    return bool(abs(mean - rest.mean()) > sigmas * error and extreme)


def strongest_change(logs: Floats) -> tuple[int, float, bool] | None:
    """Where a series of logarithms changes its level most, the ratio of after to before, whether it is certain."""
    width = max(5, math.ceil(len(logs) / _POINTS))
    m = len(logs) // width
    if m < FEWEST_BATCHES:
        return None
    means = logs[: m * width].reshape(m, width).mean(axis=1)
    noise = float(np.median(np.abs(np.diff(means)))) / 0.954  # the median of |difference| of two normals
    if noise <= 0:
        return None
    cuts = least_squares_cuts(means / noise, _PENALTY * math.log(m))
    if not cuts:
        return None
    cut = max(cuts, key=lambda at: at * (m - at) * (means[at:].mean() - means[:at].mean()) ** 2)
    before, after = means[:cut], means[cut:]
    shorter, longer = sorted((before, after), key=len)
    step = float(after.mean() - before.mean())
    certain = abs(step) > math.log(_NOTABLE) and differs(shorter, longer, _APART)
    return cut * width, math.exp(step), certain


def least_squares_cuts(values: Floats, penalty: float) -> list[int]:
    """Where to cut so that the squares about the pieces' means, and a penalty a cut, add up to least; pieces of two."""
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (values, values**2))
    count = len(values)
    least, since = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    least[0] = -penalty
    for end in range(2, count + 1):
        start = np.arange(end - 1)
        spread = squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)
        whole = least[start] + spread + penalty
        since[end] = np.argmin(whole)
        least[end] = whole[since[end]]
    cuts = []
    while count := int(since[count]):
        cuts.append(count)
    return cuts[::-1]


def slope_of(level: Floats, seconds: Floats, arrivals: float) -> Slope:
    """The slope of ``level``, the number in flight at moments evenly apart; ``arrivals`` came in each step."""
    moments = len(level)
    earlier, later = np.triu_indices(moments, 1)  # Theil and Sen's line: the median of the slopes between all pairs
    per_s = np.median((level[later] - level[earlier]) / (seconds[later] - seconds[earlier]))
    intercept = np.median(level) - per_s * np.median(seconds)
    steps = np.diff(level)
    spread = float(steps.var(ddof=1)) * autocorrelation_time(steps)
    span = float(seconds[-1] - seconds[0])
    half = t_quantile(moments - 2) * math.sqrt(1.2 * spread * moments) / span
    more = float(per_s) * span
    waiting = math.log(1 / _RARE) * spread / (2 * arrivals * (1 / STEADY_LOAD - 1))
    most = max(FEWEST_MORE, GROWTH * float(level.mean()), waiting, math.sqrt(spread * (moments - 1)))
    stays = bool(level[moments // 2 :].min() > level[: moments // 4].mean())
    estimate = Estimate(float(per_s), float(per_s - half), float(per_s + half))
    return Slope(estimate, float(intercept), float(intercept + more), most, more > most and stays)
