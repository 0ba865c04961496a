"""Intervals hold what they promise, for independent and for correlated latencies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gapmeter.analysis.stats.dependence import exceedances
from gapmeter.analysis.stats.estimate import Estimate
from gapmeter.analysis.stats.exact import interval_ranks, values_needed
from gapmeter.analysis.stats.hdr import at_rank
from gapmeter.analysis.stats.series import Series, Worth, bursts_in, pooled, share_of, time_blocks
from tests.kit.series import mm1_sojourns


def covered(estimate: Estimate, truth: float) -> bool:
    low = -math.inf if estimate.low is None else estimate.low
    high = math.inf if estimate.high is None else estimate.high
    return low <= truth <= high


@pytest.mark.parametrize(("load", "count"), [(0.0, 1500), (0.3, 5000), (0.6, 10_000), (0.8, 20_000)])
def test_the_95_percent_interval_of_p99_covers_the_truth_on_a_queue(load: float, count: int) -> None:
    hits = naive_hits = whole = 0
    replications = 300
    for seed in range(replications):
        rng = np.random.default_rng([seed, 11])
        values = mm1_sojourns(rng, load, count) if load else rng.exponential(1, count)
        truth = -math.log(0.01) / (1 - load)
        found = Series(values).percentile(99)
        hits += covered(found, truth)
        whole += found.supported
        naive_hits += covered(Series(values, known=Worth(count, count, count)).percentile(99), truth)
    assert hits / replications >= 0.93
    if whole >= 0.95 * replications:
        assert hits / replications <= 0.99, "wide intervals are no answer either"
    if load >= 0.6:
        assert naive_hits / replications < 0.75, "this queue would not tell the two apart"


@pytest.mark.parametrize(("percentile", "needed"), [(50.0, 6), (90.0, 36), (95.0, 72), (99.0, 368), (99.9, 3688)])
def test_a_percentile_is_supported_from_the_count_that_the_binomial_asks(percentile: float, needed: int) -> None:
    assert values_needed(percentile) == needed
    for count, supported in ((needed - 1, False), (needed, True)):
        values = Series(np.arange(count, dtype=float), known=Worth(count, count, count))
        found = values.percentile(percentile)
        assert found.supported is supported
        assert values.more_values(percentile) == (0 if supported else 1)


def test_how_many_more_values_are_needed_grows_with_their_correlation() -> None:
    independent, correlated = (Series(np.arange(100.0), known=Worth(worth, worth, worth)) for worth in (100, 20))
    assert independent.more_values(99) == 268
    assert correlated.more_values(99) == 1740


def test_a_run_that_is_told_how_many_more_it_needs_mostly_has_enough_with_twice_these() -> None:
    """The queue's p99, asked of 500 requests; what a run is worth is itself uncertain."""
    factors, enough = [], []
    for seed in range(40):
        run = mm1_sojourns(np.random.default_rng([seed, 31]), 0.5, 60_000)
        more = Series(run[:500]).more_values(99)
        factors.append((500 + more) / 500)
        enough.append(Series(run[: 2 * (500 + more)]).percentile(99).supported)
    assert 4 < np.median(factors) < 16
    assert np.mean(enough) > 0.7


@pytest.mark.parametrize("count", [15, 20, 40])
def test_the_median_of_a_few_independent_values_has_an_interval_that_holds(count: int) -> None:
    rng = np.random.default_rng(count)
    found = [Series(rng.exponential(size=count)).percentile(50) for _ in range(300)]
    assert np.mean([each.supported for each in found]) > 0.85
    assert np.mean([covered(each, float(np.log(2))) for each in found]) > 0.95


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_few_values_of_a_queue_are_not_taken_for_independent(load: float) -> None:
    truth = math.log(2) / (1 - load)
    runs = (mm1_sojourns(np.random.default_rng([seed, 17]), load, 20) for seed in range(400))
    assert np.mean([covered(Series(run).percentile(50), truth) for run in runs]) > 0.9


def test_gaps_that_belong_to_few_requests_are_worth_few_values() -> None:
    """Eight requests at a time, 60 gaps each, every request with a level of its own: 400 levels in all."""
    rng = np.random.default_rng(8)
    requests = np.repeat(np.arange(400).reshape(50, 8), 60, axis=0).ravel()
    gaps = rng.lognormal(0, 1, 400)[requests] * rng.lognormal(0, 0.02, len(requests)) * 1e6
    at_ns = np.repeat(np.arange(3000), 8) * 1_000_000
    by_time = Series(gaps, [time_blocks(at_ns, gaps)])
    both = Series(gaps, [requests, time_blocks(at_ns, gaps)])
    assert both.worth.tail < 500
    assert both.worth.tail <= by_time.worth.tail


def test_gaps_that_one_step_made_in_many_requests_are_worth_one() -> None:
    rng = np.random.default_rng(9)
    steps, batch = 3000, 16
    step_ms = rng.lognormal(2, 0.5, steps)
    gaps = np.repeat(step_ms, batch) * 1e6
    at_ns = np.repeat(np.cumsum(step_ms) * 1e6, batch).astype(np.int64)
    requests = (np.arange(steps)[:, None] // 50 * batch + np.arange(batch)).ravel()
    worth = Series(gaps, [requests, time_blocks(at_ns, gaps)])
    assert worth.count == steps * batch
    assert 0.4 * steps < worth.worth.tail < 1.3 * steps


def test_the_time_between_repeats_makes_no_block_wider() -> None:
    """Two repeats of 20 s, with steps of 5 ms, and ten minutes of other points between them."""
    at_ns = np.concatenate([start + np.arange(1, 4001) * 5_000_000 for start in (0, 620 * 10**9)])
    blocks = time_blocks(at_ns, np.full(8000, 5e6))
    assert np.bincount(blocks).max() <= 3, "steps"
    assert blocks[4000] - blocks[3999] > 100, "and no neighbors"


def test_the_interval_of_an_itl_percentile_covers_the_truth_when_steps_are_shared() -> None:
    truth = math.exp(stats.norm.ppf(0.99) * 0.5)
    hits, replications = 0, 200
    for seed in range(replications):
        rng = np.random.default_rng([seed, 3])
        step = rng.lognormal(0, 0.5, 2000)
        gaps = np.repeat(step, 8) * 1e6
        at_ns = np.repeat(np.cumsum(step) * 1e6, 8).astype(np.int64)
        requests = (np.arange(2000)[:, None] // 40 * 8 + np.arange(8)).ravel()
        found = Series(gaps, [requests, time_blocks(at_ns, gaps)]).percentile(99)
        hits += covered(found, truth * 1e6)
    assert hits / replications >= 0.93


def test_answers_that_never_came_push_the_percentile_to_infinity() -> None:
    values = np.concatenate([np.linspace(1, 2, 960), np.full(40, math.inf)])
    found = Series(np.random.default_rng(0).permutation(values)).percentile(99)
    assert found.value == math.inf
    assert found.low == math.inf


def test_values_that_were_not_measured_are_an_error_not_a_guess() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Series(np.array([1.0, math.nan]))


def test_a_curve_ends_at_the_last_percentile_that_is_supported() -> None:
    values = Series(np.random.default_rng(2).exponential(1, 1000))
    points = values.curve(200)
    last, _ = points[-1]
    assert all(found.supported for _, found in points)
    assert 99 < last < 99.7
    assert values_needed(last) <= 1000
    assert Series(np.zeros(0)).curve(200) == []


def test_where_the_body_drifts_its_percentiles_have_the_tails_bounds() -> None:
    """Four thousand answers between 50 and 52 ms, whose order drifts: p90 is known to be below what p95 is below."""
    drifting = Series(np.linspace(50.0, 52.0, 4000), known=Worth(6.0, 6.0, 400.0))
    body, tail = (drifting.percentile(p) for p in (90.0, 95.0))
    assert interval_ranks(4000, 6.0, 90.0)[1] is None, "which the body alone does not have"
    assert tail.supported and body.supported
    assert body.high == tail.high


@pytest.mark.parametrize("seed", range(3))
def test_what_lasts_at_the_p95_does_not_count_against_a_p99(seed: int) -> None:
    """In half of the run one answer of twenty is slow; slower ones, of which a p99 is made, come at any time."""
    rng, count = np.random.default_rng(seed), 4000
    values = rng.exponential(1.0, count)
    values[(np.arange(count) < count // 2) & (rng.random(count) < 0.05)] += 20
    values[rng.random(count) < 0.02] += 50
    series = Series(values)
    assert series.n_eff(99.0) > 2 * series.n_eff(95.0)


@given(st.lists(st.floats(1, 400), min_size=4, max_size=4), st.integers(1, 2000))
def test_ends_grow_with_the_percentile_whatever_its_parts_are_worth(worths: list[float], count: int) -> None:
    values = Series(np.arange(1.0, count + 1), known=Worth(*(min(worth, count) for worth in worths)))
    found = [values.percentile(p) for p in (50.0, 75.0, 90.0, 95.0, 99.0)]
    for lower, higher in itertools.pairwise(found):
        assert lower.high is not None or higher.high is None
        assert higher.low is not None or lower.low is None
        if higher.high is not None and lower.high is not None:
            assert lower.high <= higher.high
        if higher.low is not None and lower.low is not None:
            assert lower.low <= higher.low


@pytest.mark.parametrize(("count", "failed", "bounded"), [(300, 0, True), (300, 1, False), (200, 0, False)])
def test_the_largest_of_enough_values_bounds_a_percentile_unless_it_never_came(
    count: int, failed: int, bounded: bool
) -> None:
    """No p99 of 300 has an upper end; that none of them lies beyond it has a chance of 5 %."""
    values = np.random.default_rng(6).permutation(np.r_[np.arange(1.0, count + 1 - failed), np.full(failed, np.inf)])
    series = Series(values, known=Worth(count, count, count))
    assert series.percentile(99.0).high is None
    bound = series.at_most(99.0)
    assert (bound is not None) is bounded
    if bound is not None:
        assert (bound.value, bound.confidence) == (count, pytest.approx(1 - 0.99**count))


def test_a_percentile_rests_on_what_its_part_of_the_series_is_worth() -> None:
    series = Series(np.arange(400.0), known=Worth(10.0, 20.0, 30.0, 40.0, plain_body=100.0, plain_tail=60.0))
    percentiles = (50.0, 74.9, 75.0, 94.9, 95.0, 98.9, 99.0, 99.9)
    assert [series.n_eff(p) for p in percentiles] == [10, 10, 20, 20, 30, 30, 40, 40]
    assert Series(np.arange(400.0), known=Worth(10.0, 20.0, 30.0)).n_eff(99.0) == 30, "as the tail"
    assert [series.plain(p) for p in (50.0, 94.9, 95.0, 99.0)] == [60, 60, 36, 40], "three fifths of it, or n_eff"


def test_runs_together_are_worth_what_each_is() -> None:
    runs = [Series(np.arange(100.0), known=Worth(1.0, 2.0, 3.0, far)) for far in (40.0, None)]
    together = pooled(runs)
    assert (together.count, together.worth) == (200, Worth(2.0, 4.0, 6.0, 43.0))


def test_what_bounds_a_percentile_is_as_sure_as_its_interval_s_end() -> None:
    series = Series(np.arange(1.0, 1001), known=Worth(1000.0, 1000.0, 1000.0))
    bound = series.at_most(99.0)
    assert bound is not None
    assert (bound.value, bound.confidence) == (series.percentile(99.0).high, pytest.approx(0.975))


def test_a_body_that_drifts_is_below_the_largest_value_as_surely_as_its_tail() -> None:
    """Its median alone would be so with a chance of one half."""
    drifting = Series(np.arange(1.0, 201), known=Worth(1.0, 1.0, 60.0))
    bound = drifting.at_most(50.0)
    assert bound is not None
    assert (bound.value, bound.confidence) == (200, pytest.approx(1 - 0.95**60))
    assert Series(np.arange(1.0, 201), known=Worth(1.0, 1.0, 1.0)).at_most(50.0) is None


def test_a_share_is_worth_no_more_than_is_known_of_its_time_from_elsewhere() -> None:
    flags = np.random.default_rng(1).random(400) < 0.1
    alone, known = share_of(flags), share_of(flags, 8.0)
    assert (alone.value, known.n_eff) == (known.value, 50.0)
    assert alone.high < known.high and known.low < alone.low


@pytest.mark.parametrize(("n_eff", "bursts"), [(100.0, 10.0), (10.0, 2 * 20 / 11)])
def test_flagged_requests_that_are_not_quite_in_a_row_are_one_burst(n_eff: float, bursts: float) -> None:
    """Ten pairs among a hundred, which may be worth ten values."""
    flags = np.tile([True, True, *[False] * 8], 10)
    assert bursts_in(flags, n_eff) == pytest.approx(min(bursts, 10.0))


@pytest.mark.parametrize(
    ("load", "count", "seed", "far", "tail", "few"),
    [
        (0.5, 1000, 0, "short 90", "long 95", True),
        (0.5, 1000, 1, "short 95", "short 95", True),
        (0.5, 1000, 2, "long 99", "long 95", True),
        (0.7, 20_000, 1, "long 99", "short 95", True),  # 96 spells above the 90th
        (0.5, 10_000, 0, "short 95", "short 95", False),  # 215
        (0.3, 20_000, 3, "long 99", "long 95", False),
    ],
)
def test_of_the_estimates_of_what_a_queue_is_worth_the_least_counts(
    load: float, count: int, seed: int, far: str, tail: str, few: bool
) -> None:
    """``few``: it met so few slow spells that the body's estimate may not rest on them alone."""
    values = mm1_sojourns(np.random.default_rng(seed), load, count)
    series = Series(values)
    at = {level: exceedances(values, at_rank(series.ordered, level), None) for level in (50.0, 75.0, 90.0, 95.0, 99.0)}
    told = {f"short {level:g}": at[level].short() for level in (50.0, 75.0, 90.0, 95.0)}
    told |= {f"long {level:g}": at[level].long() for level in (50.0, 95.0, 99.0)}
    assert min(("short 90", "short 95", "long 99"), key=told.get) == far
    assert min(("short 90", "short 95", "long 95"), key=told.get) == tail
    body, middle = (min(told[name], told["long 50"]) for name in ("short 90", "short 50"))
    if few:
        body = min(body, *(ns for name, ns in told.items() if name.startswith("short")))
    assert [series.n_eff(p) for p in (50.0, 90.0, 95.0, 99.0)] == pytest.approx([middle, body, told[tail], told[far]])
