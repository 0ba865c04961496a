"""Tokens per second per user against those per GPU or core: the places of points, and which may be on the front."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.cost import hardware_units
from gapmeter.analysis.pareto import interval, merged, pace_limit, pareto, pareto_point
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.distribution import Distribution, Percentile
from gapmeter.analysis.results.pareto import ParetoPoint
from gapmeter.analysis.results.run import INVALID, PASS, Verdict
from gapmeter.analysis.results.sweep import Point, PointDistribution, PointThroughput
from gapmeter.analysis.sweep.build import _pareto
from gapmeter.analysis.sweep.curves import Axis
from gapmeter.report.document import Chart
from gapmeter.report.pareto import section
from gapmeter.scenarios.slo import parse_slo
from tests.kit.results import manifest

_VALUES = st.floats(0.1, 1000.0)
_KNOWN = st.builds(
    lambda value, down, up: Interval(value=value, low=None if down is None else value / down, high=value * up),
    _VALUES, st.none() | st.floats(1.0, 3.0), st.floats(1.0, 3.0),
)  # fmt: skip


def made(name: str, user: Interval | None, unit: Interval | None, verdict: Verdict = PASS, **more: Any) -> ParetoPoint:
    known: dict[str, Any] = {
        "side": "", "tokens_per_s_user": None, "by_median": user, "by_mean": user, "units": 1, "folder": name,
        "usd_per_million_output_tokens": Interval(value=1.0, low=None, high=None),
    }  # fmt: skip
    return ParetoPoint(name=name, verdict=verdict, tokens_per_s_unit=unit, **known | more)


def of_tpot(about: Any, median: float | None = 20.0) -> ParetoPoint:
    """100 tokens a second (80 to 125) at a TPOT of 20 ms (16 to 25)."""
    found = {50.0: Percentile(value_ms=median, ci_ms=(16.0, 25.0))} if median else {}
    tpot = Distribution(percentiles=found, max_ms=90.0, mean_ms=40.0, count=60, n_eff=9.0)
    return pareto_point("4 users", "r1", PASS, tpot, (32.0, 50.0), interval(100.0, (80.0, 125.0)), about)


@given(st.lists(st.tuples(_KNOWN, _KNOWN, st.sampled_from([PASS, INVALID])), min_size=1, max_size=8))
def test_off_the_front_is_what_another_valid_point_surely_dominates(
    drawn: list[tuple[Interval, Interval, Verdict]],
) -> None:
    found = pareto([made(str(at), *each) for at, each in enumerate(drawn)], "GPU", None)
    assert found
    valid = [(user, unit) for user, unit, verdict in drawn if verdict != INVALID]
    for point, (user, unit, verdict) in zip(found.points, drawn, strict=True):
        beaten = any(
            x.low is not None and y.low is not None and x.low > (user.high or 0) and y.low > (unit.high or 0)
            for x, y in valid
        )
        assert point.on_front == (None if verdict == INVALID else not beaten)


def test_a_point_is_what_a_user_and_each_core_gets_and_what_that_costs() -> None:
    about = manifest(scenario={"cost": {"utilisation": 0.8, "usd_per_hour": 3.6}}, placement={"server": [0, 1]})
    found = of_tpot(about)
    assert found.by_median == Interval(value=50.0, low=40.0, high=62.5), "1000 / 20 ms"
    assert found.by_mean == Interval(value=25.0, low=20.0, high=31.25)
    assert found.tokens_per_s_unit == Interval(value=50.0, low=40.0, high=62.5), "of two cores"
    cost = found.usd_per_million_output_tokens
    assert cost and (cost.value, cost.low, cost.high) == pytest.approx((12.5, 10.0, 15.625))


def test_all_points_are_compared_by_the_mean_where_one_supports_no_median() -> None:
    both, lacking = of_tpot(manifest()), of_tpot(manifest(), median=None)
    for points, statistic, places in (([both], "median", [50.0]), ([both, lacking], "mean", [25.0, 25.0])):
        found = pareto(points, "core", None)
        assert found and found.statistic == statistic
        assert [each.tokens_per_s_user and each.tokens_per_s_user.value for each in found.points] == places


_GPUS = {"gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB"]}


@pytest.mark.parametrize(
    ("about", "counted"),
    [
        ({"placement": {"server": [2, 3, 4]}}, (3, "core")),
        ({"placement": {"server": []}, "hardware": {"cores": 8}}, (8, "core")),
        ({"hardware": _GPUS}, (1, "GPU")),
        ({"hardware": _GPUS, "scenario": {"server": {"args": {"tensor_parallel_size": 4}}}}, (4, "GPU")),
        ({"scenario": {"server": {"engine": "attach"}}}, (1, "server")),
        ({"scenario": {"server": {"engine": "attach"}, "cost": {"gpu": "cpu"}}}, (1, "server")),
        ({"scenario": {"server": {"engine": "attach"}, "cost": {"gpu": "H100"}}}, (1, "GPU")),
        ({"scenario": {"server": {"engine": "attach"}, "cost": {"gpu": "H100", "gpus_per_replica": 2}}}, (2, "GPU")),
    ],
)  # fmt: skip
def test_throughput_is_counted_by_what_the_server_has(about: dict[str, Any], counted: tuple[int, str]) -> None:
    assert hardware_units(manifest(**about)) == counted


def test_sides_whose_hardware_is_counted_differently_stand_per_server() -> None:
    cores = pareto([of_tpot(manifest(placement={"server": [0, 1]}))], "core", None)
    gpus = pareto([of_tpot(manifest(hardware=_GPUS))], "GPU", None)
    found = merged([("A", cores), ("B", gpus), ("C", None)])
    assert found and found.unit == "server"
    assert [(each.side, each.units) for each in found.points] == [("A", 1), ("B", 1)]
    assert [each.tokens_per_s_unit and each.tokens_per_s_unit.value for each in found.points] == [100.0, 100.0]


def test_points_of_a_sweep_over_servers_that_are_counted_differently_stand_per_server() -> None:
    """One of two GPUs, and one of which nobody knows what it has."""
    rates = PointThroughput.model_construct(steady_tokens_per_s=100.0, steady_ci=(80.0, 125.0))
    tpot = PointDistribution(
        percentiles={50.0: Percentile(value_ms=20.0)}, max_ms=90.0, mean_ms=40.0, count=60, n_eff=9.0, mean_ci_ms=None
    )
    points = [
        Point.model_construct(index=at, label=name, folder=name, verdict=PASS, metrics={"tpot": tpot}, throughput=rates)
        for at, name in enumerate(("a", "b"))
    ]
    asked = [{"gpu": "H100", "gpus_per_replica": 2}, {}]
    made_on = {at: manifest(scenario={"server": {"engine": "attach"}, "cost": cost}) for at, cost in enumerate(asked)}
    found = _pareto(Axis(None, "", (("", (0, 1)),)), points, made_on)
    assert found and found.unit == "server"
    assert [(each.units, each.tokens_per_s_unit and each.tokens_per_s_unit.value) for each in found.points] == [
        (1, 100.0), (1, 100.0),
    ]  # fmt: skip


def test_the_pictures_marks_are_the_points_and_the_front_is_told() -> None:
    slos = [parse_slo("itl p99 <= 50 ms"), parse_slo("tpot p50 <= 25 ms"), parse_slo("ttft p99 <= 1 ms")]
    places = [(50.0, 10.0), (30.0, 90.0), (20.0, 20.0), (40.0, 60.0)]
    points = [
        made(f"at {x:g}", Interval(value=x, low=x - 2, high=x + 2), Interval(value=y, low=y - 2, high=y + 2))
        for x, y in places
    ]
    points.append(made("late", points[0].by_mean, points[0].tokens_per_s_unit, INVALID))
    found = pareto(points, "GPU", pace_limit(slos))
    assert found and found.limit and found.limit.tokens_per_s_user == 40.0, "the tightest: 25 ms a token"
    shown = section(found, "pareto")
    assert shown
    chart = next(block for block in shown.blocks if isinstance(block, Chart))
    drawn = str(chart.picture.draw("pareto"))
    marks = re.findall(r'data-user="([^"]*)" data-unit="([^"]*)" data-front="(\w+)"', drawn)
    assert [(float(x), float(y)) for x, y, _ in marks] == places
    assert [front for _, _, front in marks] == ["true", "true", "false", "true"]
    assert drawn.count("✕") == 1, "what is not valid is no mark of the front"
    assert "SLO tpot p50 &lt;= 25 ms" in drawn
    assert drawn.count("$1.00") >= 4, "a million output tokens"
    assert chart.table and [row[-1] for row in chart.table.rows] == ["may be on it", "may be on it", "off",
                                                                     "may be on it", "–"]  # fmt: skip
