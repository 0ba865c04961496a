"""Conversations are told turn by turn, where there are any and where the sample supports it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.load import describe_load, describe_turns
from gapmeter.report.run import turns_sentence
from tests.kit.runs import stamped

MS = 1_000_000


def run(turns: list[int]) -> pd.DataFrame:
    due = 10**12 + np.arange(len(turns), dtype=np.int64) * 10 * MS
    place = np.array(turns)
    tokens = {"prompt_tokens": place * 100, "prompt_tokens_asked": place * 100, "cached_tokens": (place - 1) * 100}
    return stamped(due, due, due + place * 7 * MS, due + 90 * MS, turn=place, **tokens)


def test_each_turn_has_its_own_figures() -> None:
    found = describe_turns(run([1, 2, 3] * 40))
    assert [(each.turn, each.requests, each.prompt_tokens) for each in found] == [
        (1, 40, 100), (2, 40, 200), (3, 40, 300),
    ]  # fmt: skip
    assert [each.cached_share for each in found] == pytest.approx([0, 1 / 2, 2 / 3])
    assert [each.ttft.ms(50.0) for each in found] == pytest.approx([7, 14, 21], rel=0.002)
    assert [each.ttft.ms(99.0) for each in found] == [None] * 3
    needs = found[0].ttft.at(99.0).needs
    assert needs.minutes == pytest.approx(needs.requests * 0.030 / 60), "a turn comes round every 30 ms"
    assert turns_sentence(found) == (
        "TTFT p50 by turn: turn 1 7.00 ms (100 prompt tokens), turn 2 14.0 ms (200 prompt tokens), "
        "turn 3 21.0 ms (300 prompt tokens)"
    )


def test_a_server_that_tells_only_of_what_was_cached_says_0_by_saying_nothing() -> None:
    requests, open_loop = run([1, 2, 3] * 40), Evidence("open", "poisson")
    told = requests["cached_tokens"].astype("Int64")
    requests["cached_tokens"] = told.where(told > 0)
    assert describe_load(requests, open_loop).cached_share == pytest.approx(1 / 2)
    assert [each.cached_share for each in describe_turns(requests)] == pytest.approx([0, 1 / 2, 2 / 3])
    requests["cached_tokens"] = told.where(requests["turn"] < 3)  # it says 0: what it does not tell is not known
    assert describe_load(requests, open_loop).cached_share == pytest.approx(1 / 3)
    requests["cached_tokens"] = told.where(told < 0)
    assert describe_load(requests, open_loop).cached_share is None


def test_a_turn_of_which_nothing_is_known_is_left_out_of_the_line() -> None:
    requests = run([1] * 40 + [2] * 3 + [3] * 40)
    requests.loc[requests["turn"] == 3, "outcome"] = "http_5xx"
    found = describe_turns(requests)
    assert found[1].ttft.ms(50.0) is None
    assert found[2].ttft is None
    assert turns_sentence(found) == "TTFT p50 by turn: turn 1 7.00 ms (100 prompt tokens)"


def test_a_single_turn_has_no_rate_at_which_more_would_come() -> None:
    (found,) = describe_turns(run([1]))
    assert found.ttft.at(99.0).needs.requests > 300
    assert found.ttft.at(99.0).needs.minutes is None


def test_without_conversations_there_is_nothing_to_say() -> None:
    assert describe_turns(run([0] * 40)) == ()
    assert describe_turns(run([])) == ()
    assert turns_sentence([]) is None
