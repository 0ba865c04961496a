"""Files of a user's own prompts: JSON lines with ``prompt`` or ``messages``, and ``max_tokens`` where wanted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gapmeter.scenarios.asked import Asked, Prompts
from gapmeter.scenarios.errors import BadValue, quoted, unread
from gapmeter.scenarios.values import Type, text

MOST_LINES = 2_000_000
_MOST_TOKENS = 10_000_000
_HALF = re.compile("[\ud800-\udfff]")


def prompts() -> Type:
    """The path of a file; absolute by now, or relative to the working directory."""
    path = text("a path", "prompts.jsonl")
    return Type(lambda value: read_prompts(path.read(value)), path.schema)


def read_prompts(path: str) -> Prompts:
    """Raises BadValue, which names the file and the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # further line ends may stand inside JSON
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {path}: {unread(error)}") from error
    found = [_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadValue(f"{path} holds no prompts; write one JSON object a line, with prompt or messages")
    if len(found) > MOST_LINES:
        raise BadValue(f"{path} holds more than {MOST_LINES:,} lines")
    for entry in found:
        if (entry.prompt is None) != (found[0].prompt is None):
            raise _bad(path, entry.line, "prompt and messages in one file; write all lines the one way or the other")
    return Prompts(path, tuple(found))


def _entry(path: str, number: int, line: str) -> Asked:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, number, f"not JSON: {error}; write one object a line, with prompt or messages") from error
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise _bad(path, number, f"{quoted(value)} is not an object with either prompt or messages")
    if half := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise _bad(path, number, f"half a character, \\u{ord(half[0]):04x}, cannot be sent; write both halves")
    return Asked(number, _prompt(path, number, value), _messages(path, number, value), _most(path, number, value))


def _prompt(path: str, number: int, value: dict[str, Any]) -> str | None:
    found = value.get("prompt")
    if "prompt" in value and (not isinstance(found, str) or not found):
        raise _bad(path, number, f"prompt {quoted(found)} is not a text; write what is asked, in quotes")
    return found


def _messages(path: str, number: int, value: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if "messages" not in value:
        return ()
    given = value["messages"]
    if not isinstance(given, list) or not given:
        raise _bad(path, number, "messages is not a list with at least one message")
    for message in given:
        right = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not right:
            raise _bad(path, number, f"{quoted(message)} is not a message; write {{role: user, content: …}} with texts")
    return tuple((message["role"], message["content"]) for message in given)


def _most(path: str, number: int, value: dict[str, Any]) -> int | None:
    most = value.get("max_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_TOKENS):
        raise _bad(path, number, f"max_tokens {quoted(most)} is not a number of tokens")
    return most


def _bad(path: str, number: int, what: str) -> BadValue:
    return BadValue(f"{path}:{number}: {what}")
