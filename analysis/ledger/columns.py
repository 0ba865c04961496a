"""A large table's columns, made a block of rows at a time: what is one value throughout takes no memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapmeter.analysis.arrays import AnyArray


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
