"""Few requests are all shown; of many, the slowest and an even sample. And whose spans of tokens are kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger.portions import MOST_SHOWN, chosen
from gapmeter.analysis.ledger.sieve import OF_TOKENS, AskedTokens, Sieve
from gapmeter.analysis.ledger.trace import REQUEST_SPAN
from gapmeter.records import Span
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


_WRITTEN = st.lists(
    st.tuples(st.sampled_from(OF_TOKENS), st.sampled_from([1, 2, 4, 9]), st.integers(-1, 3), st.booleans()), max_size=60
)
_IDS = {1: "a", 2: "", 4: "b", 9: "c"}  # the second is not the client's


@given(_WRITTEN, _LIMITS, _LIMITS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_what_passes_while_a_file_is_read_is_all_that_is_asked_for_of_it(
    written: list[tuple[Span, int, int, bool]], first: list[int], last: list[int], every: list[bool]
) -> None:
    asked = AskedTokens(np.array(every), np.array(first), np.array(last))
    sieve = Sieve(asked, {"a": 0, "b": 1, "c": 2})
    rows, counts = {1: 0, 2: -1, 4: 1, 9: 2}, dict[tuple[Span, int], int]()
    block, whole = list[tuple[Span, int, int]](), list[tuple[Span, int, int]]()
    passed = list[tuple[Span, int, int]]()
    for number, (code, ref, more, ends) in enumerate(written, 1):
        counts[code, ref] = counts.get((code, ref), 0) + max(more, 0)
        block.append((code, ref, counts[code, ref] if more >= 0 else 0))  # a chunk without tokens
        if ends or number == len(written):
            sieve.learn(_IDS)
            for kind in sorted(OF_TOKENS, key=lambda kind: kind != Span.EGRESS):
                refs, n = np.array([one[1:] for one in block if one[0] == kind], np.uint32).reshape(-1, 2).T
                kept = sieve.passes(kind, refs, n)
                passed += [(kind, *row) for row in zip(refs[kept].tolist(), n[kept].tolist(), strict=True)]
            whole, block = whole + block, []
    assert sieve.sure
    writes = _spans([(rows[ref], n) for code, ref, n in whole if code == Span.EGRESS])
    asked = asked.with_chunks(writes["request"], writes["n"])
    for kind in OF_TOKENS:
        all_of, some_of = (
            _spans([(rows[ref], n) for code, ref, n in spans if code == kind and rows[ref] >= 0])
            for spans in (whole, passed)
        )
        wanted, found = (
            sorted(spans[asked.carried_by(spans["request"], spans["n"])][["request", "n"]].tolist())
            for spans in (all_of, some_of)
        )
        assert found == wanted


def test_what_passes_is_not_sure_where_a_request_was_not_named_or_its_tokens_are_not_in_order() -> None:
    def is_sure(names: dict[int, str], refs: list[int], n: list[int]) -> bool:
        sieve = Sieve(AskedTokens(*np.zeros((3, 2), np.int64)), {"a": 0, "b": 1})
        sieve.learn(names)
        sieve.passes(Span.EGRESS, np.array(refs, np.uint32), np.array(n, np.uint32))
        return sieve.sure

    assert is_sure({1: "a", 2: "b"}, [1, 2, 1, 2], [1, 3, 2, 3])
    assert not is_sure({1: "a"}, [1, 2], [1, 1]), "not named yet"
    assert is_sure({1: "a", 3: "b"}, [1, 3, 1], [1, 1, 2]), "one has no name, and nobody speaks of it"
    assert not is_sure({1: "a", 3: "b"}, [1, 2], [1, 2])
    assert is_sure({1: "a"}, [1, 1, 1], [1, 2, 0]), "the end of an answer carries no token"
    assert not is_sure({1: "a", 2: "b"}, [1, 2, 1], [2, 1, 1]), "not in order"
    assert not is_sure({1: "a"}, [0], [1]), "nobody's"


def test_sieved_blocks_keep_few_of_the_tokens_of_long_answers() -> None:
    sieve = Sieve(AskedTokens(*np.array([[0], [1], [100]])), {"a": 0})
    sieve.learn({1: "a"})
    n = np.arange(1, 101, dtype=np.uint32)
    for kind in sorted(OF_TOKENS, key=lambda kind: kind != Span.EGRESS):
        parts = [sieve.passes(kind, np.ones(50, np.uint32), half) for half in np.split(n, 2)]
        assert n[np.concatenate(parts)].tolist() == [1, 100]
