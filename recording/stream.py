"""From the raw bytes of an answer and their arrival stamps to token arrivals. Pure functions; runs after the window."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recording.wire import WireRecord

Ints = NDArray[np.int64]

# Atomic, so that CR LF is never taken for a CR line followed by an empty LF line.
_LINE_END = re.compile(rb"(?>\r\n|\n|\r)")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)+")
_MOST_TOKENS = 10_000_000  # what no chunk can hold; a stamp for each would fill the memory
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer said and when.

    ``token_ns``: one stamp a token, int64 (k tokens of one chunk share theirs). ``chunk_tokens`` and ``chunk_ns``: the
    tokens and the stamp of each chunk that carried some. ``counted`` says where counts come from: ``usage`` (running
    totals in the stream), ``token_ids``, or ``unmeasured``: then each content chunk is one entry of ``token_ns``, and
    ``output_tokens`` is what the last usage said, if any. ``first_text_ns`` is the first visible text, 0 if none came.
    ``done``: the stream said that it was over. ``error``: what is wrong with the answer, "" if nothing is.
    """

    token_ns: Ints
    chunk_tokens: Ints
    chunk_ns: Ints
    first_text_ns: int = 0
    text_chars: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    counted: str = "unmeasured"
    request_metrics: dict[str, Any] | None = None
    done: bool = False
    error: str = ""


@dataclass(slots=True)
class _Reading:
    """What has been gathered while going through the events."""

    stamps: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    running: int = 0
    counted: str = ""
    first_text_ns: int = 0
    text_chars: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    finish_reason: str = ""
    done: bool = False
    error: str = ""


def parse_answer(record: WireRecord, *, first_token_only: bool = False) -> Answer:
    """The answer in a wire record, as far as it came; reading stops at the first thing that is wrong with it.

    ``first_token_only``: read no further than the first chunk with a token; for a glance while the run goes on.
    """
    reading = _Reading()
    for stamp, data in events(record):
        if data == "[DONE]":
            reading.done = True
            break
        _read_event(reading, stamp, data)
        if reading.error or (first_token_only and reading.stamps):
            break
    if not reading.error and not first_token_only:
        reading.error = _unfinished(reading, record.body)
    return _answer(reading)


def events(record: WireRecord) -> Iterator[tuple[int, str]]:
    """(stamp, data) of each server-sent event, or one for a plain JSON body.

    The stamp is the arrival of the piece that completed the event. The format is the WHATWG's: lines end in LF, CRLF or
    CR, comments and unknown fields are skipped, several data lines are joined by LF. What follows the last blank line
    was never completed and is left out, unless it is a bare end mark.
    """
    body, ends = record.body, np.cumsum(record.chunk_bytes, dtype=np.int64)
    if body.lstrip()[:1] in (b"{", b"["):
        yield _arrival(record, ends, len(body.rstrip()) - 1), body.decode(errors="replace")
        return
    at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    blanks = list(_BLANK_LINE.finditer(body, at))
    # An event is complete with the first byte of its blank line's own end.
    last = np.array([match.start() + 1 + (match[0][:2] == b"\r\n") for match in blanks], dtype=np.int64)
    pieces = np.minimum(np.searchsorted(ends, last, side="right"), max(len(ends) - 1, 0))
    stamps = record.chunk_ns[pieces].tolist() if len(ends) else [record.end_ns] * len(blanks)
    for match, stamp in zip(blanks, stamps, strict=True):
        data = _data(body[at : match.start()])
        at = match.end()
        if data is not None:
            yield stamp, data
    if _data(body[at:].rstrip()) == "[DONE]":
        yield _arrival(record, ends, len(body) - 1), "[DONE]"


def _arrival(record: WireRecord, ends: Ints, offset: int) -> int:
    """When the byte at ``offset`` of the body was read."""
    if not len(ends):
        return record.end_ns
    return int(record.chunk_ns[min(int(np.searchsorted(ends, offset, side="right")), len(ends) - 1)])


def _data(block: bytes) -> str | None:
    """The data of one event's lines, None when it has none."""
    if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
        return block[6:].decode(errors="replace")
    lines = [line for line in _LINE_END.split(block) if line == b"data" or line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines).decode(errors="replace")


def _read_event(reading: _Reading, stamp: int, data: str) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        reading.error = f"not JSON in the answer: {data[:80]!r}"
        return
    if not isinstance(value, dict):
        reading.error = f"not an object in the answer: {data[:80]!r}"
        return
    if value.get("error"):
        reading.error = f"the server said: {_message(value['error'])}"
        return
    usage = value.get("usage")
    if not isinstance(usage, dict):
        usage = None
    else:
        reading.usage = usage
    if isinstance(value.get("metrics"), dict):
        reading.metrics = value["metrics"]
    choices = value.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        _read_choice(reading, stamp, choices[0], usage)


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or error)[:300]


def _read_choice(reading: _Reading, stamp: int, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
    part = choice.get("delta") or choice.get("message") or choice
    content = False
    if isinstance(part, dict):
        for name in _TEXTS:
            text = part.get(name)
            if text and isinstance(text, str):
                content = True
                reading.text_chars += len(text)
                if not reading.first_text_ns:
                    reading.first_text_ns = stamp
        content = content or bool(part.get("tool_calls"))
    reason = choice.get("finish_reason")
    if isinstance(reason, str):
        reading.finish_reason = reason
    tokens = _count(reading, choice.get("token_ids"), usage, content)
    if tokens > _MOST_TOKENS:
        reading.error = f"a usage of {tokens} more tokens in one chunk"
    elif tokens > 0:
        reading.stamps.append(stamp)
        reading.counts.append(tokens)


def _count(reading: _Reading, ids: Any, usage: dict[str, Any] | None, content: bool) -> int:
    """Tokens of this chunk. The first chunk that says anything decides how they are counted.

    A usage that comes only with the last chunk is a sum, not a running total: it must not give that chunk all tokens.
    """
    total = usage.get("completion_tokens") if usage else None
    if type(total) is not int or total < 0:
        total = None
    if not reading.counted:
        if total is not None:
            reading.counted = "usage"
        elif isinstance(ids, list) and ids:
            reading.counted = "token_ids"
        elif content:
            reading.counted = "unmeasured"
    if reading.counted == "usage":
        new = max((total or 0) - reading.running, 0)
    elif reading.counted == "token_ids":
        new = len(ids) if isinstance(ids, list) else 0
    else:
        new = int(content)
    reading.running += new
    return new


def _unfinished(reading: _Reading, body: bytes) -> str:
    """What is wrong with an answer that has ended: nothing in it, or no end in it."""
    if reading.done or reading.finish_reason:
        return ""
    if not body:
        return "the answer is empty"
    if not reading.counted and not reading.usage:
        return f"neither JSON nor server-sent events: {body[:80]!r}"
    return "the stream ended before the answer did"


def _answer(reading: _Reading) -> Answer:
    usage = reading.usage
    details = usage.get("prompt_tokens_details")
    counts = np.asarray(reading.counts, dtype=np.int64)
    stamps = np.asarray(reading.stamps, dtype=np.int64)
    output = _whole(usage.get("completion_tokens"))
    if output is None and reading.counted in ("usage", "token_ids"):
        output = reading.running
    return Answer(
        token_ns=np.repeat(stamps, counts),
        chunk_tokens=counts,
        chunk_ns=stamps,
        first_text_ns=reading.first_text_ns,
        text_chars=reading.text_chars,
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        output_tokens=output,
        cached_tokens=_whole(details.get("cached_tokens")) if isinstance(details, dict) else None,
        finish_reason=reading.finish_reason,
        counted=reading.counted or "unmeasured",
        request_metrics=reading.metrics,
        done=reading.done,
        error=reading.error,
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
