"""Conditions on requests, as a user writes them: ``prompt_tokens > 64 and ttft_ms >= 200``.

Only comparisons of named columns with numbers or words, joined by and, or, not. The text is parsed by Python's own
parser and walked here; nothing of it is ever executed.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Bools = NDArray[np.bool_]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_LONGEST = 1000


class ConditionError(ValueError):
    """What is wrong with a condition, and what to write instead."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """For which rows a part of a condition is true, and for which false; for the others it is unknown (Kleene)."""

    true: Bools
    false: Bools

    def __invert__(self) -> _Rows:
        return _Rows(self.false, self.true)

    def __and__(self, other: _Rows) -> _Rows:
        return _Rows(self.true & other.true, self.false | other.false)


def holds(text: str, columns: Mapping[str, pd.Series]) -> Bools:
    """For which rows the condition holds; never for one that an unknown value decides. Raises ConditionError."""
    if len(text) > _LONGEST:
        raise ConditionError(f"the condition is {len(text):,} characters long; at most {_LONGEST:,} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConditionError(
            f"{text!r} is no condition; write one as: prompt_tokens > 64 and ttft_ms >= 200"
        ) from error
    return _of(tree.body, columns).true


def _of(node: ast.expr, columns: Mapping[str, pd.Series]) -> _Rows:
    if isinstance(node, ast.BoolOp):
        parts = [_of(value, columns) for value in node.values]
        if isinstance(node.op, ast.And):
            return functools.reduce(operator.and_, parts)
        return ~functools.reduce(operator.and_, [~part for part in parts])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_of(node.operand, columns)
    if isinstance(node, ast.Compare):
        return _compared(node, columns)
    raise ConditionError(f"{ast.unparse(node)!r} is no comparison; write one as: prompt_tokens > 64")


def _compared(node: ast.Compare, columns: Mapping[str, pd.Series]) -> _Rows:
    """Also a chain, such as ``32 < prompt_tokens <= 64``."""
    sides = [node.left, *node.comparators]
    pairs = []
    for left, sign, right in zip(sides[:-1], node.ops, sides[1:], strict=True):
        if type(sign) not in _COMPARE:
            raise ConditionError(f"{ast.unparse(node)!r}: only <, <=, >, >=, == and != are known")
        pairs.append(_pair(_side(left, columns), _COMPARE[type(sign)], _side(right, columns), ast.unparse(node)))
    return functools.reduce(operator.and_, pairs)


def _pair(left: Any, compare: Callable[[Any, Any], Any], right: Any, text: str) -> _Rows:
    series = next((side for side in (left, right) if isinstance(side, pd.Series)), None)
    if series is None:
        raise ConditionError(f"{text!r} compares no column; write one as: prompt_tokens > 64")
    words = [isinstance(side, str) or (isinstance(side, pd.Series) and not _numeric(side)) for side in (left, right)]
    if words[0] != words[1]:
        raise ConditionError(f"{text!r} compares words with numbers")
    known = np.ones(len(series), dtype=np.bool_)
    for side in (left, right):
        if isinstance(side, pd.Series):
            known &= side.notna().to_numpy(np.bool_)
    found = compare(left, right)
    true = np.asarray(found.fillna(False) if isinstance(found, pd.Series) else found, dtype=np.bool_)
    return _Rows(known & true, known & ~true)


def _numeric(series: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(series))


def _side(node: ast.expr, columns: Mapping[str, pd.Series]) -> Any:
    if isinstance(node, ast.Name):
        if node.id not in columns:
            raise ConditionError(f"{node.id!r} is no column; known are {', '.join(sorted(columns))}")
        return columns[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _side(node.operand, columns)
        if isinstance(inner, (int, float)):
            return -inner
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float, str))
        and not isinstance(node.value, bool)
    ):
        return node.value
    raise ConditionError(f"{ast.unparse(node)!r} is neither a column nor a number nor a word in quotes")
