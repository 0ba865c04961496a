"""What a sweep found: ``summary.json`` of its folder. Its points side by side, where its curves turn, what grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from gapmeter.analysis.results.codec import Ends, Number, Result, ResultFile, left_out
from gapmeter.analysis.results.cost import AnyCost, Value
from gapmeter.analysis.results.device import Binding
from gapmeter.analysis.results.distribution import Distribution, Percentile, percentile_key
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.requests import Throughput
from gapmeter.analysis.results.run import INVALID, Provenance, SloAnswer, Verdict

FAILED: Final = "FAILED"
MISSING: Final = "MISSING"
THROUGHPUT: Final = "throughput"  # what a knee may be found by, beside a latency


def level_key(level: float | None) -> str:
    """``p95``, or ``mean``: with ``_ms`` and ``_ci_ms`` behind it, the names in ``metrics``."""
    return "mean" if level is None else percentile_key(level)


class SweptSlo(Result):
    """An objective of the points; one on errors has neither percentile nor time."""

    text: str
    metric: str
    percentile: float | None
    limit_ms: Number


class FailedRun(ResultFile):
    """Why a place of a point has no run that counts. ``exit_code``: what that would have ended with by itself."""

    FILE = "failed.json"
    REMEDY = "delete it, and resume the sweep"
    schema_version: Literal[1] = 1
    reason: str
    exit_code: int | None = None


class Repeat(Result):
    """One run of a point. ``verdict`` FAILED: it has no figures, and ``reason`` says why."""

    folder: str
    reason: str | None
    verdict: Verdict | Literal["FAILED"]
    invalid_reasons: tuple[str, ...] = ()
    delivered_rate: Number = None
    output_tokens_per_s: Number = None
    measured: int | None = None


class PointDistribution(Distribution):
    """One metric over all repeats of a point, with the 95 % interval of the mean."""

    mean_ci_ms: Ends | None

    def at_level(self, level: float | None) -> Percentile:
        """The figure that points are compared by: a percentile, or for None the mean."""
        return Percentile(value_ms=self.mean_ms, ci_ms=self.mean_ci_ms) if level is None else self.at(level)


class RepeatRange(Result):
    """Lowest and highest of the repeats' own percentiles; None where one of them does not support it."""

    p50_ms: tuple[float, float] | None
    p90_ms: tuple[float, float] | None
    p95_ms: tuple[float, float] | None
    p99_ms: tuple[float, float] | None

    def at_level(self, level: float | None) -> tuple[float, float] | None:
        found: tuple[float, float] | None = getattr(self, f"{level_key(level)}_ms", None)
        return found


class StageMeans(Result):
    """Where the mean time goes: the stages add up to it."""

    mean_ms: float
    stages_ms: Mapping[str, float]


class PointThroughput(Throughput):
    """Over the time of all repeats.

    ``steady_tokens_per_s``, with its 95 % interval, from the first due time to the last: without the end of a load,
    when fewer and fewer are left.
    """

    steady_tokens_per_s: Number
    steady_ci: Ends | None


class Batch(Result):
    """Mean requests in a step, and waiting beside it; None without steps."""

    running: Number
    waiting: Number
    steps: int


class PointEnergy(Result):
    """Of all repeats; None unless every one measured it."""

    per_request_j: Number
    tokens_per_watt: Number


class PointEconomy(Result):
    """Cost, energy and value of all repeats together. ``emulated``: the device has no such precision by itself."""

    precision: str
    emulated: bool
    cost: AnyCost
    energy: PointEnergy
    value: Value


class PointFacts(Result):
    """What every point has. ``resolved``: its value at every swept key; ``missing``: repeats that are still to come.

    ``reason``: why it has no figures, or none that count; what its requests failed with, where all did.
    """

    index: int
    label: str
    values: Mapping[str, Any]
    resolved: Mapping[str, Any]
    folder: str
    reason: str | None
    repeats: tuple[Repeat, ...]
    missing: int
    loop: Literal["open", "closed"]
    concurrency: int | None
    requested_rate: Number


class LostPoint(PointFacts):
    """A point without figures: all of its runs failed, or none was begun."""

    verdict: Literal["FAILED", "MISSING"]
    metrics: None = None


class Point(PointFacts):
    """A point with the figures of its repeats taken together. Mappings are by metric (ttft, itl, tpot, e2e)."""

    verdict: Verdict
    metrics: Mapping[str, PointDistribution]
    between: Mapping[str, RepeatRange] | None
    stages: Mapping[str, StageMeans]
    slow_stages: Mapping[str, Mapping[str, float]]
    throughput: PointThroughput
    delivered_rate: Number
    goodput_per_s: Number
    failed_requests: int
    batch: Batch
    binding: Binding
    slo: tuple[SloAnswer, ...]
    economy: PointEconomy

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second that it settled at; over all its time where that is unknown."""
        return self.throughput.steady_tokens_per_s or self.throughput.output_tokens_per_s or None

    @property
    def answered(self) -> bool:
        """Whether there is something to measure: not every request failed."""
        return self.metrics["ttft"].count > 0

    @property
    def on_curves(self) -> bool:
        """Whether a curve may run through it: it is a valid measurement of requests that were answered."""
        return self.verdict != INVALID and self.answered


AnyPoint = Annotated[Point | LostPoint, Field(discriminator="verdict")]


class Growth(Result):
    """From one point to the next of its curve: how a figure grows, and which stage accounts for most of that.

    ``percentile``: the figure that is compared, None for the mean. ``stages_ms``: the growth of every stage in the band
    of requests that stands for it, ``band_grows_ms`` in all. ``at_knee``: it begins (of a batch size: ends) there.
    """

    series: str
    from_point: int
    to_point: int
    at_knee: bool
    from_: str = Field(alias="from")
    to: str
    metric: str
    percentile: float | None
    grows_ms: Number
    grows_ci_ms: Ends | None
    band_grows_ms: Number
    stages_ms: Mapping[str, float]
    stage: str | None
    owner: str | None
    share: Number
    share_ci: Ends | None

    @property
    def is_sure(self) -> bool:
        """Whether it goes beyond its interval."""
        low, high = self.grows_ci_ms or (None, None)
        return low is not None and high is not None and low * high > 0


class ThroughputChange(Result):
    """How throughput changes from the knee to the last point of its curve, as a ratio."""

    to: str
    ratio: float
    ratio_ci: tuple[float, float]


class CurveKnee(Result):
    """Whether a curve has a knee, by which figure, how sure, and why. ``point``, ``range``: positions in the sweep.

    ``bend`` of a latency: how far below a straight line the curve lies at the knee, as a share of its rise. ``or_at``:
    points without valid figures that lie where the knee may be as well.
    """

    series: str
    state: Literal["knee", "none", "undecided"]
    point: int | None
    label: str | None
    range: tuple[int, int] | None
    range_labels: tuple[str, str] | None
    by: str
    bend: Number
    why: str
    certainty: float
    after: ThroughputChange | None
    or_at: tuple[str, ...]


class SweptCurve(Result):
    """One curve: its points in order, and the values that they share, in words."""

    name: str
    points: tuple[int, ...]


class SweepFigures(Result):
    """``key`` orders the points, None where nothing swept has numbers; ``title`` says what it is.

    ``metric``: what the sweep is about. ``levels``: by which percentile the points are compared, None for the mean.
    """

    key: str | None
    title: str
    series: tuple[SweptCurve, ...]
    metric: str
    levels: Mapping[str, float | None]
    points: tuple[AnyPoint, ...]
    growth: tuple[Growth, ...]
    knees: tuple[CurveKnee, ...]
    pareto: Pareto | None = left_out()

    def in_order(self) -> list[Point | LostPoint]:
        """All points, curve by curve."""
        return [self.points[at] for series in self.series for at in series.points]


class PointWords(Result):
    """One point in sentences; ``slo`` in the order of its answers."""

    slo: tuple[str, ...]
    cost: str
    value: str


class SweepWords(Result):
    """The sweep in sentences, for people who read the file; ``points`` and ``growth`` in the order of the figures."""

    headline: tuple[str, ...]
    growth: tuple[str, ...]
    points: tuple[PointWords | None, ...]


class SweepResult(ResultFile):
    """Runs of one scenario at several points, side by side. ``device``: what computed the forwards, in a word."""

    FILE: ClassVar[str] = "summary.json"

    schema_version: Literal[2] = 2  # names are only ever added; counted up when one is renamed
    kind: Literal["sweep"] = "sweep"
    name: str
    status: str
    exit_code: int
    device: str
    slo: tuple[SweptSlo, ...]
    sweep: SweepFigures
    provenance: Provenance
    words: SweepWords | None = left_out()
