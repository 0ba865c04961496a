"""What requests waited for, by stage: residual, tail, bands, the device's share, groups against groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from gapmeter.analysis.results.codec import Ends, Number, Result, left_out, stands_as
from gapmeter.analysis.results.distribution import MainPercentiles

Stages = Mapping[str, float]  # by stage, in ms


class Left(Result):
    """What ledgers leave open, of all of this run: in ms, and as a share of each request's own wait."""

    p50_ms: Number
    p99_ms: Number
    max_ms: Number
    p50_share: Number
    p99_share: Number
    max_share: Number


class EventResidual(Result):
    """``strict`` counts everything in transit as unexplained too.

    ``unstamped`` is explained by a stage, but only as being within a call that is stamped as a whole (the HTTP
    application, the engine's loop), where no stamp tells what was done.
    """

    unexplained: Left
    strict: Left
    unstamped: Left


class Residual(Result):
    """To each event; None without a ledger."""

    first_token: EventResidual | None
    last_token: EventResidual | None


class Band(Result):
    """Means over the real requests (or token gaps) of a band: its stages add up to ``total_ms``."""

    count: int
    total_ms: float
    stages_ms: Stages


class RankedStage(Result):
    """A stage's share of a difference, and that in ms."""

    stage: str
    owner: str
    share: Number
    ms: Number


class OwnerPart(Result):
    """What is an owner's: of typical requests, of slow ones, and of those at the percentile that a limit is set for.

    ``ms`` and ``share``: of what slow ones wait beyond typical ones; ``at_share``: of what those at the percentile wait
    in all. ``stages`` make most of ``ms``, the largest first.
    """

    owner: str
    typical_ms: float
    slow_ms: float
    at_ms: float
    at_share: Number
    at_share_ci: Ends
    ms: float
    share: Number
    share_ci: Ends
    stages: tuple[str, ...]


class Anatomy(Result):
    """Slow requests against typical ones. ``ranked``: the stages by their share of the difference, the largest first.

    ``stage``, ``owner`` and ``share`` are the first one's, ``share_ci`` its 95 % interval. ``owners``: the same by who
    could make it shorter; ``leading`` is the first of them, where its interval clears that of the second. ``at`` are
    the requests around ``percentile``, and ``payer`` whose most of their wait is, where that is as clear. Where their
    mean is far from the percentile, ``at_range_ms`` is what they took, from the fastest to the slowest.
    """

    count: int
    typical: Band
    slow: Band
    difference_ms: float
    ranked: tuple[RankedStage, ...]
    stage: str
    owner: str
    share: float
    share_ci: Ends
    percentile: float
    at: Band
    owners: tuple[OwnerPart, ...]
    leading: str | None
    payer: str | None
    at_range_ms: tuple[float, float] | None = left_out()


class Burst(Result):
    """Slow requests that came together: ``count`` of the ``of`` slowest were due from ``from_s`` to ``to_s``.

    Seconds from the first due time. ``chance``: at most that of such a stretch, if slow requests lay at random among
    all. ``stage``: what most of their time beyond that of typical ones is, and its ``share``. ``slots``: so many, all
    that the engine has, were taken meanwhile; ``queued``: requests waited in its queue.
    """

    count: int
    of: int
    from_s: float
    to_s: float
    chance: float
    stage: str | None
    share: Number
    slots: int | None
    queued: bool


def explained_by(metric: str) -> str:
    """The metric whose ledger explains a metric: TPOT's is that of the token gaps."""
    return "itl" if metric == "tpot" else metric


class Tail(Result):
    """Every metric's anatomy, and in front the one that matters most; all None without a ledger that tells."""

    metric: str | None
    stage: str | None
    owner: str | None
    share: Number
    share_ci: Ends | None
    ttft: Anatomy | None = left_out()
    e2e: Anatomy | None = left_out()
    itl: Anatomy | None = left_out()

    def of(self, metric: str) -> Anatomy | None:
        """A metric's anatomy."""
        return {"ttft": self.ttft, "e2e": self.e2e, "itl": self.itl}.get(metric)


class UpgradeBracket(Result):
    """What is waited ``now``, and what an infinitely fast device leaves. ``percentile``: the highest all support."""

    now: MainPercentiles
    lower: MainPercentiles
    upper: MainPercentiles
    percentile: float


class Upgrade(Result):
    """The most that an infinitely fast ``device`` could bring; None for a metric that cannot tell."""

    device: str
    ttft: UpgradeBracket | None = left_out()
    e2e: UpgradeBracket | None = left_out()


class SlowBands(Result):
    """Those from a percentile up; None where too few requests lie above it."""

    p90: Band | None
    p985: Band | None
    p99: Band | None
    p999: Band | None


class SpreadBand(Band):
    """Those between two percentiles."""

    from_percentile: float = stands_as("from")
    to_percentile: float = stands_as("to")


class Bands(Result):
    """Of one metric: typical requests, slow ones, and the whole range."""

    count: int
    typical: Band
    slow: SlowBands
    spread: tuple[SpreadBand, ...]


class PartShare(Result):
    """Of a band's mean wait: so much, and its share with a 95 % interval."""

    ms: float
    share: float
    share_ci: Ends


class ComputeBand(Result):
    """Whose a band's waits were, by coarse part; None for a part that is unmeasured."""

    count: int
    total_ms: float
    compute: PartShare | None
    launch_gap: PartShare | None
    host: PartShare | None
    queue: PartShare | None
    network: PartShare | None
    load_tester: PartShare | None
    unexplained: PartShare | None


class ComputeShares(Result):
    """Of one metric: typical requests, the slowest 1 % (or seven), and all."""

    typical: ComputeBand
    slow: ComputeBand
    all: ComputeBand


class Compute(Result):
    """For how much of what requests waited did the device compute for them? Empty, without a device, without a ledger.

    ``busy_share``: of the time from the first forward to the last, the part within one; of several ``engines`` their
    mean.
    """

    device: str | None = None
    busy_share: Number = None
    engines: int | None = left_out()
    ttft: ComputeShares | None = left_out()
    e2e: ComputeShares | None = left_out()

    @model_serializer(mode="wrap")
    def _empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {} if self.device is None else handler(self)


class GroupStage(Result):
    """A stage's mean in two groups, the difference with its interval, and its share of the whole difference."""

    stage: str
    owner: str
    a_ms: float
    b_ms: float
    ms: float
    ci_ms: Ends
    share: Number


class GroupDifference(Result):
    """Group a less group b; ``ranked`` by size, whatever the sign. ``stretches``: of the run, that were drawn again."""

    a_count: int
    b_count: int
    a_ms: float
    b_ms: float
    difference_ms: float
    difference_ci_ms: Ends
    stretches: int
    ranked: tuple[GroupStage, ...]


class GroupPair(GroupDifference):
    """Two groups of requests by name."""

    key: str
    a: str
    b: str
