"""How think times are written: a duration, or one distribution of them."""

from __future__ import annotations

from typing import Any

from gapmeter.scenarios.errors import BadValue, nearest, quoted
from gapmeter.scenarios.groups import NEEDED, group, inside
from gapmeter.scenarios.pauses import ExponentialPause, FixedPause, LognormalPause, Pause, UniformPause
from gapmeter.scenarios.values import Schema, Type, duration

_TIME, _SOME_TIME = duration(), duration(least_ns=1)
_SHAPES = "5s, {exponential: 5s}, {uniform: [1s, 9s]} or {lognormal: {median: 4s, p95: 20s}}"


def pause() -> Type:
    """A think time; a bare duration is always the same."""
    kinds = {"exponential": _exponential(), "uniform": _uniform(), "lognormal": _lognormal()}
    mappings: list[Schema] = [
        {"type": "object", "properties": {name: kind.schema}, "required": [name], "additionalProperties": False}
        for name, kind in kinds.items()
    ]

    def read(value: Any) -> Pause:
        if not isinstance(value, dict):
            return FixedPause(_TIME.read(value))
        if len(value) != 1:
            raise BadValue(f"{quoted(value)} is not a think time; write {_SHAPES}")
        ((shape, part),) = value.items()
        if shape not in kinds:
            close = nearest(str(shape), kinds)
            hint = f"did you mean {close}? " if close else ""
            raise BadValue(f"no such distribution; {hint}write {_SHAPES}", (shape,))
        found: Pause = inside(kinds[shape], part, shape)
        return found

    return Type(read, {"anyOf": [*_TIME.schema["anyOf"], *mappings]})


def _exponential() -> Type:
    return Type(lambda value: ExponentialPause(_SOME_TIME.read(value)), _SOME_TIME.schema)


def _uniform() -> Type:
    def read(value: Any) -> UniformPause:
        if not isinstance(value, list) or len(value) != 2:
            raise BadValue(f"{quoted(value)} is not a range; write [shortest, longest]")
        low, high = (inside(_TIME, end, at) for at, end in enumerate(value))
        if low > high:
            raise BadValue("the shortest lies above the longest; write [shortest, longest]")
        return UniformPause(low, high)

    return Type(read, {"type": "array", "items": _TIME.schema, "minItems": 2, "maxItems": 2})


def _lognormal() -> Type:
    parts = {"median": (_SOME_TIME, NEEDED), "p95": (_SOME_TIME, NEEDED), "max": (_SOME_TIME, None)}

    def make(median: int, p95: int, max: int | None) -> LognormalPause:
        if p95 < median:
            raise BadValue("p95 lies below the median; write a longer one", ("p95",))
        return LognormalPause(median, p95, max)

    return group("{median: 4s, p95: 20s}", parts, make)
