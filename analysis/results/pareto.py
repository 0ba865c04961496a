"""What measured points offer both sides: how fast each user's answer grows, and how much the hardware serves."""

from __future__ import annotations

from typing import Literal

from gapmeter.analysis.results.codec import Result, left_out
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.run import INVALID, Verdict

Unit = Literal["GPU", "core", "server"]  # server: nobody said what hardware somebody else's has


class ParetoPoint(Result):
    """A setting or a load that was measured. Output tokens per second, each with its 95 % interval, None if unknown.

    ``by_median`` and ``by_mean``: of a user, 1000 / TPOT in ms; ``tokens_per_s_user`` is the one that all points are
    compared by. ``tokens_per_s_unit``: the server's throughput over its ``units``. ``usd_per_million_output_tokens``:
    what they cost at this throughput and the planned utilisation, whether or not the SLOs hold. ``side``: what points
    of one curve, or of one row of a comparison, share. ``on_front``: no other point is surely better both ways; None
    where it is not valid, or has no place.
    """

    name: str
    side: str
    folder: str
    verdict: Verdict
    tokens_per_s_user: Interval | None
    tokens_per_s_unit: Interval | None
    by_median: Interval | None
    by_mean: Interval | None
    units: int
    usd_per_million_output_tokens: Interval | None
    on_front: bool | None = None

    @property
    def at(self) -> tuple[Interval, Interval] | None:
        """Its place (a user's tokens per second, a unit's) where both are known."""
        x, y = self.tokens_per_s_user, self.tokens_per_s_unit
        return None if x is None or y is None else (x, y)

    @property
    def is_valid(self) -> bool:
        return self.verdict != INVALID


class PaceLimit(Result):
    """The tightest SLO on token times: the pace of a user whose tokens all take that long."""

    text: str
    tokens_per_s_user: float


class Pareto(Result):
    """All points of one sweep, search or comparison; those of one side one after the other, in their order.

    ``statistic`` of TPOT: the median, or the mean where some valid point's sample supports no median.
    """

    unit: Unit
    statistic: Literal["median", "mean"]
    limit: PaceLimit | None = left_out()
    points: tuple[ParetoPoint, ...]
