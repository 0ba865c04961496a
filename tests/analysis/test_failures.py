"""Failures are data: classes, examples, and percentiles that count them as at least their time-out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.load import describe_failures
from gapmeter.analysis.numbers import over
from gapmeter.analysis.requests.figures import bound_ns, censored, distribution
from gapmeter.analysis.requests.metrics import measured_requests
from gapmeter.analysis.results.requests import FailureExample
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.stats.series import Series
from tests.kit.results import result
from tests.kit.runs import EVIDENCE, SLOS, simulate

TIMEOUT_NS = 60_000_000_000


def requests(*outcomes: str) -> pd.DataFrame:
    """A request a second; one that failed ended 5 ms after it was due, with 3 tokens if it was cut."""
    count = len(outcomes)
    due = 7_000_000_000 + 1_000_000_000 * np.arange(count)
    return pd.DataFrame(
        {
            "request_id": [f"r-{k}" for k in range(count)], "due_ns": due, "end_ns": due + 5_000_000,
            "outcome": outcomes, "status": [500 if o == "http_5xx" else 0 for o in outcomes], "measured": True,
            "error": ["" if o == "ok" else f"error {k}" for k, o in enumerate(outcomes)],
            "token_ns": [[1, 2, 3] if o in ("ok", "cut") else None for o in outcomes],
            "censored_ns": [None if o == "ok" else TIMEOUT_NS for o in outcomes],
        }
    )  # fmt: skip


def test_every_class_is_told_with_its_first_examples_the_most_frequent_first() -> None:
    told = describe_failures(
        requests("ok", "cut", "http_5xx", "http_5xx", "ok", "http_5xx", "http_5xx", "stalled"), zero_ns=7_000_000_000
    )
    assert [(found.name, found.count) for found in told] == [("http_5xx", 4), ("cut", 1), ("stalled", 1)]
    assert told[0].share == 0.5
    assert [example.request_id for example in told[0].examples] == ["r-2", "r-3", "r-5"]
    assert told[0].examples[0] == FailureExample(
        request_id="r-2", at_s=2.0, waited_ms=5.0, status=500, tokens=0, error="error 2"
    )
    assert told[1].examples[0].tokens == 3


def test_nothing_is_told_of_a_run_in_which_nothing_failed() -> None:
    good = requests("ok", "ok")
    assert describe_failures(good, 0) == ()
    assert bound_ns(good) is None
    assert describe_failures(good.iloc[:0], 0) == ()


def test_failures_count_as_at_least_the_shortest_time_that_one_of_them_was_given() -> None:
    table = requests("ok", "timeout", "cut")
    table.loc[2, "censored_ns"] = TIMEOUT_NS + 1
    assert bound_ns(table) == TIMEOUT_NS


@given(
    st.lists(st.floats(1, TIMEOUT_NS), min_size=1, max_size=60),
    st.lists(st.floats(TIMEOUT_NS, 10 * TIMEOUT_NS), max_size=60),
    st.sampled_from([50.0, 90.0, 99.0]),
)
def test_whatever_failures_would_have_taken_a_censored_percentile_says_nothing_untrue(
    successes: list[float], unknown: list[float], percentile: float
) -> None:
    """``unknown`` is what the failed requests would have taken, had they been given the time."""
    seen = Series(np.array([*successes, *[np.inf] * len(unknown)]))
    told = censored(distribution(seen, [percentile], seen.count, 60.0), TIMEOUT_NS if unknown else None)
    truth = Series(np.array([*successes, *unknown])).percentile(percentile).value
    name = f"p{percentile:g}"
    value_ms = told.at(percentile).value_ms
    if name in told.over_ms:
        assert value_ms is None
        assert truth / 1e6 >= told.over_ms[name] == 60_000
    elif value_ms is not None:
        assert value_ms == pytest.approx(truth / 1e6, rel=2e-3)


@pytest.fixture(scope="module")
def tables() -> RunTables:
    frames = simulate(1200, rate=8.0, failures=60, error="boom")
    return RunTables(frames.requests, frames.ledger)


@pytest.fixture(scope="module")
def told(tables: RunTables) -> RunResult:
    return result(build_figures(tables, SLOS, replace(EVIDENCE, slo_on_errors=True)))


def test_percentiles_stand_twice_in_the_summary_over_successes_and_with_failures_censored(told: RunResult) -> None:
    alone, with_them = told.metrics["ttft"], told.metrics_censored["ttft"]
    assert list(told.metrics_censored) == ["ttft", "itl", "tpot", "e2e"]
    assert (alone.count, with_them.count) == (1140, 1200)
    assert alone.ms(99.0) < 100
    assert with_them.ms(99.0) is None
    assert with_them.over_ms == {"p975": 30_000, "p99": 30_000}
    assert told.counts.failed == {"http_5xx": 60}
    assert (told.verdict, told.slo[0].metric, told.slo[0].status, told.slo[0].infinite) == (
        "FAIL",
        "ttft",
        "FAIL",
        True,
    )
    assert with_them.ms(50.0) is not None and alone.ms(50.0) is not None and with_them.ms(50.0) >= alone.ms(50.0)


def test_a_percentile_among_failures_is_not_refused_however_late_answers_were_read(
    tables: RunTables, told: RunResult
) -> None:
    held = replace(EVIDENCE, client_loop_lag_ns=np.append(np.full(90, 1e5), np.full(10, 500e6)))
    late = build_figures(tables, SLOS, held)
    alone, with_them = late.metrics["ttft"], late.metrics["ttft"].with_failures
    assert alone.at(99.0).late_ms == 500 and with_them.at(99.0).infinite
    assert late.metrics_censored["ttft"].over_ms == told.metrics_censored["ttft"].over_ms


def test_where_nothing_failed_both_are_the_same() -> None:
    frames = simulate(300)
    told = result(build_figures(RunTables(frames.requests, frames.ledger), SLOS, EVIDENCE))
    for metric, alone in told.metrics.items():
        assert told.metrics_censored[metric].to_json() == {**alone.to_json(), "censored_at_ms": None, "over_ms": {}}
    assert told.failures == ()


def test_a_run_that_was_ended_before_its_first_request_has_figures() -> None:
    told = build_figures(RunTables(simulate(30).requests.iloc[:0].astype({"due_ns": "Int64"})), SLOS, EVIDENCE)
    assert (told.verdict, told.failures, told.outage) == ("INVALID", (), None)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(60_000, "> 60 s"), (1_500, "> 1.5 s"), (500, "> 500 ms"), (600_000, "> 600 s"), (12.34, "> 12.3 ms")],
)
def test_a_bound_is_written_without_digits_that_say_nothing(ms: float, text: str) -> None:
    assert over(ms) == text


@pytest.mark.parametrize("ours", ["aborted", "lost"])
def test_what_we_ended_ourselves_is_listed_and_in_no_share(ours: str) -> None:
    frames = simulate(400, failures=20, error="boom")
    failed = np.flatnonzero(frames.requests["outcome"] == "http_5xx")
    frames.requests.loc[failed[:8], "outcome"] = ours
    told = result(build_figures(RunTables(frames.requests, frames.ledger), SLOS, EVIDENCE))
    assert told.counts.failed == {"http_5xx": 12, ours: 8}
    assert (told.counts.ended, told.counts.failed_by_server) == (392, 12)
    others = build_figures(RunTables(frames.requests.drop(index=failed[:8]), frames.ledger), SLOS, EVIDENCE)
    assert (told.goodput.share, told.goodput.share_ci) == (others.goodput.share, others.goodput.share_ci)


def test_measured_requests_alone_are_counted() -> None:
    frames = simulate(100, failures=10)
    everyone = frames.requests.copy()
    everyone.loc[everyone["index"] < 5, "outcome"] = "cut"  # in the warm-up
    assert [found.name for found in describe_failures(measured_requests(everyone), 0)] == ["http_5xx"]
