"""The shapes that arrivals can have beside a constant rate. Times are nanoseconds, rates requests per second."""

from __future__ import annotations

import math
from typing import Annotated, Self

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


def _hours_from(curve: dict[str, float]) -> tuple[float, ...]:
    """Relative rates at the 24 hours of a day: 1 + swing · cos(2π (hour − peak) / 24)."""
    angles = (2 * math.pi * (hour - curve["peak"]) / HOURS for hour in range(HOURS))
    return tuple(1 + curve["swing"] * math.cos(angle) for angle in angles)


class Diurnal(Part):
    """A day's curve of the rate, compressed into ``day_ns``, again and again; the mean over a day is ``load.rate``.

    ``hours`` are relative rates at equal distances through the day, with straight lines between them; they follow from
    ``swing`` and ``peak`` where a file does not say them. The measured part begins at the first of them.
    """

    example = "{day: 4m, swing: 0.6, peak: 15}"

    day_ns: Period = Field(alias="day")
    swing: Share = Field(0.6, exclude=True)
    peak: Annotated[StrictFloat, Field(ge=0, le=HOURS), Wording("an hour of the day", "for instance 15")] = Field(
        15.0, exclude=True
    )
    hours: Annotated[
        tuple[RateOrZero, ...],
        Field(min_length=2, max_length=_MOST_HOURS),
        Wording("a curve", f"2 to {_MOST_HOURS} relative rates, 24 for hours"),
    ] = Field(default_factory=_hours_from)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "hours" in self.model_fields_set and self.model_fields_set & {"swing", "peak"}:
            raise BadValue("hours say the whole curve; write hours, or swing and peak")
        if not any(self.hours):
            raise BadValue("no relative rate is above 0; write at least one that is", ("hours",))
        return self
