"""What measured points offer both sides: how fast each user's answer grows, and how much the hardware serves."""

from __future__ import annotations

from typing import Literal

from gapmeter.analysis.results.codec import Ends, Number, Result, left_out
from gapmeter.analysis.results.run import INVALID, Verdict

Unit = Literal["GPU", "core", "server"]  # server: nobody said what hardware somebody else's has


class ParetoPoint(Result):
    """A setting or a load that was measured. Output tokens per second, each with its 95 % interval.

    ``tokens_per_s_user`` is 1000 / median TPOT in ms; without an interval it is 1000 / mean, since the sample supports
    no median. ``tokens_per_s_unit`` is the server's throughput over its ``units``. ``usd_per_million_output_tokens`` is
    what they cost at this throughput and the planned utilisation, whether or not the SLOs hold. ``side``: what points of
    one curve, or of one row of a comparison, share. ``on_front``: no other point is surely better both ways; None where
    it is not valid, or has no place.
    """

    name: str
    side: str
    folder: str
    verdict: Verdict
    tokens_per_s_user: Number
    tokens_per_s_user_ci: Ends | None
    tokens_per_s_unit: Number
    tokens_per_s_unit_ci: Ends | None
    units: int
    usd_per_million_output_tokens: Number
    usd_per_million_output_tokens_ci: Ends | None
    on_front: bool | None = None

    @property
    def at(self) -> tuple[float, float] | None:
        """Its place (a user's, a unit's tokens per second) where both are known."""
        x, y = self.tokens_per_s_user, self.tokens_per_s_unit
        return None if x is None or y is None else (x, y)

    @property
    def is_measurement(self) -> bool:
        return self.verdict != INVALID and self.at is not None


class PaceLimit(Result):
    """The tightest SLO on token times: the pace of a user whose tokens all take that long."""

    text: str
    tokens_per_s_user: float


class Pareto(Result):
    """All points of one sweep, search or comparison; those of one side one after the other, in their order."""

    unit: Unit
    limit: PaceLimit | None = left_out()
    points: tuple[ParetoPoint, ...]
