"""The kinds of arrays that figures are made from, and what is done to them in several places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def each_of(counts: Ints) -> tuple[Ints, Ints]:
    """``counts[i]`` rows for each i: whose a row is, and which of its own it is. [2, 0, 1]: [0, 0, 2], [0, 1, 0]."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)


def ranks(values: Floats) -> Ints:
    """How many values are smaller than each; of equal ones the earlier counts as smaller."""
    order = np.argsort(values, kind="stable")
    smaller = np.empty_like(order)
    smaller[order] = np.arange(len(order))
    return smaller
