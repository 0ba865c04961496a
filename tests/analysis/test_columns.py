"""Columns that come block by block are what they would be joined at the end, in less memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Columns, folded

VALUES = st.sampled_from([0.0, 1.0, np.nan])


@given(st.lists(st.tuples(st.lists(VALUES, min_size=1, max_size=4), st.booleans()), min_size=1, max_size=6))
def test_columns_are_their_blocks_one_after_the_other(blocks: list[tuple[list[float], bool]]) -> None:
    """``same``: whether a block has one array under both names."""
    made = Columns(sum(len(values) for values, _ in blocks) + 3)
    first, second = [], []
    for values, same in blocks:
        one = folded(np.array(values))
        other = one if same else folded(np.array(values[::-1]))
        made.add({"one": one, "other": other})
        first.append(one)
        second.append(other)
    whole = made.whole()
    np.testing.assert_array_equal(whole["one"], np.concatenate(first))
    np.testing.assert_array_equal(whole["other"], np.concatenate(second))
    if all(same for _, same in blocks):
        assert np.shares_memory(whole["one"], whole["other"])


def test_a_column_of_one_value_has_no_memory_of_its_own_until_another_comes() -> None:
    made = Columns(1000)
    for value in (2.0, 2.0, 3.0):
        made.add({"x": folded(np.full(100, value))})
        told = made.whole()["x"]
        assert (told.strides[0] == 0) == (value == 2.0)
    assert (len(told), told[199], told[200]) == (300, 2.0, 3.0)


def test_no_rows_are_no_rows() -> None:
    made = Columns(0)
    made.add({"x": folded(np.empty(0))})
    assert len(made.whole()["x"]) == 0
