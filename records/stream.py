"""From the raw bytes of an answer and their arrival stamps to token arrivals. Pure functions; runs after the window."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gapmeter_probe.records import Outcome
from numpy.typing import NDArray

from gapmeter.records.request import RequestRecord

Ints = NDArray[np.int64]

# Atomic, so that CR LF is never taken for a CR line followed by an empty LF line.
_LINE_END = re.compile(rb"(?>\r\n|\n|\r)")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)+")
_MOST_TOKENS = 10_000_000  # what no chunk can hold; a stamp for each would fill the memory
_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("content", "reasoning_content", "reasoning", "text", "refusal")


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


class _Piece(NamedTuple):
    """What a chunk with choices says of tokens: ids, a running total (None: nothing), text or calls of any kind.

    ``choice``: the number of the only one that it has, 0 where it has several.
    """

    stamp: int
    ids: int
    total: int | None
    content: bool
    choice: int = 0


@dataclass(slots=True)
class _Reading:
    """What has been gathered while going through the events."""

    pieces: list[_Piece] = field(default_factory=list)
    spoke: bool = False  # a chunk has brought a token
    first_text_ns: int = 0
    text_chars: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    finish_reason: str = ""
    done: bool = False
    error: str = ""


def parse_answer(record: RequestRecord, *, first_token_only: bool = False) -> Answer:
    """The answer in a request record, as far as it came; reading stops at the first thing that is wrong with it.

    ``first_token_only``: read no further than the first chunk with a token; for a check while the run goes on.
    """
    reading = _Reading()
    for stamp, data in events(record):
        if data == "[DONE]":
            reading.done = True
            break
        _read_event(reading, stamp, data)
        if reading.error or (first_token_only and reading.spoke):
            break
    if not reading.error and not first_token_only:
        reading.error = _unfinished(reading, record.body)
    usage = reading.usage
    details = usage.get("prompt_tokens_details")
    counted, new = _counts(reading.pieces, _whole(usage.get("completion_tokens")))
    brought = [(piece.stamp, tokens) for piece, tokens in zip(reading.pieces, new, strict=True) if tokens]
    stamps = np.array([stamp for stamp, _ in brought], dtype=np.int64)
    counts = np.array([tokens for _, tokens in brought], dtype=np.int64)
    output = _whole(usage.get("completion_tokens"))
    if output is None and counted != "unmeasured":
        output = sum(new)
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
        counted=counted,
        request_metrics=reading.metrics,
        done=reading.done,
        error=reading.error,
    )


def outcome_of(record: RequestRecord, answer: Answer) -> Outcome:
    """How a request ended: the wire's outcome, unless the bytes that came say that the answer itself was no good."""
    if record.outcome is not Outcome.OK:
        return record.outcome
    if answer.error:
        return Outcome.MALFORMED
    return Outcome.OK if len(answer.token_ns) else Outcome.WRONG_LENGTH


def events(record: RequestRecord) -> Iterator[tuple[int, str]]:
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
    stamps = record.arrival_ns[pieces].tolist() if len(ends) else [record.end_ns] * len(blanks)
    for match, stamp in zip(blanks, stamps, strict=True):
        data = _data(body[at : match.start()])
        at = match.end()
        if data:  # an event without data, such as a ping, is none
            yield stamp, data
    if _data(body[at:].rstrip()) == "[DONE]":
        yield _arrival(record, ends, len(body) - 1), "[DONE]"


def _arrival(record: RequestRecord, ends: Ints, offset: int) -> int:
    """When the byte at ``offset`` of the body had arrived."""
    if not len(ends):
        return record.end_ns
    return int(record.arrival_ns[min(int(np.searchsorted(ends, offset, side="right")), len(ends) - 1)])


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
    if error := _error(value):
        reading.error = f"the server said: {error}"
        return
    usage = value.get("usage")
    if not isinstance(usage, dict):
        usage = None
    else:
        reading.usage = usage
    if isinstance(value.get("metrics"), dict):
        reading.metrics = value["metrics"]
    choices = value.get("choices")
    objects = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if objects:
        _read_choices(reading, stamp, objects, usage)


def _error(value: dict[str, Any]) -> str:
    """What an error object says, in OpenAI's form or in the flat one; "" where it is none."""
    error = value.get("error")
    if not error:
        error = value if value.get("object") == "error" else None
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or error)[:300] if error else ""


def _read_choices(reading: _Reading, stamp: int, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
    content, ids = False, 0
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or choice
        if isinstance(part, dict):
            length = sum(_characters(text) for name in _TEXTS if (text := part.get(name)))
            content = content or bool(length or part.get("tool_calls") or part.get("function_call"))
            if length:
                reading.text_chars += length
                reading.first_text_ns = reading.first_text_ns or stamp
        named = choice.get("token_ids")
        ids += len(named) if isinstance(named, list) else 0
        if isinstance(choice.get("finish_reason"), str):
            reading.finish_reason = choice["finish_reason"]
    total = _whole(usage.get("completion_tokens")) if usage else None
    if max(total or 0, ids) > _MOST_TOKENS:
        reading.error = f"a usage of {max(total or 0, ids)} tokens in one chunk"
        return
    number = _whole(choices[0].get("index")) if len(choices) == 1 else None
    reading.pieces.append(_Piece(stamp, ids, total, content, number or 0))
    reading.spoke = reading.spoke or content or bool(ids or total)


def _characters(text: Any) -> int:
    """Of a text, or of a list of parts with texts."""
    if isinstance(text, list):
        return sum(_characters(part.get("text")) for part in text if isinstance(part, dict))
    return len(text) if isinstance(text, str) else 0


def _counts(pieces: list[_Piece], whole: int | None = None) -> tuple[str, list[int]]:
    """How the tokens of each piece are counted, and how many there are: by usage, by ids, or a piece with content one.

    The whole stream decides. A usage that some chunks lack, or that stays as it is while text comes, is no running
    total: a zero beside the role, a sum at the end, or what a chunk of its own holds. Taken for one, it would give all
    tokens to one chunk. Of several choices, each may have a total of its own: then these add up to the ``whole``, which
    is the last usage.
    """
    own: dict[int, int] = {}
    for piece in pieces:
        own[piece.choice] = max(own.get(piece.choice, 0), piece.total or 0)
    apart = len(own) > 1 and sum(own.values()) == whole
    new, so_far = [], dict.fromkeys(own, 0)
    for piece in pieces:
        counter = piece.choice if apart else next(iter(own))
        new.append(max((piece.total or 0) - so_far[counter], 0))
        so_far[counter] += new[-1]
    most = sum(new)
    spoken = [k for k, piece in enumerate(pieces) if piece.content]
    if most and (not spoken or _running(pieces, new, spoken)):
        return "usage", new
    if any(piece.ids for piece in pieces) and all(pieces[k].ids for k in spoken):
        return "token_ids", [piece.ids for piece in pieces]
    return "unmeasured", [int(piece.content) for piece in pieces]


def _running(pieces: list[_Piece], new: list[int], spoken: list[int]) -> bool:
    """Whether totals grow with the text: there from its first piece to its last, and larger with half of them."""
    grown = sum(new[k] > 0 for k in spoken)
    return bool(pieces[spoken[0]].total) and pieces[spoken[-1]].total is not None and 2 * grown >= len(spoken)


def _unfinished(reading: _Reading, body: bytes) -> str:
    """What is wrong with an answer that has ended: nothing in it, or no end in it."""
    if reading.done or reading.finish_reason:
        return ""
    if not body:
        return "the answer is empty"
    if body.startswith(b"\x1f\x8b"):
        return "the answer is compressed (gzip), which nothing asked for"
    if not reading.pieces and not reading.usage:
        return f"neither JSON nor server-sent events: {body[:80]!r}"
    return "the stream ended before the answer did"


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event as clients look at it that do not know which chunks carry tokens: they go by what is in it.

    ``at_ns``: when the piece that completed it arrived.

    ``choice``: it has a choice, be it empty (a role alone, a finish reason alone); ``text``: with visible or reasoning
    text; ``calls``: with a part of a tool call; ``finish``: with a finish reason. ``usage``: the completion tokens that
    it reports, None if it reports none. ``end``: the end mark of the stream, and nothing else.
    """

    at_ns: int
    choice: bool = False
    text: bool = False
    calls: bool = False
    finish: bool = False
    usage: int | None = None
    end: bool = False


def chunks(record: RequestRecord) -> Iterator[Chunk]:
    """Every event of an answer up to its end mark; what is no JSON object is left out."""
    for at_ns, data in events(record):
        if data == "[DONE]":
            yield Chunk(at_ns, end=True)
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield _chunk(at_ns, value)


def _chunk(at_ns: int, value: dict[str, Any]) -> Chunk:
    usage, choices = value.get("usage"), value.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    tokens = tokens if type(tokens) is int else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Chunk(at_ns, choice=choice is not None, usage=tokens)
    part = choice.get("delta") or choice.get("message") or choice
    part = part if isinstance(part, dict) else {}
    text = any(part.get(name) for name in ("content", "text", *_REASONING))
    return Chunk(at_ns, True, bool(text), bool(part.get("tool_calls")), bool(choice.get("finish_reason")), tokens)
