"""How long: prompts and answers in tokens, and the time that users think between an answer and their next request."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, RootModel, StrictFloat, StrictInt, ValidationInfo, model_validator

from gapmeter.scenarios.durations import Duration, PositiveDuration
from gapmeter.scenarios.errors import BadValue, quoted, unread
from gapmeter.scenarios.values import (
    MOST_TOKENS,
    READ_FILES,
    FilePath,
    Part,
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
            text = (
                f"{self.p95:.12g} lies below the median, {self.median:.12g}; write a p95 of {self.median:.12g} or more"
            )
            raise BadValue(text, ("p95",))
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
            words = Path(self.path).read_text(encoding="utf-8").split()
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
