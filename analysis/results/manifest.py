"""What a run says of itself: ``manifest.json``. Made before it starts, complete when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from gapmeter.analysis.results.codec import Result, ResultFile, left_out
from gapmeter.analysis.results.device import Weights
from gapmeter.scenarios.model import Scenario

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


class Slo(Result):
    """One limit: ``limit_ns`` and a percentile (99.9 for p99.9), or ``limit_share`` for errors."""

    metric: str
    percentile: float | None
    limit_ns: int | None
    limit_share: float | None
    text: str


class Cores(Result):
    """Who had which cores; none for a server that is not ours to place. ``shared``: both had the same."""

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


class GeneratorFloor(Result):
    """One generator's own error and cost on this machine."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    chunk_us: float
    tokens: CalibratedLimit
    requests: CalibratedLimit
    measured_wall: str
    quick: bool
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


class Target(Result):
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


class LocustWorker(Result):
    """One worker elsewhere, as the master knew it."""

    worker: int
    host: str
    pid: int
    state: str
    why: str
    planned: int | None
    reports: int
    issued: int
    finished: int
    failed: int
    test_restarts: int
    same_clock: bool
    clock_offset_ns: int
    clock_half_width_ns: int
    estimated_offset_ns: int
    estimated_half_width_ns: int
    round_trips: int


class LocustWorkers(Result):
    """All workers of a run; ``histograms``: theirs merged, by metric, as HdrHistogram encodes them."""

    locust: str
    plan: str
    port: int
    workers: tuple[LocustWorker, ...]
    histograms: Mapping[str, str]


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
    """

    FILE: ClassVar[str] = "manifest.json"
    REMEDY: ClassVar[str] = "read it with the gapmeter that wrote it, or take it again from where it was recorded"

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

    @cached_property
    def asked(self) -> Scenario:
        return Scenario.model_validate(self.scenario)


class Manifest(ManifestBase):
    """One run. ``device``: what computed the forwards, in a word; ``files``: SHA-256 by path of what was recorded."""

    repeat: int
    slo: tuple[Slo, ...]
    placement: Cores
    calibration: Calibration | None
    target: Target
    device: str
    plan: PlanFacts
    started_s: float | None = left_out()
    suspended_ns: int | None = left_out()
    workers: LocustWorkers | None = left_out()
    sweep: SweepPlace | None = left_out()
    capacity_of: TrialPlace | None = left_out()
    files: Mapping[str, str] | None = left_out()
