"""The anatomy adds up, and names the stage that was made slow."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Ranked
from gapmeter.analysis.ledger.tail import anatomy, around, slow_count
from gapmeter.analysis.numbers import duration
from gapmeter.analysis.stages import STAGES, column, owner_words
from gapmeter.report.marks import words
from gapmeter.report.why import around_sentence, pays_sentence, tail_sentence
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


@pytest.mark.parametrize("stage", [s.name for s in STAGES if s.name != "launch_gap"])
def test_the_stage_that_was_made_slow_is_named_with_its_owner(stage: str) -> None:
    found = anatomy(ledgers(600, **{stage: 80.0}))
    assert found.stage == stage
    assert found.owner == next(s.owner for s in STAGES if s.name == stage)
    assert found.share == pytest.approx(1, abs=0.05)
    low, high = found.share_ci
    assert low <= found.share <= high
    assert found.leading == found.owner
    assert found.owners[0].stages[0] == stage
    assert f"is {owner_words(found.owner, 'GPU')} ({words(stage)})" in tail_sentence(found, "ttft", "GPU")


def test_two_causes_share_the_difference_in_proportion() -> None:
    found = anatomy(ledgers(2000, queue=60.0, tokenize=20.0))
    assert [each.stage for each in found.ranked[:2]] == ["queue", "tokenize"]
    assert found.share == pytest.approx(0.75, abs=0.02)
    assert None not in found.share_ci
    first = found.owners[0]
    assert first.share == pytest.approx(found.share, abs=0.01)
    said = tail_sentence(found, "ttft", "GPU")
    assert re.search(r"; 7[45] % \(\d+ to \d+ %\) of that is contention \(queue\)$", said)


def test_a_stage_s_share_is_not_its_owner_s_and_each_has_its_own_interval() -> None:
    """Queue and core wait are both the capacity's."""
    found = anatomy(ledgers(2000, queue=60.0, core_wait=20.0))
    owner = found.owners[0]
    assert (found.stage, owner.owner, found.owner) == ("queue", "capacity", "capacity")
    (low, high), (owner_low, owner_high) = found.share_ci, owner.share_ci
    assert low and high and owner_low and owner_high
    assert low < found.share < high < owner_low < (owner.share or 0) < owner_high


@given(st.integers(28, 400), st.integers(0, 50))
@settings(deadline=None, max_examples=30)
def test_stages_add_up_to_what_the_bands_waited(count: int, seed: int) -> None:
    table = ledgers(count, seed, prefill=30.0)
    found = anatomy(table)
    slowest = np.sort(table["total_ns"])[-slow_count(count) :]
    assert found.slow.total_ms == pytest.approx(slowest.mean() / 1e6)
    for band in (found.slow, found.typical):
        assert sum(band.stages_ms.values()) == pytest.approx(band.total_ms)
    for parts in (found.ranked, found.owners):
        assert sum(each.share or 0.0 for each in parts) == pytest.approx(1)
    assert sum(part.at_ms for part in found.owners) == pytest.approx(found.at.total_ms)
    assert sum(part.ms for part in found.owners) == pytest.approx(found.difference_ms)


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
        found = anatomy(rows)
        low, high = found.share_ci
        assert found.stage == "queue"
        widths.append(high - low)
    assert widths[0] > 2 * widths[1], widths


def test_slow_requests_of_a_single_moment_have_no_interval() -> None:
    table = ledgers(1000)
    table.loc[500:514, ["queue_ns", "total_ns"]] += 80 * MS
    found = anatomy(table)
    assert (found.stage, found.share_ci) == ("queue", (None, None))
    assert tail_sentence(found, "ttft", "GPU").endswith("mostly contention (queue); there are too few to be sure")


def test_time_of_an_unmeasured_stage_lies_in_the_remainder_never_in_a_stage() -> None:
    found = anatomy(ledgers(300, queue=50.0))
    assert "launch_gap" not in found.slow.stages_ms
    assert found.slow.stages_ms["unexplained"] > 0.8


def test_a_tail_that_nobody_measured_is_said_to_belong_to_nobody_yet() -> None:
    table = ledgers(300)
    late = np.arange(300) % 30 == 0
    table.loc[late, ["unexplained_ns", "total_ns"]] += 100 * MS
    found = anatomy(table)
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
    found = anatomy(first)
    assert (found.stage, found.owner) == ("queue", "capacity")
    assert found.share > 0.8
    assert anatomy(first) == found, "the same table gives the same anatomy, interval included"


def test_the_sentence_names_what_computed_where_that_was_no_gpu() -> None:
    found = anatomy(ledgers(600, prefill=80.0))
    assert tail_sentence(found, "ttft", "CPU").endswith("is CPU forward pass (prefill)")
    assert found.owner == "GPU"  # the stage's owner by its definition, whatever stood in for it


def test_two_owners_within_each_others_intervals_are_no_single_cause() -> None:
    rng = np.random.default_rng(3)
    table = ledgers(1200)
    late = np.flatnonzero(np.arange(1200) % 40 == 7)
    for at in late:
        table.loc[at, rng.choice(["queue_ns", "tokenize_ns"])] += rng.uniform(20, 120) * MS
    table["total_ns"] = table.drop(columns="total_ns").sum(axis=1)
    found = anatomy(table)
    assert found.leading is None
    said = tail_sentence(found, "ttft", "GPU")
    assert "with no single cause: " in said
    assert "contention (queue) +" in said
    assert "API server (tokenize) +" in said


def test_what_every_request_pays_is_told_beside_what_slow_ones_wait_for() -> None:
    """Slow requests queue; but most of the limit's percentile is a tokenizer that takes 30 ms of everybody."""
    table = ledgers(2000, queue=12.0)
    table["tokenize_ns"] += 30 * MS
    table["total_ns"] += 30 * MS
    found = anatomy(table)
    assert (found.leading, found.payer) == ("capacity", "API server")
    api = next(part for part in found.owners if part.owner == "API server")
    assert api.at_share == pytest.approx(api.at_ms / found.at.total_ms)
    assert " ms of it tokenize (API server)" in pays_sentence(found, "ttft", "GPU")
    assert pays_sentence(anatomy(ledgers(600, queue=80.0)), "ttft", "GPU") == ""
    median = found.model_copy(update={"percentile": 50.0, "at": found.typical})
    assert pays_sentence(median, "ttft", "GPU").startswith("typical requests take 56.0 ms, "), "not 56 ms of 56 ms"


def test_a_stage_that_is_most_of_typical_requests_is_named_however_long_slow_ones_take() -> None:
    table = ledgers(2000, queue=120.0)
    table["tokenize_ns"] += 30 * MS
    table["total_ns"] += 30 * MS
    found = anatomy(table)
    assert found.typical.total_ms < found.at.total_ms / 2
    for said in (pays_sentence(found, "ttft", "GPU"), tail_sentence(found, "ttft", "GPU", listed=True)):
        assert " ms tokenize)" in said or " ms of it tokenize (" in said


@pytest.mark.parametrize(
    ("percentile", "low", "high"), [(99, 985, 995), (95, 925, 975), (50, 450, 550), (99.9, 993, 1000)]
)
def test_the_requests_at_a_percentile_lie_around_it(percentile: float, low: int, high: int) -> None:
    chosen = np.flatnonzero(around(Ranked(np.arange(1000.0)), percentile))
    assert chosen[0] == pytest.approx(low, abs=4)
    assert chosen[-1] + 1 == pytest.approx(high, abs=4)
    assert len(chosen) >= 7


def test_where_their_mean_is_far_from_the_percentile_the_range_of_those_around_it_is_said() -> None:
    """5 % of the requests wait 150 ms more: of those around p95, half do, and p95 itself is either."""
    table = ledgers(1000)
    table.loc[:50, ["queue_ns", "total_ns"]] += 150 * MS
    found = anatomy(table, 94.8)
    low, high = found.at_range_ms
    assert low < 30 < found.at.total_ms < 150 < high
    said = around_sentence(found, "ttft")
    assert said.endswith(f"shown is their mean, {duration(found.at.total_ms)}, not p94.8 itself")
    even = anatomy(ledgers(1000))
    assert even.at_range_ms is None
    assert around_sentence(even, "ttft") == ""


def test_an_owner_that_takes_more_than_the_whole_is_told_in_milliseconds() -> None:
    table = ledgers(1500, queue=60.0)
    late = table["queue_ns"] > 30 * MS
    table["decode_ns"] += 40 * MS
    table.loc[late, "decode_ns"] -= 30 * MS
    table["total_ns"] = table.drop(columns="total_ns").sum(axis=1)
    said = tail_sentence(anatomy(table), "ttft", "GPU")
    assert "contention (queue) takes " in said
    assert " longer; the other stages together take less" in said
    assert "%" not in said
