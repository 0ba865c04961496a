"""Durations as people write them: a number of seconds, or a number with ms, s, m or h. Nanoseconds inside."""

from __future__ import annotations

import re
import sys
from typing import Any, TypeGuard

from gapmeter.scenarios.errors import BadValue, quoted

SECOND_NS = 1_000_000_000
LONGEST_NS = 30 * 86_400 * SECOND_NS
PATTERN = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)"

_UNIT_NS = {"ms": 1_000_000, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3600 * SECOND_NS}
_OTHER_UNITS = {
    "ms": ("msec", "msecs", "millis", "millisecond", "milliseconds"), "s": ("sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"), "h": ("hr", "hrs", "hour", "hours"),
}  # fmt: skip


def read_duration(value: object, *, least_ns: int = 0, otherwise: str = "") -> int:
    """Nanoseconds of ``75``, ``"75s"`` or ``"1.5 m"``; BadValue for anything else, or below ``least_ns``.

    ``otherwise`` is put before what to write instead, for a key that takes a word too.
    """
    written = re.fullmatch(PATTERN, value) if isinstance(value, str) else None
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


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def leading_number(value: object) -> str | None:
    """The number that a text begins with: 20 for ``20rps``, none for ``1e3ms``."""
    number = re.match(r"\s*(\d+(?:\.\d+)?)(?![eE][-+\d])", value) if isinstance(value, str) else None
    return number[1] if number else None


def _meant(value: Any) -> str:
    """What was probably meant: 5m for ``5 minutes``."""
    other = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if other:
        for unit, others in _OTHER_UNITS.items():
            if other[2].lower() in others:
                return f"{other[1]}{unit}"
    return f"{leading_number(value) or 75}s, 500ms or 2m"
