"""What a request costs in money and in energy, and what a dollar buys."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from gapmeter.analysis.results.codec import Ends, Number, Result


class Interval(Result):
    """A value with its 95 % interval."""

    value: float
    low: Number
    high: Number

    def is_above(self, other: Interval) -> bool:
        """Whether the intervals are apart; an end that is unknown proves nothing."""
        return self.low is not None and other.high is not None and self.low > other.high

    @classmethod
    def of_all(cls, parts: Sequence[Interval]) -> Interval:
        """The median of several, from the lowest to the highest of their ends; none where one of them has none."""
        lows, highs = ([end for each in parts if (end := getattr(each, name)) is not None] for name in ("low", "high"))
        return cls(
            value=statistics.median(each.value for each in parts),
            low=min(lows) if len(lows) == len(parts) else None,
            high=max(highs) if len(highs) == len(parts) else None,
        )


class TokensPerRequest(Result):
    """Means over requests, those that failed with none; None where any that succeeded did not tell."""

    output: Interval | None
    prompt: Interval | None
    total: Interval | None


class Price(Result):
    """USD for an hour of one replica. ``source`` says whose price it is; ``is_default``: the catalogue's.

    ``units``: GPUs of a replica, or cores of a CPU server. ``measured_on`` names the device that was measured where it
    is another than the one that is priced, else "".
    """

    device: str
    units: int
    usd_per_unit_hour: float
    source: str
    is_default: bool
    utilisation: float
    measured_on: str
    usd_per_hour: float

    def of_request(self, rate: float) -> float:
        """USD of a request at ``rate`` requests per second, by the formula of analysis.cost."""
        return self.usd_per_hour / (3600 * rate * self.utilisation)


class SloRate(Result):
    """Requests per second at which the SLOs hold. ``basis``: capacity (searched for) or offered (the run's load)."""

    low: float
    high: Number
    basis: str


class Cost(Result):
    """USD at the SLO. ``status``: bounded, or at_most (nobody looked for a higher rate)."""

    status: Literal["bounded", "at_most"]
    reason: None
    price: Price
    rate: SloRate
    per_request_usd: float
    per_request_usd_ci: Ends
    per_million_output_tokens_usd: Number
    per_million_output_tokens_usd_ci: Ends | None
    per_million_total_tokens_usd: Number
    per_million_total_tokens_usd_ci: Ends | None


class NoCost(Result):
    """There is no cost at the SLO, and why."""

    status: Literal["none"]
    reason: str
    per_request_usd: None


AnyCost = Annotated[Cost | NoCost, Field(discriminator="status")]


class Energy(Result):
    """Joules over the measured window, of a request and of a token; idle power is in it."""

    status: Literal["measured"]
    reason: None
    source: str
    seconds: float
    joules: float
    joules_ci: Ends
    watts: Number
    per_request_j: Number
    per_request_j_ci: Ends
    per_output_token_j: Number
    per_output_token_j_ci: Ends
    tokens_per_watt: Number
    tokens_per_watt_ci: Ends
    idle_share: Number


class NoEnergy(Result):
    """Nobody counted it, and why."""

    status: Literal["unmeasured"]
    reason: str
    joules: None = None
    per_request_j: None = None
    per_output_token_j: None = None
    tokens_per_watt: None = None
    watts: None = None
    idle_share: None = None


AnyEnergy = Annotated[Energy | NoEnergy, Field(discriminator="status")]


class Value(Result):
    """Requests within their own limits that a dollar buys, at least; None with the reason."""

    good_requests_per_usd: Number
    reason: str | None


class Economy(Result):
    """Three figures of three kinds, never one, and the tokens that they rest on."""

    tokens_per_request: TokensPerRequest
    cost: AnyCost
    energy: AnyEnergy
    value: Value
