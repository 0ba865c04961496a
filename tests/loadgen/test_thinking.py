"""Think times follow the distribution that was asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gapmeter.loadgen.draws import draw_pauses, mean_pause_ns
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.scenarios.read import load_scenario
from gapmeter.scenarios.shapes import ExponentialPause, FixedPause, LognormalPause, Pause, UniformPause

S = 1_000_000_000
SPREAD = math.log(20 / 4) / stats.norm.ppf(0.95)
LAWS: list[tuple[Pause, Any, float]] = [
    (ExponentialPause(exponential="3s"), stats.expon(0, 3), 3.0),
    (UniformPause(uniform=("1s", "9s")), stats.uniform(1, 8), 5.0),
    (
        LognormalPause(lognormal={"median": "4s", "p95": "20s"}),
        stats.lognorm(SPREAD, 0, 4),
        4 * math.exp(SPREAD**2 / 2),
    ),
]


@pytest.mark.parametrize(("pause", "law", "mean"), LAWS, ids=["exponential", "uniform", "lognormal"])
def test_think_times_have_their_law_and_its_mean(pause: Pause, law: Any, mean: float) -> None:
    drawn = draw_pauses(pause, 20_000, np.random.default_rng(1)) / S
    assert stats.kstest(drawn, law.cdf).pvalue > 0.001
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    assert mean_pause_ns(pause) / S == pytest.approx(mean)


def test_a_cap_cuts_and_a_fixed_pause_is_fixed() -> None:
    rng = np.random.default_rng(1)
    assert draw_pauses(LognormalPause(lognormal={"median": "4s", "p95": "20s", "max": "6s"}), 1000, rng).max() == 6 * S
    assert set(draw_pauses(FixedPause("7ms"), 5, rng).tolist()) == {7_000_000}
    assert mean_pause_ns(FixedPause("7ms")) == 7_000_000
    assert mean_pause_ns(LognormalPause(lognormal={"median": "4s", "p95": "20s", "max": "6s"})) == 6 * S


def planned(*settings: str) -> Plan:
    closed = ("load.rate=null", "load.arrivals=closed", "load.concurrency=4", "load.requests=50", "load.warmup=auto")
    return make_plan(load_scenario("smoke", [*closed, *settings], {}), None, model_name="m")


def test_users_of_a_closed_loop_think_for_times_of_their_own_in_every_process() -> None:
    plan = planned("load.think_time={exponential: 2s}")
    assert (plan.think_time_ns, len(plan.pauses_ns)) == (2 * S, len(plan))
    shares = [plan.slice(worker, 3) for worker in range(3)]
    for share in shares:
        for index in range(len(share)):
            assert share.pause_ns(index) == plan.pause_ns(share.global_index(index))
        assert share.pause_ns(len(share) + 1) == share.pause_ns(1)
    assert planned("load.think_time=2s").pause_ns(3) == 2 * S


def test_how_long_users_think_moves_nothing_else() -> None:
    one, other = planned("load.think_time={exponential: 2s}"), planned("load.think_time={uniform: [1s, 2s]}")
    assert one.bodies == other.bodies
    assert one.digest() != other.digest()
