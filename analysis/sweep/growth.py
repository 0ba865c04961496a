"""What grows from one point to the next: the stage that accounts for it, and its owner.

For p95 and above the slow bands (``ledger.tail``) of both points are compared, else all their requests: means over
real requests, so the stages' growths add up to the bands' growth. A percentile's own growth stands beside it; where a
sample does not support it, that of the mean, whose interval knows that neighbors are alike (``stats.series``). The
interval of a stage's share draws stretches of consecutive requests (``stats.bootstrap``), not requests, for the same
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ranked
from gapmeter.analysis.ledger.tail import FEWEST_SLOW, slow_count, stage_parts, stages_in
from gapmeter.analysis.results.sweep import CurveKnee, Growth
from gapmeter.analysis.stages import UNEXPLAINED, column, owner_of
from gapmeter.analysis.stats.bootstrap import drawn_means, share_with_draws, stretches
from gapmeter.analysis.stats.estimate import Estimate
from gapmeter.analysis.sweep.curves import GROWS_WITH, Axis, CurvePoint

SLOW_LEVEL = 95.0  # from this percentile on the slow requests stand for it


def means_ms(ledgers: pd.DataFrame) -> dict[str, float]:
    """Mean time by stage, the residual last, in the order of the timeline; they add up to the mean total."""
    if not len(ledgers):
        return {}
    names = stages_in(ledgers)
    return dict(zip(names, (stage_parts(ledgers, names).mean(axis=0) / 1e6).tolist(), strict=True))


def slow_band(ledgers: pd.DataFrame, percentile: float | None) -> pd.DataFrame:
    """The rows whose growth stands for that of a percentile (None: of the mean), in their own order."""
    return ledgers[_member(ledgers, percentile)]


def _member(ledgers: pd.DataFrame, percentile: float | None) -> Bools:
    member = np.ones(len(ledgers), dtype=np.bool_)
    if percentile is not None and percentile >= SLOW_LEVEL and len(ledgers) >= 4 * FEWEST_SLOW:
        member = ~Ranked(ledgers["total_ns"].to_numpy(np.float64)).below(len(ledgers) - slow_count(len(ledgers)))
    return member


def growth_between(
    one: CurvePoint, two: CurvePoint, metric: str, percentile: float | None, series: str, *, at_knee: bool
) -> Growth:
    """From one point to the next; ``percentile``: the figure that is compared, None for the mean.

    ``share_ci`` is a 95 % interval of the largest stage's share, None where too few stretches of requests are in a band
    to tell.
    """
    level_before, level_after = one.figures[metric], two.figures[metric]
    grows = level_after.minus(level_before) if level_before and level_after else None
    ledgers = [seen.frames.ledgers[metric] for seen in (one, two)]
    before, after = (means_ms(slow_band(rows, percentile)) for rows in ledgers)
    gain = {stage: ms - before[stage] for stage, ms in after.items() if stage in before}
    alone = sorted(before.keys() ^ after.keys()) if gain else []  # what one did not measure joins both's remainders
    if alone:
        gain[UNEXPLAINED] += sum(after.get(each, 0.0) - before.get(each, 0.0) for each in alone)
    whole = sum(gain.values())
    stage = max(gain, key=lambda name: gain[name] / whole) if gain and whole else None
    share = None
    if stage and not (alone and stage == UNEXPLAINED):
        share = _share(gain[stage] / whole, ledgers, percentile, stage)
    return Growth(
        series=series,
        from_point=one.point.index,
        to_point=two.point.index,
        at_knee=at_knee,
        from_=one.point.label,
        to=two.point.label,
        metric=metric,
        percentile=percentile,
        grows_ms=grows.value if grows else None,
        grows_ci_ms=grows.known[1:] if grows else None,
        band_grows_ms=whole if gain else None,
        stages_ms=gain,
        stage=stage,
        owner=owner_of(stage) if stage else None,
        share=share.value if share else None,
        share_ci=share.known[1:] if share and share.supported else None,
    )


def _share(value: float, ledgers: Sequence[pd.DataFrame], percentile: float | None, stage: str) -> Estimate:
    """A stage's share of the growth: stretches of both points drawn again, with fixed seeds."""
    drawn = list[Floats]()
    for seed, rows in enumerate(ledgers):
        whole = rows["total_ns"].to_numpy(np.float64)
        known = column(stage) in rows
        of_stage = rows[column(stage)].to_numpy(np.float64, na_value=0.0) if known else np.zeros(len(rows))
        values = np.nan_to_num(np.stack([of_stage, whole], axis=1))
        member = _member(rows, percentile)
        drawn.append(drawn_means(values[member], stretches(whole), member, seed))
    more = drawn[1] - drawn[0]
    return share_with_draws(value, more, float(np.nansum(more[:, 1])))


def growths_of(
    axis: Axis, curve_points: Sequence[CurvePoint | None], knees: Sequence[CurveKnee], main: str,
    levels: Mapping[str, float | None],
) -> Iterator[Growth]:  # fmt: skip
    """From each point to the next of its curve: what grows, of the sweep's main metric and of a token gap.

    Points without numbers to order them (precisions, engines) are held side by side as the scenario lists them.
    """
    at_knee = {knee.series: knee.point for knee in knees}
    for name, members in axis.series if axis.key else (("", tuple(range(len(curve_points)))),):
        shown = [each for at in members if (each := curve_points[at])]
        for one, two in pairwise(shown):
            turned = two if axis.key == GROWS_WITH else one  # what a batch brought up to there, a load from there on
            for metric in dict.fromkeys((main, "itl")):
                yield growth_between(
                    one, two, metric, levels[metric], name, at_knee=turned.point.index == at_knee.get(name)
                )
