"""Means of what is alike in a row, and their ratios, are known as well as they say."""

from __future__ import annotations

import numpy as np
import pytest

from gapmeter.analysis.stats.dependence import autocorrelation_time, first_cosines
from gapmeter.analysis.stats.estimate import t_quantile
from gapmeter.analysis.stats.series import Series, level_of, level_of_interval, ratio_of_geometric_means, spread_of_mean
from tests.kit.series import ar1


def test_a_mean_of_neighbors_that_are_alike_is_known_less_well() -> None:
    """An AR(1) with 0.9 has 19 times the variance of a mean of independent values; the interval holds the truth."""
    rng, held, wide = np.random.default_rng(2), 0, 0
    for _ in range(200):
        series = ar1(rng, 0.9, 1000)
        level = level_of(100 + series)
        low, high = level.estimate.known[1:]
        held += low <= 100 <= high
        wide += level.log_error * level.value > 2.5 * series.std() / 1000**0.5
    assert held >= 0.9 * 200
    assert wide > 150


def test_a_mean_of_few_values_has_no_interval() -> None:
    assert level_of(np.ones(11)) is None


def test_the_interval_of_a_ratio_holds_one_when_nothing_differs() -> None:
    held = 0
    for seed in range(200):
        logs = np.random.default_rng(seed).normal(0, 1, 300)
        found = ratio_of_geometric_means(logs[:40], logs[40:])
        held += not found.excludes(1.0)
    assert 0.90 <= held / 200 <= 0.995


def test_a_percentile_that_is_taken_for_a_level_keeps_its_interval() -> None:
    level = level_of_interval(10.0, 8.0, 12.5)
    assert level.estimate.known == pytest.approx((10.0, 8.0, 12.5), rel=1e-4)
    drawn = level.drawn(np.random.default_rng(1), 100_000)
    assert np.quantile(drawn, [0.5, 0.025, 0.975]) == pytest.approx((10.0, 8.0, 12.5), rel=0.01)


def test_a_ratio_knows_how_alike_neighbors_are_from_its_longer_part() -> None:
    """Of 20 values of an AR(1) with 0.9, hardly any order is seen: by these, 42 % of ratios seemed to differ from 1."""
    rng, held = np.random.default_rng(3), 0
    for _ in range(200):
        logs = ar1(rng, 0.9, 220)
        found = ratio_of_geometric_means(logs[:200], logs[200:])
        held += not found.excludes(1.0)
    assert held >= 0.85 * 200


@pytest.mark.parametrize(("seed", "lasting"), [(0, True), (1, False)])
def test_of_what_lasts_and_what_is_brief_the_larger_error_of_a_mean_counts(seed: int, lasting: bool) -> None:
    series = ar1(np.random.default_rng(seed), 0.9, 500)
    cosines = first_cosines(series - series.mean())
    errors = float(np.mean(cosines**2)) / 500, float(series.var(ddof=1)) * autocorrelation_time(series) / 500
    assert (errors[0] > errors[1]) is lasting
    found = spread_of_mean(series)
    assert found is not None
    assert (found.error, found.df) == (pytest.approx(max(errors) ** 0.5), 12)


def test_a_mean_s_interval_rests_on_what_its_values_are_worth() -> None:
    values = ar1(np.random.default_rng(3), 0.9, 500)
    found = Series(values).mean()
    assert found.n_eff == pytest.approx(500 / autocorrelation_time(values))
    assert found.n_eff < 100
    half = t_quantile(found.n_eff - 1) * values.std(ddof=1) / found.n_eff**0.5
    assert found.known == pytest.approx((values.mean(), values.mean() - half, values.mean() + half))


def test_values_that_only_rise_move_as_one() -> None:
    found = Series(np.arange(100.0)).percentile(50.0)
    assert (found.n_eff, found.ends) == (0.5, (None, None))
    assert found.why == "100 values, which move as one, do not support p50"
