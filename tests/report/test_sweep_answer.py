"""A sweep's first line says which settings meet the SLOs, and which of these is the cheapest or serves most."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from gapmeter.analysis.results.cost import Cost, NoCost
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.results.sweep import Point, PointEconomy, PointThroughput, SweepFigures
from gapmeter.report.growth import headline


def point(label: str, verdict: str, tokens: float, usd: float | None = None) -> Point:
    cost = NoCost.model_construct(reason="closed loop") if usd is None else Cost.model_construct(per_request_usd=usd)
    return Point.model_construct(
        label=label, verdict=verdict, slo=(SloAnswer.model_construct(),), metrics=MappingProxyType({}),
        throughput=PointThroughput.model_construct(steady_tokens_per_s=tokens, output_tokens_per_s=tokens),
        economy=PointEconomy.model_construct(cost=cost),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("points", "told"),
    [
        (
            (point("1 user", "PASS", 90), point("4 users", "PASS", 300), point("8", "FAIL", 400)),
            (
                "The SLOs are met at 1 user, 4 users; missed at 8. "
                "Highest throughput of these: 4 users, 300 output tokens/s."
            ),
        ),
        (
            (point("4 req/s", "PASS", 90, 3e-6), point("8 req/s", "PASS", 150, 2e-6), point("16", "INCONCLUSIVE", 300)),
            (
                "The SLOs are met at 4 req/s, 8 req/s; undecided at 16. "
                "Cheapest: 8 req/s, at most $2.00 for a million requests."
            ),
        ),
        (
            (point("max batch 1", "PASS", 90, 3e-6), point("max batch 8", "PASS", 90, 3e-6)),
            "The SLOs are met at max batch 1, max batch 8.",
        ),
        (
            (
                point("4 req/s", "PASS", 90, 3e-6),
                point("8, float32", "PASS", 9, 2e-6),
                point("8, int8", "PASS", 9, 2e-6),
            ),
            (
                "The SLOs are met at (4 req/s), (8, float32), (8, int8). "
                "Cheapest: (8, float32), (8, int8), at most $2.00 for a million requests."
            ),
        ),
        ((point("1", "FAIL", 90),), "No point meets the SLOs; missed at 1."),
        (
            (point("1", "INCONCLUSIVE", 90), point("8", "FAIL", 400)),
            "No point is shown to meet the SLOs; missed at 8; undecided at 1.",
        ),
    ],
)
def test_the_first_line_answers_which_setting(points: tuple[Point, ...], told: str) -> None:
    sweep = SweepFigures.model_construct(points=points, knees=(), growth=(), metric="ttft")
    assert headline(sweep, "CPU")[0] == told
