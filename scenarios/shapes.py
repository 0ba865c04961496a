"""The shapes of values that are more than a number: lengths in tokens, pauses of users, arrivals.

Times are nanoseconds, rates requests per second.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Self

from pydantic import AfterValidator, Field, RootModel, StrictFloat, StrictInt, ValidationInfo, model_validator

from gapmeter.scenarios.errors import BadValue, quoted, unread
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.values import (
    MOST_TOKENS,
    READ_FILES,
    Duration,
    FilePath,
    Part,
    Period,
    PositiveDuration,
    RateOrZero,
    Share,
    Tokens,
    Wording,
    is_none,
    one_of,
)

_LENGTHS = "a number, {uniform: [64, 128]}, {lognormal: {median: 96, p95: 256}} or {file: lengths.txt}"
_PAUSES = "5s, {exponential: 5s}, {uniform: [1s, 9s]} or {lognormal: {median: 4s, p95: 20s}}"
_Figure = Annotated[StrictFloat, Field(ge=1, le=MOST_TOKENS), Wording("a number of tokens", "1 or more")]


class Constant(
    RootModel[Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS), Wording("a length in tokens", _LENGTHS)]], frozen=True
):
    """Every request has the same number of tokens: ``64``."""


class Uniform(Part):
    """Whole numbers from the lowest to the highest, both included, each equally likely: ``{uniform: [64, 128]}``."""

    range: Annotated[tuple[Tokens, Tokens], Wording("a range", "for instance [64, 128]")] = Field(alias="uniform")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = self.range
        if low > high:
            text = f"the lowest, {low}, lies above the highest, {high}; write [{high}, {low}]"
            raise BadValue(text, ("uniform",))
        return self


class LognormalTokens(Part):
    """Median, 95th percentile, and the cap of what lies above it."""

    example = "{median: 96, p95: 256}"

    median: _Figure
    p95: _Figure
    max: Tokens | None = Field(None, exclude_if=is_none)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.p95 < self.median:
            median = f"{self.median:.12g}"
            text = f"{self.p95:.12g} lies below the median, {median}; write a p95 of {median} or more"
            raise BadValue(text, ("p95",))
        if self.max is not None and self.max < self.median:
            median = f"{self.median:.12g}"
            raise BadValue(f"{self.max} lies below the median, {median}; write {median} or more", ("max",))
        return self


class Lognormal(Part):
    """Log-normal, rounded, at least 1: ``{lognormal: {median: 96, p95: 256}}``."""

    shape: LognormalTokens = Field(alias="lognormal")


class Sampled(Part):
    """Drawn with replacement from the numbers in a file, one a line: ``{file: lengths.txt}``."""

    path: FilePath = Field(alias="file")

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The numbers. Raises BadValue for a file that cannot be read or holds something else."""
        try:
            words = read_plain(self.path, links=True).decode("utf-8-sig").split()
        except (OSError, ValueError) as error:
            raise BadValue(f"cannot read {self.path}: {unread(error)}", ("file",)) from error
        for at, word in enumerate(words, 1):
            if not word.isascii() or not word.isdigit() or not 1 <= int(word[:20]) <= MOST_TOKENS:
                text = f"{self.path} holds {quoted(word)} as its {at}. entry; write whole numbers, one a line"
                raise BadValue(text, ("file",))
        if not words:
            raise BadValue(f"{self.path} holds no numbers; write whole numbers, one a line", ("file",))
        return tuple(map(int, words))

    @model_validator(mode="after")
    def _read_file(self, info: ValidationInfo) -> Self:
        if info.context is READ_FILES:
            _ = self.values
        return self


Lengths = Annotated[
    Constant | Uniform | Lognormal | Sampled,
    one_of({"uniform": Uniform, "lognormal": Lognormal, "file": Sampled}, Constant, "a length in tokens", _LENGTHS),
]


class FixedPause(RootModel[Duration], frozen=True):
    """Always the same: ``5s``."""


class ExponentialPause(Part):
    """Exponential with this mean: ``{exponential: 5s}``."""

    mean_ns: PositiveDuration = Field(alias="exponential")


class UniformPause(Part):
    """From the shortest to the longest, each equally likely: ``{uniform: [1s, 9s]}``."""

    range_ns: Annotated[tuple[Duration, Duration], Wording("a range", "for instance [1s, 9s]")] = Field(alias="uniform")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.range_ns[0] > self.range_ns[1]:
            raise BadValue("the shortest lies above the longest; write [shortest, longest]", ("uniform",))
        return self


class LognormalTimes(Part):
    """Median, 95th percentile, and the cap of what lies above it."""

    example = "{median: 4s, p95: 20s}"

    median_ns: PositiveDuration = Field(alias="median")
    p95_ns: PositiveDuration = Field(alias="p95")
    max_ns: PositiveDuration | None = Field(None, alias="max", exclude_if=is_none)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.p95_ns < self.median_ns:
            raise BadValue("p95 lies below the median; write a longer one", ("p95",))
        if self.max_ns is not None and self.max_ns < self.median_ns:
            raise BadValue("it lies below the median; write a longer one", ("max",))
        return self


class LognormalPause(Part):
    """Log-normal: ``{lognormal: {median: 4s, p95: 20s}}``."""

    shape: LognormalTimes = Field(alias="lognormal")


Pause = Annotated[
    FixedPause | ExponentialPause | UniformPause | LognormalPause,
    one_of(
        {"exponential": ExponentialPause, "uniform": UniformPause, "lognormal": LognormalPause}, FixedPause,
        "a think time", _PAUSES,
    ),
]  # fmt: skip


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
    tuple[Step, ...], Field(min_length=1), AfterValidator(_check_steps), Wording("a list of steps", _STEPS)
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
