"""The bench's quick server against the simulated engine in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.quick_server import QuickServer
from bench.virtual_server import Arrival, Settings, simulate
from bench.virtual_trials import SMALL_ENGINE
from gapmeter.servers.simulated.scheduler import Limits


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(5, 400), st.integers(1, 6), st.integers(1, 5))
def test_it_gives_what_the_engine_gives_to_the_nanosecond(seed: int, rate: float, most: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1e9 / rate, 150)).astype(int).tolist()
    prompts = rng.integers(1, 60, 150).tolist()
    server = Settings(Limits(max_sequences=most), replace(SMALL_ENGINE.settings.times, seed=seed))
    quick = QuickServer(server, tokens)
    for at, prompt in zip(due, prompts, strict=True):
        quick.arrive(at, prompt)
    quick.run(10**15)
    whole = simulate([Arrival(*each, tokens) for each in zip(due, prompts, strict=True)], server)
    assert quick.first_ns == [outcome.first_token_ns for outcome in whole]
    assert quick.last_ns == [outcome.last_token_ns for outcome in whole]


def test_it_refuses_a_server_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="egress_ns"):
        QuickServer(replace(SMALL_ENGINE.settings, times=replace(SMALL_ENGINE.settings.times, egress_ns=1)), 2)
    with pytest.raises(ValueError, match="may not fit"):
        QuickServer(SMALL_ENGINE.settings, 2).arrive(0, 100_000)
