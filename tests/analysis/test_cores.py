"""A server whose processes wait for cores is told so, and no other."""

from __future__ import annotations

import pandas as pd
import pytest

from gapmeter.analysis.judge.warnings import core_warning


def _rows(core_wait_ns: float | None) -> pd.DataFrame:
    rows = {"event": ["first_token", "last_token"], "total_ns": [1e6, 9e6], "core_wait_ns": [core_wait_ns, 0.0]}
    return pd.DataFrame(rows)


def test_the_warning_gives_the_share_of_the_time_to_first_tokens() -> None:
    (found,) = core_warning(_rows(51_000.0))
    assert found.text.startswith("5.1 % of the time to first tokens")
    assert found.touches == ("core_wait",)


@pytest.mark.parametrize("waited", [0.0, 29_000.0, None])
def test_little_or_unmeasured_waiting_is_not_worth_a_warning(waited: float | None) -> None:
    assert not list(core_warning(_rows(waited)))
