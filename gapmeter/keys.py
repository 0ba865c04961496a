"""Keys that must lie in nobody's folder: which there are, and texts and values without them."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import markupsafe

from gapmeter.records.process import API_KEY
from gapmeter.report.command import Command

REDACTED = "REDACTED"
_VARIABLES = (API_KEY, "OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "GAPMETER_WORKER_SECRET")
_NAME = re.compile(r"(api[-_]?key|token|secret|password)$", re.IGNORECASE)
_PASSWORD = re.compile(r"https?://[^:/?#]*:([^/?#]*)@")
_SHORTEST = 6  # a shorter one is taken out where its name stands, and not wherever its letters do


@dataclass(frozen=True, slots=True)
class Keys:
    """Every spelling of each key that is known, the longest first."""

    spellings: tuple[str, ...] = ()

    @classmethod
    def within(cls, value: Any, *more: str | None) -> Keys:
        """The keys that stand under a key's name in a JSON value, those of the environment, and ``more``."""
        spelled: set[str] = set()
        for word in {*_named(value), *more, *(os.environ.get(name) for name in _VARIABLES)}:
            if word and len(word) >= _SHORTEST:
                # As it stands, in addresses, in JSON and in HTML (as Python and as the page's templates escape).
                for form in {word, unquote(word), quote(bytes_of(word)), json.dumps(word)[1:-1]}:
                    spelled |= {form, html.escape(form), str(markupsafe.escape(form))}
        return cls(tuple(sorted((form for form in spelled if len(form) >= _SHORTEST), key=len, reverse=True)))

    def out_of(self, text: str) -> str:
        """A text without them."""
        for key in self.spellings:
            text = text.replace(key, REDACTED)
        return text

    def out_of_bytes(self, data: bytes) -> bytes:
        """Bytes, which may be no text, without them."""
        for key in self.spellings:
            data = data.replace(bytes_of(key), REDACTED.encode())
        return data

    def out_of_value(self, value: Any, name: str = "") -> Any:
        """A JSON value without them, and without what stands under a key's name or behind a key's flag."""
        if isinstance(value, Mapping):
            return {key: self.out_of_value(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            before = (name, *(item if isinstance(item, str) and item.startswith("-") else name for item in value))
            return [self.out_of_value(item, flag) for item, flag in zip(value, before, strict=False)]
        if _is_key(value, name):
            return REDACTED
        return self.out_of(value) if isinstance(value, str) else value

    def out_of_command(self, command: Command) -> Command:
        """A command line without them, nor what ``KEY=VALUE`` gives to a key's name."""
        pairs = [(word, *word.partition("=")) for word in command.without("--api-key").words]
        clean = (
            f"{name}={REDACTED}" if equals and _is_key(value, name) else self.out_of(word)
            for word, name, equals, value in pairs
        )
        return Command(tuple(clean))


def _is_key(value: Any, name: str) -> bool:
    """Whether a value is a key by its name. A number under ``token`` is one token's, or how many."""
    if isinstance(value, bool) or not value or not (found := _NAME.search(name)):
        return False
    return isinstance(value, str) or (isinstance(value, int) and found[1].lower() != "token")


def _named(value: Any, name: str = "") -> Iterator[str]:
    """What stands under a name such as api_key, wherever, and passwords in addresses."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named(inner, name)
    elif _is_key(value, name):
        yield str(value)
    elif isinstance(value, str) and (found := _PASSWORD.match(value)):
        yield found[1]


def bytes_of(key: str) -> bytes:
    """As it would lie in a file; the environment's bytes need be no text, and JSON can say half a character."""
    try:
        return key.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return key.encode(errors="surrogatepass")
