"""A difference is claimed no oftener than promised, and not at all where nothing supports it."""

from __future__ import annotations

import math

from gapmeter.analysis.stats.estimate import Difference


def test_an_unsupported_figure_has_no_interval_and_nothing_could_have_been_found() -> None:
    nothing = Difference(1.0, 2.0, why="too few")
    assert not nothing.supported
    assert math.isinf(nothing.half_width(0.95))
    assert math.isinf(nothing.least(0.95))
