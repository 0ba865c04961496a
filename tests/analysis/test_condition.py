from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger.condition import ConditionError, holds

COLUMNS = {
    "tokens": pd.Series([10, 64, 65, None], dtype="Int64"),
    "ms": pd.Series([1.5, 2.0, np.nan, 300.0]),
    "reason": pd.Series(["stop", "length", "length", "stop"]),
}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tokens > 64", [2]), ("tokens >= 64", [1, 2]), ("64 < tokens", [2]), ("10 < tokens <= 65", [1, 2]),
        ("reason == 'length' and ms < 5", [1]), ("tokens > 64 or ms > 100", [2, 3]), ("ms != 2", [0, 3]),
        ("not reason == 'stop'", [1, 2]), ("ms > -1", [0, 1, 3]), ("ms < tokens", [0, 1]),
        ("not tokens > 64", [0, 1]), ("not ms < 2", [1, 3]), ("not 10 < tokens <= 64", [0, 2]),
        ("not (tokens > 64 or ms > 100)", [0, 1]), ("not (tokens > 64 and ms > 100)", [0, 1]),
    ],
)  # fmt: skip
def test_a_condition_holds_for_the_rows_that_it_says_and_never_for_an_unknown_value(text: str, rows: list[int]) -> None:
    assert np.flatnonzero(holds(text, COLUMNS)).tolist() == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("token > 3", "'token' is no column; known are ms, reason, tokens"),
        ("tokens >", "is no condition; write one as"),
        ("tokens", "is no comparison"),
        ("tokens in (1, 2)", "only <, <="),
        ("reason > 3", "compares words with numbers"),
        ("1 < 2", "compares no column"),
        ("tokens.sum() > 3", "neither a column nor a number"),
        ("__import__('os').system('true') > 3", "neither a column nor a number"),
        ("tokens > (lambda: 3)()", "neither a column nor a number"),
        ("tokens > " + "1" * 1000, "characters long"),
        ("tokens > True", "neither a column nor a number"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ConditionError, match=r".") as refused:
        holds(text, COLUMNS)
    assert told in str(refused.value)


@given(st.text(alphabet="abct oken><=!&|()[]{}.,'\"0123456789-+*_\\\n", max_size=60))
def test_no_text_does_anything_but_hold_or_be_refused(text: str) -> None:
    try:
        assert len(holds(text, COLUMNS)) == 4
    except ConditionError:
        pass
