"""The anatomy adds up, and names the stage that was made slow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.analysis.ledger.tail import anatomy, slow_count
from gapmeter.analysis.results.latency import Anatomy
from gapmeter.analysis.stages import STAGES, column
from gapmeter.report.marks import words
from gapmeter.report.waits import tail_sentence
from tests.kit.runs import simulate

MS = 1e6


def ledgers(count: int, seed: int = 1, **slow_ms: float) -> pd.DataFrame:
    """Every stage takes about 1 ms; in 3 % of the requests some take so much longer. Launch gaps are unmeasured."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({column(s.name): rng.uniform(0.8, 1.2, count) * MS for s in STAGES})
    late = rng.permutation(count) < max(8, 0.03 * count)
    for stage, ms in slow_ms.items():
        table.loc[late, column(stage)] += ms * MS
    table["unexplained_ns"] = 1000.0
    table["total_ns"] = table.sum(axis=1)
    table["unexplained_ns"] += table["launch_gap_ns"]
    table["launch_gap_ns"] = np.nan
    return table


def known(table: pd.DataFrame) -> Anatomy:
    """The anatomy of a table that has one."""
    found = anatomy(table)
    assert found is not None
    return found


@pytest.mark.parametrize("stage", [s.name for s in STAGES if s.name != "launch_gap"])
def test_the_stage_that_was_made_slow_is_named_with_its_owner(stage: str) -> None:
    found = known(ledgers(600, **{stage: 80.0}))
    assert found.stage == stage
    assert found.owner == next(s.owner for s in STAGES if s.name == stage)
    assert found.share == pytest.approx(1, abs=0.05)
    low, high = found.share_ci
    assert low is not None and high is not None
    assert low <= found.share <= high
    assert f"is {words(stage)} ({found.owner})" in tail_sentence(found, "ttft", "GPU")


def test_two_causes_share_the_difference_in_proportion() -> None:
    found = known(ledgers(2000, queue=60.0, tokenize=20.0))
    assert [each.stage for each in found.ranked[:2]] == ["queue", "tokenize"]
    assert found.share == pytest.approx(0.75, abs=0.02)
    low, high = found.share_ci
    assert low is not None and high is not None
    sure = f"({100 * low:.0f} .. {100 * high:.0f} %)"
    said = tail_sentence(found, "ttft", "GPU")
    assert said.startswith(f"75 % {sure} of what slow requests wait beyond typical ones")


@given(st.integers(28, 400), st.integers(0, 50))
@settings(deadline=None, max_examples=30)
def test_stages_add_up_to_what_the_bands_waited(count: int, seed: int) -> None:
    table = ledgers(count, seed, prefill=30.0)
    found = known(table)
    slowest = np.sort(table["total_ns"])[-slow_count(count) :]
    assert found.slow.total_ms == pytest.approx(slowest.mean() / 1e6)
    for band in (found.slow, found.typical):
        assert sum(band.stages_ms.values()) == pytest.approx(band.total_ms)
    assert sum(each.share or 0.0 for each in found.ranked) == pytest.approx(1)


def test_slow_requests_that_come_in_bursts_say_less_than_as_many_scattered_ones() -> None:
    """Whole bursts are slow by one cause or the other: sixty slow requests are ten causes."""
    rng = np.random.default_rng(5)
    table = ledgers(4000)
    for number, start in enumerate(range(100, 4000, 400)):
        burst = slice(start, start + 19)
        table.loc[burst, column("queue" if number % 3 else "tokenize")] += rng.uniform(60, 90, 20) * MS
    table["total_ns"] = table.drop(columns="total_ns").sum(axis=1)
    widths = []
    for rows in (table, table.sample(frac=1, random_state=1, ignore_index=True)):
        found = known(rows)
        low, high = found.share_ci
        assert low is not None and high is not None
        assert found.stage == "queue"
        widths.append(high - low)
    assert widths[0] > 2 * widths[1], widths


def test_slow_requests_of_a_single_moment_have_no_interval() -> None:
    table = ledgers(1000)
    table.loc[500:514, ["queue_ns", "total_ns"]] += 80 * MS
    found = known(table)
    assert (found.stage, found.share_ci) == ("queue", (None, None))
    assert tail_sentence(found, "ttft", "GPU").startswith("all (no interval) of what slow requests wait")


def test_time_of_an_unmeasured_stage_lies_in_the_remainder_never_in_a_stage() -> None:
    found = known(ledgers(300, queue=50.0))
    assert "launch_gap" not in found.slow.stages_ms
    assert found.slow.stages_ms["unexplained"] > 0.8


def test_a_tail_that_nobody_measured_is_said_to_belong_to_nobody_yet() -> None:
    table = ledgers(300)
    late = np.arange(300) % 30 == 0
    table.loc[late, ["unexplained_ns", "total_ns"]] += 100 * MS
    found = known(table)
    assert (found.stage, found.owner) == ("unexplained", "nobody yet")


@pytest.mark.parametrize(("count", "slow"), [(28, 7), (100, 7), (466, 7), (712, 11), (10_000, 150)])
def test_the_slow_band_is_p98_5_and_up_but_at_least_seven(count: int, slow: int) -> None:
    assert slow_count(count) == slow


def test_too_few_requests_or_none_slower_have_no_anatomy() -> None:
    assert anatomy(ledgers(27, queue=10.0)) is None
    assert anatomy(pd.DataFrame({"total_ns": [], "unexplained_ns": []})) is None
    same = ledgers(100)
    for name in same.columns:
        same[name] = 1.0
    assert anatomy(same) is None


def test_near_saturation_a_simulated_server_makes_its_slow_users_wait_in_the_queue() -> None:
    frames = simulate(600, rate=14.0, slots=4, seed=3)
    first = frames.ledger[frames.ledger["event"] == "first_token"]
    found = known(first)
    assert (found.stage, found.owner) == ("queue", "capacity")
    assert found.share > 0.8
    assert anatomy(first) == found, "the same table gives the same anatomy, interval included"


def test_the_sentence_names_what_computed_where_that_was_no_gpu() -> None:
    found = known(ledgers(600, prefill=80.0))
    assert tail_sentence(found, "ttft", "CPU").endswith("is prefill (CPU forward pass)")
    assert found.owner == "GPU"  # the stage's owner by its definition, whatever stood in for it
