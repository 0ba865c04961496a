"""Bounds of counts are the textbook's, where these are whole numbers, and nothing is claimed with too few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gapmeter.analysis.stats.exact import (
    chance_far_below,
    chance_of_so_few_in_bursts,
    chance_of_so_large_a_share,
    growth_to_decide,
    interval_ranks,
    rate_at_least,
    share_at_most,
    share_bounds,
)
from gapmeter.records.histograms import nearest_rank


@given(st.integers(1, 3000), st.sampled_from([50.0, 90.0, 95.0, 99.0, 99.9]))
def test_interval_ranks_of_independent_values_are_the_textbook_binomial_ones(count: int, percentile: float) -> None:
    low, high = interval_ranks(count, float(count), percentile)
    level = percentile / 100
    below = stats.binom(count, level)
    ranks = np.arange(1, count + 1)
    lows = ranks[below.cdf(ranks - 1) <= 0.025]
    highs = ranks[below.sf(ranks - 1) <= 0.025]
    assert low == (lows.max() if len(lows) else None)
    assert high == (highs.min() if len(highs) else None)


@given(st.integers(1, 5000), st.floats(0.02, 1.0), st.sampled_from([50.0, 90.0, 99.0, 99.9]))
def test_the_percentile_lies_within_its_interval(count: int, worth: float, percentile: float) -> None:
    low, high = interval_ranks(count, max(1.0, count * worth), percentile)
    rank = nearest_rank(percentile, count)
    assert low is None or 1 <= low <= rank
    assert high is None or rank <= high <= count


@pytest.mark.parametrize(
    ("hits", "count", "grows"), [(0, 100, True), (5, 1000, True), (30, 1000, False), (10, 1000, None)]
)
def test_growth_says_how_large_a_sample_decides(hits: int, count: int, grows: bool | None) -> None:
    growth = growth_to_decide(hits, count, count, 0.01)
    if grows is None:
        assert growth is None, "a share that equals the limit is never decided"
    elif not grows:
        assert growth == 1.0
    else:
        assert growth > 1
        low, high = share_bounds(hits * growth, count * growth)
        one_sided = stats.binom.cdf(0, round(count * growth), 0.01) if not hits else 1.0
        assert high == pytest.approx(0.01, rel=0.01) or low > 0.01 or one_sided <= 0.051


@given(st.integers(1, 50), st.integers(1, 40), st.integers(51, 10_000))
def test_the_fewer_bursts_hits_came_in_the_less_is_proven_of_their_share(bursts: int, longer: int, count: int) -> None:
    hits = min(bursts * longer, count - 1)
    ends = [share_at_most(hits, count, max(bursts * part, 1e-3)) for part in (1.0, 0.5, 0.25)]
    assert ends == sorted(ends)
    assert 0 <= ends[0] <= ends[-1] <= 1
    assert ends[0] == 0 if bursts >= hits else ends[0] > hits / count
    for end, part in zip(ends, (1.0, 0.5, 0.25), strict=True):
        chance = chance_of_so_few_in_bursts(hits, count, max(bursts * part, 1e-3), end or 0.5)
        assert chance == pytest.approx(0.025 if end else 0.0)


@given(count=st.integers(2, 10_000), seconds=st.floats(0.1, 1e4), spread=st.floats(0.05, 20))
def test_of_more_uneven_arrivals_less_is_proven(count: int, seconds: float, spread: float) -> None:
    assert rate_at_least(count, seconds, 2 * spread) <= rate_at_least(count, seconds, spread) <= count / seconds


def test_a_rate_s_lower_end_is_above_the_true_rate_as_seldom_as_it_says() -> None:
    rng = np.random.default_rng(7)
    counts = rng.poisson(8.0 * 20, size=4000)
    assert 0.015 <= sum(rate_at_least(int(n), 20.0) > 8.0 for n in counts) / 4000 <= 0.031


@pytest.mark.parametrize(
    ("over_half", "count", "n_eff", "share", "proven"),
    [
        (0, 1500, 130, 0.01, True),  # 0.96^130 = 0.5 %
        (0, 1500, 110, 0.01, False),  # 0.96^110 = 1.1 %
        (0, 400, 130, 0.01, False),  # alone: 0.99^400 = 1.8 %
        (0, 1500, 99, 0.1, False),  # of fewer than a hundred it is not known what they are worth
        (75, 1500, 300, 0.01, False),  # one in twenty beyond half the limit, one in 25 allowed
        (0, 1500, 300, 0.25, False),  # of p75 nothing follows
    ],
)
def test_far_below_a_limit_both_kinds_of_slow_requests_are_ruled_out(
    over_half: int, count: int, n_eff: float, share: float, proven: bool
) -> None:
    assert (chance_far_below(over_half, count, n_eff, share) <= 0.025 / 4) is proven


@given(st.integers(2, 12), st.floats(0.001, 0.2), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_share_is_as_large_by_chance_no_more_often_than_markov_says(block: int, share: float, seed: int) -> None:
    """However alike neighbors are: here whole blocks of requests exceed the limit, or none of the block does."""
    runs = np.random.default_rng(seed).random((4000, 24 // block or 1)) < share
    found = runs.mean(axis=1)
    for least in (0.2, 0.5, 1.0):
        chance = chance_of_so_large_a_share(least * 1000, 1000, share)
        assert (found >= least).mean() <= chance + 0.03
