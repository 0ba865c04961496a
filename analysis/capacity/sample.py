"""What a trial's latencies tell, in the order of due times: their worth and bursts, a percentile, the server's rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.stats import dependence
from gapmeter.analysis.stats.hdr import at_rank

_MOST_BATCHES, _FEWEST_BATCHES, _BATCH = 20, 5, 8
_LATEST = 20  # of so many parts the last must be beyond the limit
_UNSURE = 0.7  # of n_eff: a trial that met few bursts thinks that they are shorter than they are
_FEWEST_VALUES = 40  # for a percentile
_GROWS, _IN_LINE = 0.1, 0.7  # seconds of latency a second, and how well their ranks agree: a queue that grows
_TRIMMED = 0.05  # of the completions at either end: a full server is looked at


@dataclass(frozen=True, slots=True)
class Served:
    """Requests per second that a server kept up with, with the standard error of the logarithm.

    ``saturated``: the queue grew.
    """

    rate: float
    error: float
    saturated: bool


def chance_if_stable(values: Floats, due_ns: Floats, limit: float, rate: float) -> float:
    """P(requests completed so slowly) by a queue that is stable; 1 unless the latest values all exceed ``limit``.

    ``values``: from due to done, ns, in the order of ``due_ns``, asked for at ``rate`` a second. A stable queue
    completes as many, so a batch of completions takes size / rate on average: Student's t over up to 20 batches. That
    takes the rate asked for, not the arrivals that came: a burst of them makes a queue, but no slow completions. Of
    requests some of which failed, the rate of the others.
    """
    done = (due_ns + values)[np.isfinite(values)]
    batches = min(_MOST_BATCHES, len(done) // _BATCH)
    if batches < _FEWEST_BATCHES or not (values[-max(len(values) // _LATEST, 5) :] > limit).all():
        return 1.0
    size = (len(done) - 1) // batches
    spans = np.diff(np.sort(done)[-(batches * size + 1) :: size])
    deviation = float(spans.std(ddof=1))
    if not deviation:
        return 1.0
    t = (float(spans.mean()) - size * 1e9 / rate * len(values) / len(done)) / (deviation / math.sqrt(batches))
    return float(special.stdtr(batches - 1, -t))


def log_level(
    values: Floats, percentile: float, limit: float, n_eff: float | None = None
) -> tuple[float, float] | None:
    """The logarithm of a percentile of values over its limit, and that logarithm's standard error.

    ``values`` in the order of their due times, worth ``n_eff`` independent ones (None: found here). The error of an
    order statistic is sqrt(p (1 - p) / n_eff) over the density there, which the distance to the percentile that twice
    as many exceed tells (below a median, that all do): where the tail is exponential it is scale * ln 2. None where it
    is infinite, or too few came.
    """
    share, count = 1 - percentile / 100, len(values)
    if count < _FEWEST_VALUES:
        return None
    seen = max(share, 2 / count)  # few values: a lower percentile, and the tail's slope beyond
    more = min(2 * seen, 1.0)
    ordered = np.sort(values)
    at, twice = (at_rank(ordered, 100 * (1 - part)) for part in (seen, more))
    if not math.isfinite(at) or at <= 0:
        return None
    scale = max(at - twice, 0.0) / math.log(more / seen)
    high = at + scale * math.log(seen / share) if seen > share else at
    if n_eff is None:
        n_eff = dependence.exceedances(values, at_rank(ordered, min(percentile, 90.0)), None).plain()
    error = scale / high * math.sqrt((1 - seen) / (seen * n_eff))
    return math.log(high / limit), max(error, 1 / math.sqrt(count))


def served_by(due_ns: Floats, done_ns: Floats) -> Served | None:
    """What a server kept up with, of requests in the order in which they were due; inf: never completed.

    The middle of the completions counts; the error is that of batches of them. Those that failed are counted with them
    in proportion. The queue grew where latencies rose with the due time throughout.
    """
    known = np.isfinite(done_ns)
    due, done = due_ns[known], np.sort(done_ns[known])
    if len(done) < _FEWEST_BATCHES * _BATCH:
        return None
    cut = math.floor(_TRIMMED * len(done))
    middle = done[cut : len(done) - cut]
    batches = min(_MOST_BATCHES, len(middle) // _BATCH)
    spans = np.diff(middle[:: (len(middle) - 1) // batches][: batches + 1])
    if not spans.any():  # all came in one moment, which tells no rate
        return None
    error = float(spans.std(ddof=1) / spans.mean() / math.sqrt(len(spans)))
    took, third = done_ns[known] - due, len(due) // 3
    rise = (took[-third:].mean() - took[:third].mean()) / (due[-third:].mean() - due[:third].mean())
    in_line = float(np.corrcoef(dependence.ranks_of(due), dependence.ranks_of(took))[0, 1]) if np.ptp(took) else 0.0
    rate = 1e9 * (len(middle) - 1) / float(middle[-1] - middle[0]) * len(done_ns) / len(done)
    return Served(rate, error, rise > _GROWS and in_line > _IN_LINE)


def worth(values: Floats, percentile: float) -> float:
    """How many independent values these are worth, in time order; for a trial that may be short.

    The least of n / tau of the indicator above the sample's own 95th and 99th percentile (below p95, above the 50th,
    90th and 95th), and n / tau of the values' ranks. In a short stretch the few values above a high percentile come in
    one or two bursts and say too little about how long bursts are; ranks say more. From p95 on all values below the
    75th percentile rank alike: a server whose usual latencies drift by a few per cent has ranks that are alike for
    minutes, and tells nothing by it of how long bursts are. What stats.series allows beyond that for a single run's own
    ignorance, a search does not: it has many trials, and pays for its looks already (docs/results has the share of
    false claims at the limit).
    """
    if not len(values):
        return 0.0
    ordered, levels = np.sort(values), (95.0, 99.0) if percentile >= 95 else (50.0, 90.0, 95.0)
    worths = [dependence.exceedances(values, at_rank(ordered, level), None).plain() for level in levels]
    ranked = np.maximum(values, at_rank(ordered, 75.0)) if percentile >= 95 else values
    tau = dependence.autocorrelation_time(dependence.ranks_of(ranked))
    return max(1.0, _UNSURE * min(*worths, len(values) / tau))


def worth_of_clusters(values: Floats, clusters: Sequence[Ints], percentile: float) -> float:
    """As ``worth``, for values pooled from clusters (token gaps of a request, or of a moment); ranks are not asked.

    ``clusters``: arrays that number each value's cluster, in time order. The least over all of them counts.
    """
    ordered, levels = np.sort(values), (90.0, 95.0, 99.0) if percentile >= 95 else (50.0, 90.0, 95.0)
    at = {at_rank(ordered, level) for level in levels}
    found = min(dependence.exceedances(values, one, grouping).plain() for one in at for grouping in clusters)
    return found if percentile >= 95 else _UNSURE * found


def bursts_of(values: Floats, limit: float) -> int:
    """In how many bursts values exceed ``limit``: one ends where a value is no larger than the median of all.

    Where most exceed it, how often values swing from their lower quarter to their upper half: each tells as much.
    """
    if not len(values):
        return 0
    ordered = np.sort(values)
    quarter, middle = (at_rank(ordered, percentile) for percentile in (25.0, 50.0))
    if middle == ordered[-1]:  # most failed: a burst ends where one did not
        quarter = middle = float(np.max(ordered, where=ordered < middle, initial=-math.inf))
    sides = (values > max(limit, middle)).astype(int) - (values <= (middle if middle <= limit else quarter))
    sides = sides[sides != 0]
    return int((np.diff(sides, prepend=-1) == 2).sum())
