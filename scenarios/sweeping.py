"""What a sweep runs: a grid of values for any keys, or a list of points, each a mapping of keys to values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.scenarios.errors import BadValue, nearest, quoted
from gapmeter.scenarios.values import Schema, Type

# What names a scenario or judges it is one for all points.
SAME_FOR_ALL = ("name", "summary", "slo", "repeat")
MOST_POINTS = 1000
_EXAMPLE = "sweep: {load.concurrency: [1, 2, 4, 8]}"

Path = tuple[str | int, ...]
Points = tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True)
class Written:
    """One value of one point, and where in the sweep it stands."""

    value: object
    path: Path


def sweep(types: Mapping[str, Type]) -> Type:
    """A grid or a list of points over the keys of ``types``; read as a tuple of points, empty for no sweep."""

    def read(value: Any) -> Points:
        points = list(spelled_points(value))
        for point in points:
            for key, written in point.items():
                _check(types, key, written)
        plain = [{key: written.value for key, written in point.items()} for point in points]
        twice = next((point for at, point in enumerate(plain) if point in plain[:at]), None)
        if twice is not None:
            raise BadValue(f"{_described(twice)} is there twice; repeat: 2 repeats every point")
        return tuple(plain)

    return Type(read, _schema(types))


def spelled_points(value: Any) -> Iterator[dict[str, Written]]:
    """Each point, its values as they were written. Raises BadValue for what is neither a grid nor a list of points."""
    if isinstance(value, dict) and value:
        for key, values in value.items():
            if not isinstance(values, list) or not values:
                raise BadValue(f"{quoted(values)} is not a list of values; write for instance {_EXAMPLE}", (key,))
        if (count := _product(value)) > MOST_POINTS:
            raise BadValue(f"these are {count} points, more than {MOST_POINTS}; write fewer values")
        rows = ([Written(v, (key, at)) for at, v in enumerate(values)] for key, values in value.items())
        yield from (dict(zip(value, row, strict=True)) for row in itertools.product(*rows))
    elif isinstance(value, list):
        if len(value) > MOST_POINTS:
            raise BadValue(f"these are {len(value)} points, more than {MOST_POINTS}; write fewer")
        for at, point in enumerate(value):
            if not isinstance(point, dict) or not point:
                text = f"{quoted(point)} is no point; write for instance {{server.max_batch: 8, load.rate: 16}}"
                raise BadValue(text, (at,))
            yield {key: Written(v, (at, key)) for key, v in point.items()}
    else:
        raise BadValue(f"{quoted(value)} is neither a grid nor a list of points; write for instance {_EXAMPLE}")


def owner_of(types: Mapping[str, Any], key: str) -> str | None:
    """The key that a dotted one is, or is a part of: ``server.args`` for ``server.args.forward_ms``."""
    parts = str(key).split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((head for head in heads if head in types), None)


def _check(types: Mapping[str, Type], key: str, written: Written) -> None:
    owner = owner_of(types, key)
    if owner is None or (owner != key and owner != "server.args"):
        close = nearest(str(key), types)
        hint = f"; did you mean {close}?" if close else ""
        why = (
            "it is one for the whole sweep; write it beside sweep"
            if key in SAME_FOR_ALL
            else f"no such key to sweep over{hint}"
        )
        raise BadValue(why, written.path)
    if owner != key:  # part of a mapping whose parts are free
        return
    try:
        types[owner].read(written.value)
    except BadValue as error:
        raise BadValue(error.text, (*written.path, *error.path)) from error


def _product(grid: Mapping[str, list[Any]]) -> int:
    count = 1
    for values in grid.values():
        count *= len(values)
    return count


def _described(point: Mapping[str, object]) -> str:
    return ", ".join(f"{key}: {quoted(value)}" for key, value in point.items())


def _schema(types: Mapping[str, Type]) -> Schema:
    one = {key: {"$ref": _pointer(key)} for key in types}
    part = f"^{re.escape('server.args.')}.+"
    grid = {
        "type": "object", "minProperties": 1, "additionalProperties": False,
        "properties": {key: {"type": "array", "minItems": 1, "items": kind} for key, kind in one.items()},
        "patternProperties": {part: {"type": "array", "minItems": 1}},
    }  # fmt: skip
    point = {
        "type": "object", "minProperties": 1, "additionalProperties": False,
        "properties": one, "patternProperties": {part: {}},
    }  # fmt: skip
    return {"anyOf": [grid, {"type": "array", "maxItems": MOST_POINTS, "items": point}]}


def _pointer(key: str) -> str:
    return "#/properties/" + "/properties/".join(key.split("."))
