"""A scenario as frozen values. Times are nanoseconds, rates requests per second, shares fractions of 1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from gapmeter.scenarios.arrivals import Diurnal, OnOff, Ramp, Shape, Step, Trace, spelled
from gapmeter.scenarios.asked import Prompts
from gapmeter.scenarios.pauses import Pause, seconds, spell_pause

# Those whose mean is load.rate, and those that bring rates or times of their own.
RATED_ARRIVALS = ("constant", "poisson", "gamma", "onoff", "diurnal")
UNRATED_ARRIVALS = ("ramp", "steps", "trace")
OPEN_ARRIVALS = (*RATED_ARRIVALS, *UNRATED_ARRIVALS)


@dataclass(frozen=True, slots=True)
class Constant:
    """Every request has the same number of tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from low to high, both included, each equally likely."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with this median and 95th percentile, rounded, at least 1; ``max`` caps what lies above it."""

    median: float
    p95: float
    max: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Drawn with replacement from the numbers in a file, one a line."""

    path: str
    values: tuple[int, ...]


Lengths = Constant | Uniform | Lognormal | Sampled


@dataclass(frozen=True, slots=True)
class Slo:
    """One limit. Times have ``limit_ns`` and a percentile (99.9 for p99.9), ``errors`` has ``limit_share``."""

    metric: str
    percentile: float | None
    limit_ns: int | None
    limit_share: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Server:
    """Who answers. ``url`` is set for ``engine: attach`` only; ``tokenizer`` None means the model's own."""

    engine: str
    model: str
    precision: str
    max_batch: int
    max_model_len: int | None
    args: Mapping[str, object]
    url: str | None
    tokenizer: str | None
    dialect: str
    ready_timeout_ns: int
    emulation: str = "refuse"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked: lengths in tokens of the served model, the chat template's own included; None: the trace's.

    ``turns``: how many turns a conversation has. ``file``: the prompts themselves.
    """

    kind: str
    prompt_tokens: Lengths | None
    output_tokens: Lengths | None
    shared_prefix: float
    temperature: float
    shared_prefixes: int = 1
    turns: Lengths = Constant(1)
    file: Prompts | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """How it is asked. Exactly one of ``duration_ns`` and ``requests`` is set.

    Open loop: ``rate`` is set, except for ramp, steps and trace, which have rates or times of their own. Closed loop:
    ``concurrency`` is set. ``burstiness`` is the squared coefficient of variation of the gaps: 1 is Poisson, 4 comes
    in bursts. Arrivals that have a shape have it under their own name. ``warmup_ns`` None means auto.
    """

    generator: str
    arrivals: str
    rate: float | None
    burstiness: float | None
    concurrency: int | None
    think_time: Pause
    duration_ns: int | None
    requests: int | None
    warmup_ns: int | None
    timeout_ns: int
    processes: int
    placement: str
    onoff: OnOff | None = None
    ramp: Ramp | None = None
    steps: tuple[Step, ...] | None = None
    diurnal: Diurnal | None = None
    trace: Trace | None = None
    stall_ns: int | None = None
    retries: int = 0
    retry_pause_ns: int = 500_000_000
    traceparent: bool = False

    @property
    def loop(self) -> str:
        return "open" if self.arrivals in OPEN_ARRIVALS else "closed"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What is sampled beside a run: everything ``hz`` times a second (0: nothing); /metrics at its own pace."""

    hz: float = 10.0
    metrics_every_ns: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """What serving costs. ``gpu`` None: the machine's own device. ``usd_per_hour`` None: the catalogue's price.

    ``gpus_per_replica`` None: as many as the engine's flags say. A price is that of one GPU, or of the whole server
    where there is none. ``utilisation``: the share of the rate that holds the SLOs that is planned to be used.
    """

    gpu: str | None = None
    usd_per_hour: float | None = None
    gpus_per_replica: int | None = None
    utilisation: float = 0.8


@dataclass(frozen=True, slots=True)
class Scenario:
    """One question, completely: what serves, what is asked, how, and what must hold."""

    name: str
    summary: str
    server: Server
    workload: Workload
    load: Load
    slo: tuple[Slo, ...]
    seed: int
    repeat: int
    telemetry: Telemetry = Telemetry()
    cost: Cost = Cost()
    source: Path | None = None
    sweep: tuple[Mapping[str, object], ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The resolved scenario as it could stand in a file: JSON-able, and it parses back to the same values."""
        return {f.name: plain(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "source"}

    def digest(self) -> str:
        """12 hex digits of the SHA-256 of what is measured; the same for the same values wherever they came from."""
        document = self.to_dict()
        for unmeasured in ("name", "summary", "telemetry", "cost"):  # a price changes nothing
            document.pop(unmeasured)
        if not self.sweep:  # so that what is no sweep keeps the digest that it had before there were any
            document.pop("sweep")
        lengths = (self.workload.prompt_tokens, self.workload.output_tokens)
        document["files"] = [list(sampled.values) for sampled in lengths if isinstance(sampled, Sampled)]
        if own := self.workload.file:
            document["prompts"] = [(entry.prompt, entry.messages, entry.max_tokens) for entry in own.entries]
        if trace := self.load.trace:
            document["trace"] = [trace.at_ns, trace.prompt_tokens, trace.output_tokens, trace.blocks]
        packed = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(packed.encode()).hexdigest()[:12]


def plain(name: str, value: object) -> object:
    """A value as a scenario file would spell it: seconds for ``*_ns``, text for SLOs, a mapping for lengths."""
    match value:
        case None:
            return "auto" if name == "warmup_ns" else None
        case Constant(tokens):
            return tokens
        case Uniform(low, high):
            return {"uniform": [low, high]}
        case Lognormal(median, p95, highest):
            shape = {"median": median, "p95": p95}
            return {"lognormal": shape if highest is None else shape | {"max": highest}}
        case Sampled(path):
            return {"file": path}
        case Slo():
            return value.text
        case tuple():
            return [plain(name, item) for item in value]
        case Mapping():
            return dict(value)
        case Server() | Workload() | Load() | Telemetry() | Cost():
            return {f.name.removesuffix("_ns"): plain(f.name, getattr(value, f.name)) for f in fields(value)}
        case int() if name.endswith("_ns"):
            return seconds(value)
    return _plain_part(value)


def _plain_part(value: object) -> object:
    if isinstance(value, Prompts):
        return value.path
    if isinstance(value, Shape):
        return spelled(value)
    return spell_pause(value) if isinstance(value, Pause) else value
