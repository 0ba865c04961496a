"""Differences between two sides, each of one run or several, with intervals that hold for correlated requests.

A difference is B minus A. Its standard error has two parts. *Within* runs: the stationary block bootstrap of
stats.bootstrap, every run drawn by itself; where both sides issued the same planned requests in an open
loop, a pair of runs is drawn together, request i of one with request i of the other, so that what the plan did to both
cancels out. *Between* runs: where a side has several, the variance of the runs' own estimates about their side's mean,
s^2 (1/k_A + 1/k_B); where that is larger than the one within, it is taken instead.

The interval is difference +- t * error with Student's t at the degrees of freedom behind the error that was taken: the
number of blocks less one, and no more than twice the number of independent values beyond the percentile (the spacing
around a quantile is known from those alone); between runs, k_A + k_B - 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.compare.resample import Figures, Pair, align
from gapmeter.analysis.compare.sides import STAGE_NAMES, Run
from gapmeter.analysis.requests.metrics import METRICS
from gapmeter.analysis.stats.difference import Difference
from gapmeter.analysis.stats.estimate import TAIL, Estimate, Floats
from gapmeter.analysis.stats.series import Series, pooled

RESAMPLES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Everything that was compared.

    ``metrics[metric][percentile]``; ``stages[event][stage]``: of the means, which add up to ``totals[event]``;
    ``shares[event][stage]``: a stage's share of that, None where the total may be 0;
    ``stage_percentiles[event][stage][percentile]``. ``unmeasured[event]``: stages that not every run measured; their
    time is in ``unexplained``. ``counts`` are the requests of each side, ``block`` the mean length of the blocks.
    """

    paired: bool
    why_not_paired: str
    counts: tuple[int, int]
    runs: tuple[int, int]
    block: float
    resamples: int
    metrics: Mapping[str, Mapping[float, Difference]]
    stages: Mapping[str, Mapping[str, Difference]]
    totals: Mapping[str, Difference]
    shares: Mapping[str, Mapping[str, Estimate | None]]
    stage_percentiles: Mapping[str, Mapping[str, Mapping[float, Difference]]]
    unmeasured: Mapping[str, tuple[str, ...]]


def compare_sides(
    side_a: Sequence[Run], side_b: Sequence[Run], percentiles: Mapping[str, Sequence[float]],
    stage_percentiles: Sequence[float] = (), *, resamples: int = RESAMPLES,
) -> Differences:  # fmt: skip
    """Compare two sides. ``percentiles``: of each metric, which. Deterministic; swapped sides give swapped signs."""
    a, b, why = align(side_a, side_b)
    pair = Pair(a, b, paired=not why, percentiles=percentiles, stage_percentiles=stage_percentiles)
    judge = _Judge(pair, resamples)
    names = {
        event: [n for n, known in zip(STAGE_NAMES, pair.known[event], strict=True) if known] for event in pair.known
    }
    totals = {event: judge.mean(event, len(STAGE_NAMES)) for event in names}
    stages = {event: {n: judge.mean(event, STAGE_NAMES.index(n)) for n in own} for event, own in names.items()}
    return Differences(
        paired=not why,
        why_not_paired=why,
        counts=(sum(run.count for run in a), sum(run.count for run in b)),
        runs=(len(a), len(b)),
        block=pair.block,
        resamples=resamples,
        metrics={m: {p: judge.percentile(m, i) for i, p in enumerate(percentiles[m])} for m in METRICS},
        stages=stages,
        totals=totals,
        shares={
            event: {n: judge.share(event, n, d, totals[event]) for n, d in own.items()} for event, own in stages.items()
        },
        stage_percentiles=judge.stages() if stage_percentiles else {},
        unmeasured={event: tuple(n for n in STAGE_NAMES if n not in own) for event, own in names.items()},
    )


class _Judge:
    """Turns resamples into intervals."""

    def __init__(self, pair: Pair, resamples: int) -> None:
        self._pair = pair
        self._now, self._drawn = pair.as_it_is(), pair.drawn(resamples)
        self._alone: list[list[Figures]] = pair.of_each_run() if max(map(len, pair.sides)) > 1 else [[], []]
        blocks = [sum(run.count for run in side) / pair.block for side in pair.sides]
        self._blocks = min(blocks) - 1 if pair.paired else sum(blocks) - 2

    def percentile(self, metric: str, part: int) -> Difference:
        """One percentile of one metric; unsupported where either side's sample does not reach it."""
        percentile = self._pair.percentiles[metric][part]
        series = [pooled(side, "values on a side") for side in self._pair.series[metric]]
        short = [found for found in (side.percentile(percentile) for side in series) if not found.supported]
        if short:
            return Difference(*self._ends(metric, part), why=min(short, key=lambda found: found.n_eff or 0.0).why)
        return self._difference(metric, part, _beyond(series, percentile))

    def mean(self, event: str, part: int) -> Difference:
        """A stage's mean, or the whole wait's."""
        return self._difference(event, part, math.inf)

    def stages(self) -> dict[str, dict[str, dict[float, Difference]]]:
        """The percentiles of every stage that is not 0 throughout; of few independent values, as of metrics."""
        metric = {"first_token": "ttft", "last_token": "e2e"}
        found: dict[str, dict[str, dict[float, Difference]]] = {}
        for event, stages in self._pair.shown.items():
            series = [pooled(side) for side in self._pair.series[metric[event]]]
            found[event] = {}
            for stage in stages:
                found[event][STAGE_NAMES[stage]] = {
                    p: self._difference(f"{event}.{stage}", i, _beyond(series, p))
                    for i, p in enumerate(self._pair.stage_percentiles)
                    if all(side.percentile(p).supported for side in series)
                }
        return found

    def share(self, event: str, stage: str, own: Difference, total: Difference) -> Estimate | None:
        """A stage's share of the whole difference; None where that may be 0."""
        if not total.value or not total.estimate.excludes(0.0):
            return None
        diff = self._drawn[f"{event}/1"] - self._drawn[f"{event}/0"]
        whole = diff[:, len(STAGE_NAMES)]
        same = whole * total.value > 0
        low, high = np.quantile(diff[same, STAGE_NAMES.index(stage)] / whole[same], [TAIL, 1 - TAIL])
        return Estimate((own.value or 0.0) / total.value, float(low), float(high))

    def _ends(self, name: str, part: int) -> tuple[float | None, float | None]:
        a, b = (float(self._now[f"{name}/{side}"][0, part]) for side in (0, 1))
        return (None if math.isnan(a) else a), (None if math.isnan(b) else b)

    def _difference(self, name: str, part: int, most_df: float) -> Difference:
        a, b = self._ends(name, part)
        drawn: Floats = self._drawn[f"{name}/1"][:, part] - self._drawn[f"{name}/0"][:, part]
        if a is None or b is None or np.isnan(drawn).any():
            return Difference(a, b, why="no values on a side")
        error, df = float(drawn.std(ddof=1)) / self._pair.too_small, max(1.0, min(self._blocks, most_df))
        between, runs = self._between(lambda figures, side: float(figures[f"{name}/{side}"][0, part]))
        return Difference(a, b, between, runs) if between > error else Difference(a, b, error, df)

    def _between(self, value: Callable[[Figures, int], float]) -> tuple[float, float]:
        """Standard error of the difference as the runs of each side show it, and its degrees of freedom."""
        sides = [[value(figures, number) for figures in side] for number, side in enumerate(self._alone)]
        sizes = [len(side) for side in self._pair.sides]
        df = sum(sizes) - 2
        if df < 1 or any(math.isnan(v) for side in sides for v in side):
            return 0.0, 1.0
        squares = sum(float(((np.array(side) - np.mean(side)) ** 2).sum()) for side in sides)
        return math.sqrt(squares / df * sum(1 / size for size in sizes)), float(df)


def _beyond(series: Sequence[Series], percentile: float) -> float:
    """Twice the number of independent values beyond a percentile, on the side that has fewer."""
    return 2 * min(s.n_eff(percentile) for s in series) * min(percentile, 100 - percentile) / 100
