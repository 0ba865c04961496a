"""Has a run become slower than its baseline by more than is allowed, and by more than chance?

Judged are the percentiles that the scenario's SLOs name. One has *regressed* when it grew by more than the limit and
the growth is beyond its interval: Holm's correction over the SLOs' percentiles, at 95 %, and beyond the load tester's
own floor. One that grew by more than the limit, but not beyond chance, is *undecided*: it fails nothing, and is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from gapmeter.analysis.compare.result import NOT_COMPARABLE, ClaimedFigure, Comparison, DifferenceFigure
from gapmeter.analysis.results.codec import Result
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.stats.difference import holm
from gapmeter.analysis.stats.estimate import CONFIDENCE

REGRESSED: Final = "REGRESSED"
UNDECIDED: Final = "UNDECIDED"
WITHIN: Final = "WITHIN"
UNKNOWN: Final = "NOT ESTIMABLE"
Status = Literal["REGRESSED", "UNDECIDED", "WITHIN", "NOT ESTIMABLE"]
_WORST_FIRST: tuple[Status, ...] = (REGRESSED, UNDECIDED, UNKNOWN, WITHIN)


class RegressionRow(DifferenceFigure):
    """One percentile that an SLO names, such as ``ttft p90``; A is the baseline."""

    name: str
    metric: str
    status: Status
    p_adjusted: float | None
    sentence: str = ""


class Regression(Result):
    """A run (B) against its baseline (A). ``limit``: the growth that is allowed, as a fraction.

    ``status`` is the worst row's, or NOT COMPARABLE, without rows; ``folder`` the comparison's. ``sentence`` is there
    once the report has made it, for people: no program of ours reads it.
    """

    baseline: str
    folder: str
    limit: float
    rows: tuple[RegressionRow, ...]
    status: Status | Literal["NOT COMPARABLE"]
    sentence: str = ""


def judge_regression(
    result: Comparison, slos: Sequence[tuple[str, float]], limit: float, baseline: str, folder: str
) -> Regression:
    """From a comparison of the two, in ``folder``. ``slos``: metric and percentile."""
    if not result.comparable:
        return Regression(baseline=baseline, folder=folder, limit=limit, rows=(), status=NOT_COMPARABLE)
    metrics = result.comparisons[0].metrics
    named = [(m, p, metrics[m].percentiles[percentile_key(p)]) for m, p in dict.fromkeys(slos)]
    p_values = {i: figure.p for i, (_, _, figure) in enumerate(named) if figure.p is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())).tolist(), strict=True))
    rows = tuple(_row(m, p, figure, adjusted.get(i), limit) for i, (m, p, figure) in enumerate(named))
    worst = next(status for status in _WORST_FIRST if any(row.status == status for row in rows))
    return Regression(baseline=baseline, folder=folder, limit=limit, rows=rows, status=worst)


def _row(metric: str, percentile: float, figure: ClaimedFigure, p: float | None, limit: float) -> RegressionRow:
    return RegressionRow(
        **{name: getattr(figure, name) for name in DifferenceFigure.model_fields},
        name=f"{metric} p{percentile:g}",
        metric=metric,
        status=_status(figure, p, limit),
        p_adjusted=p,
    )


def _status(figure: ClaimedFigure, p: float | None, limit: float) -> Status:
    if p is None or figure.relative is None or figure.difference_ms is None:
        return UNKNOWN
    if figure.relative <= limit:
        return WITHIN
    beyond = p <= 1 - CONFIDENCE and abs(figure.difference_ms) > (figure.floor_ms or 0.0)
    return REGRESSED if beyond else UNDECIDED
