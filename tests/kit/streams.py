"""Answers as they come over the wire: events of the OpenAI protocol, and records of their arrival."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gapmeter.records import Outcome
from gapmeter.records.answers import UNKNOWN, read_answers
from gapmeter.records.request import Block, RequestRecord, encode, split
from gapmeter.records.stream import Answer, parse_answer

# What is said of an answer that is not one.
ENDED_EARLY = "the stream ended before the answer did"
NOT_JSON = "not JSON in the answer"


def chat(text: str | None = None, total: int | None = None, **more: Any) -> dict[str, Any]:
    """One chat chunk; ``total`` is its running usage."""
    finish = more.pop("finish_reason", None)
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    value: dict[str, Any] = {"id": "c", "choices": [choice | more]}
    if total is not None:
        value["usage"] = {"prompt_tokens": 7, "completion_tokens": total, "total_tokens": 7 + total}
    return value


def role(total: int | None = None) -> dict[str, Any]:
    value = chat(None, total)
    value["choices"][0]["delta"] = {"role": "assistant", "content": ""}
    return value


def usage_only(total: int, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": total}} | more


def sse(*values: dict[str, Any] | str, end: str = "\n") -> list[bytes]:
    lines = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    return [f"data: {line}{end}{end}".encode() for line in lines]


def arrived(pieces: Sequence[bytes], at_ns: Sequence[int] | None = None) -> dict[str, Any]:
    """What a record has of pieces that came at these times, or at 10, 20, 30 ns and so on."""
    return {
        "body": b"".join(pieces),
        "chunk_ns": np.array(at_ns if at_ns is not None else [10 * (i + 1) for i in range(len(pieces))], np.int64),
        "chunk_bytes": np.array([len(piece) for piece in pieces], np.uint32),
    }


def wire(pieces: Sequence[bytes]) -> RequestRecord:
    """A good answer of which nothing else is said; it ends with its last piece."""
    return RequestRecord(
        index=0, request_id="r", worker=0, due_ns=0, status=200, outcome=Outcome.OK, end_ns=10 * len(pieces),
        **arrived(pieces),
    )  # fmt: skip


def comparable(answer: Answer) -> tuple[object, ...]:
    """All that does not depend on when its pieces came."""
    return (
        answer.chunk_tokens.tolist(), answer.text_chars, answer.prompt_tokens, answer.output_tokens,
        answer.finish_reason, answer.counted, answer.done, answer.error,
    )  # fmt: skip


def read_together(records: Sequence[RequestRecord]) -> list[Answer]:
    """What is read of them at once, as ``parse_answer`` would say it of each; what is left to that, it says itself."""
    read = read_answers(Block.joined([b"".join(encode(record)) for record in records]))
    said, counts = read.said, (read.prompt_tokens(), read.output_tokens(), read.cached_tokens())
    prompt, output, cached = ([None if one == UNKNOWN else one for one in values.tolist()] for values in counts)
    rows = zip(
        split(read.token_ns, said["tokens"]), split(read.chunk_tokens, said["chunks"]),
        split(read.chunk_ns, said["chunks"]), said["first_text_ns"].tolist(), said["characters"].tolist(),
        prompt, output, [0] * len(records), cached, read.finish_reasons(), read.counted(), read.request_metrics(),
        (said["done"] > 0).tolist(), strict=True,
    )  # fmt: skip
    both = zip(records, read.usual.tolist(), rows, strict=True)
    return [Answer(*row) if usual else parse_answer(record) for record, usual, row in both]


def same(one: Answer, other: Answer) -> bool:
    """In every field, to the type."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Answer)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b and type(a) is type(b) for a, b in pairs)
