"""MSER-5 is its formula."""

from __future__ import annotations

import numpy as np
import pytest

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.stats.changes import mser5, slope_of


def by_definition(values: Floats) -> tuple[int, bool]:
    """MSER-5 as its formula stands, one truncation at a time."""
    means = [values[i : i + 5].mean() for i in range(0, len(values) - len(values) % 5, 5)]
    m = len(means)
    scores = [np.sum((np.array(means[d:]) - np.mean(means[d:])) ** 2) / (m - d) ** 2 for d in range(m // 2 + 1)]
    return int(np.argmin(scores)) * 5, int(np.argmin(scores)) == m // 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [50, 203, 1000])
def test_mser5_is_its_formula(seed: int, count: int) -> None:
    values = np.random.default_rng(seed).lognormal(3, 1, count)
    values[: count // 10] *= 5
    assert mser5(values) == by_definition(values)


@pytest.mark.parametrize(
    ("level", "rise", "grows"), [(100, 30, False), (100, 45, True), (3, 1.5, False), (3, 2.5, True)]
)
def test_a_queue_grows_by_a_third_of_what_was_in_flight_and_by_two(level: float, rise: float, grows: bool) -> None:
    """A line without noise, which a steady queue's wandering cannot explain."""
    found = slope_of(np.linspace(level, level + rise, 40), np.arange(40.0), 10.0)
    assert found.grows is grows
    assert (found.first, found.last) == pytest.approx((level, level + rise))
