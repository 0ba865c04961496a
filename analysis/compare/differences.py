"""Differences between two sides, each of one run or several, with intervals that hold for correlated requests.

A difference is B minus A. Its standard error has two parts. *Within* runs: the stationary block bootstrap of
stats.bootstrap, every run drawn by itself; where both sides issued the same planned requests in an open
loop, a pair of runs is drawn together, request i of one with request i of the other, so that what the plan did to both
cancels out. *Between* runs: where a side has several, the variance of the runs' own estimates about their side's mean,
s^2 (1/k_A + 1/k_B).

Each gives an interval, difference +- t * error, and the wider one counts; so does the larger p-value. With several runs
a side none is narrower than Student's t-test of the runs' own values, which holds however much runs differ (as Hartung
and Knapp 2001 in meta-analysis, Statistics in Medicine 20, with Roever, Knapp and Friede's 2015 guard against runs that
agree by luck). Degrees of freedom: within, the number of blocks less one, and no more than twice the number of
independent values beyond the percentile (the spacing around a quantile is known from those alone); between runs, k_A +
k_B - 2. Relative differences are those of logarithms, so that A's own error is in them.

*Means* need no rank, so they tell where a sample is too small, or its values too alike, for a percentile. Beside these
two errors there is a third, of all requests of a side in due order: stats.series.spread_of_mean, which sees what lasts
longer than the blocks that are drawn. Nothing sees what lasts as long as the run: with one run a side, no mean is told
of fewer than twelve independent requests (n / tau). Without that rule, identical runs of 12 to 1,000 requests of M/M/1
queues at loads up to 0.95 differed at the 0.3 % level in up to 61 % of pairs; with it in at most 1.2 %.

A request that failed is no request less: it waited longer than any success. A percentile whose rank is a request that
failed counts it as what it was given, its time-out, and is "at least so much". Every other percentile counts it as the
longest success (a time-out of minutes would reach percentiles far below it, through their weights and resamples). A
mean is that of successes, which bounds that of all from below: so B may be proven slower by it, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.compare.sides import PER_REQUEST, Run, late_ns, why_refused
from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.results.comparison import FailedShares
from gapmeter.analysis.stages import STAGE_NAMES
from gapmeter.analysis.stats import bootstrap
from gapmeter.analysis.stats.bootstrap import Resampled, pooled_harrell_davis
from gapmeter.analysis.stats.dependence import autocorrelation_time
from gapmeter.analysis.stats.estimate import Difference, Estimate, Spread
from gapmeter.analysis.stats.series import Series, pooled, share_of, spread_of_mean
from gapmeter.scenarios.slo import LATENCIES

EVENTS = tuple(LEDGER_OF.values())
FEWEST = 16
_MOST_VALUES = 4_000_000  # drawn at a time
_TAILS = (0.9, 0.99)
_LONGER = 2.0  # a block length that is best for the variance leaves it too small; an interval suffers more from that
_MOST_BLOCK = 0.25  # of a run
_RESIDUAL = len(STAGE_NAMES) - 1
_LEAST_WORTH = 12.0  # of one run, for a mean

TimesDrawn = NDArray[np.int32]  # how often each request of a side is in each resample: shape (requests, resamples)
Figures = dict[str, Floats]  # by name: shape (resamples, parts)
_Ranked = tuple[Resampled, Sequence[float]]  # values, and which of their percentiles
_MEAN = "mean"  # of every metric


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


class AlignedSides:
    """Two aligned sides. ``percentiles``: of each metric, which; ``stage_percentiles``: of every stage.

    ``series[metric][side]`` are a side's values; ``block`` the mean length of the blocks that are drawn: twice the
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
        # What each request adds to sums, and, in the columns after those, to the numbers that divide them: every mean
        # is a ratio of the two.
        sums = [np.concatenate([np.concatenate(run.sums(), axis=1) for run in side]) for side in self.sides]
        self._sums = {_MEAN: sums, **tables}
        # Stages that are not 0 throughout.
        self.shown = {
            event: [i for i in range(len(STAGE_NAMES)) if any(table[:, i].any() for table in own)]
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

    def _ranked_of(self, number: int, tables: Mapping[str, Sequence[Floats]]) -> dict[str, list[_Ranked]]:
        """What one side has percentiles of, and which."""
        side = self.sides[number]
        ranked: dict[str, list[_Ranked]] = {}
        for metric in PER_REQUEST:
            values = np.concatenate([run.at_least_ns(metric) for run in side])
            ranked[metric] = [(Resampled(np.minimum(values, most)), own) for most, own in self._reached(metric, number)]
        for event, own in tables.items():
            there = own[number][:, -1] > 0
            for stage in self.shown[event] if self.stage_percentiles else ():
                values = np.where(there, own[number][:, stage], np.nan)  # NaN without a ledger
                ranked[f"{event}.{stage}"] = [(Resampled(values), self.stage_percentiles)]
        return ranked

    def errors_in_mean(self, name: str, part: int) -> list[Floats]:
        """By side: what each request of its runs adds to the error of a mean, in due order; their own mean is 0."""
        errors = []
        for sums in self._sums[name]:
            amount, count = sums[:, part], sums[:, min(_parts(name) + part, sums.shape[1] - 1)]
            errors.append((amount - amount.sum() / count.sum() * count) / count.mean())
        return errors

    def as_it_is(self) -> Figures:
        """The figures of what was measured, one row each."""
        return self._figures([np.ones((sum(run.count for run in side), 1), np.int32) for side in self.sides])

    def of_each_run(self) -> list[list[Figures]]:
        """The same of every run by itself, by side; the keys are the side's."""
        return [
            [self._of_side(number, np.repeat(alone, counts)[:, None]) for alone in np.eye(len(counts), dtype=np.int32)]
            for number, counts in enumerate([run.count for run in side] for side in self.sides)
        ]

    def drawn(self, resamples: int) -> Figures:
        """The figures of so many resamples, some at a time."""
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
            parts.append(self._figures(drawn * 2 if self.paired else drawn))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _figures(self, drawn: Sequence[TimesDrawn]) -> Figures:
        sides = [self._of_side(number, counts) for number, counts in enumerate(drawn)]
        return {name: figure for side in sides for name, figure in side.items()}

    def _of_side(self, number: int, counts: TimesDrawn) -> Figures:
        """One side's figures of each resample: keys ``ttft/0``, ``first_token/1`` …"""
        out: Figures = {
            f"{name}/{number}": np.hstack([ranked.harrell_davis(counts, own) for ranked, own in parts])
            for name, parts in self._ranked[number].items()
        }
        gaps = np.asarray(self._gap_tables[number] @ counts).T
        out[f"itl/{number}"] = np.hstack([
            pooled_harrell_davis(np.minimum(self._gap_values, most), gaps, own)
            for most, own in self._reached("itl", number)
        ])  # fmt: skip
        times = counts.astype(np.float64)
        for name, sums in self._sums.items():
            amount, count = np.hsplit(times.T @ sums[number], [_parts(name)])
            out[f"{name}/{number}"] = np.divide(amount, count, out=np.full_like(amount, np.nan), where=count > 0)
        return out


def _parts(name: str) -> int:
    """How many means there are by this name."""
    return len(LATENCIES) if name == _MEAN else len(STAGE_NAMES) + 1


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


def _table(ledger: Floats, known: NDArray[np.bool_]) -> Floats:
    """Shape (n, stages + 2): stages, whole wait, 1 where there is a ledger. What one side lacks joins the remainder."""
    there = ~np.isnan(ledger[:, _RESIDUAL])
    table = np.where(there[:, None], np.nan_to_num(ledger), 0.0)
    lacking = [i for i in range(_RESIDUAL) if not known[i]]
    table[:, _RESIDUAL] += table[:, lacking].sum(axis=1)
    table[:, lacking] = 0.0
    return np.concatenate([table, table.sum(axis=1, keepdims=True), there[:, None].astype(np.float64)], axis=1)


def _gap_tables(sides: Sequence[Sequence[Run]]) -> tuple[Floats, list[Any]]:
    """The distinct gaps of both sides in order, and by side how many of each a request has: shape (k, requests)."""
    runs = [run for side in sides for run in side]
    firsts = np.cumsum([0, *(run.count for run in runs)])
    pooled = np.concatenate([run.gaps_at_least_ns() for run in runs])
    owner = np.concatenate([run.gap_owner + first for run, first in zip(runs, firsts[:-1], strict=True)])
    values, table = _binned(pooled, owner, int(firsts[-1]))
    between = int(firsts[len(sides[0])])
    return values, [table[:, :between], table[:, between:]]


def _binned(values: Floats, owner: Ints, owners: int) -> tuple[Floats, sparse.csr_array]:
    """Pooled values rounded to four significant digits, and how many each owner has of each.

    Returns the distinct values in order, shape (k,), and a sparse matrix (k, owners).
    """
    size = 10.0 ** (np.floor(np.log10(np.maximum(values, 1.0))) - 3)
    kept, column = np.unique(np.round(values / size) * size, return_inverse=True)
    ones = np.ones(len(values), np.int32)
    return kept, sparse.csr_array((ones, (column, owner)), shape=(max(len(kept), 1), owners))


RESAMPLES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Everything that was compared.

    ``metrics[metric][percentile]``, None for the mean; ``stages[event][stage]``: of the means, which add up to
    ``totals[event]``; ``shares[event][stage]``: a stage's share of that, None where the total may be 0;
    ``stage_percentiles[event][stage][percentile]``. ``unmeasured[event]``: stages that not every run measured; their
    time is in ``unexplained``. ``failed``: the share of each side's requests that did. ``counts`` are the requests of
    each side, ``block`` the mean length of the blocks.
    """

    paired: bool
    why_not_paired: str
    counts: tuple[int, int]
    runs: tuple[int, int]
    failed: FailedShares
    block: float
    resamples: int
    metrics: Mapping[str, Mapping[float | None, Difference]]
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
    pair = AlignedSides(a, b, paired=not why, percentiles=percentiles, stage_percentiles=stage_percentiles)
    judge = _Judge(pair, resamples)
    names = {
        event: [n for n, known in zip(STAGE_NAMES, pair.known[event], strict=True) if known] for event in pair.known
    }
    totals = {event: judge.mean(event, len(STAGE_NAMES)) for event in names}
    stages = {event: {n: judge.mean(event, STAGE_NAMES.index(n)) for n in own} for event, own in names.items()}
    metrics: dict[str, dict[float | None, Difference]] = {
        m: {**{p: judge.percentile(m, i) for i, p in enumerate(percentiles[m])}, None: judge.mean_of(m)}
        for m in LATENCIES
    }
    return Differences(
        paired=not why,
        why_not_paired=why,
        counts=(sum(run.count for run in a), sum(run.count for run in b)),
        runs=(len(a), len(b)),
        failed=_failed(side_a, side_b),
        block=pair.block,
        resamples=resamples,
        metrics=metrics,
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

    def __init__(self, pair: AlignedSides, resamples: int) -> None:
        self._pair = pair
        self._now, self._drawn = pair.as_it_is(), pair.drawn(resamples)
        self._alone: list[list[Figures]] = pair.of_each_run() if max(map(len, pair.sides)) > 1 else [[], []]
        blocks = [sum(run.count for run in side) / pair.block for side in pair.sides]
        self._blocks = min(blocks) - 1 if pair.paired else sum(blocks) - 2

    def percentile(self, metric: str, part: int) -> Difference:
        """One percentile of one metric: none where a side refuses it, no interval where a sample is too small."""
        percentile = self._pair.percentiles[metric][part]
        if (late := late_ns(itertools.chain(*self._pair.sides), metric, percentile)) is not None:
            return Difference(None, None, why=why_refused(late), late=late)
        series = self._pair.series[metric]
        short = [found for found in (side.percentile(percentile) for side in series) if not found.supported]
        if short:
            return Difference(*self._ends(metric, part), why=min(short, key=lambda found: found.n_eff or 0.0).why)
        if all(side.percentile(percentile).value == math.inf for side in series):
            return Difference(None, None, why="on both sides it is a request that failed", failed="ab")
        failed = [n for n, side in zip("ab", series, strict=True) if math.inf in side.percentile(percentile).known]
        return replace(self._difference(metric, part, _beyond(series, percentile)), failed="".join(failed))

    def mean_of(self, metric: str) -> Difference:
        """A metric's mean; where a side's requests failed, only if it proves B slower."""
        if (late := late_ns(itertools.chain(*self._pair.sides), metric, None)) is not None:
            return Difference(None, None, why=why_refused(late), late=late)
        series = self._pair.series[metric]
        failed = "".join(n for n, side in zip("ab", series, strict=True) if np.isinf(side.values).any())
        found = self.mean(_MEAN, part := LATENCIES.index(metric))
        if found.spreads and max(map(len, self._pair.sides)) == 1:
            errors = self._pair.errors_in_mean(_MEAN, part)
            worth, count = min((len(each) / autocorrelation_time(each), len(each)) for each in errors)
            if worth < _LEAST_WORTH:
                few = f"{count:,} requests, worth {worth:.0f} independent ones"
                return Difference(found.a, found.b, why=f"{few}, do not support a mean of one run a side")
        if failed and not (failed == "b" and (found.value or 0.0) > 0):
            return Difference(None, None, why="requests failed, and a mean leaves them out")
        return replace(found, failed=failed)

    def mean(self, name: str, part: int) -> Difference:
        """A metric's mean, a stage's, or the whole wait's."""
        found = self._difference(name, part, math.inf)
        errors = self._pair.errors_in_mean(name, part) if found.spreads else []
        lasting = self._lasting(errors)
        if lasting is None:
            return Difference(found.a, found.b, why=found.why or "too few requests for a mean")
        logs = found.log_spreads
        if logs and found.a and found.b and (log := self._lasting([errors[0] / found.a, errors[1] / found.b])):
            logs = (*logs, log)
        return replace(found, spreads=(*found.spreads, lasting), log_spreads=logs)

    def _lasting(self, errors: Sequence[Floats]) -> Spread | None:
        if self._pair.paired and errors:
            return spread_of_mean(errors[1] - errors[0])
        spreads = [spread for each in errors if (spread := spread_of_mean(each))]
        if len(spreads) < 2:
            return None
        return Spread(math.hypot(*(each.error for each in spreads)), min(each.df for each in spreads))

    def stages(self) -> dict[str, dict[str, dict[float, Difference]]]:
        """The percentiles of every stage that is not 0 throughout; of few independent values, as of metrics."""
        found: dict[str, dict[str, dict[float, Difference]]] = {}
        for metric, event in LEDGER_OF.items():
            series = self._pair.series[metric]
            for stage in self._pair.shown.get(event, ()):
                found.setdefault(event, {})[STAGE_NAMES[stage]] = {
                    p: self._difference(f"{event}.{stage}", i, _beyond(series, p))
                    for i, p in enumerate(self._pair.stage_percentiles)
                    if all(side.percentile(p).supported for side in series)
                }
        return found

    def share(self, event: str, stage: str, own: Difference, total: Difference) -> Estimate | None:
        """A stage's share of the whole difference; None where that may be 0."""
        if not total.value or not total.estimate.excludes(0.0):
            return None
        drawn = self._drawn[f"{event}/1"] - self._drawn[f"{event}/0"]
        both = drawn[:, [STAGE_NAMES.index(stage), len(STAGE_NAMES)]]
        found = bootstrap.share_with_draws((own.value or 0.0) / total.value, both, total.value)
        return found if found.supported else None

    def _ends(self, name: str, part: int) -> tuple[float | None, float | None]:
        a, b = (float(self._now[f"{name}/{side}"][0, part]) for side in (0, 1))
        return (None if math.isnan(a) else a), (None if math.isnan(b) else b)

    def _difference(self, name: str, part: int, most_df: float) -> Difference:
        a, b = self._ends(name, part)
        drawn: list[Floats] = [self._drawn[f"{name}/{side}"][:, part] for side in (0, 1)]
        if a is None or b is None or np.isnan(drawn).any():
            return Difference(a, b, why="no values on a side")
        if not self._pair.too_small:
            return Difference(a, b, why="a single request has no spread")
        df = max(1.0, min(self._blocks, most_df))
        alone = [np.array([own[f"{name}/{side}"][0, part] for own in runs]) for side, runs in enumerate(self._alone)]
        spreads = self._spreads(drawn[1] - drawn[0], alone, df)
        if min(a, b, *(float(values.min()) for values in (*drawn, *alone) if len(values))) <= 0:
            return Difference(a, b, spreads)
        logs = self._spreads(np.log(drawn[1]) - np.log(drawn[0]), [np.log(values) for values in alone], df)
        return Difference(a, b, spreads, logs)

    def _spreads(self, drawn: Floats, alone: Sequence[Floats], df: float) -> tuple[Spread, ...]:
        """Within the runs, from resampled differences; and between them, from each side's ``alone``: a value a run."""
        within = Spread(float(drawn.std(ddof=1)) / self._pair.too_small, df)
        freedom = sum(map(len, alone)) - 2
        if freedom < 1 or any(np.isnan(values).any() for values in alone):
            return (within,)
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in alone)
        return within, Spread(math.sqrt(squares / freedom * sum(1 / len(values) for values in alone)), float(freedom))


def _failed(side_a: Sequence[Run], side_b: Sequence[Run]) -> FailedShares:
    """The share of each side's requests that failed; of bursts of failures, each request says less."""
    a, b = (share_of(~np.concatenate([run.good for run in side])) for side in (side_a, side_b))
    return FailedShares(a_share=a.value or 0.0, b_share=b.value or 0.0, a_ci=(a.low, a.high), b_ci=(b.low, b.high))


def _beyond(series: Sequence[Series], percentile: float) -> float:
    """Twice the number of independent values beyond a percentile, on the side that has fewer."""
    return 2 * min(s.n_eff(percentile) for s in series) * min(percentile, 100 - percentile) / 100
