"""What slow requests wait for that typical ones do not, and whether they came together.

Stages are means over the real requests of a band. Bands are cut by rank of what a request waited in all:
*typical* (p45 to p55), *slow* (p98.5 and up, and at least seven), slow ones from other percentiles up, and the whole
range. A stage's bar is its mean over the band, so stages and remainder add up to the band's mean wait, and the
differences of the stages add up to the difference of the waits. Percentiles of single stages never do.

A *burst* is one short stretch of the run that has more of the slowest requests than chance explains. It is found by a
scan statistic (Naus 1965, JASA 60): the most slow requests in any stretch, against slow ones that lie at random among
all requests. A stretch is so many requests long, not so many seconds, so that a burst of arrivals alone is none (as in
Kulldorff's Bernoulli model, 1997, Communications in Statistics 26). With S slow ones of n, a stretch of m that begins
with a slow one has k or more of them with a hypergeometric chance, of k - 1 more among m - 1 drawn from n - 1, of which
S - 1 are slow. Any such stretch has them with at most S times that chance, and one of several lengths with at most
the sum (union bounds). So chance is said to be none at most once in forty runs.

Slow requests of a busy queue do come together: that is found, and is true.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Floats, Ints, Ranked
from gapmeter.analysis.requests.metrics import stamps_ns
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.latency import (
    Anatomy,
    Band,
    Bands,
    Burst,
    OwnerPart,
    RankedStage,
    SlowBands,
    SpreadBand,
    Tail,
    explained_by,
)
from gapmeter.analysis.results.run import FAIL, SloAnswer
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, UNEXPLAINED_OWNER, column, owner_of
from gapmeter.analysis.stats.bootstrap import drawn_means, share_with_draws, stretches
from gapmeter.analysis.stats.estimate import TAIL
from gapmeter.analysis.stats.exact import chance_of_so_many_drawn
from gapmeter.scenarios.slo import Slo

TYPICAL = (0.45, 0.55)
SLOW_FROM = 0.985
FEWEST_SLOW = 7
FEWEST = 4 * FEWEST_SLOW
SLOW: tuple[float, ...] = (90.0, 98.5, 99.0, 99.9)  # the fields of SlowBands
_FAR = 1.5  # times a percentile, or a part of it: no mean of requests around it stands for it
_TELLING = 0.05  # a stage with less of the difference is not named
_SPREAD: tuple[float, ...] = (0, 25, 50, 75, 90, 95, 99, 99.9, 100)
_LENGTHS = (1 / 160, 1 / 80, 1 / 40, 1 / 20)  # of a stretch, as parts of all requests
_LEAST, _FEWEST_IN_BURST = 1 / 3, 5  # of the slow requests: fewer are no burst worth telling
_MOSTLY = 0.9  # of a burst's time
_MOST_OF_IT = 0.5  # of the time that a burst's requests waited longer


def stages_in(ledgers: pd.DataFrame) -> list[str]:
    """Names of the measured stages, with the remainder last."""
    return [
        *(s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()),
        UNEXPLAINED,
    ]


def stage_parts(ledgers: pd.DataFrame, names: Sequence[str], rows: Ints | slice = slice(None)) -> Floats:
    """The times of some stages in ns, of some rows: shape (rows, stages).

    A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    """
    return np.stack(list(_stage_times(ledgers, names, rows)), axis=1)


def _stage_times(ledgers: pd.DataFrame, names: Sequence[str], rows: Ints | slice = slice(None)) -> Iterator[Floats]:
    for name in names:
        times = ledgers[column(name)].array[rows].to_numpy(np.float64, na_value=np.nan)
        yield np.nan_to_num(times) if np.isnan(times).any() else times


def typical(ranked: Ranked) -> Bools:
    """Which are in the typical band."""
    return ranked.between(*_typical_ranks(len(ranked.values)))


def _typical_ranks(count: int) -> tuple[int, int]:
    return int(TYPICAL[0] * count), math.ceil(TYPICAL[1] * count)


def slow_count(count: int) -> int:
    """How many rows are the slow band: those from p98.5, and at least seven."""
    return max(FEWEST_SLOW, count - int(SLOW_FROM * count))


def describe_bands(ledgers: Mapping[str, pd.DataFrame]) -> dict[str, Bands]:
    """Per metric (ttft, e2e, itl): bands in ms by stage. ``ledgers``: rows with ``total_ns`` and a column a stage.

    A metric with fewer than 28 rows is left out; a slow band is None where fewer than seven requests lie above its
    percentile.
    """
    return {metric: _bands(rows) for metric, rows in ledgers.items() if len(rows) >= FEWEST}


def _bands(rows: pd.DataFrame) -> Bands:
    names, n = stages_in(rows), len(rows)
    slow_ranks = {percentile: math.floor(percentile * n / 100) for percentile in SLOW} | {98.5: n - slow_count(n)}
    usual = _typical_ranks(n)
    spread_ranks = [round(percentile * n / 100) for percentile in _SPREAD]
    # Between neighboring cuts every band has all rows or none, so that each row is added up once.
    cuts = sorted({0, n, *usual, *slow_ranks.values(), *spread_ranks})
    ranked, part = Ranked(rows["total_ns"].to_numpy(np.float64)), np.zeros(n, np.int64)
    for cut in cuts[1:-1]:
        part += ~ranked.below(cut)
    del ranked
    sums = np.stack([np.bincount(part, times, len(cuts) - 1) for times in _stage_times(rows, names)])

    def band(low: int, high: int = n) -> Band:
        means_ms = sums[:, cuts.index(low) : cuts.index(high)].sum(axis=1) / (high - low) / 1e6
        return _band(names, high - low, means_ms)

    between = zip(itertools.pairwise(spread_ranks), itertools.pairwise(_SPREAD), strict=True)
    return Bands(
        count=n,
        typical=band(*usual),
        slow=SlowBands(
            **{percentile_key(p): band(rank) if n - rank >= FEWEST_SLOW else None for p, rank in slow_ranks.items()}
        ),
        spread=tuple(
            SpreadBand(**dict(band(*ranks)), from_percentile=low, to_percentile=high)
            for ranks, (low, high) in between
            if ranks[1] > ranks[0]
        ),
    )


def _band(names: Sequence[str], count: int, means_ms: Floats) -> Band:
    stages_ms = dict(zip(names, means_ms.tolist(), strict=True))
    return Band(count=count, total_ms=float(means_ms.sum()), stages_ms=stages_ms)


def anatomies_of(ledgers: Mapping[str, pd.DataFrame], slos: Sequence[Slo] = ()) -> dict[str, Anatomy]:
    """By metric, of those that have one. ``ledgers`` as from ``requests.figures.ledgers_by_metric``.

    ``slos``: the first of a metric names the percentile whose requests are looked at, p99 without one.
    """
    asked = {slo.metric: slo.percentile for slo in reversed(slos) if slo.percentile is not None}
    anatomies = {metric: anatomy(rows, asked.get(metric, 99.0)) for metric, rows in ledgers.items()}
    return {metric: each for metric, each in anatomies.items() if each is not None}


def describe_tail(anatomies: Mapping[str, Anatomy], answers: Sequence[SloAnswer]) -> Tail:
    """Every metric's anatomy; in front the one that matters most: a failed SLO's, else the first SLO's, else TTFT."""
    failed = [explained_by(answer.metric) for answer in answers if answer.status == FAIL]
    asked = [explained_by(answer.metric) for answer in answers]
    first = next((metric for metric in (*failed, *asked, *anatomies) if metric in anatomies), None)
    front = anatomies[first] if first is not None else None
    return Tail(
        metric=first,
        stage=front.stage if front else None,
        owner=front.owner if front else None,
        share=front.share if front else None,
        share_ci=front.share_ci if front else None,
        ttft=anatomies.get("ttft"),
        e2e=anatomies.get("e2e"),
        itl=anatomies.get("itl"),
    )


def anatomy(ledgers: pd.DataFrame, percentile: float = 99.0) -> Anatomy | None:
    """Compare the slow with the typical rows of a ledger, and look at those around a percentile.

    ``ledgers``: rows of one event in the order of time, or token gaps with their ``end_ns``, with ``total_ns``,
    ``unexplained_ns`` and a column a stage. None when there are fewer than 28 rows, too few for two bands, or when the
    slow ones are not slower. The remainder is the stage ``unexplained``; unmeasured stages are left out, their time is
    in it. ``share_ci`` is from whole stretches of the run drawn again (stats.bootstrap), without ends where
    the slow rows lie in too few stretches to tell. Owners likewise: one is named where its interval lies above the next
    one's.
    """
    n = len(ledgers)
    if n < FEWEST:
        return None
    names, total_ns = stages_in(ledgers), ledgers["total_ns"].to_numpy(np.float64)
    in_time = np.argsort(ledgers["end_ns"].to_numpy(), kind="stable") if "end_ns" in ledgers else np.arange(n)
    total_ns = total_ns[in_time]  # with the gaps of one step side by side
    stretch = stretches(total_ns)
    ranked = Ranked(total_ns)
    members = (typical(ranked), ~ranked.below(n - slow_count(n)), around(ranked, percentile))
    bands = [stage_parts(ledgers, names, in_time[member]) for member in members]
    more_ns = bands[1].mean(axis=0) - bands[0].mean(axis=0)
    whole_ns = float(more_ns.sum())
    if whole_ns <= 0:
        return None
    shares: list[float] = (more_ns / whole_ns).tolist()
    stages = tuple(
        RankedStage(stage=names[i], owner=owner_of(names[i]), share=shares[i], ms=shares[i] * whole_ns / 1e6)
        for i in np.argsort(np.negative(shares), kind="stable")
    )
    share_ci, owners = _by_owner(names, stages, whole_ns, bands, members, stretch)
    by_wait = sorted(owners, key=lambda part: -part.at_ms)
    usual, slow, at = (_band(names, len(each), each.mean(axis=0) / 1e6) for each in bands)
    exact_ns, at_ns = float(np.quantile(total_ns, percentile / 100, method="inverted_cdf")), total_ns[members[2]]
    is_near = exact_ns / _FAR <= at_ns.mean() <= exact_ns * _FAR
    return Anatomy(
        count=n,
        typical=usual,
        slow=slow,
        difference_ms=whole_ns / 1e6,
        ranked=stages,
        stage=stages[0].stage,
        owner=stages[0].owner,
        share=max(shares),
        share_ci=share_ci,
        percentile=percentile,
        at=at,
        owners=tuple(owners),
        leading=_leading([(part.owner, part.share_ci) for part in owners]),
        payer=_leading([(part.owner, part.at_share_ci) for part in by_wait]),
        at_range_ms=None if is_near else (float(at_ns.min()) / 1e6, float(at_ns.max()) / 1e6),
    )


def _by_owner(
    names: Sequence[str], stages: Sequence[RankedStage], whole_ns: float, bands: Sequence[Floats],
    members: Sequence[Bools], stretch: NDArray[np.int32],
) -> tuple[Ends, list[OwnerPart]]:  # fmt: skip
    """The interval of the first stage's share, and every owner's part, the largest of the difference first.

    ``bands``: the times by stage of the ``members`` that are typical, slow, and at the percentile. ``whole_ns``: the
    difference, by which ``stages`` are ranked. ``stretch``: each row's.
    """
    owners = list(dict.fromkeys(each.owner for each in stages))
    of_owner = np.array([[owner_of(name) == owner for owner in owners] for name in names], dtype=np.float64)
    first, means_ms, drawn = names.index(stages[0].stage), [], []
    for parts, member in zip(bands, members, strict=True):
        # A column each: the first stage, every owner, all of it.
        times = np.concatenate([parts[:, [first]], parts @ of_owner, parts.sum(axis=1, keepdims=True)], axis=1)
        means_ms.append(times.mean(axis=0) / 1e6)
        drawn.append(drawn_means(times, stretch, member))
    usual_drawn, slow_drawn, at_drawn = drawn
    more_drawn = slow_drawn - usual_drawn

    def ends(number: int, draws: Floats, share: float) -> Ends:
        return share_with_draws(share, draws[:, [number, -1]]).ends

    found = []
    for number, owner in enumerate(owners, 1):
        usual_ms, slow_ms, at_ms = (float(means[number]) for means in means_ms)
        share, at_share = (slow_ms - usual_ms) * 1e6 / whole_ns, at_ms / float(means_ms[2][-1])
        mine = [each for each in stages if each.owner == owner]
        found.append(
            OwnerPart(
                owner=owner,
                typical_ms=usual_ms,
                slow_ms=slow_ms,
                at_ms=at_ms,
                at_share=at_share,
                at_share_ci=ends(number, at_drawn, at_share),
                ms=slow_ms - usual_ms,
                share=share,
                share_ci=ends(number, more_drawn, share),
                stages=tuple(each.stage for each in mine if 1e6 * (each.ms or 0) > _TELLING * whole_ns),
            )
        )
    return ends(0, more_drawn, stages[0].share or 0.0), sorted(found, key=lambda part: -part.ms)


def around(ranked: Ranked, percentile: float) -> Bools:
    """Which are at a percentile: so many beyond it as half of those that lie above, as many below; at least seven."""
    n = len(ranked.values)
    reach = max(n * min(1 - percentile / 100, TYPICAL[1] - TYPICAL[0]) / 2, FEWEST_SLOW / 2)
    middle = min(n * percentile / 100, n - reach)
    return ranked.between(math.floor(middle - reach), math.floor(middle + reach) + 1)


def _leading(ranked: Sequence[tuple[str, Ends]]) -> str | None:
    """The first one, where its interval lies above the next one's: nobody is named for a coin's toss."""
    (first, (low, _)), *others = ranked
    if first == UNEXPLAINED_OWNER or low is None or low <= 0:
        return None
    highs = [high for _, (_, high) in others]
    return first if all(high is not None and high < low for high in highs) else None


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
    if len(at) < _FEWEST_IN_BURST:
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
        if len(within) >= max(_FEWEST_IN_BURST, _LEAST * len(at)) and chance <= TAIL:
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
