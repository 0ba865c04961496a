"""What a search for capacity found: ``summary.json`` of its folder."""

from __future__ import annotations

import math
from typing import ClassVar, Final, Literal

from gapmeter.analysis.results.codec import Ends, Number, Result, ResultFile, left_out
from gapmeter.analysis.results.cost import AnyCost, AnyEnergy, Economy, TokensPerRequest, Value
from gapmeter.analysis.results.manifest import Ended as Ended
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.run import Provenance, SloAnswer

# How a search ended.
FOUND: Final = "found"
BUDGET: Final = "budget"
UNMEETABLE: Final = "unmeetable"
CLIENT: Final = "client_limit"
NOT_MEASURED: Final = "not_measured"
DIED: Final = "died"
INTERRUPTED: Final = "interrupted"
BROKE_OFF: Final = (NOT_MEASURED, DIED, INTERRUPTED)

HOLDS: Final = "holds"
FAILS: Final = "fails"
UNDECIDED: Final = "undecided"
INVALID_TRIAL: Final = "invalid"
TrialVerdict = Literal["holds", "fails", "undecided", "invalid"]
Leaning = Literal["holds", "fails"]


class SearchedSlo(Result):
    """An objective that had to hold."""

    text: str
    metric: str


class CountedSlo(Result):
    """``over`` of ``count`` values exceed the limit, worth ``n_eff`` independent ones; a share ``allowed`` may.

    ``value_ms``: their percentile that the curve is drawn through, and ``ci_ms`` its 95 % interval.
    """

    text: str
    over: float
    count: int
    n_eff: float
    allowed: float
    value_ms: float | None = left_out()
    ci_ms: Ends | None = left_out()


class TrialResult(Result):
    """One trial; ``slo`` decided it. ``leaning``: of an undecided one. ``folder``: its run, within the search's.

    ``overloaded``: every SLO held, but the queue grew, so the rate is not one that the server holds.
    """

    number: int
    rate: float
    verdict: TrialVerdict
    confidence: Number
    leaning: Leaning | None
    slo: str
    slos: tuple[CountedSlo, ...]
    requests: int
    measured: int
    seconds: float
    reason: str | None
    folder: str | None
    overloaded: bool | None = left_out()

    @property
    def decided_by(self) -> CountedSlo:
        return next(each for each in self.slos if each.text == self.slo)


class RatePoint(Result):
    """Goodput at a rate, requests per second that kept every limit themselves, of ``n`` measured."""

    rate: float
    good_share: Number
    goodput_per_s: Number
    goodput_ci: Ends | None
    verdict: TrialVerdict
    n: int


class Density(Result):
    """Where the capacity lies: rates, and the probability between each two neighbors."""

    rates: tuple[float, ...]
    masses: tuple[float, ...]


class ExpectedLatency(Result):
    """A percentile at ``rate``, by the curve: its median, and an interval with the search's confidence.

    None: the server cannot be said to keep up with that rate.
    """

    rate: float
    value_ms: Number
    ci_ms: Ends


class LatencyCurve(Result):
    """The limiting SLO's percentile at rising rates; where it meets ``limit_ms`` lies the capacity."""

    slo: str
    limit_ms: float
    points: tuple[ExpectedLatency, ...]


class BestSeen(Result):
    """The lowest ``rate`` tried: ``over`` of ``count`` values broke the limit of ``slo``; ``answer`` is that run's.

    Of errors that come at any rate alike: of all trials up to ``rate``, without an answer.
    """

    rate: float
    slo: str
    over: float
    count: int
    answer: SloAnswer | None


class Fleet(Result):
    """Servers for ``target_rps``: ``needed`` carry it with ``headroom`` (a share) kept free, ``spare`` may fail.

    ``planned_rps`` is what each may be given: the rate that was held (else the interval's lower end) less the headroom.
    A load balancer that deals Poisson arrivals out at random gives each server Poisson arrivals; one that looks at
    queues does better. ``usd_per_hour`` is that of all replicas, the spare ones too, and ``per_request_usd`` what a
    request then costs: that over ``target_rps``, whatever the replicas could carry; absent without a price.
    ``needed_at_high`` would carry it were the capacity the interval's upper end, where these are fewer; ``expected``:
    the limiting SLO's percentile at ``planned_rps``, where there is a curve.
    """

    target_rps: float
    headroom: float
    spare: int
    planned_rps: float
    needed: int
    usd_per_hour: float | None = left_out()
    per_request_usd: float | None = left_out()
    per_million_output_tokens_usd: float | None = left_out()
    needed_at_high: int | None = left_out()
    expected: ExpectedLatency | None = left_out()

    @classmethod
    def plan(cls, low: float, target_rps: float, headroom: float, spare: int, high: float | None = None) -> Fleet:
        """``low``: what one server surely carries, requests per second; ``high``: what it may.

        Raises ValueError for no plan.
        """
        if not (low > 0 and target_rps > 0 and 0 <= headroom < 1 and spare >= 0):
            raise ValueError("a plan needs a capacity and a target above 0, a headroom below 1, and no negative spare")
        needed, fewest = (max(1, math.ceil(target_rps / (rate * (1 - headroom)) - 1e-9)) for rate in (low, high or low))
        return cls(
            target_rps=target_rps, headroom=headroom, spare=spare, planned_rps=low * (1 - headroom), needed=needed,
            needed_at_high=fewest if fewest < needed else None,
        )  # fmt: skip

    @property
    def replicas(self) -> int:
        return self.needed + self.spare

    def at_price(self, usd_per_hour: float, output_tokens: float | None) -> Fleet:
        """The same with what it costs. ``usd_per_hour``: of one replica; ``output_tokens``: the mean of a request."""
        whole = self.replicas * usd_per_hour
        each = whole / (3600 * self.target_rps)
        tokens = each / output_tokens * 1_000_000 if output_tokens else None
        paid = {"usd_per_hour": whole, "per_request_usd": each, "per_million_output_tokens_usd": tokens}
        return self.model_copy(update=paid)


class Search(Result):
    """``rate`` per second, between ``low`` and ``high`` with ``confidence`` if latency grows as a queue's does.

    ``spread``: half of their distance, as a share of the rate. ``held``: the highest rate at which a sequential test
    found that every SLO holds; no curve is assumed for it. ``ceiling``: requests per second that the server completes
    at most; ``drift``: by what share its speed differs between trials, as far as they tell; None without a curve, as
    where only errors are limited. Without a rate that failed, ``low`` is what held. ``binding_*``: the SLO that breaks
    first, and what slow requests wait for where it does. ``best_seen``: where no rate meets every SLO. ``disturbed``:
    trials in which another program held the server's cores, or the CPU changed its speed. ``latency``: what to expect
    at other rates; ``curve``: goodput at those that were tried. ``burstiness`` of the arrivals: 1 is Poisson; None:
    on-off or a trace.
    """

    rate: float | None
    low: float | None
    high: float | None
    spread: Number
    held: float | None
    ceiling: Number
    drift: Number
    confidence: float
    within: float
    ended: Ended
    binding_slo: str | None
    binding_stage: str | None
    binding_owner: str | None
    binding_share: Number
    binding_rate: float | None
    replicas: int | None
    planning: Fleet | None
    target_rps: float | None
    requests: int
    seconds: float
    best_seen: BestSeen | None
    reason: str | None
    trials: tuple[TrialResult, ...]
    curve: tuple[RatePoint, ...]
    posterior: Density | None
    disturbed: int | None = left_out()
    latency: LatencyCurve | None = left_out()
    pareto: Pareto | None = left_out()
    burstiness: float | None = left_out()


class SearchWords(Result):
    """The answer in sentences."""

    headline: tuple[str, ...]


class CapacityResult(ResultFile):
    """The highest rate of arrivals at which every SLO holds, and what a request costs there."""

    FILE: ClassVar[str] = "summary.json"

    schema_version: Literal[3] = 3  # names are only ever added; counted up when one is renamed
    kind: Literal["capacity"] = "capacity"
    name: str
    exit_code: int
    slo: tuple[SearchedSlo, ...]
    capacity: Search
    tokens_per_request: TokensPerRequest | None = left_out()
    cost: AnyCost | None = left_out()
    energy: AnyEnergy | None = left_out()
    value: Value | None = left_out()
    provenance: Provenance
    words: SearchWords | None = left_out()

    @property
    def economy(self) -> Economy | None:
        """Cost, efficiency and value; None where no trial tells."""
        if self.tokens_per_request is None or self.cost is None or self.energy is None or self.value is None:
            return None
        return Economy(tokens_per_request=self.tokens_per_request, cost=self.cost, energy=self.energy, value=self.value)
