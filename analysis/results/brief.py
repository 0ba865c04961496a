"""What a list of many folders shows of each: the few keys of their files that it needs; no others are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from gapmeter.analysis.results.codec import Number, Result, ResultFile


class _Part(Result, extra="ignore"):
    """Some keys of a part."""


class _File(ResultFile, extra="ignore"):
    """Some keys of a file."""


class BriefServer(_Part):
    engine: str
    model: str


class BriefTarget(_Part):
    """Who was asked; a study's manifest has none, its summary does."""

    model: str


class BriefLoad(_Part):
    rate: float | None = None
    concurrency: int | None = None
    arrivals: str | None = None


class BriefWorkload(_Part):
    kind: str | None = None


class BriefScenario(_Part):
    name: str
    server: BriefServer
    load: BriefLoad
    workload: BriefWorkload = BriefWorkload()
    sweep: tuple[Mapping[str, Any], ...] | None = None


class ManifestBrief(_File):
    """Of any kind of manifest."""

    FILE: ClassVar[str] = "manifest.json"

    schema_version: Literal[1] = 1
    kind: Literal["run", "sweep", "capacity"] = "run"
    scenario: BriefScenario
    target: BriefTarget | None = None
    started_wall: str
    ended_because: str | None = None


class BriefBound(_Part):
    ms: float


class BriefMetric(_Part):
    """By percentile (``p99``): ``at_most`` where only a bound is known, ``late_ms`` where it is refused."""

    p99_ms: Number
    at_most: Mapping[str, BriefBound] = {}
    late_ms: Mapping[str, float] = {}


class BriefCounts(_Part):
    measured: int


class RunBrief(_File):
    """Of a run's summary."""

    FILE: ClassVar[str] = "summary.json"

    schema_version: Literal[2] = 2
    verdict: str
    counts: BriefCounts
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
