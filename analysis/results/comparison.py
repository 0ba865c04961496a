"""What a comparison found: ``compare.json`` of its folder.

The first side is the baseline; every other one is compared with it. Times are in ms, shares fractions; None means that
the samples cannot support a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from gapmeter.analysis.results.codec import Number, Result, ResultFile, left_out
from gapmeter.analysis.results.distribution import percentile_key, percentile_of_key
from gapmeter.analysis.results.run import Provenance

NOT_COMPARABLE: Final = "NOT COMPARABLE"
FORCED: Final = "NOT COMPARABLE, forced"

FASTER: Final = "faster"
SLOWER: Final = "slower"
MIXED: Final = "mixed"
FAILS_MORE: Final = "fails more"
FAILS_LESS: Final = "fails less"
NOTHING: Final = "no difference found"
UNKNOWN: Final = "not estimable"
Word = Literal["faster", "slower", "mixed", "fails more", "fails less", "no difference found", "not estimable"]

FACTOR: Final = "factor"
FOLLOWS: Final = "follows"
NOTED: Final = "noted"
BLOCKS: Final = "blocks"
Meaning = Literal["factor", "follows", "noted", "blocks"]
VALIDITY: Final = "validity"
VALID: Final = "valid"

Bounds = tuple[float, float]


class Fact(Result):
    """One thing that differs: its key, its value on either side, in words, and what that means for the comparison.

    ``within``: the side whose own runs differ in it, which must not differ at all.
    """

    key: str
    a: str
    b: str
    meaning: Meaning
    within: str | None = left_out()


class Comparability(Result):
    """May one side be compared with the baseline? ``factors``: what may differ, ``recognized``: since it alone does."""

    side: str
    comparable: bool
    factors: tuple[str, ...]
    recognized: bool
    facts: tuple[Fact, ...]

    @classmethod
    def of(cls, side: str, facts: tuple[Fact, ...], factors: tuple[str, ...], *, recognized: bool) -> Comparability:
        free = all(fact.meaning != BLOCKS for fact in facts)
        return cls(side=side, comparable=free, factors=factors, recognized=recognized, facts=facts)

    @property
    def blocking(self) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.facts if fact.meaning == BLOCKS)


class SideFacts(Result):
    """One side: runs of the same thing. ``requests`` counts those that were measured."""

    name: str
    runs: tuple[str, ...]
    scenario: str | None
    digest: str
    verdicts: tuple[str, ...]
    requests: int
    failed: int


class FigureName(Result):
    """Which figure is meant. ``percentile``: None for the mean."""

    metric: str
    percentile: Number

    def __str__(self) -> str:
        name = self.metric.upper()
        return f"mean {name}" if self.percentile is None else f"{name} p{self.percentile:g}"

    @property
    def key(self) -> str:
        """Where a pair's ``metrics`` have it."""
        part = "mean" if self.percentile is None else f"percentiles.{percentile_key(self.percentile)}"
        return f"metrics.{self.metric}.{part}"


class DifferenceFigure(Result):
    """B minus A of one figure with its 95 % interval; ``why`` there is none. ``late_ms``: it is refused for so much.

    ``relative`` is B / A - 1; its interval is that of log(B / A), so A's own error is in it too. ``p`` is two-sided,
    with ``df`` degrees of freedom. ``failed``: the sides on which the percentile, or an end of its interval, is of
    requests that failed; it is at least so much there, and of the difference nothing but its direction is known.
    """

    a_ms: Number
    b_ms: Number
    difference_ms: Number
    ci_ms: Bounds | None
    relative: Number
    relative_ci: Bounds | None
    p: Number
    df: Number
    why: str
    late_ms: Number = left_out()
    failed: Literal["a", "b", "ab"] | None = left_out()


class ClaimedFigure(DifferenceFigure):
    """What Holm's correction left of it; a figure outside the family is shown, never claimed.

    ``least_ms``: the smallest difference that would have been found with 80 % probability; ``floor_ms``: the load
    tester's own error; ``growth_error``: the standard error of log(B / A), with ``growth_df`` degrees of freedom.
    """

    in_family: bool
    p_adjusted: Number
    confirmed: bool
    least_ms: Number
    floor_ms: Number
    growth_error: Number = None
    growth_df: Number = None


class DecileFigure(DifferenceFigure):
    percentile: float


class MetricComparison(Result):
    """One metric: percentiles by their names, every decile, and the mean.

    The mean of a side with requests that failed is that of the others: of all, it is at least so much.
    """

    verdict: Word
    percentiles: Mapping[str, ClaimedFigure]
    shift: tuple[DecileFigure, ...]
    mean: ClaimedFigure


class StageDifference(DifferenceFigure):
    """Of a stage's mean. ``share``: of the whole difference; ``percentiles``: of the stage itself, by their names."""

    stage: str
    owner: str
    share: Number
    share_ci: Bounds | None
    percentiles: Mapping[str, DifferenceFigure]


class StageDifferences(Result):
    """The mean ledgers' difference: stages in the order of the timeline, which add up to ``total``."""

    total: DifferenceFigure
    stages: tuple[StageDifference, ...]


class FailedShares(Result):
    """The share of each side's requests that failed, with its 95 % interval."""

    a_share: float
    b_share: float
    a_ci: Bounds
    b_ci: Bounds

    @property
    def more(self) -> Literal["a", "b"] | None:
        """Which side failed more than the other beyond chance; None where neither did.

        By an interval of the difference from both shares' own (Newcombe 1998, Statistics in Medicine 17, method 10).
        """
        if self.b_share - self.a_share > math.hypot(self.b_share - self.b_ci[0], self.a_ci[1] - self.a_share):
            return "b"
        if self.a_share - self.b_share > math.hypot(self.a_share - self.a_ci[0], self.b_ci[1] - self.b_share):
            return "a"
        return None


class Change(Result):
    """What accounts for the difference of the means to one event.

    ``stage`` has the largest share of it; ``cause`` the largest share among stages that are work and not a wait for
    others' work (None where no such stage changed beyond its interval and has a tenth of the difference). Shares are of
    the whole difference. Where no stage is named, ``unexplained`` says why: nothing was claimed, the mean does not
    change beyond its interval, or it moves the other way than ``claim``, the surest figure.
    """

    metric: str
    event: str
    stage: str | None = None
    owner: str | None = None
    share: Number = None
    share_ci: Bounds | None = None
    cause: str | None = None
    cause_owner: str | None = None
    claim: FigureName | None = None
    unexplained: Literal["no claim", "uncertain", "opposite"] | None = None


class PairComparison(Result):
    """One side against the baseline; ``a`` and ``b`` are what they are called.

    ``telling``: the figure that says it best. ``unmeasured``: by event, stages that not every run measured. ``device``:
    what computed the forwards, in a word.
    """

    a: str
    b: str
    verdict: Word
    telling: FigureName | None
    paired: bool
    why_not_paired: str
    requests: tuple[int, int]
    runs: tuple[int, int]
    block_requests: float
    metrics: Mapping[str, MetricComparison]
    errors: FailedShares
    stages: Mapping[str, StageDifferences]
    unmeasured: Mapping[str, tuple[str, ...]]
    changed: Change | None
    device: str

    def figures(self) -> list[tuple[FigureName, ClaimedFigure]]:
        """Every metric's percentiles and its mean."""
        return [
            (FigureName(metric=metric, percentile=None if key == "mean" else percentile_of_key(key)), figure)
            for metric, known in self.metrics.items()
            for key, figure in {**known.percentiles, "mean": known.mean}.items()
        ]

    def family(self) -> list[tuple[FigureName, ClaimedFigure]]:
        """The figures that may be claimed, in their order."""
        return [(name, figure) for name, figure in self.figures() if figure.in_family]


class SideEstimate(Result):
    """A percentile of all runs of a side, with its order-statistic interval. ``late_ms``: it is refused for so much."""

    value_ms: Number
    ci_ms: Bounds | None
    why: str
    late_ms: Number = left_out()


class SidePart(Result):
    """A figure that only some runs have, with its interval; ``why`` this one has none, or which runs it leaves out.

    Of several runs it is their median, and from the lowest to the highest end of their intervals.
    """

    value: Number
    ci: tuple[Number, Number] | None
    why: str


class SideRow(Result):
    """One side in the table of all; ``figures`` are by name, such as ``ttft_p99``.

    ``verdict``: the runs', such as PASS; where they differ how many have which, such as ``2 PASS, 1 FAIL``.
    """

    name: str
    runs: tuple[str, ...]
    device: str
    engine: str
    load: str
    digest: str
    verdict: str
    requests: int
    figures: Mapping[str, SideEstimate]
    cost: SidePart
    energy: SidePart


class FigureSpread(Result):
    """``relative``: by how much the largest exceeds the smallest."""

    low_ms: float
    high_ms: float
    relative: float


class DeviceSpread(Result):
    """How far sides that ran the same scenario on devices of one name lie apart."""

    device: str
    sides: tuple[str, ...]
    figures: Mapping[str, FigureSpread]


class SideTable(Result):
    """All sides: latency, cost and energy of each."""

    rows: tuple[SideRow, ...]
    devices: tuple[DeviceSpread, ...]


class Method(Result):
    """How the differences were made. ``family``: the number of figures that the correction is over."""

    estimate: str
    interval: str
    confidence: float
    power: float
    resamples: int
    correction: str
    family: int
    in_turn: bool


class Asked(Result):
    """What the comparison was asked to be; ``folders``: the runs of each side, from the comparison's own folder."""

    factors: tuple[str, ...] = ()
    force: bool = False
    in_turn: bool = False
    folders: tuple[tuple[str, ...], ...] | None = left_out()

    def sides(self, folder: Path) -> list[list[Path]]:
        """The runs of each side of the comparison that lies in ``folder``; none where that is not known."""
        return [[folder / path for path in side] for side in self.folders or ()]


class PairWords(Result):
    """What was found, and what changed."""

    verdict: str
    changed: str | None


class ComparisonWords(Result):
    """The comparison in sentences, for people who read the file."""

    headline: str
    comparisons: tuple[PairWords, ...]
    method: str | None


class Comparison(ResultFile):
    """Two sides or more. ``comparisons`` and what rests on them are there where the sides are comparable, or forced."""

    FILE: ClassVar[str] = "compare.json"
    REMEDY: ClassVar[str] = "compare the runs again: gapmeter compare"

    schema_version: Literal[2] = 2  # names are only ever added; counted up when one is renamed
    verdict: str
    comparable: bool
    forced: bool
    command: str
    sides: tuple[SideFacts, ...]
    protocol: tuple[Comparability, ...]
    comparisons: tuple[PairComparison, ...]
    table: SideTable | None = left_out()
    method: Method | None = left_out()
    warnings: tuple[str, ...] = ()
    provenance: Provenance
    asked: Asked
    words: ComparisonWords | None = left_out()
