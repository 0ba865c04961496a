"""Recorded requests, to be issued again: at their own times, faster or slower, again and again.

A mistake in a file is reported with its name and the line's number.
"""

from __future__ import annotations

import bisect
import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from io import TextIOWrapper
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from gapmeter.scenarios.errors import BadValue, quoted, unread
from gapmeter.scenarios.files import MOST_BYTES, at_line, checked, json_lines
from gapmeter.scenarios.plain_file import open_plain
from gapmeter.scenarios.values import (
    CHOICE,
    MOST_TOKENS,
    READ_FILES,
    SECOND_NS,
    Duration,
    FilePath,
    Part,
    Wording,
    integer,
    is_number,
)

BLOCK_TOKENS = 512
_MOST_NS = 4 * 10**18  # since 1970, until 2096; times are made relative to the first
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_EXAMPLE = '{"timestamp": 0, "input_length": 96, "output_length": 32}'


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded requests in the order of their times; index i of every column is the same request.

    ``at_ns`` counts from the first. ``blocks`` are ids of the prompts' blocks of ``BLOCK_TOKENS`` tokens (equal ids,
    equal text), empty where the file has none. ``format`` is the file's.
    """

    format: Literal["mooncake", "azure"]
    at_ns: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @property
    def lap_ns(self) -> float:
        """From the first request to its repetition: a mean gap follows the last one. 0: all came at once."""
        return self.at_ns[-1] * len(self.at_ns) / max(len(self.at_ns) - 1, 1)

    def repeated(self, first: int, count: int) -> Recording:
        """``count`` requests from number ``first`` on, again and again; each lap has texts of its own."""
        size, texts = len(self.at_ns), 1 + max((text for ids in self.blocks for text in ids), default=0)
        places = [divmod(number, size) for number in range(first, first + count)]
        return Recording(
            format=self.format,
            at_ns=tuple(self.at_ns[row] + round(lap * self.lap_ns) - self.at_ns[first] for lap, row in places),
            prompt_tokens=tuple(self.prompt_tokens[row] for _, row in places),
            output_tokens=tuple(self.output_tokens[row] for _, row in places),
            blocks=tuple(tuple(text + lap * texts for text in self.blocks[row]) for lap, row in places if self.blocks),
        )


class Trace(Part):
    """A file of recorded requests to be issued again, ``speed`` times as fast.

    ``start_ns``: the recorded time of the first one issued. ``loop``: after the last one the first follows.
    """

    example = "{file: traces/chat.jsonl, speed: 2}"

    path: FilePath = Field(alias="file")
    format: Annotated[Literal["auto", "mooncake", "azure"], CHOICE] = "auto"
    speed: Annotated[
        StrictFloat, Field(ge=0.001, le=1e6), Wording("a speed", "2", "2 is twice as fast as recorded")
    ] = 1.0
    start_ns: Duration = Field(0, alias="start")
    loop: Annotated[StrictBool, Wording("a truth value", "true or false")] = False

    @cached_property
    def recorded(self) -> Recording:
        """All requests of the file. Raises BadValue, which names the file and the line."""
        try:
            return read_recording(self.path, self.format)
        except BadValue as error:
            raise BadValue(error.text, ("file",)) from error

    @property
    def span_ns(self) -> int:
        """From the first request to the last, or to the first again, as it will be issued."""
        lasts_ns = self.recorded.lap_ns if self.loop else self.recorded.at_ns[-1] - self.recorded.at_ns[self._first]
        return round(lasts_ns / self.speed)

    @property
    def rate(self) -> float:
        """Requests per second of the whole recording, as it will be issued; infinite if all came at once."""
        lap_ns = self.recorded.lap_ns / self.speed
        return len(self.recorded.at_ns) / lap_ns * SECOND_NS if lap_ns else math.inf

    def issued(self, count: int) -> Recording:
        """The first ``count`` requests issued, or all that there are; ``at_ns`` as recorded, from the first."""
        first, size = self._first, len(self.recorded.at_ns)
        count = count if self.loop else min(count, size - first)
        return self.recorded if (first, count) == (0, size) else self.recorded.repeated(first, count)

    def count_in(self, span_ns: int) -> int:
        """Of how many requests those issued within ``span_ns`` are the first, and a lap or less more."""
        laps = math.ceil(span_ns * self.speed / self.recorded.lap_ns) + 1 if self.loop else 1
        return laps * len(self.recorded.at_ns)

    def at_rate(self, rate: float, part: float) -> Trace:
        """The same requests again and again, ``rate`` per second, from another place: ``part`` (0 to 1) of it."""
        first = self.recorded.at_ns[int(part * len(self.recorded.at_ns))]
        speed = self.speed * rate / self.rate
        return self.model_copy(update={"speed": speed, "start_ns": first, "loop": True})

    @property
    def _first(self) -> int:
        return bisect.bisect_left(self.recorded.at_ns, self.start_ns)

    @model_validator(mode="after")
    def _read_file(self, info: ValidationInfo) -> Self:
        if info.context is not READ_FILES:
            return self
        if self.start_ns > self.recorded.at_ns[-1]:
            lasts = f"{self.recorded.at_ns[-1] / SECOND_NS:,.9g} s"
            raise BadValue(f"is after the last request of {self.path}, at {lasts}; write an earlier time", ("start",))
        if self.loop and not self.recorded.lap_ns:
            raise BadValue(
                f"all requests of {self.path} came at once: none can follow the last; leave it out", ("loop",)
            )
        return self

    @field_serializer("format")
    def _format_of_file(self, format: str) -> str:
        return self.recorded.format if format == "auto" else format


def read_recording(path: str, format: str) -> Recording:
    """The requests in a file; ``format`` auto: by its first character but blanks. Raises BadValue with file and line.

    Lines of the same time stay in the file's order.
    """
    try:
        with open_plain(path, MOST_BYTES, links=True) as raw, TextIOWrapper(raw, "utf-8-sig", newline="") as file:
            first = next((line.lstrip()[0] for line in file if line.strip()), "")
            file.seek(0)
            if first == "[" and format != "azure":
                raise BadValue(f"{path} is one list; write one object a line: {_EXAMPLE}")
            if format == "mooncake" or (format == "auto" and first == "{"):
                found: Literal["mooncake", "azure"] = "mooncake"
                rows = [row for _, row in checked(path, json_lines(path, file), _MOONCAKE)]
            else:
                found = "azure"
                rows = [row for _, row in checked(path, _csv_rows(path, file), _AZURE)] if first else []
    except BadValue:
        raise
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {path}: {unread(error)}") from error
    if not rows:
        raise BadValue(f"{path} holds no requests; write one a line: {_EXAMPLE}")
    rows.sort(key=lambda row: row.at_ns)
    return Recording(
        format=found,
        at_ns=tuple(row.at_ns - rows[0].at_ns for row in rows),
        prompt_tokens=tuple(row.prompt_tokens for row in rows),
        output_tokens=tuple(row.output_tokens for row in rows),
        blocks=tuple(row.blocks for row in rows) if any(row.blocks for row in rows) else (),
    )


def _csv_rows(path: str, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(lines)
    try:
        head = next(([name.strip() for name in cells] for cells in reader if any(map(str.strip, cells))), [])
        for name in _COLUMNS:
            if name not in head:
                found = next((word for mark, word in _OTHER_SEPARATORS.items() if mark in "".join(head)), None)
                problem = f"its columns are separated by {found}; write commas" if found else f"no column {name}"
                raise at_line(path, reader.line_num, f"{problem}; the first line must name {', '.join(_COLUMNS)}")
        for cells in reader:
            if cells and len(cells) < len(head):
                raise at_line(path, reader.line_num, f"{len(cells)} of {len(head)} columns")
            if any(map(str.strip, cells[len(head) :])):
                text = f"{len(cells)} cells for {len(head)} columns; quote a value that holds a comma"
                raise at_line(path, reader.line_num, text)
            if cells:
                row = dict(zip(head, cells, strict=False))
                yield reader.line_num, {name: row[name].strip() for name in _COLUMNS}
    except csv.Error as error:
        raise at_line(path, reader.line_num, f"not a line of a CSV: {error}") from error


def _stamp_ns(text: str) -> int:
    """Nanoseconds of a number of seconds, or of a date and time with up to nine decimals; time zones may be named."""
    try:
        seconds = float(text)
    except ValueError:
        return _date_ns(text)
    if not 0 <= seconds * SECOND_NS <= _MOST_NS:
        raise BadValue(f"{quoted(text)} is not a time; write seconds from 0, or a date and time")
    return round(seconds * SECOND_NS)


def _date_ns(text: str) -> int:
    whole, _, rest = text.partition("." if "." in text else ",")
    digits = rest[: next((i for i, c in enumerate(rest) if not c.isdecimal()), len(rest))]
    try:
        at = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError as error:
        raise BadValue(f"{quoted(text)} is not a time; write 2024-05-10 00:00:00.009930") from error
    since = at - datetime(1970, 1, 1, tzinfo=at.tzinfo and UTC)
    return (since.days * 86400 + since.seconds) * SECOND_NS + int((digits + "0" * 9)[:9])


def _milliseconds_ns(value: object) -> int:
    if not is_number(value) or not 0 <= value * 10**6 <= _MOST_NS:
        raise BadValue(f"{quoted(value)} is not a number of milliseconds from 0")
    return round(value * 10**6)


def _tokens(value: object) -> int:
    """At least 1: recorded requests without a prompt or an answer are asked with one token."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:20])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise BadValue(f"{quoted(value)} is not a number of tokens; write a whole number from 0")
    return max(value, 1)


_Tokens = Annotated[int, PlainValidator(_tokens)]
_Block = Annotated[StrictInt, Field(ge=0, le=2**63 - 1), integer("a block's id", 0)]


class _Row(BaseModel):
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Mooncake(_Row):
    at_ns: Annotated[int, PlainValidator(_milliseconds_ns)] = Field(alias="timestamp")
    prompt_tokens: _Tokens = Field(alias="input_length")
    output_tokens: _Tokens = Field(alias="output_length")
    blocks: Annotated[tuple[_Block, ...], Wording("a list of ids", "for instance [0, 1]")] = Field((), alias="hash_ids")

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        count = len(self.blocks)
        if count and not (count - 1) * BLOCK_TOKENS < self.prompt_tokens <= count * BLOCK_TOKENS:
            text = f"{count} hash_ids do not fit input_length {self.prompt_tokens}: one for each {BLOCK_TOKENS}"
            raise BadValue(text)
        return self


class _Azure(_Row):
    at_ns: Annotated[int, PlainValidator(_stamp_ns)] = Field(alias="TIMESTAMP")
    prompt_tokens: _Tokens = Field(alias="ContextTokens")
    output_tokens: _Tokens = Field(alias="GeneratedTokens")


_MOONCAKE: TypeAdapter[_Row] = TypeAdapter(
    Annotated[
        _Mooncake, Wording("an object with timestamp, input_length and output_length", f"for instance {_EXAMPLE}")
    ]
)
_AZURE: TypeAdapter[_Row] = TypeAdapter(_Azure)
