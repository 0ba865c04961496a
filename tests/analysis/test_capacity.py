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

from gapmeter.analysis.capacity import search as capacity
from gapmeter.analysis.capacity.read import count_values
from gapmeter.analysis.capacity.search import Ask, Goal, next_trial, posterior, search
from gapmeter.analysis.capacity.trial import (
    FIRST_LOOK,
    MOST_SURE,
    SURE,
    Count,
    Enough,
    Finding,
    Look,
    Outcome,
    Promise,
    Trial,
    chance_if_broken,
    chance_if_kept,
    chance_if_stable,
    find,
    hopeless,
    plan_looks,
    worth,
)
from gapmeter.analysis.results.capacity import FAILS, HOLDS, UNDECIDED, Fleet

P99 = Promise("ttft p99 <= 500 ms", "ttft", 0.01)
P95 = Promise("e2e p95 <= 2 s", "e2e", 0.05)
EMPTY = Outcome((Count(0, 100, 100),), 100, 100, 10.0, 100, 100)


def trial(rate: float, verdict: str, confidence: float = 0.95, **more: object) -> Trial:
    leaning = HOLDS if verdict == UNDECIDED else verdict
    outcome = dataclasses.replace(EMPTY, **more)  # type: ignore[arg-type]
    return Trial(rate, outcome, Finding(verdict, confidence, leaning, 0))


ONCE = Look(5000, 1.0, 1.0)


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.5))
def test_the_two_chances_are_the_binomial_tails(count: int, part: float, share: float) -> None:
    over = round(part * count)
    found = Count(over, count, count)
    law = stats.binom(count, share)
    assert chance_if_broken(found, share) == pytest.approx(law.cdf(over) if over < count else 1.0, abs=1e-9)
    kept = law.sf(over - 1) if over else 1.0
    assert chance_if_kept(found, share) == pytest.approx(min(1.0, kept / 0.9), abs=1e-9)  # a tenth is for growth


@given(st.integers(1, 100_000), st.sampled_from([(P99,), (P95,), (P99, P95)]))
def test_looks_are_in_order_and_their_shares_of_either_chance_add_up_to_one_at_most(
    most: int, promises: tuple[Promise, ...]
) -> None:
    looks = plan_looks(promises, most)
    assert looks[-1].count == most
    assert all(later.count > earlier.count for earlier, later in itertools.pairwise(looks))
    assert sum(look.fail for look in looks) <= 1 + 1e-9
    assert sum(look.hold for look in looks) <= 1 + 1e-9
    assert sum(look.hold > 0 for look in looks) <= 3
    assert len(looks) <= 4 + max(0.0, math.log(max(most, FIRST_LOOK) / FIRST_LOOK) / math.log(1.5)) + 1


def test_a_p99_cannot_hold_before_299_values_so_earlier_looks_are_given_no_chance_to_claim_it() -> None:
    assert [look.hold > 0 for look in plan_looks((P99,), 1196)[-3:]] == [True, True, True]
    assert [look.hold > 0 for look in plan_looks((P99,), 1190)[-3:]] == [False, True, True]
    assert not any(look.hold for look in plan_looks((P99,), 298))


@pytest.mark.parametrize(("share", "side"), [(0.0500001, HOLDS), (0.05, FAILS)])
def test_stopping_at_the_first_look_that_claims_a_verdict_is_wrong_no_oftener_than_it_says(
    share: float, side: str
) -> None:
    """At the very edge, where it is hardest; independent values, so that only the stopping is tried."""
    looks, wrong, repeats = plan_looks((P95,), 4000), 0, 1000
    rng = np.random.default_rng(7)
    for _ in range(repeats):
        over = np.cumsum(rng.random(4000) < share)
        for look in looks:
            found = find((P95,), [Count(float(over[look.count - 1]), look.count, look.count)], look)
            if found.verdict != UNDECIDED:
                break
        wrong += found.verdict == side
    assert wrong <= stats.binom.ppf(0.9999, repeats, 1 - SURE)


def test_all_promises_must_hold_and_one_that_fails_suffices() -> None:
    clear, broken = Count(0, 5000, 5000), Count(400, 5000, 5000)
    assert find((P99, P95), [clear, clear], ONCE).verdict == HOLDS
    found = find((P99, P95), [clear, broken], ONCE)
    assert (found.verdict, found.promise) == (FAILS, 1)
    assert found.confidence <= MOST_SURE


def test_a_growing_queue_is_worth_next_to_nothing_so_it_cannot_hold() -> None:
    """An overloaded server whose limit has not been reached yet: latencies rise, none is beyond."""
    rising = np.linspace(1, 400, 2000) + np.random.default_rng(1).normal(0, 5, 2000)
    count = Count(0, 2000, worth(rising, 99))
    assert find((P99,), [count], ONCE).verdict == UNDECIDED


def test_bursts_count_once() -> None:
    """Twenty in a row exceed, now and then: ranks alone would not see it, the indicator does."""
    rng = np.random.default_rng(3)
    values = rng.random(4000)
    for start in rng.integers(0, 3980, 8):
        values[start : start + 20] += 10
    assert worth(values, 99) < 1000


def test_usual_latencies_that_drift_do_not_make_requests_worth_less() -> None:
    """Below the 75th percentile a slow wave of a tenth; the rest is independent."""
    rng = np.random.default_rng(5)
    slow = np.sin(np.arange(4000) / 300) + 0.2 * rng.normal(size=4000)
    values = np.where(rng.random(4000) < 0.7, 10 + slow, 20 + rng.exponential(5, 4000))
    assert worth(values, 99) > 2000


def test_far_below_the_limit_fewer_requests_hold_than_close_below_it() -> None:
    close, far = Count(0, 4000, 250, over_half=200.0), Count(0, 4000, 250, over_half=0.0)
    assert find((P99,), [close], ONCE).verdict == UNDECIDED
    assert find((P99,), [far], ONCE).verdict == HOLDS


def test_far_below_the_limit_is_no_way_to_hold_with_one_value_beyond_or_with_few_values() -> None:
    """Some slow requests come alone, however calm all others are: those are told by the number of values."""
    one = Count(1, 4000, 250, over_half=1.0)
    assert chance_if_broken(one, 0.01) == pytest.approx(chance_if_broken(Count(1, 4000, 250), 0.01))
    few = Count(0, 250, 240, over_half=0.0)
    assert find((P99,), [few], ONCE).verdict == UNDECIDED


def test_a_server_that_completes_fewer_than_are_asked_for_fails_once_the_latest_are_beyond_the_limit() -> None:
    rng = np.random.default_rng(11)
    due = np.cumsum(rng.exponential(1e9 / 100, 400))
    services = 1e9 / 80 * rng.uniform(0.5, 1.5, 400)
    done = np.zeros(400)
    for k in range(400):
        done[k] = max(due[k], done[k - 1] if k else 0.0) + services[k]
    count = count_values(done - due, due, 300e6, 99.0, 100.0)
    assert count.stable < 0.01
    assert find((P99,), [count], ONCE).verdict == FAILS
    assert chance_if_stable(done - due, due, 1e12, 100.0) == 1.0, "no value is beyond that limit"


def test_a_burst_of_arrivals_is_no_growing_queue() -> None:
    """A hundred at once; the server completes as many as are asked for, be they late."""
    due = np.concatenate([np.zeros(100), np.arange(300) * 1e7])
    done = np.arange(400) * 1e7 + 1e7
    assert chance_if_stable(done - due, due, 1e6, 100.0) > 0.05


def test_a_trial_that_cannot_be_decided_any_more_is_given_up() -> None:
    looks = plan_looks((P99,), 8000)
    at_limit, clear = Count(20, 2000, 400), Count(0, 2000, 300)
    assert hopeless((P99,), [at_limit], looks[-3], looks[-1])
    assert not hopeless((P99,), [clear], looks[-3], looks[-1])


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
    within = density[(grid > math.log(low)) & (grid <= math.log(high))].sum() / density.sum()
    assert within == pytest.approx(0.9, abs=0.04)


GOAL = Goal((P99,), 10.0, within=0.1, budget_s=4000.0)


def next_rate(goal: Goal, trials: Sequence[Trial]) -> float | str:
    ask = next_trial(goal, trials)
    return ask if isinstance(ask, str) else ask.rate


def test_the_first_rates_double_until_one_fails_and_halve_until_one_leans_to_holding() -> None:
    assert next_rate(GOAL, []) == 10.0
    assert next_rate(GOAL, [trial(10, UNDECIDED, 0.5)]) == 20.0
    assert next_rate(GOAL, [trial(10, FAILS)]) == 5.0
    assert next_rate(GOAL, [trial(10, UNDECIDED, 0.5), trial(20, FAILS)]) == pytest.approx(math.sqrt(200))
    bracketed = [trial(10, HOLDS), trial(20, FAILS)]
    assert next_rate(GOAL, bracketed) == pytest.approx(posterior(bracketed).quantile(0.5))


def test_a_bracket_takes_short_trials_and_holding_a_long_one_below() -> None:
    short = next_trial(GOAL, [])
    narrow = [trial(10, UNDECIDED, 0.5), trial(20, FAILS), trial(14, UNDECIDED, 0.5), trial(17, FAILS)]
    long = next_trial(GOAL, narrow)
    assert isinstance(short, Ask)
    assert isinstance(long, Ask)
    assert long.rate < 14
    assert long.most / long.rate > 5 * short.most / short.rate


def test_holding_is_tried_where_it_fits_into_the_time() -> None:
    """At 14 a hundred requests are worth one, so that 40,000 would be needed; further down they are worth more."""
    dear = {"counts": (Count(0, 600, 6),), "measured": 600}
    cheap = {"counts": (Count(0, 300, 300),), "measured": 300}
    goal = dataclasses.replace(GOAL, budget_s=800.0)
    trials = [trial(7, UNDECIDED, 0.5, **cheap), trial(20, FAILS), trial(14, UNDECIDED, 0.5, **dear), trial(17, FAILS)]
    asked = next_trial(goal, trials)
    assert isinstance(asked, Ask)
    assert 7 <= asked.rate < 10


def test_what_could_not_be_decided_is_not_asked_again_nearby() -> None:
    known = [trial(10, HOLDS), trial(20, FAILS)]
    middle = next_rate(GOAL, known)
    assert isinstance(middle, float)
    asked = next_rate(GOAL, [*known, trial(middle, UNDECIDED, 0.5)])
    assert isinstance(asked, float)
    assert abs(math.log(asked / middle)) > 0.05


def test_a_rate_whose_verdict_does_not_fit_into_the_time_left_is_not_begun() -> None:
    hardly = {"counts": (Count(0, 1000, 2),), "measured": 1000}
    goal = dataclasses.replace(GOAL, budget_s=70.0)
    asked = next_trial(goal, [trial(10, HOLDS, 0.99, **hardly), trial(13, FAILS, 0.99)])
    assert isinstance(asked, Ask)
    assert asked.rate == pytest.approx(posterior([trial(10, HOLDS, 0.99), trial(13, FAILS, 0.99)]).quantile(0.75))


def test_an_invalid_trial_is_repeated_once_then_the_client_was_the_limit() -> None:
    limited = {"invalid": "the load tester was late", "client_limit": True}
    done = [trial(10, HOLDS), trial(20, HOLDS, **limited)]
    assert next_rate(GOAL, done) == 20
    assert next_rate(GOAL, [*done, trial(20, HOLDS, **limited)]) == capacity.CLIENT


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


def test_no_trial_begins_when_the_budget_is_spent_and_a_larger_one_goes_on() -> None:
    goal = dataclasses.replace(GOAL, budget_s=25.0)
    done = [trial(10, HOLDS), trial(20, FAILS)]
    assert next_rate(goal, done) == capacity.BUDGET
    assert isinstance(next_rate(GOAL, done), float)


class Coin:
    """A server whose share beyond the limit is known at every rate: p = allowed (rate / capacity)^9."""

    def __init__(self, truth: float, seed: int) -> None:
        self._truth, self._rng = truth, np.random.default_rng(seed)

    def run(self, rate: float, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        over = np.cumsum(self._rng.random(looks[-1]) < min(0.01 * (rate / self._truth) ** 9, 1.0))
        for at, look in enumerate(looks):
            counts = (Count(float(over[look - 1]), look, look),)
            if enough(at, counts):
                break
        return Outcome(counts, look, look, look / rate, 0, 1, at + 1)


def test_searches_on_a_known_law_find_it_and_cover_it() -> None:
    goal = Goal((P99,), 16.0, within=0.06, budget_s=800.0, lost_s=0.0)
    ends = [posterior(search(goal, Coin(100.0, seed))[0]) for seed in range(200)]
    assert np.median([known.quantile(0.5) for known in ends]) == pytest.approx(100, rel=0.02)
    covered = sum(low <= 100 <= high for low, high in (known.interval(0.95) for known in ends))
    assert covered >= stats.binom.ppf(0.001, 200, 0.95)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e5), st.floats(0, 0.9), st.integers(0, 3))
def test_a_fleet_carries_its_target_with_headroom_and_one_server_less_would_not(
    low: float, target: float, headroom: float, spare: int
) -> None:
    fleet = Fleet.plan(low, target, headroom, spare)
    assert fleet.needed * fleet.planned_rps >= target * (1 - 1e-6)
    assert fleet.needed == 1 or (fleet.needed - 1) * fleet.planned_rps < target
    assert fleet.replicas == fleet.needed + spare
