"""The pairs' interval keeps its promise, also when the machine disturbs some bursts."""

from __future__ import annotations

import numpy as np
import pytest

from bench.probe_cost import hodges_lehmann


def test_the_estimate_is_the_median_of_all_pairwise_means() -> None:
    values = np.array([0.0, 1.0, 4.0, 10.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0])
    means = [(a + b) / 2 for i, a in enumerate(values) for b in values[i:]]
    middle, low, high = hodges_lehmann(values)
    assert middle == np.median(means)
    assert low < middle < high


@pytest.mark.parametrize("disturbed", [0.0, 0.2])
def test_the_interval_holds_the_true_ratio_in_95_of_100_cases(disturbed: float) -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(600):
        values = rng.normal(0.01, 0.02, 40) + rng.normal(0, 0.5, 40) * (rng.random(40) < disturbed)
        _, low, high = hodges_lehmann(values)
        held += low <= 0.01 <= high
    assert 0.92 <= held / 600 <= 0.98
