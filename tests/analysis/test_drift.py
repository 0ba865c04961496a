"""The first seconds against the rest, each ratio with an interval that holds it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.judge.steady import describe_drift
from gapmeter.analysis.judge.warnings import speed_warning
from gapmeter.analysis.results.trust import SpeedChange
from gapmeter.report.trust import drift_sentence
from tests.kit.runs import timed


def run(seconds: int, slow: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Twenty requests a second with four tokens each; TTFT of the first ten seconds ``slow`` times the rest's."""
    ttft = np.random.default_rng(seed).lognormal(3, 0.4, seconds * 20)
    ttft[:200] *= slow
    requests = timed(ttft, every_ms=50, stream_ms=15, tokens=4)
    return requests.assign(token_ns=[at + np.arange(4) * 5_000_000 for at in requests["first_token_ns"]])


def test_a_slow_start_is_a_ratio_with_its_interval() -> None:
    told = describe_drift(run(60, slow=2.0))
    low, high = told.ttft.ratio_ci
    assert low < 2.0 < high < 2.5
    assert drift_sentence(told).endswith("; TTFT differed")
    assert told.tpot.ratio == pytest.approx(1.0)
    assert told.output_tokens_per_s.ratio == pytest.approx(1.0, abs=0.05)


def test_a_run_too_short_for_two_parts_has_no_ratio() -> None:
    told = describe_drift(run(8))
    assert (told.ttft, told.tpot, told.output_tokens_per_s, told.machine_time) == (None,) * 4
    assert drift_sentence(told) is None


@pytest.mark.parametrize("minutes", [10, 180])
def test_of_a_load_that_grows_all_the_time_the_first_ten_seconds_tell_no_ratio_of_tokens(minutes: int) -> None:
    seconds = 60 * minutes
    due_s = seconds * np.sqrt(np.random.default_rng(1).random(2 * seconds))
    requests = timed(np.full(len(due_s), 300.0), every_ms=1, stream_ms=15, tokens=4)
    moved_ns = (np.sort(due_s) * 1e9).astype(np.int64) + 10**12 - requests["due_ns"]
    for name in ("due_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns"):
        requests[name] += moved_ns
    tokens = [at + np.arange(4) * 5_000_000 for at in requests["first_token_ns"]]
    assert describe_drift(requests.assign(token_ns=tokens)).output_tokens_per_s is None


def test_a_machine_that_slows_down_is_told_from_its_canary_and_blamed_on_nothing_unmeasured() -> None:
    rng = np.random.default_rng(1)
    took_ns = [np.r_[rng.normal(20e3, 300, 10), rng.normal(26e3, 300, 40)].astype(np.int64) for _ in range(2)]
    canaries = [(np.arange(50) * 1_000_000_000, each) for each in took_ns]
    told = describe_drift(run(50), canaries)
    assert told.machine_time.ratio == pytest.approx(20 / 26, rel=0.03)
    assert "time of a fixed piece of CPU work differed" in drift_sentence(told)
    assert "thermal" not in drift_sentence(told)
    heated = describe_drift(run(50), canaries, "thermal: the clock was lowered")
    assert "(thermal: the clock was lowered)" in drift_sentence(heated)


def canary(requests: pd.DataFrame, ratio: float, noise: float) -> tuple[Ints, Ints]:
    """Of 120 seconds, the last forty of which take ``ratio`` times as long."""
    took_ns = np.random.default_rng(2).lognormal(10, noise, 120) * np.where(np.arange(120) < 80, 1.0, ratio)
    return int(requests["due_ns"].min()) + np.arange(120) * 1_000_000_000, took_ns.astype(np.int64)


@pytest.mark.parametrize("ratio", [1.4, 0.7])
def test_a_machine_that_changes_its_speed_within_the_run_is_told_with_the_moment(ratio: float) -> None:
    requests = run(120)
    change = describe_drift(requests, [canary(requests, ratio, 0.1)]).machine_change
    assert change.after_s == pytest.approx(80, abs=5)
    assert change.ratio == pytest.approx(ratio, rel=0.05)


def test_of_several_changes_of_speed_the_largest_is_told_and_none_below_fifteen_percent() -> None:
    requests = run(120)
    small, slower, faster = (canary(requests, ratio, 0.01) for ratio in (1.1, 1.2, 0.7))
    assert describe_drift(requests, [small]).machine_change is None
    for canaries in ([small, slower, faster], [faster, slower]):
        change = describe_drift(requests, canaries).machine_change
        assert change.ratio == pytest.approx(0.7, rel=0.01)


def test_a_machine_of_one_speed_has_no_change() -> None:
    rng, requests = np.random.default_rng(3), run(120)
    for _ in range(100):
        canary = np.arange(120) * 1_000_000_000, rng.lognormal(10, 0.2, 120).astype(np.int64)
        assert describe_drift(requests, [canary]).machine_change is None


@pytest.mark.parametrize(("ratio", "words"), [(1.38, "1.4 times slower"), (0.5, "2 times faster")])
def test_a_change_of_speed_is_warned_of_with_the_moment_and_what_it_does_to_a_tail(ratio: float, words: str) -> None:
    drift = describe_drift(run(50)).model_copy(update={"machine_change": SpeedChange(after_s=131.2, ratio=ratio)})
    (warning,) = speed_warning(drift)
    assert warning.text.startswith(f"the machine became {words}: from 131 s on")
    assert "p99" not in warning.text and "tail" in warning.cause
    assert not list(speed_warning(describe_drift(run(50))))
