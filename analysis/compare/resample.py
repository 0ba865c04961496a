"""Two sides of runs made comparable, and every figure of them computed on any resample of their requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.compare.sides import PER_REQUEST, STAGE_NAMES, Run
from gapmeter.analysis.requests.metrics import METRICS
from gapmeter.analysis.stats import bootstrap
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.harrell_davis import binned, harrell_davis, pooled_harrell_davis

EVENTS: tuple[str, ...] = ("first_token", "last_token")
FEWEST = 16
_MOST_VALUES = 4_000_000  # drawn at a time
_TAILS = (0.9, 0.99)
_LONGER = 2.0  # a block length that is best for the variance leaves it too small; an interval suffers more from that
_MOST_BLOCK = 0.25  # of a run
_RESIDUAL = len(STAGE_NAMES) - 1

Indices = NDArray[np.int32]
Figures = dict[str, Floats]  # by name: shape (resamples, parts)


def align(side_a: Sequence[Run], side_b: Sequence[Run]) -> tuple[list[Run], list[Run], str]:
    """Both sides cut to the requests that both measured, where those may be paired; else as they are, and why not."""
    a, b = list(side_a), list(side_b)
    if len(a) != len(b):
        return a, b, f"{len(a)} runs on one side, {len(b)} on the other"
    if not all(run.open_loop for run in (*a, *b)):
        return a, b, "in a closed loop, when a request is due depends on the answers before it"
    cut_a, cut_b = [], []
    for one, other in zip(a, b, strict=True):
        _, rows_a, rows_b = np.intersect1d(_keys(one), _keys(other), return_indices=True)
        order = np.argsort(rows_a, kind="stable")
        cut_a.append(one.rows(rows_a[order].astype(np.int64)))
        cut_b.append(other.rows(rows_b[order].astype(np.int64)))
        if len(order) < FEWEST or not np.array_equal(cut_a[-1].planned, cut_b[-1].planned):
            return a, b, "the two sides did not issue the same planned requests at the same times"
    return cut_a, cut_b, ""


def _keys(run: Run) -> NDArray[np.int64]:
    """A number for each request of a plan: its index and turn."""
    return np.asarray(run.planned[:, 0] * 4096 + np.maximum(run.planned[:, 1], 0), dtype=np.int64)


class Pair:
    """Two aligned sides. ``percentiles``: of each metric, which; ``stage_percentiles``: of every stage.

    ``series[metric][side]`` are the runs' values; ``block`` the mean length of the blocks that are drawn: twice the
    longest that any of the runs' metrics asks for. ``too_small`` is what the spread of resamples is short by, since a
    block varies about the mean of the run that it is a part of: with geometric lengths L, 1 - E[L^2] / (E[L] n).
    """

    def __init__(
        self, a: Sequence[Run], b: Sequence[Run], *, paired: bool, percentiles: Mapping[str, Sequence[float]],
        stage_percentiles: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.sides, self.paired = (list(a), list(b)), paired
        self.percentiles, self.stage_percentiles = percentiles, tuple(stage_percentiles)
        runs = [*a, *b]
        fewest = min(run.count for run in runs)
        self.block = max(1.0, min(_LONGER * max(_block(run) for run in runs), _MOST_BLOCK * fewest))
        self.too_small = math.sqrt(1 - (2 * self.block - 1) / fewest) if fewest else 1.0
        self.series = {metric: [[run.series(metric) for run in side] for side in self.sides] for metric in METRICS}
        self._gap_values, self._gap_tables = _gap_tables(self.sides)
        measured = {event: [_measured(run, event) for run in runs] for event in EVENTS}
        self.known = {e: np.logical_and.reduce(m) for e, m in measured.items() if all(each.any() for each in m)}
        self._tables = {
            event: [[_table(run.ledgers[event], known) for run in side] for side in self.sides]
            for event, known in self.known.items()
        }
        self.shown = {event: self._shown(event) for event in self.known}

    def _shown(self, event: str) -> list[int]:
        """Stages that are not 0 throughout."""
        tables = [table for side in self._tables[event] for table in side]
        return [i for i in range(len(STAGE_NAMES)) if any(table[:, i].any() for table in tables)]

    def as_it_is(self) -> Figures:
        """The figures of what was measured, one row each."""
        return self._figures([[np.arange(run.count, dtype=np.int32)[None] for run in side] for side in self.sides])

    def of_each_run(self) -> list[list[Figures]]:
        """The same of every run by itself, by side; the keys are the side's."""
        found: list[list[Figures]] = []
        for number, side in enumerate(self.sides):
            alone = [{i: np.arange(run.count, dtype=np.int32)[None]} for i, run in enumerate(side)]
            found.append([self._of_side(number, own) for own in alone])
        return found

    def drawn(self, resamples: int) -> Figures:
        """The figures of so many resamples."""
        parts = [self._figures(indices) for indices in self._indices(resamples)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _indices(self, resamples: int) -> Iterator[list[list[Indices]]]:
        """By side and run, shape (some, n) each, until there were ``resamples`` of them."""
        values = sum(run.count for side in self.sides for run in side)
        at_once = max(1, min(resamples, _MOST_VALUES // max(values, 1)))
        sources = self._sources()
        for first in range(0, resamples, at_once):
            some = min(at_once, resamples - first)
            drawn = [
                [bootstrap.draw(run.count, self.block, some, rng) for run, rng in zip(side, own, strict=True)]
                for side, own in zip(self.sides, sources, strict=False)
            ]
            yield drawn * 2 if self.paired else drawn

    def _sources(self) -> list[list[np.random.Generator]]:
        """A source of randomness a run, from what it measured; for pairs, one a pair, whichever side comes first."""
        a, b = ([run.digest() for run in side] for side in self.sides)
        if self.paired:
            return [[_source(min(x, y) + max(x, y)) for x, y in zip(a, b, strict=True)]]
        return [[_source(x) for x in a], [_source(x) for x in b]]

    def _figures(self, drawn: Sequence[Sequence[Indices]]) -> Figures:
        out: Figures = {}
        for number, own in enumerate(drawn):
            out |= self._of_side(number, dict(enumerate(own)))
        return out

    def _of_side(self, number: int, own: Mapping[int, Indices]) -> Figures:
        """One side's figures, of the runs and requests that ``own`` names: keys ``ttft/0``, ``first_token/1`` …"""
        out: Figures = {}
        side = self.sides[number]
        for metric in PER_REQUEST:
            rows = np.concatenate([side[i].values[metric][drawn] for i, drawn in own.items()], axis=1)
            out[f"{metric}/{number}"] = harrell_davis(rows, self.percentiles[metric])
        times = {i: bootstrap.counts_of(drawn) for i, drawn in own.items()}
        gaps: Any = sum(t @ self._gap_tables[number][i] for i, t in times.items())
        out[f"itl/{number}"] = pooled_harrell_davis(self._gap_values, np.asarray(gaps), self.percentiles["itl"])
        for event, tables in self._tables.items():
            sums: Any = sum(t @ tables[number][i] for i, t in times.items())
            out[f"{event}/{number}"] = sums[:, :-1] / np.maximum(sums[:, -1:], 1)
            for stage in self.shown[event] if self.stage_percentiles else ():
                rows = np.concatenate([_column(tables[number][i], stage)[drawn] for i, drawn in own.items()], axis=1)
                out[f"{event}.{stage}/{number}"] = harrell_davis(rows, self.stage_percentiles)
        return out


def _source(seed: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(seed, "little"))


def _block(run: Run) -> float:
    """The longest block that the run's metrics, or their being in the tail, ask for."""
    longest = 1.0
    for metric in PER_REQUEST:
        values = run.values[metric][~np.isnan(run.values[metric])]
        if len(values) < FEWEST:
            continue
        ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)
        series = [ranks, *((ranks >= share * len(ranks)).astype(np.float64) for share in _TAILS)]
        longest = max(longest, *(bootstrap.block_length(each) for each in series))
    return longest


def _measured(run: Run, event: str) -> NDArray[np.bool_]:
    """Which stages a run measured; none where it has no ledger."""
    table = run.ledgers[event]
    return np.asarray((~np.isnan(table)).any(axis=0), dtype=bool)


def _table(ledger: Floats, known: NDArray[np.bool_]) -> Floats:
    """Shape (n, stages + 2): stages, whole wait, 1 where there is a ledger. What one side lacks joins the remainder."""
    there = ~np.isnan(ledger[:, _RESIDUAL])
    table = np.where(there[:, None], np.nan_to_num(ledger), 0.0)
    lacking = [i for i in range(_RESIDUAL) if not known[i]]
    table[:, _RESIDUAL] += table[:, lacking].sum(axis=1)
    table[:, lacking] = 0.0
    return np.concatenate([table, table.sum(axis=1, keepdims=True), there[:, None].astype(np.float64)], axis=1)


def _column(table: Floats, stage: int) -> Floats:
    """A stage's values, NaN where there is no ledger."""
    return np.where(table[:, -1] > 0, table[:, stage], np.nan)


def _gap_tables(sides: Sequence[Sequence[Run]]) -> tuple[Floats, list[list[Any]]]:
    """The distinct gaps of both sides in order, and by side and run how many of each a request has."""
    runs = [run for side in sides for run in side]
    firsts = np.cumsum([0, *(run.count for run in runs)])
    pooled = np.concatenate([run.gaps_ns for run in runs])
    owner = np.concatenate([run.gap_owner + first for run, first in zip(runs, firsts[:-1], strict=True)])
    values, table = binned(pooled, owner, int(firsts[-1]))
    tables = [table[low:high] for low, high in pairwise(firsts)]
    return values, [tables[: len(sides[0])], tables[len(sides[0]) :]]
