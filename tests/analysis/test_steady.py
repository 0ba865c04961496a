"""A slow start is found and left out; bad luck and overload are not mistaken for one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.judge import steady
from gapmeter.analysis.stats.changes import mser5
from tests.kit.runs import timed
from tests.kit.series import mm1_sojourns

MS = 1_000_000


def run(ttft_ms: Floats) -> pd.DataFrame:
    return timed(ttft_ms, stream_ms=100, tokens=11)


@pytest.mark.parametrize("slow", [30, 60, 100])
def test_a_slow_start_is_left_out_and_little_more(slow: int) -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[:slow] *= np.linspace(8, 3, slow)
    found = steady.detect_warmup(run(ttft))
    assert found.state == "warmed"
    assert slow <= found.excluded <= slow + 30
    assert found.until_ns == 10**12 + found.excluded * 100 * MS
    assert found.ratio > 2


def test_how_much_slower_a_start_was_is_not_turned_round_by_a_few_stalls_of_the_rest() -> None:
    rng = np.random.default_rng(2)
    ttft = rng.lognormal(3, 0.2, 600)
    ttft[:60] *= 3
    ttft[60:][rng.random(540) < 0.01] = 30_000
    found = steady.detect_warmup(run(ttft))
    assert found.state == "warmed"
    assert 2.5 < found.ratio < 3.5


def test_a_steady_run_is_left_whole() -> None:
    found = [steady.detect_warmup(run(np.random.default_rng(s).lognormal(3, 0.5, 700))).state for s in range(100)]
    assert found.count("steady") >= 97


@pytest.mark.parametrize("times", [0.97, 1.03])
def test_a_start_that_differs_by_a_few_per_cent_is_not_left_out(times: float) -> None:
    ttft = np.random.default_rng(1).normal(20, 0.05, 400)
    ttft[:40] *= times
    assert steady.detect_warmup(run(ttft)).state == "steady"


def test_an_early_burst_of_a_steady_queue_is_bad_luck_and_stays() -> None:
    """MSER alone would cut a quarter of these stationary runs; the guard keeps nearly all of them whole."""
    runs = [mm1_sojourns(np.random.default_rng([s, 4]), 0.7, 1000) * 20 for s in range(200)]
    alone = sum(mser5(np.log(values))[0] > 0 for values in runs)
    found = [steady.detect_warmup(run(values)).state for values in runs]
    assert alone > 50
    assert found.count("steady") >= 190


def test_latency_that_grows_through_the_run_is_not_steady() -> None:
    ttft = np.linspace(20, 5000, 600) + np.random.default_rng(1).normal(0, 10, 600)
    found = steady.detect_warmup(run(ttft))
    assert (found.state, found.excluded) == ("unsteady", 0)


def test_slow_tokens_at_the_start_are_found_when_first_tokens_are_not_slow() -> None:
    requests = run(np.random.default_rng(1).lognormal(3, 0.3, 800))
    requests["last_token_ns"] += (np.random.default_rng(2).normal(0, 5, 800) * MS).astype(np.int64)
    requests.loc[:49, "last_token_ns"] += 400 * MS
    found = steady.detect_warmup(requests)
    assert (found.state, found.metric) == ("warmed", "tpot")
    assert 50 <= found.excluded <= 80


@pytest.mark.parametrize("count", [0, 1, 49])
def test_a_short_run_is_taken_as_it_is(count: int) -> None:
    assert steady.detect_warmup(run(np.full(count, 20.0))) == steady.Warmup(
        "steady", 0, 10**12 if count else 0, 10**12 if count else 0, "ttft", 1.0
    )


def test_failed_requests_are_passed_over() -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[:60] *= 6
    requests = run(ttft).astype({"first_token_ns": "Int64", "last_token_ns": "Int64"})
    requests.loc[10:29, ["first_token_ns", "last_token_ns"]] = pd.NA
    requests.loc[10:29, "outcome"] = "http_5xx"
    found = steady.detect_warmup(requests)
    assert found.state == "warmed"
    assert 60 <= found.excluded <= 100


def test_a_change_in_the_middle_of_a_run_leaves_nothing_out_and_is_called_unsteady() -> None:
    rng = np.random.default_rng(3)
    level = np.where(np.arange(600) < 240, 3.0, 1.0)
    ttft_ms = level * rng.gamma(20, 1 / 20, 600) * 50
    requests = timed(ttft_ms, stream_ms=ttft_ms)
    found = steady.detect_warmup(requests)
    assert (found.state, found.excluded) == ("unsteady", 0)
