"""What a list of many folders shows of each: the few keys of their files that it needs; no others are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, AliasPath, Field

from gapmeter.analysis.results.codec import Number, Result, ResultFile
from gapmeter.analysis.results.distribution import AtMost


class _Part(Result, extra="ignore"):
    """Some keys of a part."""


class _File(ResultFile, extra="ignore", populate_by_name=False):
    """Some keys of a file."""


def _within(*keys: str, default: Any = ...) -> Any:
    """A value that lies deeper in the file. With a default, a part that is no object on the way there goes unseen."""
    return Field(default, validation_alias=AliasPath(*keys))


class BriefTarget(_Part):
    """Who was asked; a study's manifest has none, its summary does."""

    model: str


class BriefLoad(_Part):
    rate: float | None = None
    concurrency: int | None = None
    arrivals: str | None = None


class BriefWorkload(_Part):
    kind: str | None = None


class ManifestBrief(_File):
    """Of any kind of manifest."""

    FILE: ClassVar[str] = "manifest.json"

    schema_version: Literal[1] = 1
    kind: Literal["run", "sweep", "capacity"] = "run"
    name: str = _within("scenario", "name")
    engine: str = _within("scenario", "server", "engine")
    model: str = _within("scenario", "server", "model")
    load: BriefLoad = _within("scenario", "load")
    workload: BriefWorkload = _within("scenario", "workload", default=BriefWorkload())
    sweep: tuple[Mapping[str, Any], ...] | None = _within("scenario", "sweep", default=None)
    target: BriefTarget | None = None
    started_wall: str
    ended_because: str | None = None


class BriefMetric(_Part):
    """By percentile (``p99``): ``at_most`` where only a bound is known, ``late_ms`` where it is refused."""

    p99_ms: Number
    at_most: Mapping[str, AtMost] = {}
    late_ms: Mapping[str, float] = {}


class RunBrief(_File):
    """Of a run's summary."""

    FILE: ClassVar[str] = "summary.json"

    schema_version: Literal[2] = 2
    verdict: str
    measured: int = _within("counts", "measured")
    metrics: Mapping[str, BriefMetric]


class BriefCapacity(_Part):
    rate: Number
    low: Number
    high: Number


class BriefOrigin(_Part):
    """``validity``: valid, INVALID, or what is missing."""

    model: str = ""
    validity: str = "valid"


class StudyBrief(_File):
    """Of a sweep's summary, or a search's, which has its ``capacity``."""

    FILE: ClassVar[str] = "summary.json"

    capacity: BriefCapacity | None = None
    provenance: BriefOrigin = BriefOrigin()


class BriefSide(_Part):
    scenario: str | None = None


class ComparisonBrief(_File):
    """Of a comparison, by latency (``sides``) or by cost (``rows``)."""

    FILE: ClassVar[str] = "compare.json"

    sides: tuple[BriefSide, ...] = Field((), validation_alias=AliasChoices("sides", "rows"))
    verdict: str | None = None
