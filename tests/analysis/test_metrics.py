"""The definitions of TTFT, ITL, TPOT, E2E and goodput, on tables of cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis import load
from gapmeter.analysis.requests import metrics
from gapmeter.analysis.requests.figures import ledgers_by_metric
from gapmeter.scenarios.slo import Slo

MS = 1_000_000


def stamp(at_ms: float) -> int:
    return 3_600_000 * MS + int(at_ms * MS)


def row(number: int, due_ms: float, sent_ms: float, tokens_ms: list[float], **changes: Any) -> dict[str, Any]:
    """One request; times in ms after one hour of uptime."""
    at = [stamp(t) for t in tokens_ms]
    base: dict[str, Any] = {
        "request_id": f"r{number}",
        "due_ns": stamp(due_ms),
        "attempt_due_ns": stamp(due_ms),
        "sent_ns": stamp(sent_ms),
        "connect_start_ns": None,
        "connect_end_ns": None,
        "first_token_ns": at[0] if at else None,
        "last_token_ns": at[-1] if at else None,
        "end_ns": at[-1] if at else stamp(due_ms + 1000),
        "output_tokens": len(at) or None,
        "output_tokens_asked": len(at),
        "outcome": "ok" if at else "timeout",
        "token_ns": np.array(at, dtype=np.int64) if at else None,
        "measured": True,
    }
    return base | changes


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        if name.endswith("_ns") and name != "token_ns":
            frame[name] = frame[name].astype("Int64")
    return frame


@pytest.mark.parametrize(
    ("metric", "origin", "expected_ms"),
    [("ttft", "due", 30.0), ("ttft", "sent", 28.0), ("e2e", "due", 60.0), ("e2e", "sent", 58.0), ("tpot", "due", 10.0)],
)
def test_each_metric_starts_and_ends_where_its_definition_says(metric: str, origin: str, expected_ms: float) -> None:
    requests = table(row(0, 10, 12, [40, 41, 69, 70]))
    assert metrics.request_values_ns(requests, metric, origin) == pytest.approx([expected_ms * MS])


def test_nanoseconds_stay_exact_after_a_year_of_uptime() -> None:
    year = 365 * 86_400 * 10**9
    requests = table(row(0, 0, 0, [1, 2], due_ns=year + 1, first_token_ns=year + 1_000_000_004))
    assert metrics.request_values_ns(requests, "ttft")[0] == 1_000_000_003


@pytest.mark.parametrize("missing", [None, -1])
def test_a_stamp_that_is_missing_makes_its_metric_unmeasured(missing: int | None) -> None:
    requests = table(row(0, 10, 12, [40, 50], first_token_ns=missing))
    assert math.isnan(metrics.request_values_ns(requests, "ttft")[0])
    assert metrics.metric_series(requests, "ttft").count == 0
    assert metrics.metric_series(requests, "e2e").count == 1


@pytest.mark.parametrize("tokens", [1, None])
def test_one_token_or_an_unknown_number_of_tokens_has_no_tpot(tokens: int | None) -> None:
    requests = table(row(0, 10, 12, [40]), row(1, 20, 20, [40, 50]))
    requests.loc[0, "output_tokens"] = tokens
    assert metrics.metric_series(requests, "tpot").count == 1


def test_gaps_are_pooled_over_requests_in_the_order_of_arrival() -> None:
    requests = table(row(0, 0, 0, [10, 30, 35]), row(1, 0, 0, [20, 32]))
    gaps = metrics.gaps_of(requests, np.array([True, True]), failures=False)
    assert (gaps.gap_ns / MS).tolist() == [20.0, 12.0, 5.0]
    assert gaps.row.tolist() == [0, 1, 0]


def test_tokens_that_arrive_together_end_one_gap() -> None:
    requests = table(row(0, 0, 0, [10, 10, 25, 25, 25, 40]))
    gaps = metrics.gaps_of(requests, np.array([True]), failures=False)
    assert (gaps.gap_ns / MS).tolist() == [15.0, 15.0]
    assert metrics.request_values_ns(requests, "tpot")[0] == 6 * MS


def test_a_failed_request_is_infinitely_late_and_never_dropped() -> None:
    requests = table(row(0, 0, 0, [10, 20]), row(1, 5, 5, [], output_tokens_asked=4), row(2, 9, 9, [30, 40]))
    for metric in ("ttft", "e2e", "tpot"):
        assert metrics.metric_series(requests, metric).count == 2
        assert np.isinf(metrics.metric_series(requests, metric, failures=True).ordered).tolist() == [False, False, True]
    assert np.isinf(metrics.metric_series(requests, "itl", failures=True).ordered).sum() == 3


def test_a_request_cut_in_the_middle_owes_the_gaps_that_did_not_come() -> None:
    requests = table(row(0, 0, 0, [10, 20, 30], output_tokens_asked=10, outcome="cut"), row(1, 0, 0, [15, 25]))
    both = metrics.metric_series(requests, "itl", failures=True)
    assert np.isinf(both.ordered).sum() == 10 - 3
    assert both.count == 2 + 7 + 1
    assert metrics.metric_series(requests, "itl").count == 1
    together = table(row(0, 0, 0, [10, 10, 10, 20], output_tokens_asked=10, outcome="cut"))
    assert np.isinf(metrics.metric_series(together, "itl", failures=True).ordered).sum() == 10 - 4


def test_warm_up_and_abandoned_requests_are_in_no_figure() -> None:
    requests = table(
        row(0, 0, 0, [10], measured=False), row(2, 8, 8, [30]), row(1, 5, 5, [20]),
        row(3, 9, 9, [], outcome="abandoned"),
    )  # fmt: skip
    assert metrics.measured_requests(requests)["request_id"].tolist() == ["r1", "r2"]


def test_generator_lag_leaves_out_the_time_of_a_new_connection() -> None:
    start = 3_600_000 * MS
    requests = table(
        row(0, 10, 12, [40]), row(1, 10, 15, [40], connect_start_ns=start + 11 * MS, connect_end_ns=start + 14 * MS)
    )
    assert metrics.generator_lag_ns(requests) == pytest.approx([2 * MS, 2 * MS])


@pytest.mark.parametrize(
    ("limits_ms", "good"),
    [
        ({}, [True, True, False, True]),
        ({"ttft": 30}, [True, False, False, True]),
        ({"itl": 12}, [True, True, False, True]),
        ({"itl": 9}, [False, True, False, True]),
        ({"ttft": 100, "e2e": 45}, [True, False, False, True]),
        ({"ttft": 30, "itl": 12, "e2e": 100}, [True, False, False, True]),
    ],
)
def test_goodput_counts_requests_whose_own_figures_lie_within_every_limit(
    limits_ms: dict[str, float], good: list[bool]
) -> None:
    requests = table(row(0, 0, 0, [20, 30, 41]), row(1, 0, 0, [40, 48]), row(2, 0, 0, []), row(3, 0, 0, [25]))
    limits = {metric: limit * MS for metric, limit in limits_ms.items()}
    if "itl" in limits_ms and limits_ms["itl"] == 12:
        assert metrics.itl_p99_ns(requests)[:2] == pytest.approx([11 * MS, 8 * MS])
    assert metrics.good_requests(requests, limits).tolist() == good


def test_goodput_is_unknown_where_an_answer_did_not_tell_the_tokens_that_a_limit_is_on() -> None:
    requests = table(row(0, 0, 0, [20, 90, 160], output_tokens=None), row(1, 0, 0, [40, 48]), row(2, 0, 0, [30]))
    assert load.describe_goodput(requests, {"tpot": 10.0 * MS}, 3.0).share is None
    assert load.describe_goodput(requests, {"ttft": 30.0 * MS}, 3.0).share == pytest.approx(2 / 3)
    assert load.describe_goodput(requests[1:], {"tpot": 10.0 * MS}, 3.0).share == 1


_USERS = [(10_000 * (n // 4) + n % 4, 10_000.0) for n in range(24)]  # four, who wait ten seconds for every answer
_QUEUE = [(50.0 * n, 50.0 * n + 100) for n in range(200)]  # twice as much is asked as served


@pytest.mark.parametrize(("waits_ms", "per_s"), [(_USERS, 0.4), (_QUEUE, 10.0)], ids=["users", "a queue that grows"])
def test_goodput_is_the_good_part_of_what_was_served(waits_ms: list[tuple[float, float]], per_s: float) -> None:
    rows = [row(n, due, due, [due + took / 2, due + took], prompt_tokens=7) for n, (due, took) in enumerate(waits_ms)]
    requests = table(*rows)
    served = load.describe_throughput(requests).requests_per_s
    assert served == pytest.approx(per_s, rel=0.01)
    assert load.describe_goodput(requests, {}, served).per_s == pytest.approx(served)
    few = load.describe_goodput(requests, {"e2e": 2_000.0 * MS}, served)  # of the queue the first 39
    assert few.per_s == pytest.approx(served * (39 / 200 if waits_ms is _QUEUE else 0.0))


def test_goodput_takes_the_limit_of_the_highest_percentile_named() -> None:
    slos: list[dict[str, Any]] = [
        {"metric": "ttft", "percentile": 99.0, "limit_ns": 900, "limit_share": None, "text": ""},
        {"metric": "ttft", "percentile": 99.0, "limit_ns": 800, "limit_share": None, "text": ""},
        {"metric": "ttft", "percentile": 50.0, "limit_ns": 200, "limit_share": None, "text": ""},
        {"metric": "errors", "percentile": None, "limit_ns": None, "limit_share": 0.01, "text": ""},
    ]
    assert metrics.limits_of([Slo(**each) for each in slos]) == {"ttft": 800.0}


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=10))
def test_the_gaps_of_a_request_sum_to_last_minus_first(steps: list[list[int]]) -> None:
    requests = table(*(row(i, 0, 0, np.cumsum(s).tolist()) for i, s in enumerate(steps)))
    gaps = metrics.gaps_of(requests, np.ones(len(requests), bool), failures=False)
    sums = np.bincount(gaps.row, weights=gaps.gap_ns, minlength=len(steps))
    assert sums == pytest.approx(metrics.elapsed_ns(requests, "first_token_ns", "last_token_ns"))
    assert (gaps.gap_ns > 0).all()


def test_the_window_holds_one_mean_gap_for_each_request() -> None:
    assert metrics.window_s(table(*(row(i, i * 100, i * 100, [i * 100 + 5]) for i in range(11)))) == pytest.approx(1.1)
    assert metrics.window_s(table(row(0, 0, 0, [1]))) == 0.0


@pytest.mark.parametrize("wanted", [["a", "b"], ["b", "c"], ["a", "c"], ["d"]])
def test_the_gaps_of_some_requests_are_theirs_side_by_side_or_not(wanted: list[str]) -> None:
    whose = pd.Categorical(["a", "a", "b", "c", "c"])
    total = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    gaps = pd.DataFrame({"request_id": whose, "total_ns": total, "unexplained_ns": np.broadcast_to(7.0, 5)}, copy=False)
    rows = ledgers_by_metric(None, gaps, pd.DataFrame({"request_id": wanted}))["itl"]
    assert rows["total_ns"].tolist() == total[whose.isin(wanted)].tolist()
    assert (rows["unexplained_ns"] == 7.0).all()


def test_a_failed_request_that_asked_for_one_token_owes_no_gap_and_no_tpot() -> None:
    rows = [row(at, 100 * at, 100 * at, [100 * at + 20]) for at in range(20)]
    rows += [row(20, 2000, 2000, [], output_tokens_asked=1), row(21, 2100, 2100, [], output_tokens_asked=4)]
    requests = pd.DataFrame(rows)
    owed = {metric: metrics.metric_series(requests, metric, failures=True).count for metric in ("ttft", "itl", "tpot")}
    assert owed == {"ttft": 22, "itl": 3, "tpot": 1}
