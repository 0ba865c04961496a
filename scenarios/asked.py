"""A user's own prompts as frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """One line: exactly one of ``prompt`` and ``messages`` (pairs of role and content). ``line`` counts from 1."""

    line: int
    prompt: str | None
    messages: tuple[tuple[str, str], ...]
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A file of them, all of one sort. ``chat``: they are messages."""

    path: str
    entries: tuple[Asked, ...]

    @property
    def chat(self) -> bool:
        return self.entries[0].prompt is None
