"""Files with a value in each line: a mistake in one is told with the file's name and the line's number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gapmeter.scenarios.errors import BadValue
from gapmeter.scenarios.values import bad_value

MOST_LINES = 2_000_000
T = TypeVar("T")


def json_lines(path: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Each line's number, from 1, and its JSON value; empty ones are passed over. Raises BadValue."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise at_line(path, number, f"not JSON: {error}; write one object a line") from error


def checked(path: str, rows: Iterable[tuple[int, Any]], kind: TypeAdapter[T]) -> Iterator[tuple[int, T]]:
    """Each row's number, and its value as a ``kind``. Raises BadValue."""
    for count, (number, row) in enumerate(rows, 1):
        if count > MOST_LINES:
            raise at_line(path, number, f"more than {MOST_LINES:,} lines; write a shorter file")
        try:
            yield number, kind.validate_python(row)
        except ValidationError as error:
            bad = bad_value(error)
            name = f"{bad.path[0]} " if bad.path else ""
            raise at_line(path, number, name + bad.text) from error


def at_line(path: str, number: int, text: str) -> BadValue:
    """The mistake in a line."""
    return BadValue(f"{path}:{number}: {text}")
