"""No steady state is an answer: a growing queue and a changed level are found, a steady queue's bursts are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench.false_alarms import _run as queue_run
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.judge import steady
from gapmeter.analysis.judge.steady import Warmup, detect_warmup
from gapmeter.analysis.judge.warnings import changing_warning, growth_warning, short_warmup_warning
from gapmeter.analysis.results.trust import Steady
from gapmeter.report.trust import steady_sentence
from tests.kit.runs import timed

STEADY = Warmup("steady", 0, 0, 0, "ttft", 1.0)


def run(ttft_ms: Floats) -> pd.DataFrame:
    return timed(ttft_ms, measured=True)


def described(requests: pd.DataFrame, *, loop: str = "open", searched: bool = True) -> Steady:
    return steady.describe_steady(requests, detect_warmup(requests), loop=loop, searched=searched)


def said(requests: pd.DataFrame, steady: Steady, offered: float | None = None) -> str:
    """What is said of a run with this state."""
    return steady_sentence(steady, measured=len(requests), offered=offered)


def test_steady_queues_are_not_said_to_grow_and_overloaded_ones_are() -> None:
    def growing(load: float) -> int:
        runs = [queue_run(np.random.default_rng([seed, 9]), load) for seed in range(40)]
        return sum(slope.grows for slope in map(steady.queue_slope, runs) if slope)

    assert growing(0.5) + growing(0.9) <= 3
    assert growing(1.1) >= 28, "82 % of runs of 1,000 requests are found, by docs/results"
    assert growing(1.4) >= 38


@pytest.mark.parametrize(("outcome", "lasts"), [("ok", True), ("refused", False)])
def test_figures_of_a_server_that_failed_from_a_moment_on_stand_for_no_longer_run(outcome: str, lasts: bool) -> None:
    requests = run(np.random.default_rng(2).lognormal(3, 0.3, 800))
    requests.loc[requests.index[300:], "outcome"] = outcome
    assert described(requests).valid_for_capacity is lasts


def test_more_offered_than_served_is_no_steady_state_and_not_valid_for_capacity() -> None:
    requests = queue_run(np.random.default_rng(4), 1.5)
    told = described(requests)
    assert (told.state, told.valid_for_capacity) == ("unsteady", False)
    words = said(requests, told, offered=30.0)
    assert "requests in flight grew by" in words
    assert "the offered load (30/s) was above what was served (2" in words
    assert [w.code for w in growth_warning(told)] == ["overload"]
    assert "e+" not in said(requests, told, offered=1250.0)
    slope = told.methods.queue_slope
    (first, last), span_s = slope.in_flight, np.ptp(requests["due_ns"]) / 1e9
    assert 0 <= first < 0.1 * last, "it began empty"
    assert last - first == pytest.approx(slope.per_s * span_s, rel=0.1)


def test_the_number_in_flight_is_exact() -> None:
    requests = run(np.full(100, 240.0))  # due every 100 ms, in flight for 250 ms
    edges = np.linspace(10**12 + 1e9, 10**12 + 9e9, 5)
    assert steady._in_flight(requests, edges) == pytest.approx([2.5] * 4)


def test_a_request_that_was_asked_again_is_one_request_in_flight() -> None:
    requests = run(np.full(100, 240.0))
    failed = requests.iloc[50:].assign(outcome="refused", superseded=True, measured=False)
    once, again = (steady.queue_slope(each) for each in (requests, pd.concat([requests, failed])))
    assert once == again


@pytest.mark.parametrize("seed", range(4))
def test_a_level_that_changes_is_found_where_it_changes(seed: int) -> None:
    ttft = np.random.default_rng(seed).lognormal(3, 0.4, 800)
    ttft[480:] *= 2
    [change] = [c for c in steady.level_changes(run(ttft)) if c.certain]
    assert abs(change.request - 480) <= 15
    assert change.metric == "ttft"
    assert change.ratio == pytest.approx(2, rel=0.15)


def test_where_pelt_and_mser_disagree_the_sentence_says_so() -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[600:] *= 2
    requests = run(ttft)
    told = steady.describe_steady(requests, STEADY, loop="open", searched=True)
    assert told.state == "steady"
    assert not told.methods.pelt.agrees
    assert "PELT disagrees: it sees TTFT at" in said(requests, told)
    requests = run(np.random.default_rng(2).lognormal(3, 0.3, 800))
    assert "PELT" not in said(requests, described(requests))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("at", "times"), [(200, 2.0), (400, 2.0), (600, 2.0), (200, 0.5), (400, 0.5), (600, 0.5)])
def test_a_level_that_changes_is_warned_of_with_what_its_direction_supports(
    at: int, times: float, *, fixed: bool
) -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[at:] *= times
    requests = run(ttft)
    told = steady.describe_steady(requests, None if fixed else detect_warmup(requests), loop="closed", searched=True)
    (warning,) = changing_warning(told)
    assert warning.text.startswith("no steady state: TTFT" if told.state == "unsteady" else "TTFT had no steady level")
    assert warning.cause.startswith("it rose: the server slowed" if times > 1 else "it fell: compilation")


def test_a_steady_run_and_a_start_that_was_found_are_no_change() -> None:
    ttft = np.random.default_rng(2).lognormal(3, 0.3, 800)
    assert not list(changing_warning(described(run(ttft))))
    ttft[:60] *= 8
    assert not list(changing_warning(described(run(ttft))))


def test_a_start_that_both_find_is_agreed_on() -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[:60] *= 8
    requests = run(ttft)
    warmup = detect_warmup(requests)
    requests.loc[: warmup.excluded - 1, "measured"] = False
    told = steady.describe_steady(requests, warmup, loop="open", searched=True)
    assert told.methods.pelt.agrees
    assert said(requests, told) == f"steady after the first {warmup.excluded} requests"


def test_a_start_that_a_fixed_warm_up_keeps_is_said() -> None:
    ttft = np.random.default_rng(1).lognormal(3, 0.3, 800)
    ttft[:60] *= 8
    requests = run(ttft)
    told = steady.describe_steady(requests, None, loop="open", searched=True)
    assert told.state == "steady"
    assert "are kept, as load.warmup says" in said(requests, told)
    (warning,) = short_warmup_warning(told)
    assert warning.text.startswith("the warm-up was too short: TTFT of the first ")
    assert warning.flag == "--set load.warmup=auto"
    ttft[:60] *= 40
    (warning,) = short_warmup_warning(steady.describe_steady(run(ttft), None, loop="open", searched=True))
    assert "e+" not in warning.text
    found = steady.describe_steady(requests, detect_warmup(requests), loop="open", searched=True)
    assert not list(short_warmup_warning(found)), "they were left out"


@pytest.mark.parametrize(
    ("count", "how", "state"),
    [(30, {}, "unknown"), (400, {"searched": False}, "not_applicable"), (400, {"loop": "closed"}, "steady")],
)
def test_what_cannot_be_asked_is_not_answered(count: int, how: dict[str, Any], state: str) -> None:
    told = described(run(np.random.default_rng(3).lognormal(3, 0.3, count)), **how)
    assert told.state == state
    assert told.methods.queue_slope is None
    assert told.valid_for_capacity is (state == "steady")


def test_a_slow_start_that_the_fixed_warm_up_left_out_already_is_no_disagreement() -> None:
    rng = np.random.default_rng(3)
    requests = run(np.where(np.arange(700) < 100, 200.0, 40.0) * rng.lognormal(0, 0.1, 700))
    requests["measured"] = np.arange(700) >= 100
    found = detect_warmup(requests[requests["measured"]])
    told = steady.describe_steady(requests, found, loop="open", searched=True)
    assert told.methods.pelt.agrees
