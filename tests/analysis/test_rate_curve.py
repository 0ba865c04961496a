"""Arrivals whose rate changes are judged by the rate that they were planned at, not by one mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.judge.arrivals import check_arrivals
from gapmeter.analysis.judge.evidence import Evidence, Knots, expected_counts, lowest_and_highest
from gapmeter.analysis.results.trust import BROKEN, OK, UNMEASURED, Check
from tests.kit.runs import stamped

S = 1_000_000_000
T0 = 10**12
RAMP: Knots = [(T0, 2.0), (T0 + 100 * S, 30.0)]
STEPS: Knots = [(T0, 5.0), (T0 + 50 * S, 5.0), (T0 + 50 * S, 0.0), (T0 + 60 * S, 0.0), (T0 + 60 * S, 40.0),
                (T0 + 100 * S, 40.0)]  # fmt: skip
EVIDENCE = Evidence("open", "ramp", 16.0, rate_knots=RAMP, window_ns=(T0, T0 + 100 * S))


def arrivals(knots: Knots, seed: int) -> Ints:
    """Poisson arrivals at the rate of the curve, by thinning."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, 100, rng.poisson(40 * 100)))
    times, rates = (np.array(column, np.float64) for column in zip(*knots, strict=True))
    there = np.interp(at * S + T0, times, rates)
    return (at[rng.uniform(0, 40, len(at)) < there] * S).astype(np.int64) + T0


def run(due: Ints, lag_ns: int = 50_000) -> pd.DataFrame:
    return stamped(due, due + lag_ns, due + S, due + S)


def found(requests: pd.DataFrame, evidence: Evidence, rule: str) -> Check:
    checks = check_arrivals(requests, evidence)
    return next(check for check in checks if check.rule == rule)


@pytest.mark.parametrize("knots", [RAMP, STEPS], ids=["ramp", "steps"])
def test_arrivals_at_the_planned_rate_are_hardly_ever_refused(knots: Knots) -> None:
    evidence = replace(EVIDENCE, rate_knots=knots)
    for rule in ("rate", "dispersion", "delivered"):
        assert sum(found(run(arrivals(knots, seed)), evidence, rule).status == BROKEN for seed in range(60)) <= 1


def test_a_constant_rate_is_no_ramp_although_its_mean_is_right() -> None:
    flat = arrivals([(T0, 16.0), (T0 + 100 * S, 16.0)], 1)
    assert found(run(flat), EVIDENCE, "rate").status == OK
    assert found(run(flat), EVIDENCE, "dispersion").status == BROKEN


def test_half_of_what_a_ramp_lets_expect_is_refused() -> None:
    check = found(run(arrivals(RAMP, 1)[::2]), EVIDENCE, "rate")
    assert check.status == BROKEN
    assert check.limit == pytest.approx(1600)
    assert "1,600 requests" in check.text or "1600 requests" in check.text


@pytest.mark.parametrize("shape", ["gamma", "trace"])
def test_other_arrivals_are_compared_with_what_was_planned(shape: str) -> None:
    rng = np.random.default_rng(1)
    due = T0 + np.cumsum(rng.gamma(0.2, 0.25, 800) * S).astype(np.int64)
    evidence = Evidence("open", shape, None if shape == "trace" else 20.0, count_dispersion=5.0)
    assert found(run(due), evidence, "dispersion").status == OK
    smoothed = run(due)
    smoothed["sent_ns"] = np.linspace(due[0], due[-1], len(due)).astype(np.int64)
    assert found(smoothed, evidence, "dispersion").status == BROKEN
    assert found(run(due[:20]), evidence, "dispersion").status == UNMEASURED


def test_a_trace_whose_requests_come_in_groups_at_regular_times_is_as_planned() -> None:
    """Each group is a window of its own, and its requests leave up to 2 ms late."""
    due = T0 + np.repeat(np.arange(200, dtype=np.int64) * 3 * S, 5)
    requests = run(due)
    requests["sent_ns"] += np.random.default_rng(1).integers(0, 2_000_000, len(due))
    assert found(requests, Evidence("open", "trace"), "dispersion").status == OK
    even = run(T0 + np.arange(1000, dtype=np.int64) * S)
    assert found(even, Evidence("open", "trace"), "dispersion").status == OK


def test_of_conversations_the_first_turns_have_the_rate_that_was_asked_for() -> None:
    first = arrivals([(T0, 16.0), (T0 + 100 * S, 16.0)], 3)
    requests = pd.concat([run(first).assign(turn=1), run(first + S).assign(turn=2)]).sort_values("due_ns")
    evidence = Evidence("open", "poisson", 16.0, unit="conversations")
    check = found(requests, evidence, "rate")
    assert check.status == OK
    assert "conversations per second" in check.text
    assert found(requests, evidence, "dispersion").status == OK
    assert found(requests.assign(turn=0), evidence, "rate").status == BROKEN


KNOTS = st.lists(st.tuples(st.integers(1, 10**10), st.floats(0, 100)), min_size=2, max_size=6)


@given(KNOTS, st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_expected_counts_are_the_area_under_the_curve(pieces: list[tuple[int, float]], shares: list[float]) -> None:
    times = np.cumsum([length for length, _ in pieces])
    rates = np.array([rate for _, rate in pieces])
    knots = list(zip(times.tolist(), rates.tolist(), strict=True))
    at = np.sort(times[0] + np.array(shares) * (times[-1] - times[0]))
    got = expected_counts(knots, at)
    for one, count in zip(at, got, strict=True):
        inside = np.append(times[times < one], one)
        wanted = np.trapezoid(np.interp(inside, times, rates), inside) / 1e9
        assert count == pytest.approx(wanted, abs=1e-5, rel=1e-6)
    assert expected_counts(knots, np.array([times[0] - 5, times[-1] + 5])).tolist() == [
        0.0, pytest.approx(np.trapezoid(rates, times) / 1e9),
    ]  # fmt: skip


def test_the_range_is_that_of_the_measured_part() -> None:
    assert lowest_and_highest(STEPS, T0) == (0.0, 40.0)
    assert lowest_and_highest(RAMP, T0 + 50 * S) == (30.0, 30.0)
