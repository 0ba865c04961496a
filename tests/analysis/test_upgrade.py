"""What an infinitely fast GPU leaves, on ledgers whose answer can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger.upgrade import bracket, without_forward_ns
from gapmeter.analysis.stages import STAGES, column
from gapmeter.report.why import upgrade_sentence
from tests.kit.runs import simulate

MS = 1e6


def ledger(hidden_ms: float = 0.0, **stages_ms: float | None) -> pd.DataFrame:
    row: dict[str, float] = {column(s.name): 0.0 for s in STAGES}
    row |= {column(name): np.nan if ms is None else ms * MS for name, ms in stages_ms.items()}
    total = sum(value for value in row.values() if not np.isnan(value))
    return pd.DataFrame([{**row, "total_ns": total, "unexplained_ns": 0.0, "hidden_host_ns": hidden_ms * MS}])


@pytest.mark.parametrize(
    ("stages", "hidden", "lower", "upper"),
    [
        ({"tokenize": 5, "prefill": 100}, 0, 5, 5),
        ({"tokenize": 5, "prefill": 100, "queue": 40}, 0, 5, 45),
        ({"tokenize": 5, "prefill": 100, "queue": 40}, 30, 35, 75),
        ({"prefill": 10, "decode": 20, "interference": 5, "launch_gap": 3}, 0, 3, 3),
        ({"prefill": 10, "decode": 20, "interference": 5, "launch_gap": 3}, 8, 11, 11),
        ({"egress": 1, "other_step": 7, "preempted": 11, "engine_wait": 13, "prefill": 2}, 0, 1, 32),
        ({"scheduling": 4, "sampling": 3, "prefill": 2, "launch_gap": None}, 0, 7, 7),
        ({"egress": 1, "prefill": 10}, 50, 11, 11),
    ],
)
def test_forwards_give_way_to_what_they_hid_and_queues_go_at_the_lower_end(
    stages: dict[str, float | None], hidden: float, lower: float, upper: float
) -> None:
    low, high = without_forward_ns(ledger(hidden, **stages))
    assert low / MS == pytest.approx([lower])
    assert high / MS == pytest.approx([upper])


@given(st.dictionaries(st.sampled_from([s.name for s in STAGES]), st.floats(0, 1000)), st.floats(0, 2000))
def test_no_upgrade_makes_a_request_slower_and_the_ends_never_cross(stages: dict[str, float], hidden: float) -> None:
    rows = ledger(hidden, **stages)
    low, high = without_forward_ns(rows)
    assert 0 <= low[0] <= high[0] + 1e-6
    assert high[0] <= rows["total_ns"][0] + 1e-3


def test_the_sentence_gives_the_bracket_at_the_highest_percentile_that_all_support() -> None:
    rows = pd.concat([ledger(tokenize=t, prefill=300, queue=50) for t in np.linspace(10, 20, 1000)], ignore_index=True)
    rows = rows.sample(frac=1, random_state=1)
    found = bracket(rows)
    assert found.percentile == 99.0
    said = upgrade_sentence(found, "ttft", "GPU")
    assert said == "an infinitely fast GPU would cut p99 TTFT from 370 ms to 19.9 .. 69.9 ms"
    few = bracket(rows.head(250))
    assert few.percentile == 95.0
    assert upgrade_sentence(few, "ttft", "CPU").startswith("instant forward passes would cut p95 TTFT from ")


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_without_measured_forwards_there_is_no_answer(stage: str) -> None:
    rows = pd.concat([ledger(tokenize=5, prefill=10)] * 50, ignore_index=True)
    rows[column(stage)] = np.nan
    assert bracket(rows) is None
    assert bracket(rows.head(0)) is None
    assert bracket(pd.DataFrame({"total_ns": []})) is None


def test_on_a_simulated_run_both_ends_lie_below_what_was_waited() -> None:
    frames = simulate(1500, rate=9.0, slots=4, seed=2)
    found = bracket(frames.ledger[frames.ledger["event"] == "last_token"])
    low, high, now = (ends.ms(found.percentile) for ends in (found.lower, found.upper, found.now))
    assert 0 < low < high < now
