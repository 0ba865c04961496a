"""A small seeded part of the evidence: intervals hold what they promise, and PASS at the limit is rare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench import coverage
from bench.queues import QUEUES


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    """M/M/1 and M/D/1 at two loads, 150 runs each."""
    return [
        cell
        for queue in (QUEUES[0], QUEUES[3])
        for load in (0.5, 0.8)
        for what, values in coverage._latencies(queue, load, 2000, 150, 5)
        for cell in coverage._cells(queue, load, what, values, (500, 2000))
    ]


def test_the_95_percent_interval_holds_the_truth_where_naive_ones_do_not(cells: list[dict[str, Any]]) -> None:
    assert len(cells) == 30
    assert all(cell["coverage"] >= 0.90 for cell in cells)
    assert np.mean([cell["coverage"] for cell in cells]) == pytest.approx(0.97, abs=0.02)
    bounded = [cell for cell in cells if cell["unbounded"] <= coverage.REALLY]
    assert all(cell["coverage_of_bounded"] >= 0.90 for cell in bounded)
    assert np.mean([cell["naive"] for cell in cells]) < 0.7


def test_a_limit_at_the_true_p99_passes_rarely_where_early_stopping_accepts_often(cells: list[dict[str, Any]]) -> None:
    busy = [cell for cell in cells if cell["percentile"] == 99 and cell["load"] == 0.8]
    assert all(cell["below"] <= 0.05 for cell in cells if cell["percentile"] == 99)
    assert all(cell["accepts"] <= 0.05 for cell in cells if cell["percentile"] >= 95)
    assert all(cell["misses"] <= 0.05 for cell in cells)
    assert all(cell["loadgen"] > 0.4 for cell in busy)
    assert all(cell["loadgen_stopping"] >= cell["loadgen"] for cell in busy)


def test_a_bound_is_too_low_no_more_often_than_its_confidence_leaves(cells: list[dict[str, Any]]) -> None:
    known = [cell for cell in cells if cell["bound"] > 0.2]
    assert len(known) > 10
    noise = 3 * (0.05 * 0.95 / 150) ** 0.5
    assert all(cell["bound_too_low"] <= 1 - cell["bound_confidence"] + noise for cell in known)
    assert all(cell["bound"] >= 1 - cell["unbounded"] - 1e-9 for cell in cells if cell["percentile"] >= 95)


def test_an_end_that_a_run_does_not_reach_is_counted_as_none(cells: list[dict[str, Any]]) -> None:
    short = [cell for cell in cells if cell["percentile"] == 99 and cell["count"] == 500 and cell["queue"] == "M/M/1"]
    assert all(cell["unbounded"] > 0.9 for cell in short)


def test_loadgens_rule_keeps_its_own_promise_on_independent_requests() -> None:
    allowed = coverage._allowed(2100)
    assert [int(np.argmax(allowed >= k)) + 1 for k in (0, 1, 10)] == [459, 662, 2010]
    exceeds = np.random.default_rng(2).random((4000, 1200)) < 0.01
    assert coverage.loadgen(exceeds)["loadgen"] <= stats.binom.ppf(0.999, 4000, 0.01) / 4000


def test_the_tables_name_every_cell_that_falls_short(cells: list[dict[str, Any]]) -> None:
    bad = {**cells[0], "coverage": 0.5}
    rows = [{"load": 0.5, "mser5": 0.02, "pelt": 0.01, "queue_slope": 0.0}]
    lines = coverage.table(
        {"seed": 5, "replications": 150, "promised": (0.93, 0.98), "cells": [bad, *cells[1:]],
         "steady": {"count": 1000, "replications": 150, "rows": rows}}
    )  # fmt: skip
    assert f"- M/M/1 time in system, 0.5, p50, n = 500: {0.5:.1%}" in lines
    assert "| 0.5 | 2.0% | 1.0% | 0.0% |" in lines
