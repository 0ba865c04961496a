"""The capacity search's arithmetic: verdicts that stay honest, the posterior, the next rate, the fleet."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.capacity import search as capacity
from analysis.capacity.evidence import (
    MOST_SURE,
    SURE,
    chance_if_broken,
    chance_if_kept,
    chances,
    find,
    look_counts,
    worth,
)
from analysis.capacity.planning import plan_fleet
from analysis.capacity.posterior import posterior
from analysis.capacity.search import Goal, next_rate, search
from analysis.capacity.trial import FAILS, HOLDS, UNDECIDED, Count, Enough, Finding, Outcome, Promise, Trial

P99 = Promise("ttft p99 <= 500 ms", "ttft", 0.01)
P95 = Promise("e2e p95 <= 2 s", "e2e", 0.05)
EMPTY = Outcome((Count(0, 100, 100),), 100, 100, 10.0, 100, 100)


def trial(rate: float, verdict: str, confidence: float = 0.95, **more: object) -> Trial:
    leaning = HOLDS if verdict == UNDECIDED else verdict
    outcome = dataclasses.replace(EMPTY, **more)  # type: ignore[arg-type]
    return Trial(rate, outcome, Finding(verdict, confidence, leaning, 0))


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.5))
def test_the_two_chances_are_the_binomial_tails(count: int, part: float, share: float) -> None:
    over = round(part * count)
    found = Count(over, count, count)
    law = stats.binom(count, share)
    assert chance_if_broken(found, share) == pytest.approx(law.cdf(over) if over < count else 1.0, abs=1e-9)
    assert chance_if_kept(found, share) == pytest.approx(law.sf(over - 1) if over else 1.0, abs=1e-9)


@given(st.integers(1, 100_000))
def test_looks_grow_by_half_and_end_with_the_longest(most: int) -> None:
    looks = look_counts(most)
    assert looks[-1] == most
    assert all(later > earlier for earlier, later in itertools.pairwise(looks))
    assert len(looks) <= 2 + max(0.0, math.log(max(most, 60) / 60) / math.log(1.5)) + 1


def test_a_p99_cannot_hold_before_299_values_so_earlier_looks_are_no_chance_to_be_wrong() -> None:
    looks = (100, 298, 299, 400)
    assert chances((P99,), looks).to_hold == 3
    assert chances((P99,), looks).to_fail == 5


@pytest.mark.parametrize(("share", "side"), [(0.0500001, HOLDS), (0.05, FAILS)])
def test_stopping_at_the_first_look_that_claims_a_verdict_is_wrong_no_oftener_than_it_says(
    share: float, side: str
) -> None:
    """At the very edge, where it is hardest; independent values, so that only the stopping is tried."""
    looks, wrong, repeats = look_counts(4000), 0, 1000
    counted = chances((P95,), looks)
    rng = np.random.default_rng(7)
    for _ in range(repeats):
        over = np.cumsum(rng.random(4000) < share)
        for look in looks:
            found = find((P95,), [Count(float(over[look - 1]), look, look)], counted)
            if found.verdict != UNDECIDED:
                break
        wrong += found.verdict == side
    assert wrong <= stats.binom.ppf(0.9999, repeats, 1 - SURE)


def test_all_promises_must_hold_and_one_that_fails_suffices() -> None:
    clear, broken = Count(0, 5000, 5000), Count(400, 5000, 5000)
    counted = chances((P99, P95), look_counts(5000))
    assert find((P99, P95), [clear, clear], counted).verdict == HOLDS
    found = find((P99, P95), [clear, broken], counted)
    assert (found.verdict, found.promise) == (FAILS, 1)
    assert found.confidence <= MOST_SURE


def test_a_growing_queue_is_worth_next_to_nothing_so_it_cannot_hold() -> None:
    """An overloaded server whose limit has not been reached yet: latencies rise, none is beyond."""
    rising = np.linspace(1, 400, 2000) + np.random.default_rng(1).normal(0, 5, 2000)
    count = Count(0, 2000, worth(rising, 99))
    assert find((P99,), [count], chances((P99,), look_counts(2000))).verdict == UNDECIDED


def test_bursts_count_once() -> None:
    """Twenty in a row exceed, now and then: ranks alone would not see it, the indicator does."""
    rng = np.random.default_rng(3)
    values = rng.random(4000)
    for start in rng.integers(0, 3980, 8):
        values[start : start + 20] += 10
    assert worth(values, 99) < 1000


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.floats(0.5, 0.99)), min_size=1, max_size=12))
def test_the_posterior_is_the_product_of_every_trials_odds(told: list[tuple[int, bool, float]]) -> None:
    trials = [trial(rate, HOLDS if holds else FAILS, sure) for rate, holds, sure in told]
    known = posterior(trials)
    grid = np.linspace(known.edges[0], known.edges[-1], 200_001)
    density = np.ones_like(grid)
    for rate, holds, sure in told:
        density *= np.where((grid > math.log(rate)) == holds, 2 * sure, 2 * (1 - sure))
    below = density[grid <= math.log(known.quantile(0.5))].sum() / density.sum()
    assert below == pytest.approx(0.5, abs=0.02)  # the narrowest step is some 300 points of the grid
    assert known.masses.sum() == pytest.approx(1.0)
    low, high = known.interval(0.9)
    assert known.mass(low, high) == pytest.approx(0.9, abs=1e-6)


GOAL = Goal((P99,), 10.0, within=0.1)


def test_the_first_rates_double_until_one_fails_and_halve_until_one_holds() -> None:
    assert next_rate(GOAL, []) == 10.0
    assert next_rate(GOAL, [trial(10, HOLDS)]) == 20.0
    assert next_rate(GOAL, [trial(10, FAILS)]) == 5.0
    bracketed = [trial(10, HOLDS), trial(20, FAILS)]
    assert next_rate(GOAL, bracketed) == pytest.approx(posterior(bracketed).quantile(0.5))


def test_what_could_not_be_decided_is_not_asked_again_nearby() -> None:
    known = [trial(10, HOLDS), trial(20, FAILS)]
    middle = next_rate(GOAL, known)
    assert isinstance(middle, float)
    after = [*known, trial(middle, UNDECIDED, 0.5)]
    asked = next_rate(GOAL, after)
    assert isinstance(asked, float)
    assert abs(math.log(asked / middle)) > 0.05


def test_an_invalid_trial_is_repeated_once_then_the_client_was_the_limit() -> None:
    limited = {"invalid": "the load tester was late", "client_limit": True}
    done = [trial(10, HOLDS), trial(20, HOLDS, **limited)]
    assert next_rate(GOAL, done) == 20
    done.append(trial(20, HOLDS, **limited))
    assert next_rate(GOAL, done) == pytest.approx(math.sqrt(200))
    held = [*done, trial(18, HOLDS)]
    assert next_rate(GOAL, held) == capacity.CLIENT


def test_a_trial_that_is_invalid_for_another_reason_twice_ends_the_search() -> None:
    broken = {"invalid": "records were dropped"}
    assert next_rate(GOAL, [trial(10, FAILS, **broken), trial(10, FAILS, **broken)]) == capacity.NOT_MEASURED


def test_an_slo_that_no_rate_meets_ends_the_search_after_eight_halvings() -> None:
    done = [trial(10 / 2**k, FAILS) for k in range(9)]
    assert next_rate(GOAL, done[:-1]) == pytest.approx(10 / 2**8)
    assert next_rate(GOAL, done) == capacity.UNMEETABLE


@pytest.mark.parametrize(
    ("last", "ended"), [({"died": "killed"}, capacity.DIED), ({"interrupted": True}, capacity.INTERRUPTED)]
)
def test_a_dead_server_and_ctrl_c_end_the_search(last: dict[str, object], ended: str) -> None:
    assert next_rate(GOAL, [trial(10, HOLDS), trial(20, FAILS, **last)]) == ended


def test_no_trial_begins_when_the_budget_is_spent() -> None:
    goal = dataclasses.replace(GOAL, budget_s=25.0)
    assert next_rate(goal, [trial(10, HOLDS), trial(20, HOLDS)]) == capacity.BUDGET
    assert goal.looks(100.0, spent_s=20.0)[-1] == 500


class Coin:
    """A server whose share beyond the limit is known at every rate: p = allowed (rate / capacity)^9."""

    def __init__(self, truth: float, seed: int) -> None:
        self._truth, self._rng = truth, np.random.default_rng(seed)

    def run(self, rate: float, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        over = np.cumsum(self._rng.random(looks[-1]) < min(0.01 * (rate / self._truth) ** 9, 1.0))
        for look in looks:
            counts = (Count(float(over[look - 1]), look, look),)
            if enough(counts):
                break
        return Outcome(counts, look, look, look / rate, 0, 1)


def test_searches_on_a_known_law_find_it_and_cover_it() -> None:
    goal = Goal((P99,), 16.0, within=0.06, longest=8000, budget=80_000)
    ends = [posterior(search(goal, Coin(100.0, seed))[0]) for seed in range(200)]
    assert np.median([known.quantile(0.5) for known in ends]) == pytest.approx(100, rel=0.02)
    covered = sum(low <= 100 <= high for low, high in (known.interval(0.95) for known in ends))
    assert covered >= stats.binom.ppf(0.001, 200, 0.95)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e5), st.floats(0, 0.9), st.integers(0, 3))
def test_a_fleet_carries_its_target_with_headroom_and_one_server_less_would_not(
    low: float, target: float, headroom: float, spare: int
) -> None:
    fleet = plan_fleet(low, target, headroom, spare)
    assert fleet.needed * fleet.planned_rps >= target * (1 - 1e-6)
    assert fleet.needed == 1 or (fleet.needed - 1) * fleet.planned_rps < target
    assert fleet.replicas == fleet.needed + spare
