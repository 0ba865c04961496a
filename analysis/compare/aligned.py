"""Two sides of runs, drawn together where they issued the same plan: what they measured, and what each draw gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from gapmeter.analysis.arrays import Bools, Floats
from gapmeter.analysis.compare.sides import PER_REQUEST, RunColumns
from gapmeter.analysis.numbers import counted
from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.stages import STAGE_NAMES
from gapmeter.analysis.stats import bootstrap
from gapmeter.analysis.stats.bootstrap import Resampled, pooled_harrell_davis
from gapmeter.analysis.stats.series import pooled
from gapmeter.scenarios.slo import LATENCIES

EVENTS = tuple(LEDGER_OF.values())
_FEWEST = 16  # requests, to be paired, or to tell how long blocks should be
_PAIRED = 0.5  # of either side's requests: what pairs leave out, they say nothing of
_MOST_VALUES = 4_000_000  # drawn at a time
_TAILS = (0.9, 0.99)
_LONGER = 2.0  # a block length that is best for the variance leaves it too small; an interval suffers more from that
_MOST_BLOCK = 0.25  # of a run
_RESIDUAL = len(STAGE_NAMES) - 1

TimesDrawn = NDArray[np.int32]  # how often each request of a side is in each resample: shape (requests, resamples)
Figures = dict[str, Floats]  # by name: shape (resamples, parts)
_Ranked = tuple[Resampled, Sequence[float]]  # values, and which of their percentiles
MEAN = "mean"  # of every metric


def align(side_a: Sequence[RunColumns], side_b: Sequence[RunColumns]) -> tuple[list[RunColumns], list[RunColumns], str]:
    """Both sides cut to the requests that both measured, where those may be paired; else as they are, and why not."""
    a, b = list(side_a), list(side_b)
    if len(a) != len(b):
        return a, b, f"{counted(len(a), 'run')} on one side, {len(b)} on the other"
    if not all(run.open_loop for run in (*a, *b)):
        return a, b, "in a closed loop, when a request is due depends on the answers before it"
    cut_a, cut_b = [], []
    for one, other in zip(a, b, strict=True):
        _, rows_a, rows_b = np.intersect1d(one.planned[:, 0], other.planned[:, 0], return_indices=True)
        order = np.argsort(rows_a, kind="stable")
        cut_a.append(one.rows(rows_a[order].astype(np.int64)))
        cut_b.append(other.rows(rows_b[order].astype(np.int64)))
        if len(order) < _FEWEST or not np.array_equal(cut_a[-1].planned, cut_b[-1].planned):
            return a, b, "the two sides did not issue the same planned requests at the same times"
        if len(order) < _PAIRED * max(one.count, other.count):
            return a, b, "most of the longer side's requests have none to be paired with"
    return cut_a, cut_b, ""


class AlignedSides:
    """Two aligned sides. ``percentiles``: of each metric, which; ``stage_percentiles``: of every stage.

    ``series[metric][side]`` are a side's values; ``block`` the mean length of the blocks that are drawn: twice the
    longest that any of the runs' metrics asks for. ``too_small`` is what the spread of resamples is short by, since a
    block varies about the mean of the run that it is a part of: with geometric lengths L, 1 - E[L^2] / (E[L] n).
    """

    def __init__(
        self, a: Sequence[RunColumns], b: Sequence[RunColumns], *, paired: bool,
        percentiles: Mapping[str, Sequence[float]], stage_percentiles: Sequence[float],
    ) -> None:  # fmt: skip
        self.sides, self.paired = (list(a), list(b)), paired
        self.percentiles, self.stage_percentiles = percentiles, tuple(stage_percentiles)
        runs = [*a, *b]
        fewest = min(run.count for run in runs)
        self.block = max(1.0, min(_LONGER * max(_block(run) for run in runs), _MOST_BLOCK * fewest))
        self.too_small = math.sqrt(1 - (2 * self.block - 1) / fewest) if fewest else 1.0
        self.series = {
            metric: [pooled([run.series(metric) for run in side], "values on a side") for side in self.sides]
            for metric in LATENCIES
        }
        self._gap_values, self._gap_tables = _gap_tables(self.sides)
        measured = {event: [(~np.isnan(run.ledgers[event])).any(axis=0) for run in runs] for event in EVENTS}
        self.known = {e: np.logical_and.reduce(m) for e, m in measured.items() if all(each.any() for each in m)}
        tables = {
            event: [_table(np.concatenate([run.ledgers[event] for run in side]), known) for side in self.sides]
            for event, known in self.known.items()
        }
        of_metrics = [
            _Means(*(np.concatenate(parts) for parts in zip(*(run.sums() for run in side), strict=True)))
            for side in self.sides
        ]
        self._means = {MEAN: of_metrics, **tables}
        # Stages that are not 0 throughout.
        self.shown = {
            event: [i for i in range(len(STAGE_NAMES)) if any(table.amounts[:, i].any() for table in own)]
            for event, own in tables.items()
        }
        self._ranked = [self._ranked_of(number, tables) for number in range(len(self.sides))]

    def _reached(self, metric: str, number: int) -> list[tuple[float, Sequence[float]]]:
        """The percentiles of one side that are no request's that failed, with the longest success; then those that are.

        These go with infinity: values are cut there.
        """
        series, percentiles = self.series[metric][number], self.percentiles[metric]
        first = next((i for i, p in enumerate(percentiles) if series.percentile(p).value == math.inf), len(percentiles))
        longest = float(np.max(series.values, where=np.isfinite(series.values), initial=0.0)) or math.inf
        parts = [(longest, percentiles[:first]), (math.inf, percentiles[first:])]
        return [part for part in parts if part[1]] or parts[:1]

    def _ranked_of(self, number: int, tables: Mapping[str, Sequence[_Means]]) -> dict[str, list[_Ranked]]:
        """What one side has percentiles of, and which."""
        side = self.sides[number]
        ranked: dict[str, list[_Ranked]] = {}
        for metric in PER_REQUEST:
            values = np.concatenate([run.at_least_ns(metric) for run in side])
            ranked[metric] = [(Resampled(np.minimum(values, most)), own) for most, own in self._reached(metric, number)]
        for event, own in tables.items():
            there = own[number].counts[:, 0] > 0
            for stage in self.shown[event] if self.stage_percentiles else ():
                values = np.where(there, own[number].amounts[:, stage], np.nan)  # NaN without a ledger
                ranked[f"{event}.{stage}"] = [(Resampled(values), self.stage_percentiles)]
        return ranked

    def errors_in_mean(self, name: str, part: int) -> list[Floats]:
        """For each side, what its runs' requests add to the error of a mean, in due order; their own mean is 0."""
        return [means.errors(part) for means in self._means[name]]

    def as_it_is(self) -> list[Figures]:
        """Each side's figures of what was measured, one row each."""
        counts = (sum(run.count for run in side) for side in self.sides)
        return [self._of_side(number, np.ones((count, 1), np.int32)) for number, count in enumerate(counts)]

    def of_each_run(self) -> list[list[Figures]]:
        """The figures of every run by itself, for each side."""
        return [
            [self._of_side(number, np.repeat(alone, counts)[:, None]) for alone in np.eye(len(counts), dtype=np.int32)]
            for number, counts in enumerate([run.count for run in side] for side in self.sides)
        ]

    def drawn(self, resamples: int) -> list[Figures]:
        """Each side's figures of so many resamples, some at a time."""
        # A source of randomness a run, from what it measured; for pairs, one a pair, whichever side comes first.
        seeds = [[run.digest() for run in side] for side in self.sides]
        if self.paired:
            seeds = [[min(pair) + max(pair) for pair in zip(*seeds, strict=True)]]
        sources = [[np.random.default_rng(int.from_bytes(seed, "little")) for seed in own] for own in seeds]
        values = sum(run.count for side in self.sides for run in side)
        at_once = max(1, min(resamples, _MOST_VALUES // max(values, 1)))
        parts = []
        for first in range(0, resamples, at_once):
            some = min(at_once, resamples - first)
            drawn = [
                np.concatenate([
                    bootstrap.counts_of(bootstrap.draw(run.count, self.block, some, rng))
                    for run, rng in zip(side, own, strict=True)
                ])
                for side, own in zip(self.sides, sources, strict=False)
            ]  # fmt: skip
            parts.append([self._of_side(*each) for each in enumerate(drawn * 2 if self.paired else drawn)])
        return [
            {name: np.concatenate([part[name] for part in own]) for name in own[0]} for own in zip(*parts, strict=True)
        ]

    def _of_side(self, number: int, counts: TimesDrawn) -> Figures:
        """One side's figures of each resample."""
        out: Figures = {
            name: np.hstack([ranked.harrell_davis(counts, own) for ranked, own in parts])
            for name, parts in self._ranked[number].items()
        }
        gaps = np.asarray(self._gap_tables[number] @ counts).T
        out["itl"] = np.hstack([
            pooled_harrell_davis(np.minimum(self._gap_values, most), gaps, own)
            for most, own in self._reached("itl", number)
        ])  # fmt: skip
        times = counts.astype(np.float64)
        return out | {name: own[number].drawn(times) for name, own in self._means.items()}


class _Means:
    """Means of one side, each a ratio of two sums: what its requests add to the amounts, and to what divides these.

    Shapes (requests, means), and of ``counts`` the same, or (requests, 1) where one number divides them all.
    """

    def __init__(self, amounts: Floats, counts: Floats) -> None:
        self.amounts, self.counts = amounts, counts
        self._used = np.flatnonzero(amounts.any(axis=0))  # of a ledger's stages a quarter
        self._added = amounts[:, self._used]

    def errors(self, part: int) -> Floats:
        """What each request adds to the error of one of the means."""
        amount, count = self.amounts[:, part], self.counts[:, min(part, self.counts.shape[1] - 1)]
        return np.asarray((amount - amount.sum() / count.sum() * count) / count.mean())

    def drawn(self, times: Floats) -> Floats:
        """The means of each resample, shape (resamples, means); NaN for one of nothing."""
        sums = np.zeros((times.shape[1], self.amounts.shape[1]))
        # Not times.T @ added, for whose many small products a BLAS wakes all its threads, which spin.
        sums[:, self._used] = np.einsum("ir,ik->rk", times, self._added)
        counts = np.einsum("ir,ik->rk", times, self.counts)
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        return np.asarray(means, dtype=np.float64)


def _block(run: RunColumns) -> float:
    """The longest block that the run's metrics, or their being in the tail, ask for."""
    longest = 1.0
    for metric in PER_REQUEST:
        values = run.values[metric][~np.isnan(run.values[metric])]
        if len(values) < _FEWEST:
            continue
        ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)
        series = [ranks, *((ranks >= share * len(ranks)).astype(np.float64) for share in _TAILS)]
        longest = max(longest, *(bootstrap.block_length(each) for each in series))
    return longest


def _table(ledger: Floats, known: Bools) -> _Means:
    """Of every stage and of the whole wait, where there is a ledger. What one side lacks joins the remainder."""
    there = ~np.isnan(ledger[:, _RESIDUAL])
    table = np.where(there[:, None], np.nan_to_num(ledger), 0.0)
    lacking = [i for i in range(_RESIDUAL) if not known[i]]
    table[:, _RESIDUAL] += table[:, lacking].sum(axis=1)
    table[:, lacking] = 0.0
    return _Means(np.hstack([table, table.sum(axis=1, keepdims=True)]), there[:, None].astype(np.float64))


def _gap_tables(sides: Sequence[Sequence[RunColumns]]) -> tuple[Floats, list[Any]]:
    """The distinct gaps of both sides in order, to four significant digits; by side how many of each a request has.

    Shapes: (k,), and of sparse matrices (k, requests).
    """
    runs = [run for side in sides for run in side]
    firsts = np.cumsum([0, *(run.count for run in runs)])
    gaps = np.concatenate([run.gaps_at_least_ns() for run in runs])
    owner = np.concatenate([run.gap_owner + first for run, first in zip(runs, firsts[:-1], strict=True)])
    size = 10.0 ** (np.floor(np.log10(np.maximum(gaps, 1.0))) - 3)
    values, row = np.unique(np.round(gaps / size) * size, return_inverse=True)
    ones, shape = np.ones(len(gaps), np.int32), (max(len(values), 1), int(firsts[-1]))
    table = sparse.csr_array((ones, (row, owner)), shape=shape)
    between = int(firsts[len(sides[0])])
    return values, [table[:, :between], table[:, between:]]
