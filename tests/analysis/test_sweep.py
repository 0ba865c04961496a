"""The sweep gives every nanosecond to one activity, the one of highest priority."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger import critical_path
from gapmeter.analysis.ledger.critical_path import Intervals, at_least, overlaps, pieces, sweep, union, with_holes
from gapmeter.loadgen import transport

CLASSES = 5

_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30), st.integers(0, CLASSES - 1)))


def _intervals(rows: list[tuple[int, int, int, int]]) -> Intervals:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Intervals(*columns)


def _columns(table: Intervals) -> tuple[np.ndarray, ...]:
    return table.event, table.start, table.end, table.cls


def _sums(owned: Intervals, events: int = 4) -> np.ndarray:
    found = np.zeros((events, CLASSES), int)
    np.add.at(found, (owned.event, owned.cls), owned.end - owned.start)
    return found


def _by_hand(rows: list[tuple[int, int, int, int]], over: set[int], under: set[int]) -> tuple[np.ndarray, np.ndarray]:
    owned, hidden = np.zeros((4, CLASSES), int), np.zeros(4, int)
    for event in range(4):
        for tick in range(31):
            active = {cls for e, start, end, cls in rows if e == event and start <= tick < end}
            if active:
                owned[event, min(active)] += 1
                hidden[event] += min(active) in over and bool(active & under)
    return owned, hidden


@given(_rows)
def test_every_tick_goes_to_the_active_class_of_highest_priority(rows: list[tuple[int, int, int, int]]) -> None:
    rows = [row for row in rows if row[1] < row[2]]
    got, hidden = sweep(_intervals(rows), 4, CLASSES, over=np.array([0, 1]), under=np.array([3]))
    want, want_hidden = _by_hand(rows, {0, 1}, {3})
    assert (_sums(got) == want).all()
    assert (hidden == want_hidden).all()


@given(_rows, st.integers(1, 4))
def test_enough_intervals_at_once_are_found_as_by_looking_at_every_tick(
    rows: list[tuple[int, int, int, int]], count: int
) -> None:
    ends = [(start, end) for _, start, end, _ in rows if start <= end]
    start, end = at_least(count, *np.array(ends, np.int64).reshape(-1, 2).T)
    found = [tick for tick in range(31) if sum(low <= tick < high for low, high in ends) >= count]
    assert [tick for low, high in zip(start, end, strict=True) for tick in range(low, high)] == found
    assert (start[1:] > end[:-1]).all()


_stretches = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def test_the_module_in_c_is_there_wherever_others_were_built() -> None:
    assert (critical_path.native is None) == (transport._native is None)


@given(_rows, _stretches, st.sampled_from([1, 20, 100]))
def test_the_module_in_c_says_the_same_as_numpy(
    rows: list[tuple[int, int, int, int]], stretches: list[tuple[int, int]], apart: int
) -> None:
    event, start, end, cls = np.array(rows, np.int64).reshape(-1, 4).T
    table = Intervals(event, start, end, apart * cls)
    begun, ended = np.sort(np.array(stretches, np.int64).ravel()).reshape(-1, 2).T  # some are empty, some touch
    over, under = apart * np.array([0, 1]), apart * np.array([1, 3])
    found = []
    for native in (critical_path.native, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(critical_path, "native", native)
            owned, hidden = sweep(table, 4, apart * CLASSES, over=over, under=under)
            cut, met = table.outside(begun, ended), overlaps(start, end, begun, ended)
        found.append([*_columns(owned), hidden, *_columns(cut), *met])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(critical_path.native is None, reason="it was not built")
def test_the_module_in_c_refuses_columns_that_do_not_fit_together() -> None:
    zero, one, two = (np.full(1, value, np.int64) for value in range(3))
    marks, none = np.zeros(1, np.uint8), np.empty(0, np.int64)
    ns = np.zeros(3, np.int64)
    for columns in (
        (one, zero, one, zero), (-one, zero, one, zero), (zero, zero, one, one), (zero, zero, one, -one),
        (zero, none, one, zero), (zero, zero, one, none),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="columns"):
            critical_path.native.sweep(*columns, marks, zero.copy())
    for columns in ((zero, none, zero, one), (zero, one, zero, none)):
        with pytest.raises(ValueError, match="columns"):
            critical_path.native.meet(*columns, False)
    for event, rows, reason, kind in ((one, zero, 0, 0), (zero, one, 0, 0), (zero, zero, 1, 0), (zero, zero, 0, 3)):
        reasons, kinds = np.full(1, reason, np.int16), np.full(1, kind, np.uint8)
        with pytest.raises(ValueError, match="columns"):
            critical_path.native.kept(event, zero, two, rows, one, zero, one, reasons, kinds, zero.copy(), ns)


def test_times_too_far_apart_for_one_key_are_swept_all_the_same() -> None:
    far = 10**18
    owned = pieces(Intervals(*np.array([[4, 0, far, 2], [0, 3, far, 1], [0, 0, 5, 0]]).T), 5, CLASSES)
    assert owned.event.tolist() == [0, 0, 4]
    assert owned.start.tolist() == [0, 5, 0] and owned.end.tolist() == [5, far, far]
    assert owned.cls.tolist() == [0, 1, 2]


def test_many_events_are_swept_like_few() -> None:
    rng = np.random.default_rng(1)
    start = rng.integers(0, 1000, 900_000)
    event = rng.integers(0, 3000, 900_000)
    many = Intervals(event, start, start + rng.integers(1, 9, 900_000), rng.integers(0, CLASSES, 900_000))
    whole, _ = sweep(many, 3000, CLASSES)
    some = many.event == 1234
    alone, _ = sweep(Intervals(np.zeros(some.sum(), int), many.start[some], many.end[some], many.cls[some]), 1, CLASSES)
    assert (_sums(whole, 3000)[1234] == _sums(alone, 1)[0]).all()


@given(_stretches)
def test_a_union_covers_the_same_ticks_in_order_without_overlap(stretches: list[tuple[int, int]]) -> None:
    start, end = (
        np.array(column, dtype=np.int64) for column in (zip(*stretches, strict=True) if stretches else ((), ()))
    )
    low, high = union(np.minimum(start, end), np.maximum(start, end))
    ticks = {tick for a, b in stretches for tick in range(min(a, b), max(a, b))}
    assert {tick for a, b in zip(low, high, strict=True) for tick in range(a, b)} == ticks
    assert (low[1:] > high[:-1]).all()


@given(_rows, _stretches)
def test_the_parts_within_stretches_cover_just_the_ticks_of_both(
    rows: list[tuple[int, int, int, int]], stretches: list[tuple[int, int]]
) -> None:
    rows = [row for row in rows if row[1] < row[2]]
    kept = [(a, b) for a, b in stretches if a < b]
    start, end = np.array(kept, dtype=np.int64).reshape(-1, 2).T
    table = _intervals(rows)
    row, _, low, high = overlaps(table.start, table.end, *union(start, end))
    got = sorted((e, t) for e, a, b in zip(table.event[row], low, high, strict=True) for t in range(a, b))
    inside = {tick for a, b in kept for tick in range(a, b)}
    assert got == sorted((e, t) for e, a, b, _ in rows for t in range(a, b) if t in inside)


@given(_rows)
def test_what_is_owned_comes_in_order_without_overlap_neighbors_joined(rows: list[tuple[int, int, int, int]]) -> None:
    found = pieces(_intervals([row for row in rows if row[1] < row[2]]), 4, CLASSES)
    same = found.event[1:] == found.event[:-1]
    assert (found.start[1:] >= found.end[:-1])[same].all()
    touching = same & (found.start[1:] == found.end[:-1])
    assert (found.cls[1:] != found.cls[:-1])[touching].all()


@given(_rows)
def test_with_its_holes_a_window_is_covered_exactly_once(rows: list[tuple[int, int, int, int]]) -> None:
    rows = [row for row in rows if row[1] < row[2]]
    low, high = np.zeros(4, int), np.full(4, 30)
    owned = pieces(_intervals(rows), 4, CLASSES)
    whole = with_holes(owned, low, high)
    named = whole.cls >= 0
    assert all((getattr(whole, n)[named] == getattr(owned, n)).all() for n in ("event", "start", "end", "cls"))
    assert (np.diff(whole.event) >= 0).all()
    for event in range(4):
        mine = whole.event == event
        assert whole.start[mine][0] == 0 and whole.end[mine][-1] == 30
        assert (whole.start[mine][1:] == whole.end[mine][:-1]).all()
