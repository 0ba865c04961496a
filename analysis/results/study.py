"""The manifests of what consists of many runs: a sweep's and a capacity search's; and any folder's, by its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gapmeter.analysis.results.codec import Result, left_out
from gapmeter.analysis.results.manifest import Manifest, ManifestBase, Slo

Ended = Literal["found", "budget", "unmeetable", "client_limit", "not_measured", "died", "interrupted"]


class SweepPoint(Result):
    """One point: the values that it sets, and what it has at every swept key (None where that is unset)."""

    values: Mapping[str, Any]
    resolved: Mapping[str, Any]
    digest: str
    folder: str


class SweepManifest(ManifestBase):
    """A sweep. ``order``: for each server that is started, the (point, repeat) that are run on it, one by one."""

    kind: Literal["sweep"] = "sweep"
    repeat: int
    points: tuple[SweepPoint, ...]
    order: tuple[tuple[tuple[int, int], ...], ...]


class TrialNote(Result):
    """One trial of a search: which look at it ended it (``looks``: after so many requests), what went wrong."""

    rate: float
    folder: str
    looks: tuple[int, ...]
    ended: int
    from_ns: int
    seconds: float
    interrupted: bool = False
    died: str | None = left_out()
    reason: str | None = left_out()


class SearchFacts(Result):
    """What is searched, and the trials so far. ``ended``: how the search ended; None while it goes on."""

    target_rps: float | None
    headroom: float
    spare: int
    confidence: float
    within: float
    budget_s: float
    start: float
    longest: int
    lost_s: float
    trials: tuple[TrialNote, ...]
    ended: Ended | None


class SearchManifest(ManifestBase):
    """A search for capacity."""

    kind: Literal["capacity"] = "capacity"
    slo: tuple[Slo, ...]
    capacity: SearchFacts


AnyManifest = Manifest | SweepManifest | SearchManifest
_KINDS: Mapping[str, type[SweepManifest] | type[SearchManifest]] = {
    "sweep": SweepManifest, "capacity": SearchManifest,
}  # fmt: skip


def read_manifest(folder: Path) -> AnyManifest:
    """A folder's manifest, by its kind. Raises NotReadable, FileNotFoundError where there is none, OSError."""
    path = folder / Manifest.FILE
    text = path.read_bytes()
    try:
        kind = json.loads(text).get("kind", "")
    except (ValueError, RecursionError, AttributeError):
        kind = ""  # which the reader of a run's says
    cls: type[AnyManifest] = _KINDS.get(str(kind), Manifest)
    return cls.parse(text, path)
