"""The kinds of arrays that figures are made from, and what is done to them in several places."""

from __future__ import annotations

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
    return total - np.repeat(total[first] - values[first], last - first + 1)


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
