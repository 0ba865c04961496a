"""A sweep's first line says which settings meet the SLOs, and which of these is the cheapest or serves most."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from gapmeter.analysis.results.cost import Cost, Interval, NoCost
from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.pareto import Pareto, ParetoPoint
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.results.sweep import Growth, Point, PointEconomy, PointThroughput, SweepFigures
from gapmeter.report.growth import headline

MORE = Needs(requests=240, minutes=0.4)
HOURS = Needs(requests=90_000, minutes=115.0)


def point(
    label: str, verdict: str, tokens: float, usd: float | None = None, needs: Needs | None = MORE, **resolved: object
) -> Point:
    cost = NoCost.model_construct(reason="closed loop") if usd is None else Cost.model_construct(per_request_usd=usd)
    return Point.model_construct(
        label=label, folder=label, verdict=verdict, metrics=MappingProxyType({}),
        slo=(SloAnswer.model_construct(status=verdict, needs=needs), SloAnswer.model_construct(status="PASS")),
        resolved={key.replace("__", "."): value for key, value in resolved.items()},
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
                "The SLOs are met at 4 req/s, 8 req/s; undecided at 16 (needs 240 more requests). "
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
        (
            (
                point("prompt 8", "PASS", 90, 2e-6, workload__prompt_tokens=8, load__rate=4),
                point("prompt 64", "PASS", 80, 3e-6, workload__prompt_tokens=64, load__rate=4),
            ),
            (
                "The SLOs are met at prompt 8, prompt 64. "
                "They are not ranked, because their requests differ (prompt_tokens)."
            ),
        ),
        (
            (
                point("prompt 8", "PASS", 90, 2e-6, workload__prompt_tokens=8),
                point("prompt 64", "FAIL", 80, None, workload__prompt_tokens=64),
            ),
            ("The SLOs are met at prompt 8; missed at prompt 64. prompt 8 costs at most $2.00 for a million requests."),
        ),
        ((point("1", "FAIL", 90),), "No point meets the SLOs; missed at 1."),
        (
            (point("1", "INCONCLUSIVE", 90), point("8", "FAIL", 400)),
            "No point is shown to meet the SLOs; missed at 8; undecided at 1 (needs 240 more requests).",
        ),
        (
            (point("1", "INCONCLUSIVE", 9), point("8", "INCONCLUSIVE", 9, needs=Needs(requests=60, minutes=3.2))),
            (
                "No point is shown to meet the SLOs; undecided at 1 (needs 240 more requests), "
                "8 (needs about 3 min more)."
            ),
        ),
        (
            (point("1", "INCONCLUSIVE", 9, needs=None), point("8", "INCONCLUSIVE", 9, needs=HOURS)),
            (
                "No point is shown to meet the SLOs; undecided at 1 (longer runs would hardly decide it), "
                "8 (longer runs would hardly decide it)."
            ),
        ),
    ],
)
def test_the_first_line_answers_which_setting(points: tuple[Point, ...], told: str) -> None:
    sweep = SweepFigures.model_construct(points=points, knees=(), growth=(), metric="ttft")
    assert headline(sweep, "CPU")[0] == told


def paid(folder: str, low: float, high: float) -> ParetoPoint:
    cost = Interval(value=(low + high) / 2, low=low, high=high)
    return ParetoPoint.model_construct(folder=folder, usd_per_million_output_tokens=cost)


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ((paid("8", 3, 3.2), paid("16", 1.9, 2.1)), "Cheapest: 16, 300 output tokens/s at $2.00 a million."),
        (
            (paid("8", 2, 2.2), paid("16", 1.9, 2.1)),
            "Cheapest: 16, 300 output tokens/s at $2.00 a million; 8 may be as cheap.",
        ),
        ((paid("16", 1.9, 2.1),), "Highest throughput of these: 16, 300 output tokens/s."),
    ],
)
def test_where_users_wait_for_their_answers_a_token_is_cheapest_where_most_are_served(
    costs: tuple[ParetoPoint, ...], told: str
) -> None:
    sweep = SweepFigures.model_construct(
        points=(point("8", "PASS", 200), point("16", "PASS", 300)), knees=(), growth=(), metric="ttft",
        pareto=Pareto.model_construct(points=costs),
    )  # fmt: skip
    assert headline(sweep, "CPU")[0] == f"The SLOs are met at 8, 16. {told}"


def growth(metric: str, ends: tuple[float, float] | None) -> Growth:
    return Growth.model_construct(
        series="", from_="4 req/s", to="8 req/s", metric=metric, percentile=None, at_knee=False,
        grows_ms=ends and sum(ends) / 2, grows_ci_ms=ends,
    )  # fmt: skip


ALIKE = "No two neighboring points differ by more than the interval of their difference"


@pytest.mark.parametrize(
    ("ttft", "itl", "told"),
    [
        ((-1.0, 2.0), (-1.0, 2.0), f"{ALIKE}."),
        (None, (-1.0, 2.0), f"{ALIKE}, as far as they can be compared: mean TTFT is refused or not estimable at some."),
        (None, None, "No two neighboring points can be compared: mean TTFT, mean ITL are refused or not estimable."),
    ],
)
def test_points_that_cannot_be_compared_are_not_said_to_be_alike(
    ttft: tuple[float, float] | None, itl: tuple[float, float] | None, told: str
) -> None:
    growths = (growth("ttft", ttft), growth("itl", itl))
    sweep = SweepFigures.model_construct(points=(), knees=(), growth=growths, metric="ttft")
    assert headline(sweep, "CPU") == [told]
