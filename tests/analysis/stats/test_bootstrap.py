"""Resamples follow the run's own dependence, and percentiles of them are Harrell and Davis's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from gapmeter.analysis.stats import bootstrap
from gapmeter.analysis.stats.bootstrap import Resampled, counts_of, pooled_harrell_davis


def once(values: NDArray[np.float64], percentile: float) -> float:
    """The percentile of the values as they are."""
    return Resampled(values).harrell_davis(np.ones((len(values), 1), np.int32), [percentile]).item()


def test_every_percentile_of_one_value_is_that_value() -> None:
    assert [once(np.array([7.0]), percentile) for percentile in (1, 50, 99.9)] == pytest.approx([7.0] * 3)


def test_values_that_are_missing_are_left_out_of_each_resample() -> None:
    counts = np.array([[1, 1, 0], [1, 0, 3], [0, 1, 0], [1, 1, 0]], np.int32)
    found = Resampled(np.array([1.0, np.nan, 2.0, 3.0])).harrell_davis(counts, [50])[:, 0]
    assert found[:2] == pytest.approx([2.0, 2.0])
    assert math.isnan(found[2])
    assert np.isnan(Resampled(np.full(4, np.nan)).harrell_davis(counts, [50, 99])).all()


@pytest.mark.parametrize("size", [2, 5, 300, 4000])  # the largest reads only a part of the order for each percentile
@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_percentiles_of_resamples_are_scipys_of_the_values_written_out(size: int, missing: float) -> None:
    rng = np.random.default_rng(size)
    values = np.where(rng.random(size) < missing, np.nan, rng.lognormal(0, 1, size).round(2))
    drawn, asked = bootstrap.draw(size, 3.0, 4, rng), [1.0, 50.0, 99.0, 99.9]
    theirs = [stats.mstats.hdquantiles(row[~np.isnan(row)], np.array(asked) / 100) for row in values[drawn]]
    assert Resampled(values).harrell_davis(counts_of(drawn), asked) == pytest.approx(np.array(theirs), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1.0, 1e6), min_size=200, max_size=300))
def test_pooled_percentiles_are_those_of_the_values_written_out(given: list[float]) -> None:
    kept, column = np.unique(given, return_inverse=True)
    counts = np.bincount(column, minlength=len(kept)).astype(np.float64)[None]
    pooled = pooled_harrell_davis(kept, counts, [50, 90])[0]
    assert pooled == pytest.approx([once(np.array(given), p) for p in (50, 90)], rel=1e-3)


def test_blocks_are_longer_the_more_alike_neighbors_are() -> None:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(2000)
    alike = np.convolve(noise, np.ones(20), "same")
    assert bootstrap.block_length(noise) < 5
    assert bootstrap.block_length(alike) > 15
    assert bootstrap.block_length(np.ones(100)) == 1


def test_a_resample_is_made_of_runs_of_neighbors() -> None:
    drawn = bootstrap.draw(100, 10, 400, np.random.default_rng(1))
    follows = (np.diff(drawn, axis=1) % 100 == 1).mean()
    assert drawn.min() == 0
    assert drawn.max() == 99
    assert follows == pytest.approx(0.9, abs=0.02)
    assert (counts_of(drawn).sum(axis=0) == 100).all()


def test_stretches_follow_one_another_and_grow_with_what_neighbors_share() -> None:
    rng = np.random.default_rng(5)
    alone = bootstrap.stretches(rng.normal(size=1000))
    shared = bootstrap.stretches(np.repeat(rng.normal(size=50), 20))
    assert (np.diff(alone) >= 0).all()
    assert alone.max() > 3 * shared.max() > 0


def test_means_of_drawn_stretches_are_around_the_mean() -> None:
    values = np.random.default_rng(2).normal(10, 1, (400, 1))
    stretch = bootstrap.stretches(values[:, 0])
    drawn = bootstrap.drawn_means(values, stretch, np.ones(400, np.bool_))
    low, high = bootstrap.with_draws(values.mean(), drawn[:, 0]).ends
    assert low < values.mean() < high
    assert high - low < 0.5


def test_of_a_long_series_as_many_stretches_are_drawn_as_tell_something() -> None:
    found = bootstrap.stretches(np.random.default_rng(5).normal(size=300_000))
    assert found[-1] + 1 == 2000
    sizes = np.bincount(found)
    assert (np.diff(found) >= 0).all() and sizes.max() - sizes.min() <= 1
