"""The one error that a mistake in a scenario ends in, and the wording that its makers share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


class BadValue(ValueError):
    """A value that a key cannot take. ``path`` leads to the offending part inside the key's value."""

    def __init__(self, text: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.text = text
        self.path = path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a file with line and column (both from 1), or a flag or variable by name."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


class ScenarioError(Exception):
    """A user's mistake in a scenario, a ``--set`` flag or an environment variable; its text names the remedy."""

    def __init__(self, text: str, *, place: Place | None = None, key: str = "") -> None:
        self.text = text
        self.place = place
        self.key = key
        where = " ".join(part for part in (str(place or ""), key) if part)
        super().__init__(f"{where}: {text}" if where else text)


def quoted(value: object) -> str:
    """A value as it is shown inside a message: text in double quotes, cut when long."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def unread(error: OSError | ValueError) -> str:
    """Why a file of text could not be read, with the remedy where there is one."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8"
    return str(getattr(error, "strerror", None) or error)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like ``word``, or None when none does."""
    close = get_close_matches(word.lower(), list(choices), n=1, cutoff=0.65)
    return close[0] if close else None


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``did you mean rate? `` when a choice looks like the word, else nothing."""
    close = nearest(str(word), choices)
    return f"did you mean {close}? " if close else ""


def either(choices: Iterable[str]) -> str:
    """``a, b or c``."""
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last
