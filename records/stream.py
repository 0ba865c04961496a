"""From the raw bytes of an answer and their arrival stamps to token arrivals. Pure functions; runs after the window."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gapmeter_probe.records import Outcome

from gapmeter.records.request import Ints, RequestRecord

# Atomic, so that CR LF is never taken for a CR line followed by an empty LF line.
_LINE_END = re.compile(rb"(?>\r\n|\n|\r)")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)+")
_EVENT_ERROR = re.compile(rb"(?:^|[\r\n])event: ?error *(?:[\r\n]|$)")
_MOST_COUNTED = 1 << 40
_MOST_TOKENS = 10_000_000  # what no chunk can hold
_MOST_SILENT = 1 << 17  # tokens that a server may think without sending any, where fewer were asked for
REASONING = ("reasoning", "reasoning_content")
_CALLS = ("tool_calls", "function_call")
_FAILED = ("error", "abort", "insufficient_system_resource")  # finish reasons of an answer that the server gave up
_TEXTS = ("content", "reasoning_content", "reasoning", "reasoning_details", "text", "refusal")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer said and when.

    ``token_ns``: one stamp a token, int64 (k tokens of one chunk share theirs). ``chunk_tokens`` and ``chunk_ns``: the
    tokens and the stamp of each chunk that carried some. ``counted`` says where counts come from: ``usage`` (running
    totals in the stream), ``token_ids``, or ``unmeasured``: then each content chunk is one entry of ``token_ns``, and
    ``output_tokens`` is what the last usage said, if any. ``hidden_tokens``: those of them that were never sent, since
    the server thought in silence. ``first_text_ns`` is the first visible text, 0 if none came. ``done``:
    the stream said that it was over. ``error``: what is wrong with the answer, "" if nothing is.
    """

    token_ns: Ints
    chunk_tokens: Ints
    chunk_ns: Ints
    first_text_ns: int = 0
    text_chars: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hidden_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str = ""
    counted: str = "unmeasured"
    request_metrics: dict[str, Any] | None = None
    done: bool = False
    error: str = ""


@dataclass(slots=True)
class _Reading:
    """What has been gathered while going through the events.

    The lists have an entry for each chunk with choices: when it came, how many ids, a running total (-1: none), whether
    it has text or calls, and the number of its only choice, 0 where it has several.
    """

    stamps: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    content: list[bool] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    spoke: bool = False  # a chunk has brought a token
    reasoned: bool = False  # a chunk has brought a text of reasoning
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
    if _is_plain(record.body):
        for stamp, data in events(record):
            _read_event(reading, stamp, data)
    else:
        _read_stream(reading, record, first_token_only=first_token_only)
    if not reading.error and not first_token_only:
        reading.error = _unfinished(reading, record.body)
    usage = reading.usage
    details = usage.get("prompt_tokens_details")
    output = _whole(usage.get("completion_tokens")) or None  # a server that does not count says 0
    counted, new = _counts(reading, output)
    # Each token has a stamp: a few bytes that claim millions of them would fill the memory.
    if (claimed := int(new.sum())) > max(_MOST_SILENT, 2 * record.output_tokens) + len(record.body):
        reading.error = reading.error or f"a usage of {claimed} tokens in {len(record.body)} bytes"
        counted, new = "unmeasured", np.zeros_like(new)
    brought = new > 0
    stamps, counts = np.array(reading.stamps, dtype=np.int64)[brought], new[brought]
    if output is None and counted != "unmeasured":
        output = int(new.sum())
    return Answer(
        token_ns=np.repeat(stamps, counts),
        chunk_tokens=counts,
        chunk_ns=stamps,
        first_text_ns=reading.first_text_ns,
        text_chars=reading.text_chars,
        prompt_tokens=_whole(usage.get("prompt_tokens")) or None,
        output_tokens=output,
        hidden_tokens=0 if reading.reasoned else _hidden(usage, output, counts, told=counted != "unmeasured"),
        cached_tokens=_whole(details.get("cached_tokens")) if isinstance(details, dict) else None,
        finish_reason=reading.finish_reason,
        counted=counted,
        request_metrics=reading.metrics,
        done=reading.done,
        error=reading.error,
    )


def _read_stream(reading: _Reading, record: RequestRecord, *, first_token_only: bool) -> None:
    blocks, stamps, rest = _blocks(record)
    for block, stamp in zip(blocks, stamps, strict=True):
        data = _data(block)
        if _is_end(data):
            reading.done = True
            return
        if data:
            _read_event(reading, stamp, data)
            if not reading.error and b"event" in block and _EVENT_ERROR.search(block):
                reading.error = f"the server said: {storable(data)}"
        elif block.startswith(b"error:"):  # llama.cpp's own field, with an end mark behind it as of a good answer
            _read_event(reading, stamp, f'{{"error": {block[6:].decode(errors="replace")}}}')
        if reading.error or (first_token_only and reading.spoke):
            return
    reading.done = _is_end(_data(rest))


def outcome_of(record: RequestRecord, answer: Answer) -> Outcome:
    """How a request ended: the wire's outcome, unless the bytes that came say that the answer itself was no good.

    An answer whose end mark came is there, also where the body that carried it was never ended.
    """
    if record.outcome in (Outcome.TIMEOUT, Outcome.STALLED) and answer.done and record.status == 200:
        return Outcome.OK if len(answer.token_ns) and not answer.error else record.outcome
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
    body = record.body
    if _is_plain(body):
        (stamp,) = _arrivals(record, np.array([len(body.rstrip()) - 1]))
        yield stamp, body.decode(errors="replace")
        return
    blocks, stamps, rest = _blocks(record)
    for block, stamp in zip(blocks, stamps, strict=True):
        data = _data(block)
        if data:  # an event without data, such as a ping, is none
            yield stamp, data
    if _is_end(_data(rest)):
        (stamp,) = _arrivals(record, np.array([len(body) - 1]))
        yield stamp, "[DONE]"


def _is_plain(body: bytes) -> bool:
    """Whether it is JSON as a whole."""
    return body[:1] != b"d" and body.lstrip()[:1] in (b"{", b"[")


def _blocks(record: RequestRecord) -> tuple[list[bytes], list[int], bytes]:
    """The body's blocks that a blank line ended, when the first byte of that line had arrived, and what follows."""
    body = record.body
    if b"\r" not in body and not body.startswith(b"\xef"):
        *blocks, rest = body.split(b"\n\n")
        last = np.cumsum([len(block) + 2 for block in blocks], dtype=np.int64) - 1
    else:
        at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
        blanks = list(_BLANK_LINE.finditer(body, at))
        starts = [at, *(match.end() for match in blanks)]
        blocks = [body[start : match.start()] for start, match in zip(starts, blanks, strict=False)]
        rest = body[starts[-1] :]
        last = np.array([match.start() + 1 + (match[0][:2] == b"\r\n") for match in blanks], dtype=np.int64)
    return blocks, _arrivals(record, last), rest.rstrip()


def _arrivals(record: RequestRecord, offsets: Ints) -> list[int]:
    """When the bytes at these offsets of the body had arrived."""
    if not len(record.chunk_bytes):
        return [record.end_ns] * len(offsets)
    ends = np.cumsum(record.chunk_bytes, dtype=np.int64)
    pieces = np.minimum(np.searchsorted(ends, offsets, side="right"), len(ends) - 1)
    stamps: list[int] = record.arrival_ns[pieces].tolist()
    return stamps


def _data(block: bytes) -> str | None:
    """The data of one event's lines, None when it has none."""
    if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
        return block[6:].decode(errors="replace")
    lines = [line for line in _LINE_END.split(block) if line == b"data" or line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines).decode(errors="replace")


def _is_end(data: str | None) -> bool:
    return data is not None and data.strip() == "[DONE]"


def _read_event(reading: _Reading, stamp: int, data: str) -> None:
    """Take note of what an event says."""
    try:
        value = json.loads(data)
        error = _error(value) if isinstance(value, dict) else ""
    except (ValueError, RecursionError):
        reading.error = f"not JSON in the answer: {data[:80]!r}"
        return
    if not isinstance(value, dict):
        reading.error = f"not an object in the answer: {data[:80]!r}"
        return
    if error:
        reading.error = f"the server said: {error}"
        return
    usage = value.get("usage")
    if not isinstance(usage, dict):
        usage = None
    else:
        reading.usage = usage
    if isinstance(value.get("metrics"), dict):
        reading.metrics = engine_metrics(value["metrics"])
    choices = value.get("choices")
    objects = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if objects:
        _read_choices(reading, stamp, objects, usage)


def _error(value: dict[str, Any]) -> str:
    """What an error object says, in OpenAI's form or in the flat one; "" where it is none."""
    error = value.get("error")
    if not error and (value.get("object") == "error" or (error is not None and "choices" not in value)):
        error = value
    text = error.get("message") if isinstance(error, dict) else error
    return storable(str(text or error)) if error else ""


def _read_choices(reading: _Reading, stamp: int, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
    content, role_alone, ids = False, False, 0
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or choice
        if isinstance(part, dict):
            length = sum(_characters(text) for name in _TEXTS if (text := part.get(name)))
            content = content or bool(length or any(part.get(name) for name in _CALLS))
            role_alone |= bool(part.get("role") and choice.get("delta") and not choice.get("finish_reason"))
            reading.reasoned = reading.reasoned or any(part.get(name) for name in REASONING) or _thinks(part)
            if length:
                reading.text_chars += length
                reading.first_text_ns = reading.first_text_ns or stamp
        named = choice.get("token_ids")
        ids += len(named) if isinstance(named, list) else 0
        if isinstance(choice.get("finish_reason"), str):
            reading.finish_reason = storable(choice["finish_reason"])
    said = usage.get("completion_tokens") if usage else None
    most = max(said if type(said) is int else 0, ids)
    if most > _MOST_TOKENS:
        reading.error = f"a usage of {str(most)[:30]} tokens in one chunk"
        return
    if reading.finish_reason in _FAILED:
        reading.error = f"the server ended the answer with finish_reason {reading.finish_reason}"
        return
    total = _whole(said)
    if role_alone and not (content or ids or reading.stamps):
        total = None  # it comes before the first token, whatever its usage counts
    number = _whole(choices[0].get("index")) if len(choices) == 1 else None
    reading.stamps.append(stamp)
    reading.ids.append(ids)
    reading.totals.append(-1 if total is None else total)
    reading.content.append(content)
    reading.choices.append(number or 0)
    reading.spoke = reading.spoke or content or bool(ids or total)


def _characters(text: Any, deepest: int = 8) -> int:
    """Of a text, or of a list of parts with texts; JSON may be nested deeper than Python calls may be."""
    if isinstance(text, list) and deepest:
        parts = [part for part in text if isinstance(part, dict)]
        texts = [part.get("text") or part.get("thinking") or part.get("summary") for part in parts]
        return sum(_characters(each, deepest - 1) for each in texts)
    return len(text) if isinstance(text, str) else 0


def _thinks(part: dict[str, Any]) -> bool:
    """Whether a list of parts in it has a text of reasoning, as servers of Mistral, MiniMax and Databricks send it."""
    content, details = part.get("content"), part.get("reasoning_details")
    parts = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    return any(each.get("thinking") or each.get("summary") for each in parts) or _characters(details) > 0


def _counts(reading: _Reading, whole: int | None) -> tuple[str, Ints]:
    """How the tokens of each piece are counted, and how many there are: by usage, by ids, or a piece with content one.

    The whole stream decides. A usage that some chunks lack, or that stays as it is while text comes, is no running
    total: a zero beside the role, a sum at the end, what a chunk of its own holds, or a count that runs ahead of the
    text. Taken for one, it would give all tokens to one chunk, or end the answer while text still comes. Of several
    choices, each may have a total of its own: then these add up to the ``whole``, which is the last usage.
    """
    totals, content = np.array(reading.totals, np.int64), np.array(reading.content, np.bool_)
    new = _grown(totals)
    if len(set(reading.choices)) > 1:
        choices = np.array(reading.choices, np.int64)
        of_choices = [choices == choice for choice in np.unique(choices)]
        if sum(max(int(totals[own].max()), 0) for own in of_choices) == whole:
            for own in of_choices:
                new[own] = _grown(totals[own])
    if new.any() and (not content.any() or _running(totals[content], new[content])):
        return "usage", new
    if any(reading.ids) and (ids := np.array(reading.ids, np.int64))[content].all():
        return "token_ids", ids
    return "unmeasured", content.astype(np.int64)


def _grown(totals: Ints) -> Ints:
    """By how much each exceeds all before it, 0 at least."""
    most = np.maximum.accumulate(np.maximum(totals, 0))
    most[1:] -= most[:-1].copy()
    return most


def _running(totals: Ints, new: Ints) -> bool:
    """Whether totals grow with the text: there from its first piece, larger with half of them and with its last."""
    return bool(totals[0] > 0 and new[-1] > 0 and 2 * np.count_nonzero(new) >= len(new))


def _hidden(usage: dict[str, Any], output: int | None, counts: Ints, *, told: bool) -> int:
    """Tokens of reasoning among the output of an answer in which no text of it came.

    ``counts``: of each chunk, as it was ``told``, else 1; what came behind the first one was sent. A server may send
    its reasoning as part of the answer: then there are as many chunks as tokens. Some leave these tokens out of the
    output: then only the usage's total has them.
    """
    details = usage.get("completion_tokens_details")
    said = _whole((details if isinstance(details, dict) else usage).get("reasoning_tokens"))
    prompt, total = _whole(usage.get("prompt_tokens")), _whole(usage.get("total_tokens"))
    if not said or output is None or (prompt is not None and total == prompt + output + said):
        return 0
    most = int(counts[0]) - 1 if told else output - len(counts)
    hidden = min(said, most)
    return hidden if 0 < hidden < output else 0


def _unfinished(reading: _Reading, body: bytes) -> str:
    """What is wrong with an answer that has ended: nothing in it, or no end in it."""
    if reading.done or reading.finish_reason:
        return ""
    if not body:
        return "the answer is empty"
    if body.startswith(b"\x1f\x8b"):
        return "the answer is compressed (gzip), which nothing asked for"
    if reading.stamps or reading.usage:
        return "the stream ended before the answer did"
    what = "JSON that is no answer" if _is_plain(body) else "neither JSON nor server-sent events"
    return f"{what}: {body[:80]!r}"


def engine_metrics(said: dict[str, Any]) -> dict[str, Any] | None:
    """What an engine says of a request in numbers, such as a column can hold; None where it says nothing."""
    numbers = {name: one for name, one in said.items() if type(one) in (int, float) and name.isprintable()}
    return {name: one for name, one in numbers.items() if abs(one) < 1 << 62} or None


def storable(text: str) -> str:
    """A server's words, not too many, as files and tables can hold them: JSON may name halves of characters."""
    return text[:300].encode(errors="replace").decode()


def _whole(value: Any) -> int | None:
    """A count; None for what is none, or is more than anything here can come to."""
    return value if type(value) is int and 0 <= value <= _MOST_COUNTED else None
