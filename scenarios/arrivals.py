"""The shapes that arrivals can have beside a constant rate, as frozen values. Times are nanoseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapmeter.scenarios.pauses import seconds

HOURS = 24


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Poisson process whose rate jumps between two values, each held for an exponential time of mean ``on``, ``off``.

    ``quiet`` is the rate while off as a share of that while on; the mean over time is ``load.rate``.
    """

    on_ns: int
    off_ns: int
    quiet: float = 0.0


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes in a straight line from ``start`` to ``end`` (requests per second) over ``over_ns``, then stays.

    ``over_ns`` None means the measured part. In the warm-up the rate is ``start``.
    """

    start: float
    end: float
    over_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A rate (requests per second) and how long it holds; the last one of a list holds on."""

    rate: float
    for_ns: int


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A day's curve of the rate, compressed into ``day_ns``, again and again; the mean over a day is ``load.rate``.

    ``hours`` are relative rates at equal distances through the day, with straight lines between them. The measured part
    begins at the first of them.
    """

    day_ns: int
    hours: tuple[float, ...]


def daily(swing: float, peak: float) -> tuple[float, ...]:
    """Relative rates at the 24 hours of a day: 1 + swing · cos(2π (hour − peak) / 24)."""
    return tuple(1 + swing * math.cos(2 * math.pi * (hour - peak) / HOURS) for hour in range(HOURS))


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests to be issued again, ``speed`` times as fast. Index i of every column is the same request.

    ``at_ns`` counts from the first, as recorded. ``blocks`` are ids of the prompt's blocks of ``block_tokens`` tokens
    (equal ids, equal text), empty where the file has none.
    """

    path: str
    speed: float
    at_ns: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    block_tokens: int
    format: str = "auto"

    @property
    def span_ns(self) -> int:
        """From the first request to the last, as it will be issued."""
        return round(self.at_ns[-1] / self.speed)


Shape = OnOff | Ramp | Step | Diurnal | Trace


def spelled(shape: Shape) -> dict[str, object]:
    """A shape as a scenario file would spell it."""
    match shape:
        case OnOff(on_ns, off_ns, quiet):
            return {"on": seconds(on_ns), "off": seconds(off_ns), "quiet": quiet}
        case Ramp(start, end, over_ns):
            line: dict[str, object] = {"from": start, "to": end}
            return line if over_ns is None else line | {"over": seconds(over_ns)}
        case Step(rate, for_ns):
            return {"rate": rate, "for": seconds(for_ns)}
        case Diurnal(day_ns, hours):
            return {"day": seconds(day_ns), "hours": list(hours)}
        case Trace(path, speed):
            return {"file": path, "format": shape.format, "speed": speed}
