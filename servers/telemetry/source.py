"""The seam of the sampler: a source is opened once, says what it is, and is read at every deadline."""

from __future__ import annotations

from typing import Any, Protocol

Row = dict[str, Any]


class Absent(Exception):
    """There is no such source here; the message says why, for the user."""


class ReadFailed(Exception):
    """This one sample could not be had; the message says why."""


class Source(Protocol):
    """Something that can be sampled. ``about`` is written once, at the start: names, limits, units that a row lacks."""

    name: str
    about: Row

    def read(self) -> list[Row]:
        """The rows of one sample, without their stamp. Raises ReadFailed, or Absent when it will never be had."""
