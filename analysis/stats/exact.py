"""Exact bounds of counts: of a share, of the rank of a percentile, of a rate; and what a longer run would know.

A share of values beyond a limit is binomial, and its bounds are Clopper and Pearson's (1934, Biometrika 26) in their
beta form, which takes real numbers: n_eff stands for n, and exceedances are counted in the same coin. "p99 <= limit"
says that at most 1 % of values exceed the limit, so that the ranks between which a percentile lies and the test of a
promise about it are one statement. A rate's bounds are Garwood's (1936, Biometrika 28), in their gamma form.

*Far below a limit* that no value has reached, less evidence is enough. Slow requests of two kinds could have been
missed. Those that come alone are told by the plain number of values. Those that come in bursts, as queues make them,
also show below the limit: where the tail falls at least as 1 / x^2 from a part of the limit on (a queue's falls
exponentially), it is enough that at most four times the allowed share exceeds its half, or that the largest value is
small: with m a part of the limit, 1 / m^2 times the share would exceed it. Two chances to be wrong, so each counts
twice. Neither tells of a stall that never happened.

*Far beyond a limit* nothing need be known of how alike neighbors are: a share of requests has the same mean however
they hang together, so that by Markov's inequality it exceeds x with a chance of at most its mean over x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from gapmeter.analysis.stats.dependence import later
from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL

HALF_TIMES = 4.0  # so many times the allowed share may exceed half the limit
FEWEST_FAR = 100.0  # independent values: below, n_eff itself is not known well enough
_MOST_GROWTH = 1024.0  # a sample that would have to grow more is of no reasonable size


def share_bounds(hits: float, count: float) -> tuple[float, float]:
    """Clopper-Pearson 95 % bounds of a share, ``hits`` of ``count``; real numbers allowed."""
    if count <= 0:
        return 0.0, 1.0
    low = float(special.betaincinv(hits, count - hits + 1, TAIL)) if hits > 0 else 0.0
    high = float(special.betaincinv(hits + 1, count - hits, 1 - TAIL)) if hits < count else 1.0
    return low, high


def share_at_most(hits: float, count: float, bursts: float) -> float:
    """The upper end where ``hits`` came in so many ``bursts``: 97.5 % sure, 0 where each came alone or there was none.

    Bursts and the calm between them take turns. If the lengths of each are geometric, the mean of k of them has the
    degrees of freedom 2 k / (1 - 1 / mean), so that the odds found over the true ones are F-distributed; what is cut
    off at the ends counts as one calm more. The number of values that a share is worth would come from these same
    bursts: where they are short by chance, so is that.
    """
    calm = count - hits
    if bursts >= hits or not calm:
        return float(bursts < hits)
    odds = hits / calm * (bursts + 1) / bursts / float(special.fdtri(*_freedom(hits, count, bursts), TAIL))
    return odds / (1 + odds)


def chance_of_so_few_in_bursts(hits: float, count: float, bursts: float, share: float) -> float:
    """The same as a test: P(so few ``hits``, in so many ``bursts``) if so large a ``share`` of all were; 0 as there."""
    calm = count - hits
    if bursts >= hits or not calm or share >= 1:
        return float(bursts < hits and share < 1)
    if share <= 0:
        return 1.0
    ratio = hits / calm * (bursts + 1) / bursts / (share / (1 - share))
    return float(special.fdtr(*_freedom(hits, count, bursts), ratio))


def _freedom(hits: float, count: float, bursts: float) -> tuple[float, float]:
    """The degrees of freedom of the mean length of bursts, and of the calm between them."""
    calm = count - hits
    return 2 * bursts / (1 - bursts / hits), 2 * (bursts + 1) / max(1 - bursts / calm, 1 / count)


def rate_at_least(count: float, seconds: float, dispersion: float = 1.0) -> float:
    """The lower end of Garwood's 95 % interval of a Poisson rate, events a second, from ``count / dispersion``.

    ``dispersion``: of arrivals that are more (above 1) or less even than Poisson's.
    """
    return float(special.gammaincinv(count / dispersion, TAIL)) * dispersion / seconds


@functools.lru_cache(maxsize=4096)
def decisive_counts(n_eff: float, share: float) -> tuple[float | None, float | None]:
    """How many of ``n_eff`` values may exceed a limit before the share above it is proven.

    First: the most exceedances (a real number) for which the upper bound of the share above is still at most
    ``share``; None when even no exceedance proves it. Second: the fewest for which its lower bound is above ``share``;
    None when even all do not. Each bound is one-sided at 97.5 %.
    """

    def at_least(k: float) -> float:
        return float(special.betainc(k, n_eff - k + 1, share))

    one, tolerable, damning = at_least(1.0), None, None
    if one >= 1 - TAIL:
        tolerable = float(special.bdtrik(TAIL, n_eff, share))
    if at_least(n_eff) <= TAIL and one >= TAIL:
        damning = 1 + float(special.bdtrik(1 - TAIL, n_eff, share))
    elif at_least(n_eff) <= TAIL:  # less than one exceedance, where ``bdtrik`` ends
        low, damning = 0.0, 1.0
        for _ in range(60):
            middle = (low + damning) / 2
            low, damning = (middle, damning) if at_least(middle) > TAIL else (low, middle)
    return tolerable, damning


def interval_ranks(count: int, n_eff: float, percentile: float) -> tuple[int | None, int | None]:
    """1-based ranks of the interval's ends among ``count`` sorted values, None where there is no such value.

    The upper end is the least value of which at most ``tolerable`` values lie above, the lower end the greatest
    that at least ``damning`` values reach.
    """
    tolerable, damning = decisive_counts(n_eff, 1 - percentile / 100)
    scale = count / n_eff
    high = None if tolerable is None else count - math.floor(tolerable * scale + 1e-9)
    low = None if damning is None else count - math.ceil(damning * scale - 1e-9) + 1
    return low or None, high


def values_needed(percentile: float) -> int:
    """The least number of independent values whose extremes enclose a percentile with 95 % confidence.

    Both (1-q)^n and q^n at most 2.5 %: 368 for p99, 3,688 for p99.9.
    """
    share = 1 - percentile / 100
    return math.ceil(math.log(TAIL) / math.log(max(share, 1 - share)) - 1e-9)


def chance_of_so_few(over: float, count: int, n_eff: float, share: float) -> float:
    """P(at most ``over`` of ``count`` values, worth ``n_eff``, beyond a limit) if so large a ``share`` of all were."""
    if not count or share <= 0:
        return 1.0
    found = over * n_eff / count
    return 1.0 if found >= n_eff else float(special.betainc(n_eff - found, found + 1, 1 - share))


def chance_of_so_many(over: float, count: int, n_eff: float, share: float) -> float:
    """P(at least ``over`` of ``count`` values, worth ``n_eff``, beyond a limit) if so small a ``share`` of all were."""
    if not count or over <= 0 or share >= 1:
        return 1.0
    found = over * n_eff / count
    return float(special.betainc(found, n_eff - found + 1, share))


def far_applies(n_eff: float, share: float) -> bool:
    """Whether ``n_eff`` independent values and an allowed ``share`` beyond the limit can be argued from half of it."""
    return n_eff >= FEWEST_FAR and HALF_TIMES * share < 1


def chance_far_below(over_half: float, count: int, n_eff: float, share: float) -> float:
    """P(no value beyond the limit and so few beyond its half) if the share beyond the limit were ``share``.

    Of ``count`` values, worth ``n_eff``, none exceeds the limit and ``over_half`` its half. 1 where it does not apply.
    """
    if not far_applies(n_eff, share):
        return 1.0
    alone = chance_of_so_few(0.0, count, float(count), share)
    return max(alone, chance_of_so_few(over_half, count, n_eff, HALF_TIMES * share))


def chance_far_from(
    largest: float, over_half: int, count: int, n_eff: float, share: float
) -> tuple[float, float, int] | None:
    """P(no value beyond the limit, and so little near it) if the share beyond the limit were ``share``.

    Of ``count`` values, worth ``n_eff``, the ``largest`` is so large a part of the limit, and ``over_half`` exceed its
    half. Returns the chance, the part that tells most, and how many exceed that; None where a value exceeds the limit
    or nothing can be argued.
    """
    if not count or largest > 1:
        return None
    found = []
    if far_applies(n_eff, share):
        found.append((chance_of_so_few(over_half, count, n_eff, HALF_TIMES * share), 0.5, over_half))
    if largest < 0.5 and n_eff >= FEWEST_FAR * (2 * largest) ** 2:
        found.append((chance_of_so_few(0, count, n_eff, min(share / max(largest, 1e-9) ** 2, 1.0)), largest, 0))
    if not found:
        return None
    bursts, part, over = min(found)
    return max(chance_of_so_few(0.0, count, float(count), share), 2 * bursts), part, over


def chance_of_so_large_a_share(over: float, count: int, share: float) -> float:
    """The most that P(at least ``over`` of ``count`` beyond a limit) can be if no more than ``share`` of all were."""
    return min(share * count / over, 1.0) if over else 1.0


def chance_of_so_many_drawn(hits: int, marked: int, drawn: int, count: int) -> float:
    """P(``hits`` or more of the ``marked`` among so many drawn of ``count``, none twice): hypergeometric."""
    if hits <= 0:
        return 1.0
    found = np.arange(hits, min(marked, drawn) + 1)
    logs = _log_choose(marked, found) + _log_choose(count - marked, drawn - found) - _log_choose(count, drawn)
    return min(float(np.exp(logs).sum()), 1.0)


def _log_choose(n: int, k: Any) -> Any:
    """The logarithm of n over k; minus infinity where k is none of 0 to n."""
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def growth_to_decide(
    hits: int, count: int, n_eff: float, share: float, plain: float | None = None, bursts: float | None = None,
    *, bound: bool = True,
) -> float | None:  # fmt: skip
    """By what factor the sample must grow until a share is proven above or below ``share``, if it stays what it is.

    ``plain``: what it is worth by its autocorrelation time alone (``Series.plain``); ``bursts``: as in
    ``share_at_most``; ``bound``: the largest value may decide it too, as it does of percentiles. None when a
    thousandfold sample would not do: the truth is too close to the limit.
    """

    def decided(worth: float) -> bool:
        tolerable, damning = decisive_counts(worth, share)
        k, grown = hits / count * worth, worth / n_eff
        if bound and not hits and (1 - share) ** worth <= 1 - CONFIDENCE:  # none: the share is bounded on one side
            return True
        few = tolerable is not None and k <= tolerable
        if few and bursts is not None:
            few = share_at_most(hits * grown, count * grown, bursts * grown) <= share
        return few or (damning is not None and k >= damning)

    return growth(n_eff, max(plain or n_eff, n_eff), decided, _MOST_GROWTH)


def growth(n_eff: float, plain: float, enough: Callable[[float], bool], most: float) -> float | None:
    """By what factor a sample must grow until what it will be worth is enough; None if that is more than ``most``."""
    worth = later(n_eff, plain)
    if enough(n_eff):
        return 1.0
    if not enough(worth(most)):
        return None
    low, high = 1.0, most
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(worth(middle)) else (middle, high)
    return high
