"""A stream as other clients look at it: one value an event, whatever it carries.

``records.stream`` says which chunks carry tokens and how many. Clients that do not know go by what is in a chunk: a
choice, some text, a usage. For telling what they would have measured, those facts are kept apart here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gapmeter.records.request import RequestRecord
from gapmeter.records.stream import events

_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event. ``at_ns``: when the piece that completed it was read.

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
