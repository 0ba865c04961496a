"""A user's own prompts, and how a file that a scenario names is read, line by line.

A mistake in one is reported with the file's name and the line's number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, RootModel, TypeAdapter, ValidationError, ValidationInfo, model_validator

from gapmeter.scenarios.errors import BadValue, either, nearest, quoted, unread
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.values import READ_FILES, FilePath, Tokens, Wording, bad_value

MOST_LINES = 2_000_000
MOST_BYTES = 1 << 30
T = TypeVar("T")


def json_lines(path: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Each line's number, from 1, and its JSON value; empty ones are passed over. Raises BadValue."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise at_line(path, number, f"not JSON: {error}; write one object a line") from error


def checked(path: str, rows: Iterable[tuple[int, Any]], kind: TypeAdapter[T]) -> Iterator[tuple[int, T]]:
    """Each row's number, and its value as a ``kind``. Raises BadValue."""
    for count, (number, row) in enumerate(rows, 1):
        if count > MOST_LINES:
            raise at_line(path, number, f"more than {MOST_LINES:,} lines; write a shorter file")
        try:
            yield number, kind.validate_python(row)
        except ValidationError as error:
            bad = bad_value(error)
            name = f"{bad.path[0]} " if bad.path else ""
            raise at_line(path, number, name + bad.text) from error
        except RecursionError as error:
            raise at_line(path, number, "lists and objects in each other, too deep to be read; write fewer") from error


def at_line(path: str, number: int, text: str) -> BadValue:
    """The mistake in a line."""
    return BadValue(f"{path}:{number}: {text}")


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
        lines = (
            read_plain(path, MOST_BYTES, links=True).decode("utf-8-sig").split("\n")
        )  # further line ends may stand inside JSON
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot read {path}: {unread(error)}") from error
    entries = []
    for number, line in checked(path, json_lines(path, lines), _LINE):
        messages = tuple((message.role, message.content) for message in line.messages)
        entries.append(OwnPrompt(number, line.prompt, messages, line.max_tokens))
        if (line.prompt is None) != (entries[0].prompt is None):
            raise at_line(path, number, "prompt and messages in one file; write all lines the one way or the other")
    if not entries:
        raise BadValue(f"{path} holds no prompts; write one JSON object a line, with prompt or messages")
    return tuple(entries)


_Text = Annotated[str, Wording("a text", "it in quotes")]
# Of OpenAI's and vLLM's requests: with these another answer is asked for.
_ASKED = frozenset({
    "temperature", "top_p", "top_k", "min_p", "stop", "seed", "tools", "tool_choice", "functions", "function_call",
    "response_format", "n", "best_of", "logprobs", "logit_bias", "frequency_penalty", "presence_penalty",
    "max_completion_tokens", "min_tokens", "reasoning_effort", "suffix", "echo",
})  # fmt: skip


class _Message(BaseModel):
    role: Annotated[str, Wording("a text", "a role in quotes, for instance user")]
    content: Annotated[str, Wording("a text", "content as one text in quotes; lists of parts are not sent")]

    @model_validator(mode="before")
    @classmethod
    def _check(cls, value: object) -> object:
        return _all_sent(value, cls, lambda _: True)


class _Line(BaseModel):
    """What else a line says of its prompt, such as an id, is passed over; but not what asks for another answer."""

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
        return _all_sent(value, cls, lambda key: key in _ASKED or nearest(key, cls.model_fields) is not None)


def _all_sent(value: object, model: type[BaseModel], matters: Callable[[str], bool]) -> object:
    """An object, if it asks for nothing that is not sent."""
    for key in sorted(map(str, value.keys() - model.model_fields.keys())) if isinstance(value, dict) else ():
        if matters(key):
            raise BadValue(f"{quoted(key)} is not sent; remove it ({either(model.model_fields)} are)")
    return value


_LINE = TypeAdapter(_Line)
