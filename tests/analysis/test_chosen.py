"""Few requests are all shown; of many, the slowest and an even sample."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.portions import MOST_SHOWN, chosen


def _requests(count: int) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    due = np.arange(count) * 1_000_000
    first = due + rng.integers(1, 1000, count)
    table = pd.DataFrame(
        {"due_ns": due, "first_token_ns": first, "last_token_ns": first + rng.integers(0, 1000, count)}
    )
    table = table.astype("Int64")
    table["outcome"] = "ok"
    return table


def test_of_few_requests_all_that_were_answered_are_shown() -> None:
    table = _requests(50)
    table.loc[7, "outcome"] = "refused"
    table.loc[8, "first_token_ns"] = pd.NA
    assert np.flatnonzero(~chosen(table)).tolist() == [7, 8]


def test_of_many_the_slowest_and_an_even_sample_are_shown() -> None:
    table = _requests(20_000)
    table.loc[11, "outcome"] = "timed_out"
    kept = chosen(table)
    assert kept.sum() == MOST_SHOWN and not kept[11]
    waited = (table["last_token_ns"] - table["due_ns"]).drop(index=11)
    assert kept[waited.nlargest(500).index].all()
    assert np.diff(np.flatnonzero(kept)).max() < 100
