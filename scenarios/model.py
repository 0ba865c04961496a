"""A scenario as frozen values, and every key that a file may have: what it means, and what it is when left out.

Times are nanoseconds inside and seconds in a file, rates requests per second, shares fractions of 1. What a model
serialises to could stand in a scenario file. The JSON Schema and `gapmeter config` are made from these models too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from gapmeter.scenarios.errors import BadValue, nearest
from gapmeter.scenarios.files import Prompts
from gapmeter.scenarios.points import read_points
from gapmeter.scenarios.shapes import Constant, Diurnal, FixedPause, Lengths, OnOff, Pause, Ramp, Sampled, Steps
from gapmeter.scenarios.slo import Slos
from gapmeter.scenarios.trace import Trace
from gapmeter.scenarios.values import (
    CHOICE,
    MOST_RATE,
    SECOND_NS,
    Arguments,
    DeviceName,
    Duration,
    Name,
    Part,
    PositiveDuration,
    Precision,
    SamplesPerSecond,
    ScrapePeriod,
    Share,
    Summary,
    TextLine,
    Url,
    Warmup,
    Wording,
    bad_value,
    integer,
)

# Those whose mean is load.rate, and those that bring rates or times of their own.
RATED_ARRIVALS = ("constant", "poisson", "gamma", "onoff", "diurnal")
UNRATED_ARRIVALS = ("ramp", "steps", "trace")
# Under which the load is meant to change through the run: it has no steady state, and ends as it was drawn.
CHANGING_ARRIVALS = (*UNRATED_ARRIVALS, "diurnal")
OPEN_ARRIVALS = (*RATED_ARRIVALS, *UNRATED_ARRIVALS)
MOST_REQUESTS = 2_000_000
DTYPES = frozenset({"float32", "bfloat16", "float16", "half", "float", "auto"})  # another precision is a quantization
MOST_BATCH = 65536

_Engine = Annotated[Literal["transformers", "vllm", "attach", "simulated"], CHOICE]
_Kind = Annotated[Literal["chat", "completion", "conversation", "file"], CHOICE]
_Arrivals = Annotated[
    Literal["constant", "poisson", "gamma", "onoff", "ramp", "steps", "diurnal", "trace", "closed"], CHOICE
]
_ContextLength = Annotated[StrictInt, Field(ge=2, le=10_000_000), integer("a context length", 2048)]
_Temperature = Annotated[StrictFloat, Field(ge=0, le=2), Wording("a number", "for instance 0.5")]
_Rate = Annotated[StrictFloat, Field(ge=1e-5, le=MOST_RATE), Wording("a rate", "20", "requests per second")]
_Burstiness = Annotated[
    StrictFloat,
    Field(ge=0.001, le=1000),
    Wording("a burstiness", "4", "squared coefficient of variation of the gaps; 1 is Poisson"),
]
_Users = Annotated[StrictInt, Field(ge=1, le=100_000), integer("a number of users", 16)]
_Requests = Annotated[StrictInt, Field(ge=1, le=MOST_REQUESTS), integer("a number of requests", 500)]
_Price = Annotated[StrictFloat, Field(ge=1e-6, le=1e6), Wording("a price", "2.49", "USD per hour")]
_Sweep = Annotated[tuple[dict[str, object], ...], BeforeValidator(lambda value: read_points(value, check=_check_swept))]


class Server(Part):
    """Who answers."""

    engine: _Engine = "transformers"
    """transformers and vllm are launched; attach asks a server that already runs at server.url; simulated is a server
    of known stage times that proves the measurement itself."""
    model: TextLine = "builtin:tiny"
    """builtin:NAME, a folder, or a hub id."""
    precision: Precision = "float32"
    """float32, bfloat16, float16, or a word of the engine's own."""
    emulation: Annotated[Literal["refuse", "mark"], CHOICE] = "refuse"
    """What happens when the device has no native arithmetic of that precision: refuse ends the run before it begins,
    mark runs it and marks every result as emulated."""
    max_batch: Annotated[StrictInt, Field(ge=1, le=MOST_BATCH), integer("a batch size", 8)] = 8
    """The engine's cap on requests that run together."""
    max_model_len: _ContextLength | None = None
    """Cap on prompt and output tokens of one request; longer prompts are cut to fit. Left out: the engine's
    default, 2,048 at most on Transformers and vLLM."""
    args: Arguments = Field({})
    """Further engine flags by name, passed through and recorded."""
    url: Url | None = None
    """The address of a running server; engine attach only."""
    tokenizer: TextLine | None = None
    """Folder or hub id of the served model's tokenizer; engine attach only."""
    dialect: Annotated[Literal["full", "plain"], CHOICE] = "full"
    """full asks for exact output lengths and running token counts (vLLM's fields ignore_eos, min_tokens and
    continuous_usage_stats); plain leaves these out for servers that refuse them; engine attach only."""
    ready_timeout_ns: PositiveDuration = Field(600 * SECOND_NS, alias="ready_timeout")
    """How long a launched server may take until it answers."""

    @property
    def flags(self) -> dict[str, Any]:
        """``args`` under one spelling of their names, which may be written as on a command line."""
        return {name.lstrip("-").replace("-", "_"): value for name, value in self.args.items()}


class Workload(Part):
    """What is asked. Lengths are tokens of the served model, the chat template's own included; None: the trace's."""

    kind: _Kind = "chat"
    """chat asks /v1/chat/completions with one user message, completion asks /v1/completions. conversation: several
    turns of one user, each with all that was said before it; load.rate is then conversations per second, and a closed
    loop's users hold one conversation after another. file: prompts of your own."""
    prompt_tokens: Lengths | None = None
    """Prompt length in the served model's tokens, the chat template's own included; in a conversation that of each
    question as if it were asked alone. Left out only where a trace gives it."""
    output_tokens: Lengths | None = None
    """Length of the answer in tokens. Left out only where a trace gives it."""
    file: Prompts | None = None
    """JSON lines with prompt or messages, and max_tokens unless output_tokens is set (kind file only); sent in order,
    and again from the start when they run out."""
    turns: Lengths = Constant(1)
    """How many turns a conversation has (conversation only)."""
    shared_prefix: Share = 0.0
    """Share of each prompt that is the same text in every request."""
    shared_prefixes: Annotated[StrictInt, Field(ge=1, le=100_000), integer("a number of texts", 4)] = 1
    """How many such shared texts there are; each request begins with one of them, drawn evenly."""
    temperature: _Temperature = 0.0
    """Sampling temperature; 0 takes the likeliest token, so that equal requests get equal answers."""


class Load(Part):
    """How it is asked. Exactly one of ``duration_ns`` and ``requests`` is set.

    Open loop: ``rate`` is set, except for ramp, steps and trace, which have rates or times of their own. Closed loop:
    ``concurrency`` is set. Arrivals that have a shape have it under their own name. ``warmup_ns`` None means auto.
    """

    generator: Annotated[Literal["asyncio", "locust"], CHOICE] = "asyncio"
    """What issues the requests."""
    arrivals: _Arrivals = "poisson"
    """closed: each of load.concurrency users asks again when answered. All others are open loops: arrivals do not wait
    for answers. onoff, ramp, steps, diurnal and trace have a shape under their own name."""
    rate: _Rate | None = None
    """Requests per second (open loop): the mean where the rate changes by chance or through a day. ramp, steps and
    trace have rates or times of their own."""
    burstiness: _Burstiness | None = None
    """Squared coefficient of variation of the gaps between arrivals (gamma only): 1 is Poisson, above 1 comes in
    bursts, below 1 is steadier. It is 1 / shape, the inverse of what vLLM's bench calls burstiness."""
    onoff: OnOff | None = None
    """Bursts (onoff only): the rate is high and low in turn, each for an exponential time with mean on and off; quiet
    is the low rate as a share of the high one. Their mean over time is load.rate."""
    ramp: Ramp | None = None
    """Requests per second from and to (ramp only), in a straight line over the measured part, or over a time after
    which the rate stays."""
    steps: Steps | None = None
    """Rates one after the other, each for a time; the last one continues (steps only)."""
    diurnal: Diurnal | None = None
    """A day's curve compressed into a time, again and again (diurnal only): swing around load.rate with its peak at an
    hour, or hours with relative rates through the day."""
    trace: Trace | None = None
    """Requests recorded elsewhere, issued at their own times, speed times as fast (trace only), from a recorded time on
    (start), with loop again and again: JSON lines with timestamp (ms), input_length, output_length and hash_ids, or a
    CSV with TIMESTAMP, ContextTokens and GeneratedTokens. Lengths that the workload does not give are the trace's."""
    concurrency: _Users | None = None
    """Users of the closed loop."""
    think_time: Pause = FixedPause(0)
    """From an answer's end until the same user's next request: in a closed loop, and between the turns of a
    conversation."""
    duration_ns: PositiveDuration | None = Field(None, alias="duration")
    """How long the measured part lasts; with load.patience, at least. Instead of it: load.requests."""
    patience_ns: PositiveDuration | None = Field(None, alias="patience")
    """How long the measured part may last at most, if there are too few independent requests for both ends of the SLOs'
    percentiles by the end of load.duration. Four looks decide, the last at this time; they depend on how many
    independent values there are, never on the values. If it is left out, or no longer than load.duration, load.duration
    is exact; so it is with load.requests, with a rate that has a shape in time (ramp, steps, diurnal, trace), and if a
    flag or a variable sets load.duration alone."""
    requests: _Requests | None = None
    """How many requests are measured, instead of load.duration."""
    warmup_ns: Warmup = Field(None, alias="warmup")
    """Load before the measured part, on top of it. auto: a tenth of the measured part, 2 s to 30 s (closed loop of so
    many requests: two for each user)."""
    timeout_ns: PositiveDuration = Field(60 * SECOND_NS, alias="timeout")
    """How long after its due time a request may take; one that takes longer counts as failed."""
    stall_ns: PositiveDuration | None = Field(None, alias="stall")
    """How long a stream that has begun may bring no token before it is given up as stalled; left out: no limit. The
    wait for the first token is limited only by load.timeout."""
    retries: Annotated[StrictInt, Field(ge=0, le=100), integer("a number of retries", 2)] = 0
    """How often a request is retried that was refused, answered 5xx, 408, 425 or 429, or cut or timed out before
    anything had come. Every attempt is a record; latency counts from when the first was due."""
    retry_pause_ns: Duration = Field(SECOND_NS // 2, alias="retry_pause")
    """From a failed attempt's end until the next one is due; doubled each time, up to 8 s."""
    traceparent: Annotated[StrictBool, Wording("a truth value", "true or false")] = False
    """Whether requests have a traceparent header (W3C Trace Context), so that the server's own OpenTelemetry spans
    are placed under ours."""
    processes: Annotated[StrictInt, Field(ge=1, le=1024), integer("a number of processes", 1)] = 1
    """Generator processes that share the plan."""
    placement: Annotated[Literal["auto", "shared"], CHOICE] = "auto"
    """auto gives the generator cores of its own where the machine has enough; shared lets generator and server use all
    of them, which suits a server of several processes on a small machine."""

    @property
    def longest_ns(self) -> int | None:
        """How long the measured part may last; None where a number of requests ends it."""
        if self.duration_ns is None or self.patience_ns is None or self.arrivals in CHANGING_ARRIVALS:
            return self.duration_ns
        return max(self.duration_ns, self.patience_ns)

    @property
    def may_last_longer(self) -> bool:
        """Whether it may last longer than ``duration_ns``."""
        return self.longest_ns != self.duration_ns

    @property
    def loop(self) -> Literal["open", "closed"]:
        """Whether arrivals wait for answers: ``open`` or ``closed``."""
        return "open" if self.arrivals in OPEN_ARRIVALS else "closed"


class Telemetry(Part):
    """What is watched meanwhile."""

    hz: SamplesPerSecond = 10.0
    """Samples per second of GPUs, CPU energy and the server's processes; 0 switches telemetry off."""
    metrics_every_ns: ScrapePeriod = Field(SECOND_NS, alias="metrics_every")
    """How often the engine's /metrics page is read, which costs its API server time; 0 for never."""


class Cost(Part):
    """What serving costs."""

    gpu: DeviceName | None = None
    """The device that is paid for, by a name of the catalogue; the machine's own when left out."""
    usd_per_hour: _Price | None = None
    """Price of one GPU for an hour, or of the whole server where there is none; the catalogue's when left out."""
    gpus_per_replica: Annotated[StrictInt, Field(ge=1, le=4096), integer("a number of GPUs", 1)] | None = None
    """GPUs that serve together as one replica; as many as the engine's flags split the model over when left out."""
    utilisation: Annotated[StrictFloat, Field(gt=0, le=1), Wording("a number", "for instance 0.5")] = 0.8
    """Planned load, as a share of the rate at which the SLOs hold: what it leaves is the headroom of a fleet, too."""


class Scenario(Part):
    """One scenario of gapmeter: what serves, what is asked, how, and what must hold."""

    name: Name = "scenario"
    """Names the scenario in its run's folder; the file's own name when left out."""
    summary: Summary = ""
    """One line that says which question this scenario answers."""
    server: Server = Field(default_factory=Server)
    """Who answers."""
    workload: Workload = Field(default_factory=Workload)
    """What is asked."""
    load: Load
    """How it is asked."""
    telemetry: Telemetry = Field(default_factory=Telemetry)
    """What is watched meanwhile."""
    cost: Cost = Field(default_factory=Cost)
    """What serving costs."""
    slo: Slos = ()
    """Limits that must hold, for instance ttft p99 <= 500 ms or errors <= 1 %."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**63 - 1), integer("a seed", 1)] = 1
    """Everything random in the plan follows from it."""
    repeat: Annotated[StrictInt, Field(ge=1, le=1000), integer("a number of repeats", 3)] = 1
    """How often the same plan is run, each time with new text."""
    sweep: _Sweep = ()
    """Runs the scenario at many points: a mapping of keys to lists (every combination), or a list of mappings. The
    server restarts only when one of its keys changes; repeat: how often every point runs."""
    source: SkipJsonSchema[Path | None] = Field(None, exclude=True)
    model_asked_for: SkipJsonSchema[bool] = Field(False, exclude=True)  # beyond what the file says

    def to_dict(self) -> dict[str, Any]:
        """The resolved scenario as it could stand in a file: JSON-able, and it reads back to the same values."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """12 hex digits of the SHA-256 of what is measured; the same for the same values wherever they came from."""
        document = self.to_dict()
        for unmeasured in ("name", "summary", "telemetry", "cost"):  # a price changes nothing
            document.pop(unmeasured)
        if not self.sweep:  # so that what is no sweep keeps the digest that it had before there were any
            document.pop("sweep")
        if self.load.patience_ns is None:  # the same
            document["load"].pop("patience")
        for section in ("workload", "load"):  # what the files hold counts, not where they lie
            document[section] = without_paths(document[section])
        read = self._read_from_files()
        document["files"] = [read[key] for key in _LENGTHS_OF if key in read]
        document |= {name: read[key] for key, name in _FILES.items() if key in read}
        return _digest(document)

    def contents(self) -> dict[str, str]:
        """12 hex digits of the SHA-256 of what each file that it names holds, by key: the same wherever it lies."""
        return {key: _digest(values) for key, values in self._read_from_files().items()}

    def _read_from_files(self) -> dict[str, list[Any]]:
        """What the files that it names hold, by key."""
        lengths = {key: getattr(self.workload, key.partition(".")[2]) for key in _LENGTHS_OF}
        read: dict[str, list[Any]] = {
            key: list(sampled.values) for key, sampled in lengths.items() if isinstance(sampled, Sampled)
        }
        if own := self.workload.file:
            read["workload.file"] = [(entry.prompt, entry.messages, entry.max_tokens) for entry in own.entries]
        if trace := self.load.trace:
            recorded = trace.recorded
            read["load.trace"] = [recorded.at_ns, recorded.prompt_tokens, recorded.output_tokens, recorded.blocks]
        return read


_LENGTHS_OF = ("workload.prompt_tokens", "workload.output_tokens", "workload.turns")
_FILES = {"workload.file": "prompts", "load.trace": "trace"}  # by what a digest calls them


def _digest(value: Any) -> str:
    packed = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(packed.encode()).hexdigest()[:12]


def without_paths(value: Any) -> Any:
    """A part of a scenario's document in which every file has the same name."""
    if not isinstance(value, Mapping):
        return value
    return {key: "" if key == "file" and inner is not None else without_paths(inner) for key, inner in value.items()}


def _keys() -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, info in Scenario.model_fields.items():
        if name in SECTIONS:
            fields = SECTIONS[name].model_fields.items()
            keys |= {f"{name}.{field.alias or leaf}": field for leaf, field in fields}
        elif not info.exclude:
            keys[name] = info
    return keys


# The groups of keys, and every dotted key that a file may have, in the order in which they are listed.
SECTIONS: dict[str, type[Part]] = {
    "server": Server, "workload": Workload, "load": Load, "telemetry": Telemetry, "cost": Cost,
}  # fmt: skip
KEYS = _keys()
_SAME_FOR_ALL = ("name", "summary", "slo", "repeat")  # they name the scenario or judge it
SWEPT_KEYS = tuple(key for key in KEYS if key not in (*_SAME_FOR_ALL, "sweep"))


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's document by dotted key."""
    groups = {f"{name}.{leaf}": value for name in SECTIONS for leaf, value in document[name].items()}
    return {key: value for key, value in document.items() if key not in SECTIONS} | groups


@cache
def defaults() -> dict[str, Any]:
    """What holds for a key that nobody wrote, as a file would spell it."""
    return flat(Scenario.model_validate({section: {} for section in SECTIONS}).to_dict())


def _check_swept(key: str, value: object) -> None:
    if key in _SAME_FOR_ALL:
        raise BadValue("it is one for the whole sweep; write it beside sweep")
    if str(key).startswith("server.args."):  # the parts of this mapping are free
        return
    if key not in SWEPT_KEYS:
        whole = next((known for known in SWEPT_KEYS if known.endswith(f".{key}")), None)
        close = whole or nearest(str(key), SWEPT_KEYS)
        remedy = f"did you mean {close}?" if close else "write it in full, for instance load.rate"
        raise BadValue(f"no such key to sweep over; {remedy}")
    check_value(key, value)


def check_value(key: str, value: object) -> None:
    """Raises BadValue for a value, as a file would spell it, that its key cannot take."""
    try:
        _adapter(key).validate_python(value)
    except ValidationError as error:
        raise bad_value(error) from error


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    kind: Any = Annotated[KEYS[key].annotation, KEYS[key]]
    return TypeAdapter(kind)
