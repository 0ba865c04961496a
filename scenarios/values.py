"""How each kind of value in a scenario is written: one reader and one JSON Schema a kind, side by side.

A reader takes the plain YAML value and returns the value that the program uses, or raises BadValue with a text that
says what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from scenarios.errors import BadValue, either, nearest, quoted
from scenarios.model import Constant, Lengths, Lognormal, Sampled, Uniform

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_UNIT_NS = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}
_LONGEST_NS = 30 * 24 * _UNIT_NS["h"]
_MOST_TOKENS = 10_000_000
_PRECISIONS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Type:
    """A kind of value: how to read it from YAML, and what its JSON Schema is."""

    read: Callable[[Any], Any]
    schema: Schema


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _leading_number(value: object, otherwise: str) -> str:
    found = _NUMBER.match(value) if isinstance(value, str) else None
    return found.group(1) if found else otherwise


def text(what: str, example: str, pattern: str = r"^\S(.*\S)?$") -> Type:
    """Text that matches ``pattern``."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern.strip("^$"), value):
            raise BadValue(f"{quoted(value)} is not {what}; write for instance {example}")
        return value

    return Type(read, {"type": "string", "pattern": pattern})


def whole(what: str, least: int, most: int, example: int) -> Type:
    """A whole number within bounds, both included."""

    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadValue(f"{quoted(value)} is not {what}; write a whole number, for instance {example}")
        if not least <= value <= most:
            raise BadValue(f"{value} is not {what}; write a whole number from {least} to {most}")
        return value

    return Type(read, {"type": "integer", "minimum": least, "maximum": most})


def positive(what: str, unit: str, example: str) -> Type:
    """A number above 0."""

    def read(value: Any) -> float:
        if not is_number(value) or value <= 0:
            suggestion = _leading_number(value, example)
            raise BadValue(f"{quoted(value)} is not {what}; write {suggestion} ({unit})")
        return float(value)

    return Type(read, {"type": "number", "exclusiveMinimum": 0})


def share(most: int = 1, *, above_zero: bool = False) -> Type:
    """A number from 0 (itself left out with ``above_zero``) to ``most``."""
    span = f"above 0 up to {most}" if above_zero else f"from 0 to {most}"

    def read(value: Any) -> float:
        if not is_number(value) or not 0 <= value <= most or (above_zero and value == 0):
            raise BadValue(f"{quoted(value)} is out of range; write a number {span}, for instance 0.5")
        return float(value)

    return Type(read, {"type": "number", "exclusiveMinimum" if above_zero else "minimum": 0, "maximum": most})


def flag() -> Type:
    """true or false."""

    def read(value: object) -> bool:
        if not isinstance(value, bool):
            raise BadValue(f"{quoted(value)} is neither true nor false")
        return value

    return Type(read, {"type": "boolean"})


def duration(*, least_ns: int = 0, auto: bool = False) -> Type:
    """A time: a number of seconds, or a number with ms, s, m or h. With ``auto``, that word is read as None."""
    schema: Schema = {
        "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": f"^{_DURATION.pattern}$"}]
    }
    if auto:
        schema["anyOf"].append({"const": "auto"})

    def read(value: Any) -> int | None:
        if auto and value == "auto":
            return None
        ns = _duration_ns(value)
        if ns is None:
            also = "auto, " if auto else ""
            raise BadValue(
                f"{quoted(value)} is not a duration; write {also}{_leading_number(value, '75')}s, 500ms or 2m"
            )
        if not least_ns <= ns <= _LONGEST_NS:
            raise BadValue(f"{quoted(value)} is out of range; write a duration {_range_of(least_ns)}30 days")
        return ns

    return Type(read, schema)


def _range_of(least_ns: int) -> str:
    return f"from {least_ns / 1e9:g} s to " if least_ns else "up to "


def _duration_ns(value: Any) -> int | None:
    if is_number(value):
        return round(value * 1e9)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return round(float(found.group(1)) * _UNIT_NS[found.group(2)]) if found else None


def choice(choices: Sequence[str], later: Sequence[str] = ()) -> Type:
    """One of a few words; ``later`` ones are known to the design but not written yet."""

    def read(value: Any) -> str:
        if value in choices:
            return str(value)
        if value in later:
            raise BadValue(f"{quoted(value)} is not supported yet; write {either(choices)}")
        close = nearest(value, choices) if isinstance(value, str) else None
        hint = f"did you mean {close}? " if close else ""
        raise BadValue(f"{quoted(value)} is not one of the choices; {hint}write {either(choices)}")

    return Type(read, {"enum": list(choices)})


def precision() -> Type:
    """A number format; the short names that people use become the engines' own."""
    word = text("a precision", "float32, bfloat16 or float16", r"^[A-Za-z0-9_-]+$")
    return Type(lambda value: _PRECISIONS.get(word.read(value), value), word.schema)


def url() -> Type:
    """The root of an HTTP server, without a trailing slash or ``/v1``."""

    def read(value: Any) -> str:
        if isinstance(value, str) and re.match(r"https?://[^/]*@", value):
            raise BadValue("the address carries a user's name, which is not sent; pass a key with --api-key")
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", value):
            raise BadValue(f"{quoted(value)} is not a server's address; write for instance http://127.0.0.1:8000")
        return value.rstrip("/").removesuffix("/v1")

    return Type(read, {"type": "string", "pattern": r"^https?://[^/\s?#@]+(/[^\s?#]*)?$"})


def arguments() -> Type:
    """Engine flags by name; values are plain: text, numbers, true or false, or lists and mappings of them."""

    def read(value: Any) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise BadValue(f"{quoted(value)} is not a mapping of engine flags; write for instance {{num_blocks: 256}}")
        for name in value:
            if not isinstance(name, str):
                raise BadValue(f"{quoted(name)} is not the name of an engine flag; write text")
        return dict(value)

    return Type(read, {"type": "object"})


def lengths() -> Type:
    """Token counts: a number, or one distribution."""
    tokens: Schema = {"type": "integer", "minimum": 1, "maximum": _MOST_TOKENS}
    number: Schema = {"type": "number", "minimum": 1, "maximum": _MOST_TOKENS}
    shapes: dict[str, Schema] = {
        "uniform": {"type": "array", "items": tokens, "minItems": 2, "maxItems": 2},
        "lognormal": {
            "type": "object",
            "properties": {"median": number, "p95": number, "max": tokens},
            "required": ["median", "p95"],
            "additionalProperties": False,
        },
        "file": {"type": "string"},
    }
    mappings = [
        {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
        for name, schema in shapes.items()
    ]
    return Type(_read_lengths, {"anyOf": [tokens, *mappings]})


_SHAPES = "a number, {uniform: [64, 128]}, {lognormal: {median: 96, p95: 256}} or {file: lengths.txt}"


def _read_lengths(value: Any) -> Lengths:
    if isinstance(value, int) and not isinstance(value, bool):
        return Constant(_tokens(value, ()))
    if not isinstance(value, dict) or len(value) != 1:
        raise BadValue(f"{quoted(value)} is not a length in tokens; write {_SHAPES}")
    (shape, inner), *_ = value.items()
    readers: dict[str, Callable[[object], Lengths]] = {"uniform": _uniform, "lognormal": _lognormal, "file": _sampled}
    if shape not in readers:
        close = nearest(shape, readers) if isinstance(shape, str) else None
        hint = f"did you mean {close}? " if close else ""
        raise BadValue(f"no such distribution; {hint}write {_SHAPES}", (shape,))
    return readers[shape](inner)


def _tokens(value: object, path: tuple[str | int, ...]) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_TOKENS:
        raise BadValue(
            f"{quoted(value)} is not a number of tokens; write a whole number from 1 to {_MOST_TOKENS}", path
        )
    return value


def _uniform(value: object) -> Uniform:
    if not isinstance(value, list) or len(value) != 2:
        raise BadValue(f"{quoted(value)} is not a range; write [lowest, highest]", ("uniform",))
    low, high = (_tokens(end, ("uniform", at)) for at, end in enumerate(value))
    if low > high:
        raise BadValue(f"the lowest, {low}, lies above the highest, {high}; write [{high}, {low}]", ("uniform",))
    return Uniform(low, high)


def _lognormal(value: object) -> Lognormal:
    if not isinstance(value, dict):
        raise BadValue(f"{quoted(value)} is not a mapping; write {{median: 96, p95: 256}}", ("lognormal",))
    for key in value:
        if key not in ("median", "p95", "max"):
            raise BadValue("no such key; lognormal has median, p95 and max", ("lognormal", key))
    for key in ("median", "p95"):
        if key not in value:
            raise BadValue(f"{key} is missing; write {{median: 96, p95: 256}}", ("lognormal",))
        if not is_number(value[key]) or not 1 <= value[key] <= _MOST_TOKENS:
            raise BadValue(f"{quoted(value[key])} is not a number of tokens; write 1 or more", ("lognormal", key))
    if value["p95"] < value["median"]:
        raise BadValue(f"{value['p95']} lies below the median, {value['median']}", ("lognormal", "p95"))
    highest = None if value.get("max") is None else _tokens(value["max"], ("lognormal", "max"))
    return Lognormal(float(value["median"]), float(value["p95"]), highest)


def _sampled(value: object) -> Sampled:
    """The path is absolute by now, or relative to the working directory."""
    if not isinstance(value, str):
        raise BadValue(f"{quoted(value)} is not a path; write {{file: lengths.txt}}", ("file",))
    try:
        lines = Path(value).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"cannot read {value}: {getattr(error, 'strerror', None) or error}", ("file",)) from error
    numbers = []
    for at, word in enumerate(lines, 1):
        if not word.isascii() or not word.isdigit() or not 1 <= int(word) <= _MOST_TOKENS:
            raise BadValue(
                f"{value} holds {quoted(word)} as its {at}. entry; write whole numbers, one a line", ("file",)
            )
        numbers.append(int(word))
    if not numbers:
        raise BadValue(f"{value} holds no numbers; write whole numbers, one a line", ("file",))
    return Sampled(value, tuple(numbers))
