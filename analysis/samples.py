"""The sampler's lines of JSON beside a run, each as it writes them or passed over: a kill leaves half a line.

Whoever hands over a folder may have written anything there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, TypeAdapter

_MOST = 2**62
_WORDS = frozenset({"name", "domain", "group", "of"})  # whose values are texts; all others are numbers
_NEEDED = {
    "gpu": {"at_ns", "gpu"},
    "pcie": {"at_ns", "gpu"},
    "rapl": {"at_ns", "domain", "energy_uj"},
    "processes": {"at_ns", "pid", "name", "cpu_ns", "rss_bytes", "threads", "voluntary", "involuntary"},
    "engine": {"at_ns", "took_ns"},
    "schedstat": {"at_ns", "pid", "tid", "ran_ns", "waited_ns"},
    "switches": {"pid", "of", "name"},
    "limits": {"at_ns", "group", "throttled_ns"},
}

_Number = Annotated[int, Field(gt=-_MOST, lt=_MOST)]


class _Gpu(BaseModel):
    gpu: _Number
    name: str | None = None
    pids: list[_Number] | None = None
    pcie_generation: _Number | None = None
    pcie_width: _Number | None = None


class _Domain(BaseModel):
    domain: str
    name: str
    range_uj: FiniteFloat


class _Source(BaseModel):
    every_ns: PositiveInt = 1
    gpus: list[_Gpu] = []
    throttle_bits: dict[str, _Number] = {}
    domains: list[_Domain] = []


class _Spoken(BaseModel):
    """What the sampler says of itself, first (``start``), meanwhile, and at its end."""

    type: Literal["start", "alive", "end"]
    at_ns: _Number
    cpu_ns: _Number = 0
    dropped: _Number = 0
    hz: _Number | FiniteFloat = 0
    nice: _Number = 0
    cores: list[_Number] = []
    sources: dict[str, _Source] = {}


class _Missed(BaseModel):
    """Deadlines that passed unread."""

    type: Literal["missed"]
    at_ns: _Number
    sources: list[str]
    count: _Number
    since_ns: _Number
    until_ns: _Number


class _Unread(BaseModel):
    """A read that failed, or a source that is not there."""

    type: Literal["failed", "absent"]
    at_ns: _Number
    source: str
    why: str


_NOTE = TypeAdapter[Any](Annotated[_Spoken | _Missed | _Unread, Field(discriminator="type")])


def read_notes(path: Path) -> tuple[list[dict[str, Any]], int]:
    """What the sampler noted, and how many lines are no note of it."""
    return _lines(path, lambda line: _NOTE.validate_json(line).model_dump(exclude_unset=True))


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The samples of the source whose file it is, none where there is no such file; and how many lines are none."""
    needed = _NEEDED[path.stem]

    def row_of(line: bytes) -> dict[str, Any]:
        row = json.loads(line)
        if not (isinstance(row, dict) and needed <= row.keys() and all(_fits(*each) for each in row.items())):
            raise ValueError("it is no sample of this source")
        return row

    return _lines(path, row_of)


def _fits(name: str, value: Any) -> bool:
    """Whether a column may hold it. A number is one that an array of 64 bits has room for (a mask has all of them)."""
    if name in _WORDS:
        return isinstance(value, str)
    return isinstance(value, int | float) and abs(value) < (_MOST if name == "at_ns" else 2**64)


def _lines(path: Path, read: Callable[[bytes], dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    rows, broken = list[dict[str, Any]](), 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            rows.append(read(line))
        except (ValueError, RecursionError):
            broken += 1
    return rows, broken
