"""Values that are mappings of named parts: one reader and one JSON Schema from a table of the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gapmeter.scenarios.errors import BadValue, nearest, quoted
from gapmeter.scenarios.values import Schema, Type

NEEDED: Final = object()
Parts = Mapping[str, tuple[Type, Any]]


def group(example: str, parts: Parts, make: Callable[..., Any]) -> Type:
    """A mapping: each part by name with its type and its default (NEEDED: none); ``make`` gets them as keywords.

    A default is spelled as in a file; None is passed on as it is.
    """
    needed = [name for name, (_, default) in parts.items() if default is NEEDED]
    schema: Schema = {
        "type": "object",
        "properties": {name: kind.schema for name, (kind, _) in parts.items()},
        "required": needed,
        "additionalProperties": False,
    }

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise BadValue(f"{quoted(value)} is not a mapping; write for instance {example}")
        for name in value:
            if name not in parts:
                close = nearest(str(name), parts)
                hint = f"did you mean {close}? " if close else ""
                raise BadValue(f"no such key; {hint}write for instance {example}", (name,))
        for name in needed:
            if name not in value:
                raise BadValue(f"{name} is missing; write for instance {example}")
        found = {name: value.get(name, default) for name, (_, default) in parts.items()}
        return make(
            **{name: None if part is None else inside(parts[name][0], part, name) for name, part in found.items()}
        )

    return Type(read, schema)


def inside(kind: Type, value: Any, *path: str | int) -> Any:
    """Read a part; what is wrong with it is told with the way to it."""
    try:
        return kind.read(value)
    except BadValue as error:
        raise BadValue(error.text, (*path, *error.path)) from error
