"""The shapes that arrivals can have beside a constant rate. Times are nanoseconds, rates requests per second."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StrictFloat, model_validator

from gapmeter.scenarios.durations import Period, PositiveDuration
from gapmeter.scenarios.errors import BadValue
from gapmeter.scenarios.values import Part, RateOrZero, Share, Wording, is_none

HOURS = 24
_MOST_HOURS = 1440
_STEPS = "for instance [{rate: 2, for: 20s}, {rate: 8, for: 20s}]"


class OnOff(Part):
    """A Poisson process whose rate jumps between two values, each held for an exponential time of mean ``on``, ``off``.

    ``quiet`` is the rate while off as a share of that while on; the mean over time is ``load.rate``.
    """

    example = "{on: 2s, off: 6s, quiet: 0.1}"

    on_ns: Period = Field(alias="on")
    off_ns: Period = Field(alias="off")
    quiet: Share = 0.0


class Ramp(Part):
    """The rate goes in a straight line from ``start`` to ``end`` over ``over_ns``, then stays.

    ``over_ns`` None means the measured part. In the warm-up the rate is ``start``.
    """

    example = "{from: 2, to: 20}"

    start: RateOrZero = Field(alias="from")
    end: RateOrZero = Field(alias="to")
    over_ns: PositiveDuration | None = Field(None, alias="over", exclude_if=is_none)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.start and not self.end:
            raise BadValue("a ramp from 0 to 0 asks nothing; write for instance {from: 2, to: 20}")
        return self


class Step(Part):
    """A rate and how long it holds; the last one of a list holds on."""

    example = "{rate: 2, for: 20s}"

    rate: RateOrZero
    for_ns: PositiveDuration = Field(alias="for")


def _check_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if not any(step.rate for step in steps):
        raise BadValue(f"no step has a rate above 0; write {_STEPS}")
    return steps


Steps = Annotated[
    tuple[Step, ...],
    Field(min_length=1),
    AfterValidator(_check_steps),
    Wording("a list of steps", _STEPS),
]


def daily(swing: float, peak: float) -> tuple[float, ...]:
    """Relative rates at the 24 hours of a day: 1 + swing · cos(2π (hour − peak) / 24)."""
    return tuple(1 + swing * math.cos(2 * math.pi * (hour - peak) / HOURS) for hour in range(HOURS))


def _daily(given: dict[str, Any]) -> tuple[float, ...]:
    return daily(0.6 if given["swing"] is None else given["swing"], 15 if given["peak"] is None else given["peak"])


class Diurnal(Part):
    """A day's curve of the rate, compressed into ``day_ns``, again and again; the mean over a day is ``load.rate``.

    ``hours`` are relative rates at equal distances through the day, with straight lines between them; where a file says
    ``swing`` and ``peak``, they follow from these. The measured part begins at the first of them.
    """

    example = "{day: 4m, swing: 0.6, peak: 15}"

    day_ns: Period = Field(alias="day")
    swing: Share | None = Field(None, exclude=True)
    peak: Annotated[StrictFloat, Field(ge=0, le=HOURS), Wording("an hour of the day", "for instance 15")] | None = (
        Field(None, exclude=True)
    )
    hours: Annotated[
        tuple[RateOrZero, ...],
        Field(min_length=2, max_length=_MOST_HOURS),
        Wording("a curve", f"2 to {_MOST_HOURS} relative rates, 24 for hours"),
    ] = Field(default_factory=_daily)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "hours" in self.model_fields_set and (self.swing is not None or self.peak is not None):
            raise BadValue("hours say the whole curve; write hours, or swing and peak")
        if not any(self.hours):
            raise BadValue("no relative rate is above 0; write at least one that is", ("hours",))
        return self
