"""The kinds of arrays that figures are made from, what is done to them in several places, and large tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]


def each_of(counts: Ints) -> tuple[Ints, Ints]:
    """``counts[i]`` rows for each i: whose a row is, and which of its own it is. [2, 0, 1]: [0, 0, 2], [0, 1, 0]."""
    return ranges(np.zeros_like(counts), counts)


def ranges(first: Ints, after: Ints) -> tuple[Ints, Ints]:
    """The numbers from ``first[i]`` up to before ``after[i]`` for each i: whose each is, and the numbers.

    [5, 9, 7], [7, 9, 8]: [0, 0, 2], [5, 6, 7].
    """
    counts = np.maximum(after - first, 0)
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def places(ordered: Ints, values: Ints) -> Ints:
    """Where in ``ordered`` each value stands (the first of equal ones), -1 where it does not."""
    if not len(ordered):
        return np.full(len(values), -1)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[at] == values, at, -1)


def changes(*columns: AnyArray) -> Bools:
    """Which rows differ from the one before in any of these columns; the first does."""
    new = np.zeros(len(columns[0]), np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def distinct(values: AnyArray) -> AnyArray:
    """Each value once, in order. NumPy's ``unique`` hashes them, which takes up to 40 times as long."""
    ordered = np.sort(values)
    return ordered[changes(ordered)]


def runs(begins: Bools) -> tuple[Ints, Ints]:
    """The first and the last row of each run of rows, by which of them begin one."""
    first = np.flatnonzero(begins)
    return first, np.append(first[1:], len(begins))[: len(first)] - 1


def running_sums(groups: AnyArray, values: Ints) -> Ints:
    """The sum of ``values`` up to each row, from where its run of equal ``groups`` began."""
    total, (first, last) = np.cumsum(values, dtype=np.int64), runs(changes(groups))
    total -= np.repeat(total[first] - values[first], last - first + 1)
    return total


class Ranked:
    """Values by rank: how many are smaller than each; of equal ones the earlier counts as smaller."""

    def __init__(self, values: Floats) -> None:
        self.values, self.ordered = values, np.sort(values)

    def below(self, rank: int) -> Bools:
        """Which have a smaller rank: so many, as far as there are."""
        if rank <= 0 or rank >= len(self.values):
            return np.full(len(self.values), rank > 0)
        last = self.ordered[rank - 1]
        member: Bools = self.values < last
        member[np.flatnonzero(self.values == last)[: rank - np.searchsorted(self.ordered, last)]] = True
        return member

    def between(self, low: int, high: int) -> Bools:
        """Which have a rank from ``low`` up to before ``high``."""
        return self.below(high) & ~self.below(low)


def folded(values: AnyArray) -> AnyArray:
    """A column that is one value throughout as that value repeated, which takes no memory."""
    repeated = np.broadcast_to(values[:1].copy(), values.shape) if len(values) else values
    return repeated if np.array_equal(values, repeated, equal_nan=True) else values


class Columns:
    """Columns that come some rows at a time, up to ``most``.

    Each has its array from the first row on that differs: parts that are joined at the end would be in memory twice.
    What is one array under two names stays one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._rows = most, 0
        self._of: dict[str, AnyArray] = {}

    def add(self, block: Mapping[str, AnyArray]) -> None:
        """The next rows. Every block has the same columns."""
        grown, taken = dict[tuple[int, int], AnyArray](), set[int]()
        rows = len(next(iter(block.values())))
        for name, part in block.items():
            before = self._of.get(name)
            both = id(before), id(part)
            if both not in grown:
                grown[both] = self._with(before, part, alone=id(before) not in taken)
                taken.add(id(before))
            self._of[name] = grown[both]
        self._rows += rows

    def whole(self) -> dict[str, AnyArray]:
        """All rows of each."""
        return {
            name: values[: self._rows] if values.strides[0] else np.broadcast_to(values[:1], self._rows)
            for name, values in self._of.items()
        }

    def _with(self, before: AnyArray | None, part: AnyArray, *, alone: bool) -> AnyArray:
        """``before``: what is there of this column; not ``alone``: another one goes on with that."""
        if before is None and not part.strides[0]:
            return part
        if before is not None and before.strides[0]:
            values = before if alone else before.copy()
        elif before is not None and not part.strides[0] and np.array_equal(before[:1], part[:1], equal_nan=True):
            return before
        else:
            values = np.empty(self._most, part.dtype)
            values[: self._rows] = part[:0] if before is None else before[:1]
        values[self._rows : self._rows + len(part)] = part
        return values
