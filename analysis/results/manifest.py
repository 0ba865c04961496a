"""What a run, a sweep and a search say of themselves: ``manifest.json``. Made before they start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from gapmeter.analysis.results.codec import Result, ResultFile, first_problem, left_out
from gapmeter.analysis.results.device import Weights
from gapmeter.records.workers import LocustWorkers
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.slo import Slo

_LOCALHOST = ("localhost", "127.0.0.1", "::1")
Status = Literal["running", "complete", "incomplete", "interrupted"]  # interrupted: of a study


class Hardware(Result):
    """The machine. ``gpus``: as nvidia-smi names them, with memory and driver."""

    cpu: str
    cores: int
    affinity: tuple[int, ...]
    memory_gib: float
    system: str
    gpus: tuple[str, ...]


class Git(Result):
    """The scenario author's checkout."""

    commit: str
    changed: bool


class Placement(Result):
    """Core numbers; none for a server that is not ours to place. ``shared``: it has the same as the generator."""

    generator: tuple[int, ...]
    server: tuple[int, ...]
    shared: bool


class CalibratedMachine(Result):
    """What a calibration holds for."""

    cpu: str
    cores: int
    system: str
    python: str
    gapmeter: str


class CalibratedLimit(Result):
    """The highest rate of one process that was exact.

    ``ended_by``: client (a higher rate was not), server (the null server could not send faster) or search (none higher
    was tried); with the last two the process can do more.
    """

    per_s: float = Field(gt=0)
    ended_by: str

    @property
    def reached(self) -> bool:
        """Whether it is the process's own limit."""
        return self.ended_by == "client"


class FloorFigures(Result):
    """What a load tester itself adds on this machine. ``quick``: measured with little effort."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    chunk_us: float
    quick: bool


class GeneratorFloor(FloorFigures):
    """One generator's own error and cost on this machine."""

    lag_p50_ms: float
    lag_p99_ms: float
    tokens: CalibratedLimit
    requests: CalibratedLimit
    measured_wall: str
    cores_shared: bool


class Calibration(Result):
    """What ``gapmeter calibrate`` found on this machine."""

    machine: CalibratedMachine
    most_error_ms: float
    generators: Mapping[str, GeneratorFloor]


class MeasuredRate(Result):
    """A kernel's rate over its repeats: GB/s or TFLOPS."""

    median: float
    low: float
    high: float
    repeats: int


class Peaks(Result):
    """What the server's cores can do at most, measured before it began; see machine/roofline."""

    cores: tuple[int, ...]
    llc_bytes: int | None
    array_bytes: int
    triad: MeasuredRate
    read: MeasuredRate
    cached: MeasuredRate | None
    multiply: MeasuredRate
    multiply_precision: str
    took_s: float


class PrecisionSupport(Result):
    """Whether the device computes in the run's precision by itself; ``native`` None: nobody knows.

    ``format`` is "" for a word of the engine's own that names no arithmetic. ``supported``: the formats of the device,
    as a scenario writes them.
    """

    precision: str
    format: str
    device: str
    native: bool | None
    supported: tuple[str, ...]
    emulated: bool


class TargetFacts(Result):
    """Who was asked, and what is known of whom: of a server of ours how it was launched, of another its models."""

    url: str
    model: str
    dialect: str
    command: tuple[str, ...] | None = left_out()
    env: Mapping[str, str] | None = left_out()
    versions: Mapping[str, str] | None = left_out()
    precision: PrecisionSupport | None = left_out()
    weights: Weights | None = left_out()
    tensor_parallel: int | None = left_out()
    peaks: Peaks | None = left_out()
    models: tuple[str, ...] | None = left_out()


class OwnUsers(Result):
    """The user's locustfile."""

    name: str
    sha256: str


class Shortened(Result):
    """The load was ended early, since enough was known. ``in_flight``: awaited or aborted."""

    at_ns: int
    in_flight: Literal["awaited", "aborted"]


class PlanFacts(Result):
    """What was to be issued; see loadgen.plan.Plan. Times count from ``t0_ns`` (CLOCK_MONOTONIC), None before it."""

    digest: str
    loop: Literal["open", "closed"]
    planned: int | None
    measured_from_ns: int
    warmup_requests: int
    end_ns: int
    prompt_tokens_exact: bool
    prompt_tokens: int
    output_tokens: int
    rate_knots: tuple[tuple[int, float], ...]
    count_dispersion: float
    prefix_share: float | None
    think_time_ns: int
    conversations: int | None
    notes: tuple[str, ...]
    warmup_auto: bool
    warmup_ns: int
    timeout_ns: int
    output_enforced: bool
    t0_ns: int | None = left_out()
    locustfile: OwnUsers | None = left_out()
    shortened: Shortened | None = left_out()
    clock_offsets_ns: Mapping[str, int] | None = left_out()

    @property
    def start_ns(self) -> int:
        """``t0_ns``. Raises ValueError for a load that had not begun."""
        if self.t0_ns is None:
            raise ValueError("the load had not begun")
        return self.t0_ns


class SweepPlace(Result):
    """The sweep that a run is a point of, and the values that it has there."""

    folder: str
    point: int
    values: Mapping[str, Any]


class TrialPlace(Result):
    """The search for capacity that a run is a trial of."""

    folder: str
    trial: int


class ManifestBase(ResultFile):
    """What every manifest says: of a run, and of a study that visits several loads.

    ``scenario``: the resolved scenario as it could stand in a file, with every key; ``asked``: the same as values.
    ``contents``: 12 hex digits of the SHA-256 of what each file that it names held, by key; None without such a file.
    ``server_here``: the server ran on this machine, found out when it was asked; None from an older version.
    """

    FILE: ClassVar[str] = "manifest.json"
    REMEDY: ClassVar[str] = "read it with the gapmeter that wrote it, or copy it again from where it was recorded"

    schema_version: Literal[1] = 1
    status: Status
    scenario: Mapping[str, Any]
    scenario_digest: str
    command: str
    started_wall: str
    started_wall_ns: int
    started_ns: int
    hardware: Hardware
    versions: Mapping[str, str]
    git: Git | None
    ended_because: str | None = left_out()
    contents: Mapping[str, str] | None = left_out()
    server_here: bool | None = left_out()
    _path: Path = Path(FILE)  # where it was read from

    @classmethod
    def parse(cls, text: bytes | str, path: Path) -> Self:
        found = super().parse(text, path)
        found._path = path
        return found

    @property
    def is_server_here(self) -> bool:
        """Whether ``hardware`` is the server's; of a server that an older version attached to, as its address reads."""
        server = self.scenario.get("server", {})
        by_name = server.get("engine") != "attach" or urlsplit(server.get("url") or "").hostname in _LOCALHOST
        return by_name if self.server_here is None else self.server_here

    @cached_property
    def asked(self) -> Scenario:
        """Raises NotReadable for a kept scenario that this version's scenarios could not be."""
        try:
            return Scenario.model_validate(self.scenario)
        except ValidationError as error:
            key, problem = first_problem(error, self.scenario)
            raise self.not_readable(self._path, f"scenario.{key}".rstrip("."), problem) from error


class Manifest(ManifestBase):
    """One run. ``device``: what computed the forwards, in a word; ``files``: SHA-256 by path of what was recorded."""

    repeat: int
    slo: tuple[Slo, ...]
    placement: Placement
    calibration: Calibration | None
    target: TargetFacts
    device: str
    plan: PlanFacts
    started_s: float | None = left_out()
    suspended_ns: int | None = left_out()
    workers: LocustWorkers | None = left_out()
    sweep: SweepPlace | None = left_out()
    capacity_of: TrialPlace | None = left_out()
    files: Mapping[str, str] | None = left_out()


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

    @property
    def number(self) -> int:
        """By its folder's name: a trial that was left out has one too; 0 where the name has none."""
        head, *_ = self.folder.rpartition("/")[2].partition("-")
        return int(head) if head.isdecimal() and len(head) < 10 else 0


class SearchFacts(Result):
    """What is searched, and the trials so far. ``ended``: how the search ended; None while it goes on.

    ``trace_rate``: of a trace as the scenario has it.
    """

    target_rps: float | None
    headroom: float
    spare: int
    confidence: float
    within: float
    budget_s: float
    start: float
    trace_rate: float | None = None
    longest: int
    lost_s: float
    trials: tuple[TrialNote, ...]
    ended: Ended | None


class SearchManifest(ManifestBase):
    """A search for capacity."""

    kind: Literal["capacity"] = "capacity"
    slo: tuple[Slo, ...]
    capacity: SearchFacts

    def with_facts(self, **facts: Any) -> SearchManifest:
        """The same with other facts of the search."""
        return self.model_copy(update={"capacity": self.capacity.model_copy(update=facts)})


AnyManifest = Manifest | SweepManifest | SearchManifest
_KINDS: Mapping[str, type[SweepManifest] | type[SearchManifest]] = {
    "sweep": SweepManifest, "capacity": SearchManifest,
}  # fmt: skip


def read_manifest(folder: Path) -> AnyManifest:
    """A folder's manifest, by its kind. Raises NotReadable, FileNotFoundError where there is none, OSError."""
    path = folder / Manifest.FILE
    text = read_plain(path)
    try:
        kind = json.loads(text).get("kind", "")
    except (ValueError, RecursionError, AttributeError):
        kind = ""  # which the reader of a run's says
    cls: type[AnyManifest] = _KINDS.get(str(kind), Manifest)
    return cls.parse(text, path)
