"""The first seconds against the rest, each ratio with an interval that holds it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.judge.steady import describe_drift
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


def test_a_machine_that_slows_down_is_told_from_its_canary_and_blamed_on_nothing_unmeasured() -> None:
    rng = np.random.default_rng(1)
    canaries = [np.r_[rng.normal(20e3, 300, 10), rng.normal(26e3, 300, 40)].astype(np.int64) for _ in range(2)]
    told = describe_drift(run(50), canaries)
    assert told.machine_time.ratio == pytest.approx(20 / 26, rel=0.03)
    assert "time of a fixed piece of CPU work differed" in drift_sentence(told)
    assert "thermal" not in drift_sentence(told)
    heated = describe_drift(run(50), canaries, "thermal: the clock was lowered")
    assert "(thermal: the clock was lowered)" in drift_sentence(heated)
