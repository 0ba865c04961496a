"""A difference is claimed no oftener than promised, and not at all where nothing supports it."""

from __future__ import annotations

import math

import pytest

from gapmeter.analysis.stats.estimate import Difference, Spread, t_quantile


def test_an_unsupported_figure_has_no_interval_and_nothing_could_have_been_found() -> None:
    nothing = Difference(1.0, 2.0, why="too few")
    assert not nothing.supported
    assert math.isinf(nothing.half_width(0.95))
    assert math.isinf(nothing.least(0.95))


def test_of_two_errors_of_a_difference_the_one_that_claims_less_counts() -> None:
    """Many requests that say little of how runs differ: 0.1 with many degrees of freedom, and 0.3 with four."""
    within, between = Spread(0.1, 1000.0), Spread(0.3, 4.0)
    for spreads in ((within, between), (between, within)):
        found = Difference(1.0, 2.0, spreads, spreads)
        half = t_quantile(4.0) * 0.3
        assert found.estimate.ends == pytest.approx((1 - half, 1 + half))
        assert (found.df, found.p, found.least(0.95)) == (4.0, between.p(1.0), between.least(0.95))
        assert found.growth_ends == pytest.approx((2 / math.exp(half) - 1, 2 * math.exp(half) - 1))
