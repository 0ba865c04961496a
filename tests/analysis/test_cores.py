"""A server whose processes wait for cores is told so, and no other."""

from __future__ import annotations

import pandas as pd
import pytest

from gapmeter.analysis.judge.warnings import core_warning
from gapmeter.analysis.ledger.cores import Culprit


def _rows(core_wait_ns: float | None) -> pd.DataFrame:
    rows = {"event": ["first_token", "last_token"], "total_ns": [1e6, 9e6], "core_wait_ns": [core_wait_ns, 0.0]}
    return pd.DataFrame(rows)


def test_the_warning_gives_the_share_of_the_time_to_first_tokens() -> None:
    (found,) = core_warning(_rows(51_000.0), {})
    assert found.text == "the server waited for a CPU core for 5.1 % of the time to the first token"
    assert found.touches == ("core_wait",)


@pytest.mark.parametrize("waited", [0.0, 29_000.0, None])
def test_little_or_unmeasured_waiting_is_not_worth_a_warning(waited: float | None) -> None:
    assert not list(core_warning(_rows(waited), {}))


@pytest.mark.parametrize(
    ("held", "text", "flag"),
    [
        (
            {Culprit("api", "egress"): 71, Culprit("engine"): 27, Culprit("load tester"): 2},
            "; the cores were running API server at egress (71 %), engine (27 %)",
            "more cores for the server",
        ),
        (
            {Culprit("another program"): 90, Culprit("engine", "input_prep"): 10},
            "; the cores were running another program (90 %), engine at input prep (10 %)",
            "dedicated cores for the server",
        ),
        (
            {Culprit("engine"): 90, Culprit("nobody"): 10},
            "; the cores were running engine (90 %), no program (10 %)",
            "more cores for the server",
        ),
        (
            {Culprit("load tester"): 5},
            "the load tester (100 %)",
            "other cores, or another machine, for the load tester",
        ),
    ],
)
def test_who_had_the_core_is_named_and_what_to_do_about_him(held: dict[Culprit, int], text: str, flag: str) -> None:
    (found,) = core_warning(_rows(51_000.0), held)
    assert found.text.endswith(text)
    assert found.flag == flag
