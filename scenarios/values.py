"""How each kind of value in a scenario is written: one reader and one JSON Schema a kind, side by side.

A reader takes the plain YAML value and returns the value that the program uses, or raises BadValue with a text that
says what was expected.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from gapmeter.scenarios.errors import BadValue, either, nearest, quoted, unread
from gapmeter.scenarios.model import Constant, Lengths, Lognormal, Sampled, Uniform

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)(?![eE][-+\d])")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_OTHER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_OTHER_UNITS = {
    "ms": ("msec", "msecs", "millis", "millisecond", "milliseconds"), "s": ("sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"), "h": ("hr", "hrs", "hour", "hours"),
}  # fmt: skip
_UNIT_NS = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}
_LARGEST = sys.float_info.max
_LONGEST_NS = 30 * 24 * _UNIT_NS["h"]
_MOST_TOKENS = 10_000_000
MOST_RATE = 1_000_000
_PRECISIONS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Type:
    """A kind of value: how to read it from YAML, and what its JSON Schema is."""

    read: Callable[[Any], Any]
    schema: Schema


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


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
            raise BadValue(f"{quoted(value)} is not {what}; write a whole number from {least} to {most}")
        return value

    return Type(read, {"type": "integer", "minimum": least, "maximum": most})


def positive(what: str, unit: str, example: str, *, least: float, most: float) -> Type:
    """A number above 0, within bounds (both included) beyond which nobody can mean it."""

    def read(value: Any) -> float:
        if not is_number(value) or value <= 0:
            suggestion = _leading_number(value, example)
            raise BadValue(f"{quoted(value)} is not {what}; write {suggestion} ({unit})")
        if not least <= value <= most:
            raise BadValue(f"{quoted(value)} is out of range; write {what} from {least:,.12g} to {most:,.12g} ({unit})")
        return float(value)

    return Type(read, {"type": "number", "minimum": least, "maximum": most})


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
            raise BadValue(f"{quoted(value)} is neither true nor false; write true or false")
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
            raise BadValue(f"{quoted(value)} is not a duration; write {also}{_meant(value)}")
        if not least_ns <= ns <= _LONGEST_NS:
            raise BadValue(f"{quoted(value)} is out of range; write a duration {_range_of(least_ns)}30 days")
        return ns

    return Type(read, schema)


def _range_of(least_ns: int) -> str:
    return f"from {least_ns / 1e9:g} s to " if least_ns else "up to "


def _meant(value: Any) -> str:
    """What whoever wrote this may have meant: 5m for ``5 minutes``."""
    found = _OTHER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if found:
        for unit, others in _OTHER_UNITS.items():
            if found[2].lower() in others:
                return f"{found[1]}{unit}"
    return f"{_leading_number(value, '75')}s, 500ms or 2m"


def _duration_ns(value: Any) -> int | None:
    """Nanoseconds, None for what is no duration; one too long to be counted in them is beyond every range."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if not is_number(value) and not found:
        return None
    ns = float(found.group(1)) * _UNIT_NS[found.group(2)] if found else float(value) * 1e9
    return round(max(min(ns, 2.0 * _LONGEST_NS), -1.0))


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
            raise BadValue(f"{quoted(value)} is not a server's address; {_scheme_of(value)}")
        _check_host(value)
        return value.rstrip("/").removesuffix("/v1")

    return Type(read, {"type": "string", "pattern": r"^https?://[^/\s?#@]+(/[^\s?#]*)?$"})


def _scheme_of(value: object) -> str:
    """What to write instead of an address that lacks its scheme, or has another."""
    bare = re.fullmatch(r"(?:\w+:/{0,2})?([^/\s?#@:]+:\d+(?:/[^\s?#]*)?)", value) if isinstance(value, str) else None
    return f"write http://{bare[1]}" if bare else "write for instance http://127.0.0.1:8000"


def _check_host(value: str) -> None:
    """The parts of an address that only who takes it apart can judge."""
    try:
        parts = urlsplit(value)
        (parts.hostname or "").encode("idna" if ":" not in (parts.hostname or "") else "ascii")
        if parts.port == 0 or not parts.hostname:
            raise ValueError("no port or no host")
    except ValueError as error:
        text = f"{quoted(value)} is not a server's address: {error}; write for instance http://127.0.0.1:8000"
        raise BadValue(f"{text}, or http://[::1]:8000 for IPv6") from error


def arguments() -> Type:
    """Engine flags by name; values are plain: text, numbers, true or false, or lists and mappings of them."""

    def read(value: Any) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise BadValue(f"{quoted(value)} is not a mapping of engine flags; write for instance {{num_blocks: 256}}")
        for name, part in value.items():
            if not isinstance(name, str) or not name:
                raise BadValue(f"{quoted(name)} is not the name of an engine flag; write text")
            _check_finite(part, (name,))
        return dict(value)

    return Type(read, {"type": "object"})


def _check_finite(value: Any, path: tuple[str | int, ...]) -> None:
    """JSON has no word for a number that is too large, and a command line's reader may take it for another."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(part, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
        raise BadValue(f"{quoted(value)} is too large a number; write less, or text in quotes", path)


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
        raise BadValue(
            f"{value['p95']} lies below the median, {value['median']}; write a p95 of {value['median']} or more",
            ("lognormal", "p95"),
        )
    highest = None if value.get("max") is None else _tokens(value["max"], ("lognormal", "max"))
    return Lognormal(float(value["median"]), float(value["p95"]), highest)


def _sampled(value: object) -> Sampled:
    """The path is absolute by now, or relative to the working directory."""
    if not isinstance(value, str):
        raise BadValue(f"{quoted(value)} is not a path; write {{file: lengths.txt}}", ("file",))
    try:
        lines = Path(value).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {value}: {unread(error)}", ("file",)) from error
    numbers = []
    for at, word in enumerate(lines, 1):
        if not word.isascii() or not word.isdigit() or not 1 <= int(word[:20]) <= _MOST_TOKENS:
            raise BadValue(
                f"{value} holds {quoted(word)} as its {at}. entry; write whole numbers, one a line", ("file",)
            )
        numbers.append(int(word))
    if not numbers:
        raise BadValue(f"{value} holds no numbers; write whole numbers, one a line", ("file",))
    return Sampled(value, tuple(numbers))
