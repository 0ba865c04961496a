"""What slow requests wait for that typical ones do not: stages as means over the real requests of a band.

Bands are cut by rank of what a request waited in all: *typical* (p45 to p55), *slow* (p98.5 and up, and at least
seven), slow ones from other percentiles up, and the whole range. A stage's bar is its mean over the band, so stages and
remainder add up to the band's mean wait, and the differences of the stages add up to the difference of the waits.
Percentiles of single stages never do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ints, Ranked
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.latency import (
    Anatomy,
    Band,
    Bands,
    OwnerPart,
    RankedStage,
    SlowBands,
    SpreadBand,
    Tail,
)
from gapmeter.analysis.results.run import FAIL, SloAnswer
from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column
from gapmeter.analysis.stats.bootstrap import drawn_means, share_with_draws, stretches
from gapmeter.scenarios.slo import Slo

TYPICAL = (0.45, 0.55)
SLOW_FROM = 0.985
FEWEST_SLOW = 7
FEWEST = 4 * FEWEST_SLOW
SLOW: tuple[float, ...] = (90.0, 98.5, 99.0, 99.9)  # the fields of SlowBands
UNEXPLAINED_OWNER = "nobody yet"
_FAR = 1.5  # times a percentile, or a part of it: no mean of requests around it stands for it
_TELLING = 0.05  # a stage with less of the difference is not named
_SPREAD: tuple[float, ...] = (0, 25, 50, 75, 90, 95, 99, 99.9, 100)


def owner_of(stage: str) -> str:
    """The owner's key, as summary.json has it; for people see ``analysis.stages.owner_words``."""
    return BY_NAME[stage].owner if stage in BY_NAME else UNEXPLAINED_OWNER


def stages_in(ledgers: pd.DataFrame) -> list[str]:
    """Names of the measured stages, with the remainder last."""
    return [
        *(s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()),
        UNEXPLAINED,
    ]


def stage_parts(ledgers: pd.DataFrame, names: Sequence[str], rows: Bools | Ints | slice = slice(None)) -> Floats:
    """The times of some stages in ns, of some rows: shape (rows, stages).

    A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    """
    if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
        rows = np.flatnonzero(rows)
    columns = [ledgers[column(name)].array[rows].to_numpy(np.float64, na_value=np.nan) for name in names]
    return np.asarray(np.nan_to_num(np.stack(columns, axis=1)))


def typical(ranked: Ranked) -> Bools:
    """Which are in the typical band."""
    n = len(ranked.values)
    return ranked.between(int(TYPICAL[0] * n), math.ceil(TYPICAL[1] * n))


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
    ranked = Ranked(rows["total_ns"].to_numpy(np.float64))

    def band(member: Bools) -> Band:
        return _band(names, stage_parts(rows, names, member))

    def slow(percentile: float) -> Band | None:
        rank = math.floor(percentile * n / 100)
        return band(~ranked.below(rank)) if n - rank >= FEWEST_SLOW else None

    spread = []
    for low, high in itertools.pairwise(_SPREAD):
        inside = ranked.between(round(low * n / 100), round(high * n / 100))
        if inside.any():
            spread.append(SpreadBand(**dict(band(inside)), from_percentile=low, to_percentile=high))
    return Bands(
        count=n,
        typical=band(typical(ranked)),
        slow=SlowBands(p90=slow(90.0), p985=band(~ranked.below(n - slow_count(n))), p99=slow(99.0), p999=slow(99.9)),
        spread=tuple(spread),
    )


def _band(names: Sequence[str], parts: Floats) -> Band:
    means = parts.mean(axis=0) / 1e6
    return Band(count=len(parts), total_ms=float(means.sum()), stages_ms=dict(zip(names, means.tolist(), strict=True)))


def anatomies_of(ledgers: Mapping[str, pd.DataFrame], slos: Sequence[Slo] = ()) -> dict[str, Anatomy]:
    """By metric, of those that have one. ``ledgers`` as from ``requests.figures.ledgers_by_metric``.

    ``slos``: the first of a metric names the percentile whose requests are looked at, p99 without one.
    """
    asked = {slo.metric: slo.percentile for slo in reversed(slos) if slo.percentile is not None}
    anatomies = {metric: anatomy(rows, asked.get(metric, 99.0)) for metric, rows in ledgers.items()}
    return {metric: each for metric, each in anatomies.items() if each is not None}


def describe_tail(anatomies: Mapping[str, Anatomy], answers: Sequence[SloAnswer]) -> Tail:
    """Every metric's anatomy; in front the one that matters most: a failed SLO's, else the first SLO's, else TTFT."""
    failed = [answer.metric for answer in answers if answer.status == FAIL]
    first = next((m for m in (*failed, *(a.metric for a in answers), *anatomies) if m in anatomies), None)
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
    names, total = stages_in(ledgers), ledgers["total_ns"].to_numpy(np.float64)
    in_time = np.argsort(ledgers["end_ns"].to_numpy(), kind="stable") if "end_ns" in ledgers else np.arange(n)
    total = total[in_time]  # with the gaps of one step side by side
    ranked = Ranked(total)
    exact = float(np.quantile(total, percentile / 100, method="inverted_cdf"))
    bands = (typical(ranked), ~ranked.below(n - slow_count(n)), around(ranked, percentile))
    usual, late, at = (stage_parts(ledgers, names, in_time[member]) for member in bands)
    more = late.mean(axis=0) - usual.mean(axis=0)
    whole = float(more.sum())
    if whole <= 0:
        return None
    shares = more / whole
    ranking = np.argsort(-shares, kind="stable")
    top, stretch = int(ranking[0]), stretches(total)
    stages = tuple(
        RankedStage(stage=names[i], owner=owner_of(names[i]), share=float(shares[i]), ms=float(shares[i]) * whole / 1e6)
        for i in ranking
    )
    owners = list(dict.fromkeys(each.owner for each in stages))
    of_owner = np.array([[owner_of(name) == owner for owner in owners] for name in names], dtype=np.float64)
    columns = [
        np.concatenate([parts[:, [top]], parts @ of_owner, parts.sum(axis=1, keepdims=True)], axis=1)
        for parts in (usual, late, at)
    ]
    means = [each.mean(axis=0) / 1e6 for each in columns]
    blocks = int(stretch[-1]) + 1
    drawn = [drawn_means(each, stretch[member], blocks) for each, member in zip(columns, bands, strict=True)]
    drawn_more = None if drawn[0] is None or drawn[1] is None else drawn[1] - drawn[0]

    def share_ends(column: int, draws: Floats | None, share: float) -> Ends:
        return share_with_draws(share, None if draws is None else draws[:, [column, -1]]).ends

    found = [
        OwnerPart(
            owner=owner,
            typical_ms=float(means[0][i]),
            slow_ms=float(means[1][i]),
            at_ms=float(means[2][i]),
            at_share=(at_share := float(means[2][i] / means[2][-1])),
            at_share_ci=share_ends(i, drawn[2], at_share),
            ms=(ms := float(means[1][i] - means[0][i])),
            share=ms * 1e6 / whole,
            share_ci=share_ends(i, drawn_more, ms * 1e6 / whole),
            stages=tuple(
                each.stage for each in stages if each.owner == owner and 1e6 * (each.ms or 0) > _TELLING * whole
            ),
        )
        for i, owner in enumerate(owners, 1)
    ]
    by_difference = sorted(found, key=lambda part: -part.ms)
    by_wait = sorted(found, key=lambda part: -part.at_ms)
    return Anatomy(
        count=n,
        typical=_band(names, usual),
        slow=_band(names, late),
        difference_ms=whole / 1e6,
        ranked=stages,
        stage=names[top],
        owner=owner_of(names[top]),
        share=float(shares[top]),
        share_ci=share_ends(0, drawn_more, float(shares[top])),
        percentile=percentile,
        at=_band(names, at),
        owners=tuple(by_difference),
        leading=_leading([(part.owner, part.share_ci) for part in by_difference]),
        payer=_leading([(part.owner, part.at_share_ci) for part in by_wait]),
        at_range_ms=None if exact / _FAR <= total[bands[2]].mean() <= exact * _FAR else _range_ms(total[bands[2]]),
    )


def _range_ms(values_ns: Floats) -> tuple[float, float]:
    return float(values_ns.min()) / 1e6, float(values_ns.max()) / 1e6


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
