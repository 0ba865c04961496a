"""The queues that intervals are proven on: exact quantiles, and simulations that agree with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import queues
from bench.queues import QUEUES, Queue


def crommelin(load: float, t: float) -> float:
    """P(wait <= t) in M/D/1 by Crommelin's alternating series (1932): exact, and usable for small t only."""
    terms = (
        (load * (j - t)) ** j / math.factorial(j) * math.exp(-load * (j - t)) for j in range(math.floor(t) + 1)
    )  # fmt: skip
    return (1 - load) * sum(terms)


@given(st.floats(0.05, 0.95), st.floats(0.0, 6.0))
def test_the_md1_wait_by_positive_terms_is_the_older_alternating_series(load: float, t: float) -> None:
    assert queues.franx(load, t) == pytest.approx(crommelin(load, t), abs=1e-9)


def test_the_share_that_waits_is_the_one_in_erlangs_tables() -> None:
    assert queues.erlang_c(1, 0.7) == pytest.approx(0.7)
    assert queues.erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert queues.erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-4)


@pytest.mark.parametrize("load", [0.3, 0.8])
@pytest.mark.parametrize("queue", [*QUEUES, Queue("G/M/1", 1, burstiness=4.0)], ids=lambda queue: queue.name)
def test_simulated_latencies_fall_below_the_exact_quantiles_as_often_as_these_say(queue: Queue, load: float) -> None:
    waits, sojourns = queues.simulate(queue, load, 1500, 200, seed=3)
    for level in (0.5, 0.9, 0.99):
        for values, exact in ((waits, queues.wait_quantile), (sojourns, queues.sojourn_quantile)):
            truth = exact(queue, load, level)
            shares = (values <= truth + 1e-9).mean(axis=1)
            error = float(shares.std() / math.sqrt(len(shares)))
            atom = (values <= truth + 1e-9).mean() if truth in (0.0, 1.0) else level
            assert abs(float(shares.mean()) - atom) < 4.5 * error + 1e-12


def test_lindleys_recursion_is_its_definition() -> None:
    rng = np.random.default_rng(1)
    gaps, services = rng.exponential(1.2, (3, 50)), rng.exponential(1.0, (3, 50))
    waits = np.zeros((3, 50))
    for i in range(1, 50):
        waits[:, i] = np.maximum(0, waits[:, i - 1] + services[:, i - 1] - gaps[:, i])
    assert queues.lindley(gaps, services) == pytest.approx(waits)
    assert queues.many_servers(gaps, services, 1) == pytest.approx(waits)
