"""How the shapes of arrivals are written: on and off, ramps, steps, days, traces."""

from __future__ import annotations

from typing import Any

from gapmeter.scenarios.arrivals import HOURS, Diurnal, OnOff, Ramp, Step, Trace, daily
from gapmeter.scenarios.errors import BadValue, quoted
from gapmeter.scenarios.groups import NEEDED, group, inside
from gapmeter.scenarios.replay import FORMATS, read_trace
from gapmeter.scenarios.values import MOST_RATE, Type, choice, duration, is_number, positive, share, text

_SOME_TIME = duration(least_ns=1)
_PERIOD = duration(least_ns=1_000_000)
_MOST_HOURS = 1440


def rate_or_none() -> Type:
    """Requests per second, 0 included."""

    def read(value: Any) -> float:
        if not is_number(value) or value < 0:
            raise BadValue(f"{quoted(value)} is not a rate; write 8 (requests per second), or 0 for none")
        if value > MOST_RATE:
            raise BadValue(f"{quoted(value)} is out of range; write a rate up to {MOST_RATE:,}")
        return float(value)

    return Type(read, {"type": "number", "minimum": 0, "maximum": MOST_RATE})


def onoff() -> Type:
    """Bursts: ``{on: 2s, off: 6s, quiet: 0.1}``."""
    parts = {"on": (_PERIOD, NEEDED), "off": (_PERIOD, NEEDED), "quiet": (share(), 0)}

    def make(on: int, off: int, quiet: float) -> OnOff:
        return OnOff(on, off, quiet)

    return group("{on: 2s, off: 6s, quiet: 0.1}", parts, make)


def ramp() -> Type:
    """``{from: 2, to: 20}``, and ``over: 60s`` where that is not the measured part."""
    parts = {"from": (rate_or_none(), NEEDED), "to": (rate_or_none(), NEEDED), "over": (_SOME_TIME, None)}

    def make(to: float, over: int | None, **rest: float) -> Ramp:
        if not to and not rest["from"]:
            raise BadValue("a ramp from 0 to 0 asks nothing; write for instance {from: 2, to: 20}")
        return Ramp(rest["from"], to, over)

    return group("{from: 2, to: 20}", parts, make)


def steps() -> Type:
    """``[{rate: 2, for: 20s}, {rate: 8, for: 20s}]``."""
    example = "[{rate: 2, for: 20s}, {rate: 8, for: 20s}]"
    parts = {"rate": (rate_or_none(), NEEDED), "for": (_SOME_TIME, NEEDED)}
    one = group("{rate: 2, for: 20s}", parts, lambda rate, **rest: Step(rate, rest["for"]))

    def read(value: Any) -> tuple[Step, ...]:
        if not isinstance(value, list) or not value:
            raise BadValue(f"{quoted(value)} is not a list of steps; write for instance {example}")
        found = tuple(inside(one, item, at) for at, item in enumerate(value))
        if not any(step.rate for step in found):
            raise BadValue(f"no step has a rate above 0; write for instance {example}")
        return found

    return Type(read, {"type": "array", "items": one.schema, "minItems": 1})


def diurnal() -> Type:
    """``{day: 4m, swing: 0.6, peak: 15}``, or the curve itself: ``{day: 4m, hours: [1, 1, 3, 9, …]}``."""
    parts = {
        "day": (_PERIOD, NEEDED),
        "swing": (share(), None),
        "peak": (_hour(), None),
        "hours": (_hours(), None),
    }

    def make(day: int, swing: float | None, peak: float | None, hours: tuple[float, ...] | None) -> Diurnal:
        if hours is not None and (swing is not None or peak is not None):
            raise BadValue("hours say the whole curve; write hours, or swing and peak")
        return Diurnal(day, hours or daily(0.6 if swing is None else swing, 15 if peak is None else peak))

    return group("{day: 4m, swing: 0.6, peak: 15}", parts, make)


def trace() -> Type:
    """``{file: traces/code.jsonl, speed: 2}``; the path is absolute by now, or relative to the working directory."""
    parts = {
        "file": (text("a path", "traces/chat.jsonl"), NEEDED),
        "format": (choice(("auto", *FORMATS)), "auto"),
        "speed": (positive("a speed", "2 is twice as fast as recorded", "2", least=0.001, most=1e6), 1),
    }

    def make(file: str, format: str, speed: float) -> Trace:
        try:
            return read_trace(file, format, speed)
        except BadValue as error:
            raise BadValue(error.text, ("file",)) from error

    return group("{file: traces/chat.jsonl, speed: 2}", parts, make)


def _hour() -> Type:
    def read(value: Any) -> float:
        if not is_number(value) or not 0 <= value <= HOURS:
            raise BadValue(f"{quoted(value)} is not an hour of the day; write a number from 0 to {HOURS}")
        return float(value)

    return Type(read, {"type": "number", "minimum": 0, "maximum": HOURS})


def _hours() -> Type:
    one = rate_or_none()

    def read(value: Any) -> tuple[float, ...]:
        if not isinstance(value, list) or not 2 <= len(value) <= _MOST_HOURS:
            raise BadValue(f"{quoted(value)} is no curve; write 2 to {_MOST_HOURS} relative rates, 24 for hours")
        found = tuple(inside(one, item, at) for at, item in enumerate(value))
        if not any(found):
            raise BadValue("no relative rate is above 0; write at least one that is")
        return found

    return Type(read, {"type": "array", "items": one.schema, "minItems": 2, "maxItems": _MOST_HOURS})
