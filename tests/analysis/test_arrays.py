"""What is done to arrays in several places is what a loop over their rows would do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Ints, changes, distinct, places, ranges, running_sums, runs

_pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)))


def _columns(pairs: list[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2).T


@given(_pairs)
def test_ranges_are_the_numbers_from_each_first_to_before_its_end(pairs: list[tuple[int, int]]) -> None:
    first, after = _columns(pairs)
    expected = [(i, number) for i, (low, high) in enumerate(pairs) for number in range(low, high)]
    assert list(zip(*(column.tolist() for column in ranges(first, after)), strict=True)) == expected


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(-1, 10)))
def test_the_place_of_a_value_is_the_first_that_has_it_or_none(ordered: list[int], values: list[int]) -> None:
    ordered.sort()
    found = places(np.array(ordered, np.int64), np.array(values, np.int64)).tolist()
    assert found == [ordered.index(value) if value in ordered else -1 for value in values]


@given(st.lists(st.integers(-5, 5)))
def test_of_equal_values_one_is_left_and_all_are_in_order(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@given(_pairs)
def test_runs_begin_where_a_row_differs_and_sums_begin_anew_with_them(pairs: list[tuple[int, int]]) -> None:
    groups, values = _columns(pairs)
    begins = [i for i, (group, _) in enumerate(pairs) if i == 0 or group != pairs[i - 1][0]]
    first, last = runs(changes(groups))
    assert first.tolist() == begins
    assert last.tolist() == [i - 1 for i in [*begins[1:], *([len(pairs)] if pairs else [])]]
    sums = [sum(values[max(b for b in begins if b <= i) : i + 1].tolist()) for i in range(len(pairs))]
    assert running_sums(groups, values).tolist() == sums
    both = [i for i, pair in enumerate(pairs) if i == 0 or pair != pairs[i - 1]]
    assert np.flatnonzero(changes(groups, values)).tolist() == both
