"""Few requests are all shown; of many, the slowest and an even sample. And whose spans of tokens are kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger.portions import MOST_SHOWN, chosen
from gapmeter.analysis.ledger.trace import REQUEST_SPAN, AskedTokens
from gapmeter.records.reader import Table


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


_COUNTS = st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 12)), max_size=25)
_LIMITS = st.lists(st.integers(0, 12), min_size=3, max_size=3)


def _spans(counts: list[tuple[int, int]]) -> Table:
    """Of these requests, with so many tokens so far; each starts at a moment of its own."""
    spans = np.zeros(len(counts), REQUEST_SPAN)
    spans["request"], spans["n"] = np.array(sorted(counts), np.int64).reshape(-1, 2).T
    spans["start"] = np.arange(len(counts))
    return spans


def _carried(spans: Table, request: int, n: int) -> list[int]:
    """When the first that reaches a token began."""
    return spans["start"][(spans["request"] == request) & (spans["n"] >= n)][:1].tolist()


@given(_COUNTS, _COUNTS, _LIMITS, _LIMITS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_spans_that_are_kept_are_those_that_carried_the_tokens_asked_for(
    written: list[tuple[int, int]], counts: list[tuple[int, int]], first: list[int], last: list[int], every: list[bool]
) -> None:
    writes, spans = _spans(written), _spans(counts)
    asked = AskedTokens(np.array(every), np.array(first), np.array(last))
    asked = asked.with_chunks(writes["request"], writes["n"])
    kept = spans[asked.carried_by(spans["request"], spans["n"])]
    assert set(kept["start"].tolist()) <= set(spans["start"].tolist())
    for request in range(3):
        chunk = min((n for whose, n in written if whose == request and n > 0), default=0)
        assert asked.first[request] == max(first[request], chunk)
        upto = range(1, int(asked.first[request]) + 1)
        for n in range(1, 14) if every[request] else (*upto, *range(last[request], 14)):
            assert _carried(kept, request, n) == _carried(spans, request, n)


def test_of_a_request_whose_gaps_are_not_told_what_lies_between_is_left_out() -> None:
    spans = _spans([(request, n) for request in range(2) for n in range(1, 11)])
    asked = AskedTokens(np.array([False, True]), np.array([2, 2]), np.array([9, 9]))
    kept = spans[asked.carried_by(spans["request"], spans["n"])]
    assert kept["n"][kept["request"] == 0].tolist() == [1, 2, 9, 10]
    assert kept["n"][kept["request"] == 1].tolist() == list(range(1, 11))
