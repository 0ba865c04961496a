"""A file of a user's own prompts: JSON lines with ``prompt`` or ``messages``, and ``max_tokens`` where wanted."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, RootModel, TypeAdapter, ValidationInfo, model_validator

from gapmeter.scenarios.errors import BadValue, quoted, unread
from gapmeter.scenarios.lines import at_line, checked, json_lines
from gapmeter.scenarios.values import READ_FILES, FilePath, Tokens, Wording

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class OwnPrompt:
    """One line: exactly one of ``prompt`` and ``messages`` (pairs of role and content). ``line`` counts from 1."""

    line: int
    prompt: str | None
    messages: tuple[tuple[str, str], ...]
    max_tokens: int | None


class Prompts(RootModel[FilePath], frozen=True):
    """A file of prompts, all lines of one sort."""

    @property
    def path(self) -> str:
        """Absolute, or relative to the working directory."""
        return self.root

    @cached_property
    def entries(self) -> tuple[OwnPrompt, ...]:
        """The prompts. Raises BadValue, which names the file and the line."""
        return _read_prompts(self.root)

    @property
    def chat(self) -> bool:
        """Whether they are messages."""
        return self.entries[0].prompt is None

    @model_validator(mode="after")
    def _read_file(self, info: ValidationInfo) -> Self:
        if info.context is READ_FILES:
            _ = self.entries
        return self


def _read_prompts(path: str) -> tuple[OwnPrompt, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # further line ends may stand inside JSON
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {path}: {unread(error)}") from error
    entries = [
        OwnPrompt(number, line.prompt, tuple((m.role, m.content) for m in line.messages), line.max_tokens)
        for number, line in checked(path, json_lines(path, lines), _LINE)
    ]
    if not entries:
        raise BadValue(f"{path} holds no prompts; write one JSON object a line, with prompt or messages")
    for entry in entries:
        if (entry.prompt is None) != (entries[0].prompt is None):
            text = "prompt and messages in one file; write all lines the one way or the other"
            raise at_line(path, entry.line, text)
    return tuple(entries)


_Text = Annotated[str, Wording("a text", "it in quotes")]


class _Message(BaseModel):
    role: _Text
    content: _Text


class _Line(BaseModel):
    prompt: Annotated[_Text, Field(min_length=1), Wording("a text", "what is asked, in quotes")] | None = None
    messages: Annotated[
        tuple[Annotated[_Message, Wording("a message", "{role: user, content: …} with texts")], ...],
        Field(min_length=1),
        Wording("a list with at least one message", "for instance [{role: user, content: …}]"),
    ] = ()
    max_tokens: Tokens | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, value: object) -> object:
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise BadValue(f"{quoted(value)} is not an object with either prompt or messages")
        if half := _HALF_A_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
            raise BadValue(f"half a character, \\u{ord(half[0]):04x}, cannot be sent; write both halves")
        return value


_LINE = TypeAdapter(_Line)
