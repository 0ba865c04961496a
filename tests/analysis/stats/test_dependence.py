"""What correlated values are worth: dependence that is strong, that is weak and lasts, that a run has hardly met."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.stats import dependence
from tests.kit.series import ar1


def above_median(series: Floats) -> dependence.Exceedances:
    return dependence.exceedances(series, float(np.median(series)), None)


def test_independent_values_keep_most_of_their_count() -> None:
    rng = np.random.default_rng(1)
    found = [above_median(rng.exponential(size=2000)) for _ in range(50)]
    assert np.median([each.short() for each in found]) > 0.9 * 2000
    assert np.median([each.long() for each in found]) > 0.7 * 2000


def test_what_is_weak_and_lasts_drowns_in_single_lags_and_is_seen_by_the_cosines() -> None:
    """A fiftieth of the variance lasts some 200 values: no lag shows it; the mean varies as if of a third of them."""
    rng = np.random.default_rng(2)
    found = [
        above_median(np.sqrt(0.02) * ar1(rng, 0.99, 10_000) + np.sqrt(0.98) * rng.normal(size=10_000))
        for _ in range(20)
    ]
    short, long = (np.median([by(each) for each in found]) for by in _ESTIMATES)
    assert long < 0.5 * short
    assert long < 10_000 / 2.5


def test_what_is_strong_and_short_is_seen_by_both() -> None:
    rng = np.random.default_rng(3)
    found = [above_median(ar1(rng, 0.8, 5000)) for _ in range(20)]
    short, long = (np.median([by(each) for each in found]) for by in _ESTIMATES)
    assert 5000 / 9 < long < short < 5000 / 3


@pytest.mark.parametrize("spells", [2, 5, 20, 80])
def test_a_run_that_met_few_spells_is_worth_less_than_its_spells(spells: int) -> None:
    series = np.zeros(spells * 500)
    for start in range(100, len(series), 500):
        series[start : start + 20] = 1.0
    found = dependence.exceedances(series, 0.5, None)
    worth = len(series) / dependence.autocorrelation_time(series)
    assert found.short() < worth
    assert found.short() / worth == pytest.approx(1, abs=0.1) if spells == 80 else found.short() < 0.95 * worth


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e9 / 3])
def test_a_constant_has_no_dependence_however_its_mean_is_rounded(value: float) -> None:
    for count in (4, 100, 1001):
        assert dependence.autocorrelation_time(np.full(count, value)) == 1.0


def test_values_that_are_clusters_of_one_are_worth_what_they_are_without_clusters() -> None:
    series = ar1(np.random.default_rng(4), 0.7, 1500)
    alone, pooled = (dependence.exceedances(series, 1.0, by) for by in (None, np.arange(len(series))))
    assert (alone.short(), alone.long()) == pytest.approx((pooled.short(), pooled.long()))


def test_a_cluster_of_equal_values_is_worth_one() -> None:
    each = np.random.default_rng(5).normal(size=1000)
    clusters = np.repeat(np.arange(1000), 30)
    pooled = dependence.exceedances(np.repeat(each, 30), 0.0, clusters)
    assert pooled.short() == pytest.approx(above_median(each).short(), rel=0.15)
    assert pooled.count == 30_000


def test_answers_that_never_came_are_above_where_they_are_all_that_is() -> None:
    series = np.concatenate([np.ones(900), np.full(100, np.inf)])
    found = dependence.exceedances(series, np.inf, None)
    assert found.share == 0.1
    assert found.short() < 20, "they came in one go"


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, np.inf]), min_size=1, max_size=60), st.sampled_from([0.0, 1.0, np.inf]))
def test_n_eff_lies_between_its_least_and_the_count(values: list[float], threshold: float) -> None:
    found = dependence.exceedances(np.array(values), threshold, None)
    for worth in (found.short(), found.long(), found.plain()):
        assert dependence.LEAST <= worth <= len(values)


_ESTIMATES = (dependence.Exceedances.short, dependence.Exceedances.long)


def test_the_autocorrelation_time_of_an_ar1_series_is_the_known_one() -> None:
    rng = np.random.default_rng(5)
    for phi in (0.0, 0.5, 0.9):
        series = ar1(rng, phi, 200_000)
        assert dependence.autocorrelation_time(series) == pytest.approx((1 + phi) / (1 - phi), rel=0.1)


@pytest.mark.parametrize("count", [7, 22, 36, 37, 66, 121, 182])
def test_the_autocorrelation_time_is_that_of_the_covariances_themselves(count: int) -> None:
    series = ar1(np.random.default_rng(count), 0.8, count)
    centred = series - series.mean()
    lags = np.correlate(centred, centred, "full")[count - 1 :] / (centred @ centred)
    pairs = [lags[at] + lags[at + 1] for at in range(0, count - 1, 2)]
    positive = list(itertools.takewhile(lambda pair: pair > 0, pairs))
    assert dependence.autocorrelation_time(series) == pytest.approx(max(1.0, 2 * sum(positive) - 1), rel=1e-9)


@pytest.mark.parametrize("lags", [1, 2, 7, 64, 99, 100, 199, 200])
def test_autocovariances_block_by_block_are_those_of_the_whole_series(lags: int) -> None:
    series = np.random.default_rng(lags).normal(size=200)
    expected = np.correlate(series, series, "full")[199 : 199 + lags]
    assert dependence.autocovariances(series, lags) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_long_series_is_worth_what_its_covariances_say_also_where_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    series = np.cumsum(np.random.default_rng(1).normal(size=300))
    whole = dependence.autocorrelation_time(series)
    monkeypatch.setattr(dependence, "_LAGS", (2, 8))
    assert dependence.autocorrelation_time(series) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("series", [[], [1.0], [2.0] * 50, [0.1] * 49, [0.0, 1.0] * 30, [0.0, 1e-300] * 30])
def test_constant_short_or_alternating_series_count_as_independent(series: list[float]) -> None:
    assert dependence.autocorrelation_time(np.array(series)) == 1.0


def test_pooled_values_that_are_all_on_one_side_are_worth_their_clusters() -> None:
    found = dependence.exceedances(np.ones(6), 2.0, np.array([0, 0, 0, 2, 2, 2]))
    assert (found.short(), found.long(), found.plain()) == (2, 2, 2)
