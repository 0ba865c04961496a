"""Far below a limit: what may be said of the share beyond a limit that no value has reached.

Slow requests of two kinds could have been missed. Those that come alone are told by the plain number of values. Those
that come in bursts, as queues make them, also show below the limit: where the tail falls at least as 1 / x^2 from half
the limit on (a queue's falls exponentially), it is enough that at most four times the allowed share exceeds half the
limit. Neither tells of a stall that never happened.
"""

from __future__ import annotations

from scipy import special

HALF_TIMES = 4.0  # so many times the allowed share may exceed half the limit
FEWEST = 100.0  # independent values: below, n_eff itself is not known well enough


def applies(n_eff: float, share: float) -> bool:
    """Whether ``n_eff`` independent values and an allowed ``share`` beyond the limit can be argued so."""
    return n_eff >= FEWEST and HALF_TIMES * share < 1


def chance_far_below(over_half: float, count: int, n_eff: float, share: float) -> float:
    """P(no value beyond the limit and so few beyond its half) if the share beyond the limit were ``share``.

    Of ``count`` values, worth ``n_eff``, none exceeds the limit and ``over_half`` its half. 1 where it does not apply.
    """
    if not applies(n_eff, share):
        return 1.0
    alone = lower_tail(0.0, count, float(count), share)
    return max(alone, lower_tail(over_half, count, n_eff, HALF_TIMES * share))


def lower_tail(over: float, count: int, n_eff: float, share: float) -> float:
    """P(at most so many) of a binomial distribution, in its beta form, which takes real numbers."""
    if not count or share <= 0:
        return 1.0
    found = over * n_eff / count
    return 1.0 if found >= n_eff else float(special.betainc(n_eff - found, found + 1, 1 - share))
