"""Slow requests that came together are found with their moment; ones that lie at random are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Bools
from gapmeter.analysis.ledger.tail import closest_together, describe_bursts, slow_count
from gapmeter.analysis.results.latency import Burst
from gapmeter.report.why import burst_sentence
from tests.kit.series import mm1_sojourns

MS = 1_000_000
SECOND = 1000 * MS


def marked(count: int, at: Any) -> Bools:
    slow = np.zeros(count, np.bool_)
    slow[at] = True
    return slow


@pytest.mark.parametrize(
    ("slow", "together"),
    [
        (marked(1845, np.arange(28) * 65), None),
        (marked(1845, [*range(300, 313), *range(400, 1500, 74)]), 13),
        (marked(1845, [*range(300, 308), *range(400, 1845, 74)]), None),
        (marked(1845, [*range(300, 318, 2), *range(900, 909), *range(1000, 1845, 90)]), None),
        (marked(1845, range(28)), 28),
        (marked(100, [40, 41, 42, 43, 44, 70, 99]), 5),
        (marked(100, [10, 41, 42, 43, 44, 70, 99]), None),
        (marked(20_000, [*range(9500, 9650), *range(0, 9000, 60)]), 150),
    ],
    ids=["evenly", "13 of 28", "eight of 28", "two groups", "at once", "five of seven", "four of seven", "half of 300"],
)
def test_a_stretch_that_has_too_many_slow_requests_for_chance_is_found(slow: Bools, together: int | None) -> None:
    found = closest_together(slow)
    assert (None if found is None else len(found[0])) == together
    if found is not None:
        within, chance = found
        assert slow[within].all() and slow[within[0] : within[-1] + 1].sum() == len(within)
        assert chance <= 0.025


@pytest.mark.parametrize("count", [40, 200, 466, 2000, 20_000])
def test_slow_requests_that_lie_at_random_are_called_a_burst_in_at_most_one_of_forty_runs(count: int) -> None:
    rng, many = np.random.default_rng(count), 1000
    slow = slow_count(count)
    found = sum(closest_together(marked(count, rng.permutation(count)[:slow])) is not None for _ in range(many))
    assert found <= 0.025 * many


def requests_of(waits_ms: Any, due_ns: Any) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Requests and their ledgers: a tenth of a millisecond of prefill, the rest queue."""
    names = [f"r{at}" for at in range(len(due_ns))]
    total = np.asarray(waits_ms) * MS
    rows = pd.DataFrame({"request_id": names, "prefill_ns": 0.1 * MS, "queue_ns": total - 0.1 * MS})
    rows = rows.assign(unexplained_ns=0.0, total_ns=total)
    return pd.DataFrame({"request_id": names, "due_ns": due_ns}), {"ttft": rows}


@given(st.integers(0, 200), st.sampled_from([0.5, 0.7, 0.8, 0.9]))
def test_what_is_said_of_a_queue_is_true(seed: int, load: float) -> None:
    """Its slow requests do come together, so that much is found, and each count and time is the records' own."""
    rng = np.random.default_rng(seed)
    waits, due = mm1_sojourns(rng, load, 800), np.cumsum(rng.exponential(SECOND / load, 800)).astype(np.int64)
    requests, ledgers = requests_of(waits, due)
    burst = describe_bursts(requests, ledgers, int(due[0])).get("ttft")
    if burst is None:
        return
    at_s, slowest = (due - due[0]) / 1e9, np.argsort(-waits)[:12]
    within = (at_s >= burst.from_s) & (at_s <= burst.to_s)
    assert burst.of == len(slowest) == slow_count(800)
    assert burst.count == within[slowest].sum() >= burst.of / 3
    assert within.sum() <= 800 / 20
    assert (burst.stage, burst.slots, burst.queued) == ("queue", None, False)


def test_a_burst_of_arrivals_alone_is_none() -> None:
    """Half of all requests are due within a second of a minute; slow ones are any."""
    due = np.concatenate([np.linspace(0, 30, 500), np.linspace(30, 31, 1000), np.linspace(31, 60, 500)]) * SECOND
    requests, ledgers = requests_of(np.random.default_rng(1).exponential(10, 2000), due.astype(np.int64))
    assert describe_bursts(requests, ledgers, 0) == {}


def test_requests_that_all_took_the_same_time_are_no_burst() -> None:
    requests, ledgers = requests_of(np.full(400, 5.0), np.arange(400) * SECOND)
    assert describe_bursts(requests, ledgers, 0) == {}


def steps(running: int, waiting: int) -> pd.DataFrame:
    """Every 10 ms; so many run and wait from 18 to 21 s, one runs at other times."""
    at = np.arange(0, 60 * SECOND, 10 * MS)
    busy = (at >= 18 * SECOND) & (at < 21 * SECOND)
    return pd.DataFrame({"schedule_ns": at, "running": np.where(busy, running, 1), "waiting": waiting * busy})


@pytest.mark.parametrize(
    ("known", "slots", "full", "queued"),
    [
        (steps(4, 3), 4, 4, True),
        (steps(4, 0), 4, 4, False),
        (steps(4, 3), 8, None, True),
        (steps(4, 3), None, None, True),
        (steps(1, 2), 1, None, True),
        (steps(3, 0), 4, None, False),
        (None, 4, None, False),
    ],
)
def test_what_the_engine_held_meanwhile_is_known_from_its_steps(
    known: pd.DataFrame | None, slots: int | None, full: int | None, queued: bool
) -> None:
    due = np.linspace(0, 60, 1200)
    waits = np.where((due > 19) & (due < 19.5), 200.0, np.random.default_rng(2).uniform(1, 2, 1200))
    requests, ledgers = requests_of(waits, (due * SECOND).astype(np.int64))
    burst = describe_bursts(requests, ledgers, 0, known, slots)["ttft"]
    assert 19 < burst.from_s < burst.to_s < 19.5
    assert (burst.slots, burst.queued) == (full, queued)


BURST = Burst(
    count=13, of=28, from_s=19.02, to_s=20.04, chance=1e-9, stage="queue", share=0.9, slots=4, queued=True
)  # fmt: skip


@pytest.mark.parametrize(
    ("known", "more"),
    [
        ({}, ", when all 4 slots were taken"),
        ({"slots": None}, ", when requests waited in the scheduler's queue"),
        ({"slots": None, "queued": False}, "; most of their extra time was queue (contention)"),
        (
            {"stage": "prefill"},
            ", when all 4 slots were taken; most of their extra time was prefill (CPU forward pass)",
        ),
        ({"stage": None, "slots": None, "queued": False}, ""),
    ],
)
def test_a_burst_is_told_in_one_sentence(known: dict[str, Any], more: str) -> None:
    said = "13 of the 28 slowest requests were due within 1.02 s (t = 19.0 s)"
    assert burst_sentence(BURST.model_copy(update=known), "CPU") == said + more
