"""Wording that all kinds of results share."""

from __future__ import annotations

import pytest

from gapmeter.analysis.results.codec import Ends
from gapmeter.report.words import part_of


@pytest.mark.parametrize(
    ("share", "ends", "told"),
    [
        (0.22, (0.12, 0.34), "22 % (12 to 34 %)"),
        (0.97, (0.59, 1.0), "97 % (59 to 100 %)"),
        (0.97, (0.59, 1.68), "97 % (59 % or more)"),
        (0.99, (0.97, 1.01), "99 % (97 % or more)"),
        (1.003, (0.97, 1.01), "all (97 % or more)"),
        (1.003, (0.998, 1.01), "all"),
        (1.02, None, "all"),
        (1.87, (1.36, 2.94), "more than all"),
        (0.5, (None, None), "50 %"),
        (-0.1, (-0.2, 0.02), "-10 % (-20 to 2.0 %)"),
    ],
)
def test_no_share_of_a_whole_reaches_beyond_all_of_it(share: float, ends: Ends | None, told: str) -> None:
    assert part_of(share, ends) == told
