from __future__ import annotations

import pytest

from bench import compare
from bench.compare import CHANGES, Job, compare_seed, summarize, table
from bench.virtual_run import Traffic, virtual_run
from bench.virtual_server import Settings
from gapmeter.analysis.results.comparison import SLOWER
from gapmeter.servers.simulated.scheduler import Limits


def test_one_seed_gives_a_row_a_comparison_and_the_rows_a_table() -> None:
    rows = compare_seed(Job("light", 3, CHANGES[:1]))
    assert [row["kind"] for row in rows] == ["A/A", "A/A, other arrivals", "forward +5 %"]
    figures = summarize(rows)
    assert figures["left_over_ns"] < 1e-3
    assert figures["null"]["A/A"]["headline"]["of"] == 1
    assert figures["change"]["forward +5 %"]["found"]["hits"] == 1
    assert figures["change"]["forward +5 %"]["right_cause"]["hits"] == 1
    assert any(line.startswith("| forward +5 % | 1 |") for line in table(figures))


def test_a_change_that_is_found_without_its_stage_is_not_put_into_the_right_one() -> None:
    rows = [
        {"word": SLOWER, "stage": stage, "cause": stage, "expected": "decode", "load": "light"}
        for stage in ("decode", None)
    ]
    assert compare._found(rows)["right_cause"]["share"] == 0.5


def test_a_run_whose_stages_would_not_simply_add_up_is_refused() -> None:
    arrivals = Traffic(requests=40, warmup=0).arrivals(1)
    with pytest.raises(ValueError, match="asynchronous"):
        virtual_run(arrivals, Settings(Limits(asynchronous=True)), "x")
    with pytest.raises(ValueError, match="KV blocks"):
        virtual_run(Traffic(requests=40, rate=500.0, warmup=0).arrivals(1), Settings(Limits(kv_blocks=24)), "x")
