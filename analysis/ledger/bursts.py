"""Did the slowest requests come together? One short stretch of the run that has more of them than chance explains.

A scan statistic (Naus 1965, JASA 60): the most slow requests in any stretch, against slow ones that lie at random among
all requests. A stretch is so many requests long, not so many seconds, so that a burst of arrivals alone is none (as in
Kulldorff's Bernoulli model, 1997, Communications in Statistics 26). With S slow ones of n, a stretch of m that begins
with a slow one has k or more of them with a hypergeometric chance, of k - 1 more among m - 1 drawn from n - 1, of which
S - 1 are slow. Any such stretch has them with at most S times that chance, and one of several lengths with at most
the sum (union bounds). So chance is said to be none at most once in forty runs.

Slow requests of a busy queue do come together: that is found, and is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ints, Ranked
from gapmeter.analysis.ledger.tail import FEWEST, slow_count, stage_parts, stages_in, typical
from gapmeter.analysis.requests.metrics import stamps_ns
from gapmeter.analysis.results.latency import Burst
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.analysis.stats.estimate import TAIL
from gapmeter.analysis.stats.exact import chance_of_so_many_drawn

_LENGTHS = (1 / 160, 1 / 80, 1 / 40, 1 / 20)  # of a stretch, as parts of all requests
_LEAST, _FEWEST = 1 / 3, 5  # of the slow requests: fewer are no burst worth telling
_MOSTLY = 0.9  # of a burst's time
_MOST_OF_IT = 0.5  # of the time that a burst's requests waited longer


def describe_bursts(
    requests: pd.DataFrame, ledgers: Mapping[str, pd.DataFrame], zero_ns: int, steps: pd.DataFrame | None = None,
    slots: int | None = None,
) -> dict[str, Burst]:  # fmt: skip
    """By metric (ttft, e2e), where its slowest requests (p98.5 and up) came together.

    ``requests`` as from ``measured_requests``, ``ledgers`` theirs by metric. ``zero_ns``: from where times count.
    ``steps``: those of the only engine, which has so many ``slots``; None where that is unknown.
    """
    due_ns = pd.Series(stamps_ns(requests, "due_ns"), requests["request_id"])
    found = dict[str, Burst]()
    for metric in ("ttft", "e2e"):
        rows = ledgers.get(metric)
        if rows is None or len(rows) < FEWEST:
            continue
        mine = due_ns.reindex(rows["request_id"]).to_numpy(np.int64)
        burst = _burst(rows, mine, zero_ns, steps, slots)
        found |= {metric: burst} if burst else {}
    return found


def _burst(
    rows: pd.DataFrame, due_ns: Ints, zero_ns: int, steps: pd.DataFrame | None, slots: int | None
) -> Burst | None:
    ranked = Ranked(rows["total_ns"].to_numpy(np.float64))
    # Of requests that took the same time none counts, since which of them are the slow ones is their order.
    slow = ranked.values > ranked.ordered[-slow_count(len(rows)) - 1]
    if (closest := closest_together(slow)) is None:
        return None
    within, chance = closest
    first_ns, last_ns = int(due_ns[within[0]]), int(due_ns[within[-1]])
    names, usual = stages_in(rows), np.flatnonzero(typical(ranked))
    more_ns = stage_parts(rows, names, within).mean(axis=0) - stage_parts(rows, names, usual).mean(axis=0)
    first = int(more_ns.argmax())
    share = float(more_ns[first] / more_ns.sum())
    named = share >= _MOST_OF_IT and names[first] != UNEXPLAINED
    full, queued = _state(steps, slots, first_ns, last_ns)
    return Burst(
        count=len(within), of=int(slow.sum()), from_s=(first_ns - zero_ns) / 1e9, to_s=(last_ns - zero_ns) / 1e9,
        chance=chance, stage=names[first] if named else None, share=share if named else None,
        slots=slots if full else None, queued=queued,
    )  # fmt: skip


def closest_together(slow: Bools) -> tuple[Ints, float] | None:
    """The slow requests of the least likely stretch, and at most how likely one is by chance.

    ``slow``: which requests are, in the order in which they were due. None where none is unlikely, or has many.
    """
    at, count = np.flatnonzero(slow), len(slow)
    if len(at) < _FEWEST:
        return None
    lengths = sorted({max(2, math.ceil(part * count)) for part in _LENGTHS})

    def chance_of(most: int, length: int) -> float:
        return len(lengths) * len(at) * chance_of_so_many_drawn(most - 1, len(at) - 1, length - 1, count - 1)

    found = []
    for length in lengths:
        inside = np.searchsorted(at, at + length) - np.arange(len(at))  # of the stretch that begins with each
        first = int(inside.argmax())
        within = at[first : first + int(inside[first])]
        chance = chance_of(len(within), length)
        if len(within) >= max(_FEWEST, _LEAST * len(at)) and chance <= TAIL:
            # Of several the one is told that is least likely without what follows its last slow request.
            found.append((chance_of(len(within), int(within[-1] - within[0]) + 1), chance, within))
    if not found:
        return None
    _, chance, within = min(found, key=lambda one: one[0])
    return within, chance


def _state(steps: pd.DataFrame | None, slots: int | None, first_ns: int, last_ns: int) -> tuple[bool, bool]:
    """Whether between two moments all slots were taken, and whether requests waited: for 90 % of the time or more."""
    if steps is None or not len(steps) or last_ns <= first_ns:
        return False, False
    begun, running, waiting = (
        steps[name].to_numpy(np.float64, na_value=0.0) for name in ("schedule_ns", "running", "waiting")
    )
    until_next: Floats = np.diff(np.clip(np.append(begun, np.inf), first_ns, last_ns))
    held = until_next / (last_ns - first_ns)
    full = slots is not None and slots > 1 and float(held[running >= slots].sum()) >= _MOSTLY
    return full, float(held[waiting > 0].sum()) >= _MOSTLY
