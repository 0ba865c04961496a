"""What one run found: ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pydantic import GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from gapmeter.analysis.results.codec import Number, Result, ResultFile, left_out
from gapmeter.analysis.results.cost import Economy
from gapmeter.analysis.results.device import Roofline, Telemetry
from gapmeter.analysis.results.distribution import (
    AtMost,
    CensoredDistribution,
    GroupDistribution,
    KnownPercentile,
    MetricDistribution,
    Needs,
    StageDistribution,
)
from gapmeter.analysis.results.latency import Bands, Burst, Compute, GroupPair, Residual, Tail, Upgrade
from gapmeter.analysis.results.requests import (
    ClosedLoop,
    Counts,
    FailureClass,
    Goodput,
    LoadFacts,
    Outage,
    PeerDefinitions,
    Throughput,
    Turn,
)
from gapmeter.analysis.results.trust import Check, Drift, Floor, RunWarning, Steady, Trust

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]
PASS: Final = "PASS"
FAIL: Final = "FAIL"
INCONCLUSIVE: Final = "INCONCLUSIVE"
INVALID: Final = "INVALID"


class Confidence(Result):
    """Of the intervals, and of each side of a verdict."""

    interval: float
    verdict: float


Basis = Literal["interval", "bound", "far", "share", "outage"]


class FarBelow(Result):
    """How many requests exceeded a ``part`` of the limit: its half, or as much as the largest took."""

    part: float
    beyond: int


class Leaning(Result):
    """What an undecided SLO probably is: PASS or FAIL, how sure, and by what of that which could not decide it."""

    status: Literal["PASS", "FAIL"]
    sure: float
    basis: Basis


class SloAnswer(Result):
    """Whether one SLO holds. Its limit, value, low, high and sample are in ``unit``: ms, or a share for errors.

    In a file they have it in their names (``limit_ms``). ``sure``: how sure the answer is, one-sided, and by what
    (``basis``, see judge.verdict). ``sample``: what this sample has at the percentile, also where it supports no
    ``value``; then ``at_most`` bounds it, and ``highest`` is the highest percentile below it that has both ends.
    ``beyond``: how many values exceed the limit. ``infinite``: answers that never came reach the value or the interval.
    ``estimable_with``: what would give the interval both ends, ``needs`` what would settle an INCONCLUSIVE.
    ``stage`` and ``owner``: what explains the slow requests, where a ledger tells. ``beyond_half`` and ``far``: how
    many requests exceeded half the limit, or that part of it which tells most, where that decided. ``late``: what of
    the value may be the load tester's own lateness, where the value is refused or not judged for that; ``may_be_late``:
    the same, in ms, wherever it is worth speaking of. ``outage``: what decided, where that is the basis.
    ``resent``: how many requests were sent a second time, where the answer is open for these. ``leaning``: of an
    INCONCLUSIVE, where it is 80 % sure or more.
    """

    text: str
    metric: str
    percentile: float | None
    status: Verdict
    sure: Number = None
    basis: Basis | None = None
    limit: float
    value: Number
    low: Number
    high: Number
    sample: Number = None
    infinite: bool
    beyond: int | None = None
    count: int
    n_eff: float
    confidence: float
    estimable_with: Needs | None
    needs: Needs | None
    stage: str | None
    owner: str | None
    at_most: AtMost | None = left_out()
    highest: KnownPercentile | None = left_out()
    beyond_half: int | None = left_out()
    far: FarBelow | None = left_out()
    late: Number = left_out()
    may_be_late: Number = left_out()
    outage: Outage | None = left_out()
    resent: int | None = left_out()
    leaning: Leaning | None = left_out()

    @property
    def unit(self) -> Literal["ms", "share"]:
        return "share" if self.metric == "errors" else "ms"

    @property
    def unjudged(self) -> bool:
        """Whether lateness may have decided it."""
        return self.status == INVALID and self.late is not None

    @property
    def among_failures(self) -> bool:
        """Whether the percentile lies among requests that failed, so that it has no value."""
        return self.metric != "errors" and self.late is None and bool(self.beyond) and self.sample is None

    @model_validator(mode="before")
    @classmethod
    def _without_unit(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "limit" in value:
            return value
        unit = "_share" if value.get("metric") == "errors" else "_ms"
        return {key.removesuffix(unit) if key in _WITH_UNIT else key: item for key, item in value.items()}

    @model_serializer(mode="wrap")
    def _with_unit(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {f"{key}_{self.unit}" if key in _LIMITS else key: item for key, item in handler(self).items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        target = handler.resolve_ref_schema(reference)
        for name in _LIMITS:
            del target["properties"][name]
        target["required"] = [name for name in target["required"] if name not in _LIMITS]
        target["patternProperties"] = {f"^({'|'.join(_LIMITS)})_(ms|share)$": {"type": ["number", "null"]}}
        return reference


_LIMITS = ("limit", "value", "low", "high", "sample", "late")
_WITH_UNIT = {f"{name}_{unit}" for name in _LIMITS for unit in ("ms", "share")}


class StepFit(Result):
    """How long a decode-only step takes by what is in it, and how wrong that is."""

    base_ms: float
    per_sequence_ms: float
    per_kv_token_us: float
    error_ms: float
    decode_only_steps: int


class CoreHolder(Result):
    """Who had a core while requests waited for it: a process, and the stage that it was at ("" for none of its stages).

    ``process``: ``api``, ``engine``, ``server`` (another of its processes), ``load tester``, ``another program``
    (``program`` names it, where known), ``CPU limit`` (of the server's control group), ``stopped`` (the server,
    by a signal or a debugger), ``nobody`` (being moved) or ``unknown``. ``share`` of all such waiting of the run's
    requests, ``mean_ms`` of a request.
    """

    process: str
    stage: str
    share: float
    mean_ms: float
    program: str = ""


SupportLevel = Literal["exact", "approximate", "refused"]
EXACT: Final = "exact"
APPROXIMATE: Final = "approximate"
REFUSED: Final = "refused"


class Supported(Result):
    """Something that the server did or was, and how well the ledger knows it.

    ``detail``: what it was here ("2 ranks"); ``text``: what the level means; ``touches``: the stages concerned.
    """

    feature: str
    level: SupportLevel
    detail: str
    text: str
    touches: tuple[str, ...]


class Ranks(Result):
    """How far apart the ranks of an engine began a step's forward, over the steps that all of them ran."""

    steps: int
    begun_apart_p50_ms: float
    begun_apart_p99_ms: float


class LedgerFacts(Result):
    """The ledger itself: why it was refused, stages that are unmeasured, stamps that were out of order a little.

    ``core_held``: the most time first; left out where there is no ledger. ``core_waits``: what waits for a core are
    known from: the kernel's records of every switch, its sums of waits, or (not at all) the probes' spans alone.
    ``support``: what the server was, and how well the ledger knows it; ``ranks``: of a tensor parallel one.
    ``gaps_of``: of how many requests, drawn at random, token gaps were divided, where not of all.
    """

    refused: tuple[str, ...]
    unmeasured: tuple[str, ...]
    clipped: Mapping[str, int]
    requests: int
    interference: StepFit | None
    killed_processes: tuple[str, ...]
    core_held: tuple[CoreHolder, ...] | None = left_out()
    core_waits: Literal["switches", "sums", "spans"] = "spans"
    support: tuple[Supported, ...] | None = left_out()
    ranks: Ranks | None = left_out()
    gaps_of: int | None = left_out()


class ShortenedLoad(Result):
    """When the load was ended, since enough was known; ``in_flight``: awaited or aborted."""

    after_s: float
    in_flight: str


class MadeBy(Result):
    """The version installed, and a digest of the code of figures."""

    gapmeter: str
    analysis: str


UNKNOWN = "unknown"
STAMPS = ("INVALID", "NOT COMPARABLE")  # what a validity begins with whose figures must not be taken at their word


class Provenance(Result):
    """Eleven facts about the run, or the runs, behind a figure; each as text, ``n`` too."""

    scenario: str
    digest: str
    model: str
    precision: str
    engine: str
    hardware: str
    load: str
    n: str
    validity: str
    date: str
    command: str

    def line(self) -> str:
        """All of it in one line of text; what is unknown is left out, but for the validity."""
        named = " ".join(part for part in (self.scenario, self.digest) if part and part != UNKNOWN)
        many = f"n = {self.n}" if self.n != UNKNOWN else ""
        parts = [named, self.model, self.precision, self.engine, self.hardware, self.load, many, self.validity,
                 self.date, self.command]  # fmt: skip
        return " · ".join(part for part in parts if part and part != UNKNOWN)

    def facts(self) -> dict[str, str]:
        """The same, by name, for JSON and for the metadata of files."""
        return self.to_json()

    @property
    def stamp(self) -> str | None:
        """What must be written across every picture, if anything."""
        return next((word for word in STAMPS if self.validity.startswith(word)), None)


class VerdictWords(Result):
    """``slo``: a sentence each, in the order of the answers."""

    headline: str
    slo: tuple[str, ...]


class Words(VerdictWords):
    """A sentence for each part of a result that has something to say; mappings are by metric."""

    trust: str
    steady: str
    drift: str | None
    closed_loop: str | None
    turns: str | None
    tail: Mapping[str, str]
    upgrade: Mapping[str, str]
    compute: Mapping[str, str]
    telemetry: str | None
    utilisation: str | None
    roofline: str | None
    cost: str
    energy: str
    value: str


class RunVerdict(Result):
    """The verdict and why."""

    schema_version: Literal[2] = 2  # names are only ever added; counted up when one is renamed
    name: str
    verdict: Verdict
    exit_code: int
    invalid_reasons: tuple[str, ...]
    slo: tuple[SloAnswer, ...]


class RunFigures(RunVerdict):
    """What requests and their ledgers tell. Mappings are by metric (ttft, itl, tpot, e2e), stage or group.

    ``device``: what computed the forwards, in a word.
    """

    device: str
    confidence: Confidence
    load: LoadFacts
    counts: Counts
    metrics: Mapping[str, MetricDistribution]
    metrics_from_sent: Mapping[str, MetricDistribution]
    metrics_censored: Mapping[str, CensoredDistribution]
    turns: tuple[Turn, ...]
    closed_loop: ClosedLoop | None
    failures: tuple[FailureClass, ...]
    outage: Outage | None = left_out()
    goodput: Goodput
    throughput: Throughput
    stages: Mapping[str, StageDistribution]
    stages_to_first_token: Mapping[str, StageDistribution]
    groups: Mapping[str, GroupDistribution]
    residual: Residual
    tail: Tail
    upgrade: Upgrade
    checks: tuple[Check, ...]
    warnings: tuple[RunWarning, ...]
    floor: Floor | None
    trust: Trust


class RunResult(Economy, RunFigures, ResultFile):
    """Everything that one run's records tell: ``summary.json``. ``words`` are there once the report has made them.

    ``bursts``: by metric, where its slowest requests came together.
    """

    FILE: ClassVar[str] = "summary.json"

    telemetry: Telemetry | None
    roofline: Roofline
    ledger: LedgerFacts
    steady: Steady
    drift: Drift
    bands: Mapping[str, Bands]
    compute: Compute
    explore: Mapping[str, tuple[GroupPair, ...]]
    made_by: MadeBy
    provenance: Provenance
    shortened: ShortenedLoad | None = left_out()
    definitions: Mapping[str, PeerDefinitions] | None = left_out()
    bursts: Mapping[str, Burst] | None = left_out()
    words: Words | None = left_out()

    @property
    def verdict_file(self) -> VerdictFile:
        """Its part that is a file of its own."""
        own = {name: getattr(self, name) for name in (*RunVerdict.model_fields, "provenance", "words")}
        return VerdictFile(**own)


class VerdictFile(RunVerdict, ResultFile):
    """The verdict alone: ``verdict.json``."""

    FILE: ClassVar[str] = "verdict.json"

    provenance: Provenance
    words: VerdictWords | None = left_out()
