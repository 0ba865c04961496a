"""Traces of recorded requests: Mooncake's JSON lines, and the CSV of the Azure LLM inference traces.

Mooncake: one object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` and, where there are any,
``hash_ids``: one id for each block of 512 prompt tokens, equal ids for equal prefixes up to there.
Azure: columns TIMESTAMP (date and time, or a number of seconds), ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gapmeter.scenarios.arrivals import Trace
from gapmeter.scenarios.errors import BadValue, quoted, unread

FORMATS = ("mooncake", "azure")
BLOCK_TOKENS = 512
MOST_LINES = 2_000_000
_MOST_TOKENS = 10_000_000
_MOST_NS = 1e18
_EXAMPLE = '{"timestamp": 0, "input_length": 96, "output_length": 32}'
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class _Row:
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: str, format: str, speed: float) -> Trace:
    """The trace in a file, in the order of its timestamps; ``format`` auto: by the file's first character.

    Lines of the same time stay in the file's order. Raises BadValue, which names the file and the line.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = file.read(1)
            file.seek(0)
            found = format if format != "auto" else "mooncake" if first == "{" else "azure"
            rows = list(_READERS[found](path, file)) if first else []
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {path}: {unread(error)}") from error
    if not rows:
        raise BadValue(f"{path} holds no requests; write one a line: {_EXAMPLE}")
    rows.sort(key=lambda row: row.at_ns)
    start_ns = rows[0].at_ns
    return Trace(
        path=path,
        speed=speed,
        at_ns=tuple(row.at_ns - start_ns for row in rows),
        prompt_tokens=tuple(row.prompt_tokens for row in rows),
        output_tokens=tuple(row.output_tokens for row in rows),
        blocks=tuple(row.blocks for row in rows) if any(row.blocks for row in rows) else (),
        block_tokens=BLOCK_TOKENS,
        format=found,
    )


def _mooncake(path: str, lines: Iterator[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(path, number, f"not JSON: {error}; write one object a line: {_EXAMPLE}") from error
        if not isinstance(value, dict):
            raise _bad(path, number, f"{quoted(value)} is not an object with timestamp, input_length, output_length")
        at_ms = _field(path, number, value, "timestamp")
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms * 1e6 <= _MOST_NS:
            raise _bad(path, number, f"timestamp {quoted(at_ms)} is not a number of milliseconds from 0")
        prompt, output = (
            _tokens(path, number, name, _field(path, number, value, name)) for name in ("input_length", "output_length")
        )
        yield _Row(round(at_ms * 1e6), prompt, output, _blocks(path, number, value.get("hash_ids"), prompt))
        _not_too_many(path, number)


def _blocks(path: str, number: int, value: Any, prompt_tokens: int) -> tuple[int, ...]:
    if value is None:
        return ()
    whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    if not whole or any(one < 0 for one in value):
        raise _bad(path, number, f"hash_ids {quoted(value)} is not a list of whole numbers from 0")
    if value and not (len(value) - 1) * BLOCK_TOKENS < prompt_tokens <= len(value) * BLOCK_TOKENS:
        raise _bad(
            path, number, f"{len(value)} hash_ids do not fit input_length {prompt_tokens}: one for each {BLOCK_TOKENS}"
        )
    return tuple(value)


def _azure(path: str, lines: Iterator[str]) -> Iterator[_Row]:
    reader = csv.reader(lines)
    try:
        yield from _azure_rows(path, reader)
    except csv.Error as error:
        raise _bad(path, reader.line_num, f"not a line of a CSV: {error}") from error


def _azure_rows(path: str, reader: Any) -> Iterator[_Row]:
    head = [name.strip() for name in next(reader, [])]
    missing = [name for name in _COLUMNS if name not in head]
    if missing:
        raise _bad(path, 1, f"no column {missing[0]}; the first line must name {', '.join(_COLUMNS)}")
    at = {name: head.index(name) for name in _COLUMNS}
    for cells in reader:
        number = reader.line_num
        if not cells:
            continue
        if len(cells) < len(head):
            raise _bad(path, number, f"{len(cells)} of {len(head)} columns")
        stamp, prompt, output = (cells[at[name]].strip() for name in _COLUMNS)
        prompt_tokens, output_tokens = (
            _tokens(path, number, name, int(text[:20]) if text.isascii() and text.isdecimal() else text)
            for name, text in (("ContextTokens", prompt), ("GeneratedTokens", output))
        )
        yield _Row(_stamp_ns(path, number, stamp), prompt_tokens, output_tokens)
        _not_too_many(path, number)


def _stamp_ns(path: str, number: int, text: str) -> int:
    """Nanoseconds of a number of seconds, or of a date and time with up to nine decimals; time zones may be named."""
    try:
        seconds = float(text)
    except ValueError:
        return _date_ns(path, number, text)
    if not 0 <= seconds * 1e9 <= _MOST_NS:
        raise _bad(path, number, f"TIMESTAMP {quoted(text)} is not a time; write seconds from 0, or a date and time")
    return round(seconds * 1e9)


def _date_ns(path: str, number: int, text: str) -> int:
    whole, _, rest = text.partition(".")
    digits = rest[: next((i for i, c in enumerate(rest) if not c.isdecimal()), len(rest))]
    try:
        at = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError as error:
        raise _bad(path, number, f"TIMESTAMP {quoted(text)} is not a time; write 2024-05-10 00:00:00.009930") from error
    since = at - datetime(1970, 1, 1, tzinfo=at.tzinfo)
    return (since.days * 86400 + since.seconds) * 1_000_000_000 + int((digits + "0" * 9)[:9])


def _field(path: str, number: int, value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise _bad(path, number, f"{name} is missing")
    return value[name]


def _tokens(path: str, number: int, name: str, value: Any) -> int:
    """At least 1: recorded requests without a prompt or an answer are asked with one token."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        raise _bad(path, number, f"{name} {quoted(value)} is not a number of tokens")
    return max(value, 1)


def _not_too_many(path: str, number: int) -> None:
    if number > MOST_LINES:
        raise _bad(path, number, f"more than {MOST_LINES:,} lines; write a shorter trace")


def _bad(path: str, number: int, text: str) -> BadValue:
    return BadValue(f"{path}:{number}: {text}")


_READERS = {"mooncake": _mooncake, "azure": _azure}
