"""Where a well-kept library has the same method, ours gives its figures.

Ours are kept since they take what the libraries do not (n_eff, a real number, in place of n; whole tables of resamples
at once), and since ``arch`` and ``statsmodels`` are large for four short functions, as ``ruptures`` is for one:
they are installed for this alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import ruptures
from arch.bootstrap import StationaryBootstrap, optimal_block_length
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.rates import confint_poisson

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.stats.bootstrap import block_length, draw
from gapmeter.analysis.stats.changes import least_squares_cuts
from gapmeter.analysis.stats.dependence import autocorrelation_time
from gapmeter.analysis.stats.estimate import Difference, Spread, holm
from gapmeter.analysis.stats.exact import chance_of_so_many, chance_of_so_many_drawn, rate_at_least, share_bounds
from gapmeter.analysis.stats.series import Series, ratio_of_geometric_means
from tests.kit.series import ar1


def see_saw(rng: np.random.Generator, count: int) -> Floats:
    """Values whose neighbors are unlike, so that no allowance is made for their being alike."""
    noise = rng.normal(0, 1, count + 1)
    values = np.asarray(3 + noise[1:] - 0.9 * noise[:-1])
    assert autocorrelation_time(values) == 1
    return values


@pytest.mark.parametrize("phi", [0.7, 0.9, 0.95])
@pytest.mark.parametrize("count", [100, 1000, 5000])
def test_the_length_of_blocks_is_archs_but_for_a_lag(phi: float, count: int) -> None:
    """Its window begins at the first negligible autocorrelation, ours, as in the paper, at the last that is not."""
    series = ar1(np.random.default_rng([count, round(100 * phi)]), phi, count)
    theirs = float(optimal_block_length(series)["stationary"].iloc[0])
    assert block_length(series) == pytest.approx(theirs, rel=0.05)


def test_a_mean_spreads_over_stationary_resamples_as_it_does_over_archs() -> None:
    series, draws = ar1(np.random.default_rng(3), 0.8, 1000), 4000
    theirs = StationaryBootstrap(20, series, seed=1).apply(np.mean, draws).std()
    ours = series[draw(len(series), 20.0, draws, np.random.default_rng(2))].mean(axis=1).std()
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_holm_is_statsmodels(count: int) -> None:
    p = np.random.default_rng(count).beta(0.3, 3, count).tolist()
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])


@settings(deadline=None)
@given(st.floats(1, 1e5), st.just(0.0) | st.floats(1e-6, 1))
def test_bounds_of_a_share_are_statsmodels_also_between_whole_numbers(count: float, part: float) -> None:
    low, high = proportion_confint(part * count, count, method="beta")
    hits = part * count
    expected = (0.0 if hits <= 0 else float(low), 1.0 if hits >= count else float(high))
    assert share_bounds(hits, count) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(0.1, 1e4))
def test_bounds_of_a_rate_are_statsmodels(count: int, seconds: float) -> None:
    low, _ = confint_poisson(count, seconds, method="exact-c")
    assert rate_at_least(count, seconds) == pytest.approx(low)


@pytest.mark.parametrize("count", [2, 50, 401])
def test_a_mean_has_scipys_interval(count: int) -> None:
    values = see_saw(np.random.default_rng(count), count)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert Series(values).mean().ends == pytest.approx((theirs.low, theirs.high))


def test_a_ratio_of_geometric_means_has_scipys_interval_of_welch() -> None:
    rng = np.random.default_rng(8)
    one, two = rng.normal(1, 0.3, 40), see_saw(rng, 400)
    theirs = stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
    found = ratio_of_geometric_means(one, two)
    assert np.log(found.known[1:]) == pytest.approx((theirs.low, theirs.high))


def test_a_difference_has_scipys_interval_and_p() -> None:
    rng = np.random.default_rng(9)
    a, b = rng.normal(0, 1, 30), rng.normal(0.4, 1, 30)
    theirs = stats.ttest_rel(b, a)
    found = Difference(float(a.mean()), float(b.mean()), (Spread(float((b - a).std(ddof=1)) / 30**0.5, 29),))
    assert found.p == pytest.approx(theirs.pvalue)
    ends = theirs.confidence_interval(0.95)
    assert found.estimate.ends == pytest.approx((ends.low, ends.high))


@given(st.integers(0, 2**32 - 1), st.integers(10, 200), st.integers(0, 4), st.sampled_from([10.0, 40.0, 80.0]))
@settings(deadline=None, max_examples=100)
def test_levels_change_where_ruptures_cuts(seed: int, count: int, levels: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, count) + np.repeat(rng.normal(0, 5, levels + 1), count)[:: levels + 1]
    theirs = ruptures.KernelCPD(kernel="linear", min_size=2).fit(values.reshape(-1, 1)).predict(pen=penalty)
    assert least_squares_cuts(values, penalty) == theirs[:-1]


@given(st.integers(1, 400), st.data())
def test_chances_of_so_many_are_scipys(count: int, data: st.DataObject) -> None:
    marked, drawn, hits = (data.draw(st.integers(0, count)) for _ in range(3))
    hypergeometric = stats.hypergeom(count, marked, drawn).sf(hits - 1)
    assert chance_of_so_many_drawn(hits, marked, drawn, count) == pytest.approx(hypergeometric, rel=1e-6, abs=1e-12)
    binomial = stats.binom(count, 0.01).sf(hits - 1)
    assert chance_of_so_many(hits, count, count, 0.01) == pytest.approx(binomial, rel=1e-6, abs=1e-12)
