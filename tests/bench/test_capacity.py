"""The capacity search on the simulated engine's own scheduler, in virtual time."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import stats

from bench.capacity import GOAL, one_p99_search, plain_bisection
from bench.virtual_trials import SMALL, VirtualOracle, VirtualTrial
from gapmeter.analysis.capacity.search import posterior, search

TRUTH = 137.3  # docs/results/capacity.json, standard error 0.13
QUICK = dataclasses.replace(GOAL, budget_s=200.0)


def test_thirty_searches_in_virtual_time_find_the_known_capacity() -> None:
    rates, covered = [], 0
    for seed in range(30):
        known = posterior(search(QUICK, VirtualOracle(SMALL, 500_000 + seed))[0])
        low, high = known.interval(0.95)
        rates.append(known.quantile(0.5))
        covered += low <= TRUTH <= high
    assert abs(np.median(rates) / TRUTH - 1) < 0.05
    assert covered >= stats.binom.ppf(0.001, 30, 0.95)


def test_searches_at_p99_nearly_always_have_both_ends_within_the_default_budget() -> None:
    """The server like chat-p99: 70.4 req/s by brute force, docs/results/capacity.json."""
    ends = [one_p99_search(700_000 + seed) for seed in range(12)]
    both = [found for found in ends if found]
    assert len(both) >= 11
    assert sum(low <= 70.4 <= high for low, _, high in both) >= 10


def test_a_search_is_the_same_for_the_same_seed() -> None:
    one, other = (search(QUICK, VirtualOracle(SMALL, 3)) for _ in range(2))
    assert one == other


def test_going_on_with_a_virtual_trial_tells_the_same_as_running_it_at_once() -> None:
    by_steps, at_once = (VirtualTrial(SMALL, 130.0, (1, 2)) for _ in range(2))
    for measured in (60, 90, 400):
        by_steps.count(measured)
    assert by_steps.count(700) == at_once.count(700)


def test_an_overloaded_virtual_server_is_told_after_two_seconds_of_load() -> None:
    trials, _ = search(dataclasses.replace(QUICK, start=1000.0), VirtualOracle(SMALL, 9))
    assert trials[0].verdict == "fails"
    assert trials[0].outcome.measured <= 2000


def test_plain_bisection_ends_near_the_truth_with_long_trials() -> None:
    rate, spent = plain_bisection(1500, 1)
    assert abs(rate / TRUTH - 1) < 0.25
    assert spent > 10 * 1500
