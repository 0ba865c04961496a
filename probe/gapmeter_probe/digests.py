"""Whether the code that a hook reads is code that it was made for: digests of functions, by vLLM's version.

A function that kept its name may have changed its meaning. ``digests.json`` holds, for every target of the hooks, a
digest of its code in each version on which the probe was tested (setup/digests.py makes it).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("digests.json")


class Table(NamedTuple):
    """``versions``: of vLLM, oldest first; ``targets``: by a hook's target, the versions that have each digest."""

    versions: tuple[str, ...]
    targets: Mapping[str, Mapping[str, tuple[str, ...]]]


@functools.lru_cache(maxsize=1)
def table() -> Table:
    """The digests of the versions on which the probe was tested."""
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    return Table(
        tuple(known["versions"]),
        {name: {one: tuple(which) for one, which in digests.items()} for name, digests in known["targets"].items()},
    )


def order(version: str) -> tuple[int, ...]:
    """What versions are compared by: 0.9 comes before 0.31."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def digest(source: str) -> str:
    """The digest of a function's code alone: comments, docstrings, layout and Python's version change nothing."""
    indented = source[:1].isspace()
    tree = ast.parse(f"if True:\n{source}" if indented else source)
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    parts: list[str] = []
    for node in body:
        _spell(node, parts)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def digest_of(function: Callable[..., Any]) -> str:
    """The digest of a function's source; "" where that cannot be had."""
    try:
        return digest(inspect.getsource(function))
    except Exception:  # noqa: BLE001 - its file may have changed since, and the engine's import goes on
        return ""


def known(target: str, function: Callable[..., Any]) -> bool | None:
    """Whether this function is as in a version on which the probe was tested; None for a target of no such version."""
    digests = table().targets.get(target)
    return None if digests is None else digest_of(function) in digests


def _spell(node: ast.AST, parts: list[str]) -> None:
    """Names and values in their order. Fields that are empty are left out: newer versions of Python have more."""
    parts.append(type(node).__name__)
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if value is None or value == []:
            continue
        parts.append(f"{name}=")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                _spell(item, parts)
            else:
                parts.append(repr(item))
    parts.append(".")
