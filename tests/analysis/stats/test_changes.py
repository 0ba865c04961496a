"""MSER-5 is its formula."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gapmeter.analysis.stats.changes import mser5

Floats = NDArray[np.float64]


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
