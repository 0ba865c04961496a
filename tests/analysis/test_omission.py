"""A closed loop is called what it is; what its users omitted while they waited is estimated by a published rule."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.load import describe_closed_loop, with_omitted
from gapmeter.analysis.results.requests import ClosedLoop
from gapmeter.report.run import CLOSED_LOOP, closed_loop_sentence
from tests.kit.runs import timed

MS = 1_000_000


def by_the_rule(values: list[int], interval: int) -> list[int]:
    """HdrHistogram's recordValueWithExpectedInterval, value by value."""
    out = []
    for value in values:
        out.append(value)
        missing = value - interval
        while missing >= interval:
            out.append(missing)
            missing -= interval
    return sorted(out)


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 3000))
def test_values_are_added_as_hdrhistogram_adds_them(values: list[int], interval: int) -> None:
    found = with_omitted(np.array(values, np.float64), float(interval))
    assert found.tolist() == by_the_rule(values, interval)


def test_a_stall_counts_as_long_as_it_lasted_for_those_who_would_have_asked() -> None:
    """One user, 1 ms answers every 10 ms, one stall of 1 s: an open loop would have had 99 more, from 990 ms down."""
    values = np.array([1.0] * 9_900 + [1000.0])
    whole = with_omitted(values, 10.0)
    assert len(whole) == 9_901 + 99
    assert whole[-100:].tolist() == [float(wait) for wait in range(10, 1001, 10)]
    assert np.percentile(values, 99) == 1
    assert np.percentile(whole, 99.5) == pytest.approx(505, abs=10)


def run(e2e_ms: list[float], outcome: str = "ok") -> pd.DataFrame:
    return timed(np.array(e2e_ms) - 0.5, every_ms=10, stream_ms=0.5, outcome=outcome)


CLOSED = Evidence("closed", "closed", concurrency=4, think_time_ns=10 * MS)


def test_an_open_loop_has_nothing_to_say() -> None:
    assert describe_closed_loop(run([5.0] * 100 + [900.0]), Evidence("open", "poisson", 5.0)) is None


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (run([5.0] * 500 + [29.0]), "no answer took twice the pace of 15 ms"),
        (run([5.0] * 500, outcome="timeout"), "nobody's pace is known"),
        (run([]), "nothing was measured"),
    ],
)
def test_where_the_correction_does_not_apply_there_is_the_label_alone(requests: pd.DataFrame, why: str) -> None:
    found = describe_closed_loop(requests, CLOSED)
    assert found == ClosedLoop(corrected=None), why
    assert closed_loop_sentence(found) == CLOSED_LOOP


def test_the_estimate_stands_beside_with_its_pace_and_what_was_added() -> None:
    found = describe_closed_loop(run(([5.0] * 700 + [1500.0] + [5.0] * 800) * 2), CLOSED)
    told = found.corrected
    assert told.expected_interval_ms == 15
    assert told.e2e.added == 2 * 99
    assert told.e2e.p50_ms == 5
    assert told.e2e.p99_ms == pytest.approx(1500 - 17 * 15, abs=30)
    assert told.ttft.p99_ms < told.e2e.p99_ms
    assert closed_loop_sentence(found).startswith(CLOSED_LOOP)
    assert (
        "corrected for 198 requests that users at their pace of 15.0 ms would have sent meanwhile"
        in closed_loop_sentence(found)
    )


def test_a_percentile_that_the_sample_cannot_support_is_not_corrected_either() -> None:
    found = describe_closed_loop(run([5.0] * 60 + [1500.0]), CLOSED)
    assert found.corrected.e2e.p50_ms is not None
    assert found.corrected.e2e.p99_ms is None
