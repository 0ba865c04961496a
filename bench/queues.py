"""Queues whose latencies have known quantiles: what a percentile's interval can be proven on.

Time is counted in mean services. Arrivals are Poisson but in G/M/1; a queue at load r with k servers gets k r of
them in a unit.

- M/M/1 and M/M/k (Erlang 1917): a wait exceeds t with probability C exp(-(k - kr) t), C by Erlang's second formula;
  the time in the system adds an exponential service, so its tail is a mixture of two exponentials.
- M/D/1: Franx (2001, A simple solution for the M/D/c waiting time distribution, Operations Research Letters 29):
  P(W <= t) = exp(-r u) * sum over j < m of Q[m - 1 - j] (r u)^j / j!, with m = floor(t) + 1, u = m - t, and Q the
  cumulative distribution of the number waiting. Every term is positive, where Crommelin's older series alternates.
- G/M/1 (Kleinrock 1975, Queueing Systems 1, section 6.4): a wait exceeds t with probability s exp(-(1 - s) t), with s
  the root below 1 of s = A(1 - s), and A the Laplace transform of the gaps between arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from gapmeter.analysis.arrays import Floats

MOST_WAITING = 400  # of the M/D/1 distribution that is summed; at load 0.9 more wait with probability below 1e-35
_CHUNK = 250  # replications that are simulated at once, for the memory's sake
_RELAXATIONS = 10.0


@dataclass(frozen=True, slots=True)
class Queue:
    """``name`` as printed; ``servers``; ``deterministic`` services all take 1, the others are exponential of mean 1.

    ``burstiness``: squared coefficient of variation of the gaps, gamma distributed; 1 is Poisson. Of one server only.
    """

    name: str
    servers: int
    deterministic: bool = False
    burstiness: float = 1.0


QUEUES = (Queue("M/M/1", 1), Queue("M/M/4", 4), Queue("M/M/32", 32), Queue("M/D/1", 1, deterministic=True))


def wait_quantile(queue: Queue, load: float, level: float) -> float:
    """The wait that a share ``level`` of requests does not exceed; 0 where so many do not wait at all."""
    if queue.deterministic:
        return _solve(lambda t: 1 - franx(load, t), level)
    waits, drain = _tail(queue, load)
    return max(0.0, math.log(waits / (1 - level)) / drain)


def sojourn_quantile(queue: Queue, load: float, level: float) -> float:
    """The time in the system, wait and service, that a share ``level`` of requests does not exceed."""
    if queue.deterministic:
        return 1 + wait_quantile(queue, load, level)
    waits, drain = _tail(queue, load)
    if queue.servers == 1:
        return -math.log(1 - level) / drain
    if math.isclose(drain, 1):
        return _solve(lambda t: (1 + waits * t) * math.exp(-t), level)

    def above(t: float) -> float:
        both = (drain * math.exp(-t) - math.exp(-drain * t)) / (drain - 1)
        return (1 - waits) * math.exp(-t) + waits * both

    return _solve(above, level)


def _tail(queue: Queue, load: float) -> tuple[float, float]:
    """The share of requests that wait, and the rate at which the tail of their waits falls."""
    bursts = queue.burstiness
    if bursts == 1:
        return erlang_c(queue.servers, load), queue.servers * (1 - load)
    waits = float(optimize.brentq(lambda s: (1 + (1 - s) * bursts / load) ** (-1 / bursts) - s, 0.0, 1 - 1e-6))
    return waits, 1 - waits


def erlang_c(servers: int, load: float) -> float:
    """The share of requests that wait in an M/M/k queue, by Erlang's recursion for the loss formula."""
    offered, loss = servers * load, 1.0
    for k in range(1, servers + 1):
        loss = offered * loss / (k + offered * loss)
    return loss / (1 - load * (1 - loss))


def franx(load: float, t: float) -> float:
    """P(wait <= t) in an M/D/1 queue with services of length 1."""
    m = math.floor(t) + 1
    waiting = _waiting_md1(load)
    j = np.arange(m)
    return float(np.sum(waiting[m - 1 - j] * stats.poisson.pmf(j, load * (m - t))))


def simulate(queue: Queue, load: float, count: int, replications: int, seed: int) -> tuple[Floats, Floats]:
    """Waits and times in the system of ``count`` requests in a row: two arrays of shape (replications, count).

    The queue starts empty and settles before the first request counts.
    """
    ahead = requests_to_settle(load, queue.servers)
    waits, sojourns = [], []
    for chunk, first in enumerate(range(0, replications, _CHUNK)):
        rng = np.random.default_rng([seed, queue.servers, int(queue.deterministic), round(100 * load), chunk])
        shape = (min(_CHUNK, replications - first), ahead + count)
        gaps = rng.gamma(1 / queue.burstiness, queue.burstiness / (queue.servers * load), shape)
        services = np.ones(shape) if queue.deterministic else rng.exponential(1.0, shape)
        wait = lindley(gaps, services) if queue.servers == 1 else many_servers(gaps, services, queue.servers)
        waits.append(wait[:, ahead:])
        sojourns.append(wait[:, ahead:] + services[:, ahead:])
    return np.concatenate(waits), np.concatenate(sojourns)


def requests_to_settle(load: float, servers: int = 1) -> int:
    """Ten relaxation times of a queue that starts empty, in requests.

    One is r / (1 - sqrt r)^2 requests (Cohen 1982, The Single Server Queue, for M/M/1).
    """
    return math.ceil(_RELAXATIONS * max(load / (1 - math.sqrt(load)) ** 2, servers * load))


def lindley(gaps: Floats, services: Floats) -> Floats:
    """Waits in a single-server queue that starts empty (Lindley 1952); ``gaps[:, i]`` precedes arrival i.

    W(i+1) = max(0, W(i) + service(i) - gap(i+1)) is the walk of these steps above its own running minimum.
    """
    walk = np.zeros_like(gaps)
    np.cumsum(services[:, :-1] - gaps[:, 1:], axis=1, out=walk[:, 1:])
    return walk - np.minimum.accumulate(walk, axis=1)


def many_servers(gaps: Floats, services: Floats, servers: int) -> Floats:
    """Waits where the first of several servers to be free takes the next request."""
    arrivals = np.cumsum(gaps, axis=1)
    free, rows = np.zeros((len(gaps), servers)), np.arange(len(gaps))
    waits = np.empty_like(gaps)
    for i in range(gaps.shape[1]):
        taken = free.argmin(axis=1)
        start = np.maximum(arrivals[:, i], free[rows, taken])
        free[rows, taken] = start + services[:, i]
        waits[:, i] = start - arrivals[:, i]
    return waits


def _waiting_md1(load: float) -> Floats:
    """P(at most n wait) for n below ``MOST_WAITING``, in an M/D/1 queue.

    The number in the system that a departure leaves behind is crossed upwards as often as downwards at each level n:
    p[n] a[0] = p[0] A[n] + sum over 0 < i < n of p[i] A[n + 1 - i], with a the Poisson probabilities of arrivals
    during a service and A their tails. All terms are positive.
    """
    n = np.arange(MOST_WAITING + 2)
    first, tail = math.exp(-load), stats.poisson.sf(n - 1, load)
    p = np.zeros(MOST_WAITING + 1)
    p[0] = 1 - load
    for level in range(1, MOST_WAITING + 1):
        p[level] = (p[0] * tail[level] + p[1:level] @ tail[level:1:-1]) / first
    return np.cumsum(p)[1:]


def _solve(above: Callable[[float], float], level: float) -> float:
    """Where a tail that falls from at most 1 to 0 is 1 - level; 0 where it begins below."""
    if above(0.0) <= 1 - level:
        return 0.0
    high = 1.0
    while above(high) > 1 - level:
        high *= 2
    return float(optimize.brentq(lambda t: above(t) - (1 - level), 0.0, high, xtol=1e-12))
