"""What a gate found: by how much runs are slower than their baseline, or fail more, and whether that is allowed."""

from __future__ import annotations

from typing import Final, Literal

from gapmeter.analysis.results.codec import Number, Result, left_out
from gapmeter.analysis.results.comparison import DifferenceFigure, FailedShares

REGRESSED: Final = "REGRESSED"
UNDECIDED: Final = "UNDECIDED"
WITHIN: Final = "WITHIN"
NOT_ESTIMABLE: Final = "NOT ESTIMABLE"
MOST_RUNS: Final = 100  # a side: no advice asks for more
RegressionStatus = Literal["REGRESSED", "UNDECIDED", "WITHIN", "NOT ESTIMABLE"]


class RegressionRow(DifferenceFigure):
    """A percentile that an SLO names, such as ``ttft p90``, or a ``mean ttft`` that regressed; A is the baseline.

    ``p_adjusted``: one-sided, of a growth beyond the limit. ``least``: the smallest growth that these runs call a
    regression in 80 of 100 cases, a fraction; ``runs_needed``: how many runs a side would decide what is undecided, at
    this growth and this spread, as often. None where nothing tells, or where more than ``MOST_RUNS`` would be needed.
    ``floor_ms``: the load tester's own error, where a growth beyond the limit is no larger than that.
    """

    name: str
    metric: str
    status: RegressionStatus
    p_adjusted: float | None
    least: Number = None
    runs_needed: int | None = None
    floor_ms: Number = left_out()
    sentence: str = ""


class FailedRow(FailedShares):
    """Requests that failed: REGRESSED where B failed more beyond chance, UNDECIDED where it failed more at all."""

    status: RegressionStatus
    sentence: str = ""


class Regression(Result):
    """Runs (B) against their baseline (A). ``limit``: the growth that is allowed, as a fraction.

    ``status`` is the worst row's, or NOT COMPARABLE, without rows; ``folder`` the comparison's; ``runs`` of each side.
    ``sentence``, for people, is there once the report has made it.
    """

    baseline: str
    folder: str
    limit: float
    rows: tuple[RegressionRow, ...]
    status: RegressionStatus | Literal["NOT COMPARABLE"]
    failed: FailedRow | None = None
    runs: tuple[int, int] | None = None
    sentence: str = ""

    @property
    def one_run_a_side(self) -> bool:
        """Whether nothing tells how much runs of the same thing differ."""
        return self.runs == (1, 1)
