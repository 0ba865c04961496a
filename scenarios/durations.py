"""Durations as people write them: a number of seconds, or a number with ms, s, m or h. Nanoseconds inside."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from gapmeter.scenarios.errors import BadValue, quoted
from gapmeter.scenarios.values import is_number, leading_number

SECOND_NS = 1_000_000_000
LONGEST_NS = 30 * 86_400 * SECOND_NS

_PATTERN = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)"
_UNIT_NS = {"ms": 1_000_000, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3600 * SECOND_NS}
_OTHER_UNITS = {
    "ms": ("msec", "msecs", "millis", "millisecond", "milliseconds"), "s": ("sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"), "h": ("hr", "hrs", "hour", "hours"),
}  # fmt: skip


def read_duration(value: object, *, least_ns: int = 0, otherwise: str = "") -> int:
    """Nanoseconds of ``75``, ``"75s"`` or ``"1.5 m"``; BadValue for anything else, or below ``least_ns``.

    ``otherwise`` is put before what to write instead, for a key that takes a word too.
    """
    written = re.fullmatch(_PATTERN, value) if isinstance(value, str) else None
    if written:
        exact_ns = float(written[1]) * _UNIT_NS[written[2]]
    elif is_number(value):
        exact_ns = float(value) * SECOND_NS
    else:
        raise BadValue(f"{quoted(value)} is not a duration; write {otherwise}{_meant(value)}")
    ns = round(min(max(exact_ns, -1.0), 2.0 * LONGEST_NS))  # infinity cannot be rounded
    if not least_ns <= ns <= LONGEST_NS:
        span = f"from {least_ns / SECOND_NS:g} s to" if least_ns else "up to"
        raise BadValue(f"{quoted(value)} is out of range; write a duration {span} 30 days")
    return ns


def seconds(ns: int) -> int | float:
    """Nanoseconds as seconds, whole where they are."""
    return ns // SECOND_NS if ns % SECOND_NS == 0 else ns / SECOND_NS


def _meant(value: Any) -> str:
    """What was probably meant: 5m for ``5 minutes``."""
    other = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if other:
        for unit, others in _OTHER_UNITS.items():
            if other[2].lower() in others:
                return f"{other[1]}{unit}"
    return f"{leading_number(value) or 75}s, 500ms or 2m"


def _read_warmup(value: object) -> int | None:
    return None if value == "auto" else read_duration(value, otherwise="auto, ")


def _spell_warmup(ns: int | None) -> int | float | str:
    return "auto" if ns is None else seconds(ns)


_SCHEMA: list[JsonSchemaValue] = [{"type": "number", "minimum": 0}, {"type": "string", "pattern": f"^{_PATTERN}$"}]
_WRITTEN = (PlainSerializer(seconds), WithJsonSchema({"anyOf": _SCHEMA}))

# Nanoseconds, written as above: any, more than none, and long enough to be drawn one after the other.
Duration = Annotated[int, PlainValidator(read_duration), *_WRITTEN]
PositiveDuration = Annotated[int, PlainValidator(partial(read_duration, least_ns=1)), *_WRITTEN]
Period = Annotated[int, PlainValidator(partial(read_duration, least_ns=1_000_000)), *_WRITTEN]
# None is written auto.
Warmup = Annotated[
    int | None,
    PlainValidator(_read_warmup),
    PlainSerializer(_spell_warmup),
    WithJsonSchema({"anyOf": [*_SCHEMA, {"const": "auto"}]}),
]
