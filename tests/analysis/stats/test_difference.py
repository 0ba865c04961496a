"""A difference is claimed no oftener than promised, and not at all where nothing supports it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.stats.estimate import Difference, holm


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_never_makes_a_p_smaller_nor_changes_their_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert (adjusted >= np.array(p) - 1e-15).all()
    assert (adjusted <= 1).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


def test_holm_multiplies_the_smallest_by_the_number_of_tests_and_the_next_by_one_less() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_an_unsupported_figure_has_no_interval_and_nothing_could_have_been_found() -> None:
    nothing = Difference(1.0, 2.0, why="too few")
    assert not nothing.supported
    assert math.isinf(nothing.half_width(0.95))
    assert math.isinf(nothing.least(0.95))
