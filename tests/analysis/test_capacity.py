"""The capacity search's arithmetic: verdicts that stay honest, the curve, the next rate, the fleet."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bench.virtual_trials import search
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity import search as capacity
from gapmeter.analysis.capacity.build import build_search
from gapmeter.analysis.capacity.curve import Ceiling, Pace, Posterior, TrialLevel, fit, least, speeds_of
from gapmeter.analysis.capacity.read import MeasuredTrial, count_all, count_good, count_values, goal_of
from gapmeter.analysis.capacity.sample import (
    Served,
    bursts_of,
    chance_if_stable,
    log_level,
    served_by,
    worth,
    worth_of_clusters,
)
from gapmeter.analysis.capacity.search import Goal, held_rate, next_trial, posterior, requests_to_hold
from gapmeter.analysis.capacity.trial import (
    FIRST_LOOK,
    SURE,
    Ask,
    Count,
    Enough,
    Finding,
    Look,
    Outcome,
    Trial,
    chance_if_broken,
    chance_of_such_bursts,
    find,
    hopeless,
    plan_looks,
    values_to_hold,
)
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.capacity import BUDGET, FAILS, HOLDS, UNDECIDED, Ended, Fleet, Search
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.analysis.results.run import CoreHolder
from gapmeter.analysis.results.trust import RunWarning
from gapmeter.analysis.stats.estimate import MOST_SURE
from gapmeter.report.capacity import headline
from gapmeter.scenarios.slo import Slo
from tests.kit.runs import slo, timed, write_run
from tests.kit.searches import write_search

P99, P95 = slo("ttft", 99.0, 500), slo("e2e", 95.0, 2000)
EMPTY = Outcome((Count(0, 100, 100),), 100, 100, 10.0, 100, 100)
FULL = {"served": Served(15.0, 0.03, saturated=True)}
LIMITED = {"invalid": "the load tester was late", "client_limit": True}


def trial(rate: float, verdict: str, confidence: float = 0.95, leaning: str = HOLDS, **more: object) -> Trial:
    """A brief one, or with as many requests as were ``measured``. ``leaning``: of one that is undecided."""
    leaning = leaning if verdict == UNDECIDED else verdict
    outcome = dataclasses.replace(EMPTY, **more)  # type: ignore[arg-type]
    most = outcome.measured if "measured" in more else 2 * FIRST_LOOK
    return Trial(rate, outcome, Finding(verdict, confidence, leaning, 0), most)


ONCE = Look(5000, 1.0, 1.0)


@pytest.mark.parametrize("percentile", [50.0, 90.0])
def test_token_gaps_that_swing_together_for_seconds_are_worth_a_value_in_as_long(percentile: float) -> None:
    """1,200 requests a tenth of a second apart, whose gaps follow a level that is alike for three seconds."""
    rng, keeps = np.random.default_rng(1), math.exp(-0.1 / 3)
    shocks, level = rng.normal(size=1200), np.zeros(1200)
    for at in range(1, 1200):
        level[at] = keeps * level[at - 1] + math.sqrt(1 - keeps**2) * shocks[at]
    gaps = np.repeat(np.exp(0.3 * level), 16) * rng.lognormal(0, 0.05, 1200 * 16)
    assert worth_of_clusters(gaps, [np.repeat(np.arange(1200), 16)], percentile) < 1.5 * 1200 / (2 * 10 * 3)


def test_an_overload_that_serves_less_than_a_lower_rate_did_tells_no_ceiling() -> None:
    goal, well = Goal((P99,), 10.0), Count(2.0, 600, 600.0, log_level=(math.log(0.4), 0.1))
    fine = trial(60.0, HOLDS, measured=600, counts=(well,), served=Served(60.0, 0.03, saturated=False))
    collapsed = {"counts": (Count(400.0, 600, 600.0),), "measured": 600}
    full = trial(100.0, FAILS, **collapsed, served=Served(20.0, 0.05, saturated=True))
    known = posterior(goal, [fine, full])
    assert known is not None and known.interval(0.95)[0] > 40


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.5))
def test_the_chance_of_so_few_is_the_binomial_tail(count: int, part: float, share: float) -> None:
    over = round(part * count)
    law = stats.binom(count, share)
    expected = law.cdf(over) if over < count else 1.0
    assert chance_if_broken(Count(over, count, count), share) == pytest.approx(expected, abs=1e-9)


@given(st.integers(20, 3000), st.floats(0.02, 1), st.floats(0.001, 0.05))
def test_one_burst_says_no_more_than_markov_s_inequality_and_more_bursts_say_more(
    count: int, part: float, share: float
) -> None:
    over = math.ceil(part * count)
    one, *more = (chance_of_such_bursts(over, count, bursts, share) for bursts in (1, 4, 8, 16))
    if over >= 20 * share * count:
        assert one == pytest.approx(share * count / over, rel=0.06)
    if over > 4 * share * count and over >= 16:
        assert [one, *more] == sorted([one, *more], reverse=True)


@pytest.mark.parametrize(
    ("values", "bursts"),
    [
        ([1, 1, 1, 1], 0),
        ([1, 9, 1, 1, 9, 9, 1, 1], 2),
        ([9, 1, 1, 1, 1, 9], 2),
        ([1, 1, 1, 9, 3, 9, 4, 9, 1, 1], 1),  # between them it does not recover
        ([7, 8, 9, 9, 9, 8], 1),  # most exceed it, and they rise and fall once
        ([9, 6, 9, 6, 9, 6, 9, 6], 4),
    ],
)
def test_a_burst_lasts_until_a_request_is_as_quick_as_the_median(values: list[float], bursts: int) -> None:
    assert bursts_of(np.array(values, float), 5.0) == bursts


@given(st.integers(1, 100_000), st.sampled_from([(P99,), (P95,), (P99, P95)]))
def test_looks_are_in_order_and_their_shares_of_either_chance_add_up_to_one_at_most(
    most: int, slos: tuple[Slo, ...]
) -> None:
    looks = plan_looks(slos, most)
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


def test_all_slos_must_hold_and_one_that_fails_suffices() -> None:
    clear, broken = Count(0, 5000, 5000), Count(400, 5000, 5000)
    assert find((P99, P95), [clear, clear], ONCE).verdict == HOLDS
    found = find((P99, P95), [clear, broken], ONCE)
    assert (found.verdict, found.slo) == (FAILS, 1)
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
    early = next(look for look in looks if look.count > 100)
    assert not hopeless((P99,), [Count(1, early.count, early.count)], early, looks[-1]), "one request tells nothing"


@pytest.mark.parametrize(
    ("over", "leaning", "confidence"), [(5, HOLDS, 0.90), (10, HOLDS, 0.5), (14, FAILS, 0.69), (20, FAILS, 0.94)]
)
def test_an_undecided_trial_is_as_sure_as_its_last_look(over: int, leaning: str, confidence: float) -> None:
    """1,000 requests whose p99 has so many beyond its limit, where ten are allowed."""
    found = find((P99,), [Count(over, 1000, 1000)], plan_looks((P99,), 1000)[-1])
    assert (found.verdict, found.leaning) == (UNDECIDED, leaning)
    assert found.confidence == pytest.approx(confidence, abs=0.01)


@pytest.mark.parametrize(("bursts", "verdict"), [(1, UNDECIDED), (12, FAILS)])
def test_a_share_far_above_the_one_allowed_fails_once_it_came_in_several_bursts(bursts: int, verdict: str) -> None:
    """A trial on a real server: 353 of 1,980 requests beyond the limit of a p99, worth 8 independent ones."""
    look = plan_looks((P99,), 1980)[-1]
    assert find((P99,), [Count(353, 1980, 8, bursts=bursts)], look).verdict == verdict


ERRORS = slo("errors", None, 0.01)
ERRORS_GOAL = Goal((ERRORS,), 10.0)
P50, P90 = (slo("e2e", p, 2000) for p in (50.0, 90.0))


@pytest.mark.parametrize(
    ("slos", "over", "count", "fails"),
    [
        ((P99,), 33, 64, True),
        ((P99,), 32, 64, False),
        ((P95,), 64, 64, True),
        ((P95,), 30, 30, True),
        ((P95,), 29, 29, False),
        ((P95,), 63, 64, False),
        ((P90,), 64, 64, False),
        ((P50,), 64, 64, False),
        ((P99, P95, ERRORS), 64, 64, True),
    ],
)
def test_what_is_beyond_its_limit_throughout_fails_at_once_however_alike_neighbors_are(
    slos: tuple[Slo, ...], over: int, count: int, fails: bool
) -> None:
    """A server that fails every request, or takes as long for each: its values swing nowhere, so no burst is counted.

    Undecided, a search asked ever higher rates of it, up to the load tester's own limit.
    """
    counts = [Count(over, count, count, bursts=0)] * len(slos)
    for look in plan_looks(slos, count)[-2:]:
        found = find(slos, counts, look)
        assert (found.verdict == FAILS) is fails
        if fails:
            assert found.confidence == SURE
            assert slos[found.slo] == slos[-1], "failed requests exceed every limit, so errors lead"


@pytest.mark.parametrize("percentile", [99.0, 50.0, 25.0, 10.0])
def test_the_error_of_a_percentile_is_what_it_scatters_by(percentile: float) -> None:
    rng = np.random.default_rng(8)
    found = [log_level(rng.exponential(1.0, 4000), percentile, 2.0) for _ in range(300)]
    logs, errors = np.array([each for each in found if each]).T
    assert np.mean(logs) == pytest.approx(math.log(-math.log(1 - percentile / 100) / 2), abs=0.01)
    assert np.std(logs) == pytest.approx(np.median(errors), rel=0.25)


@pytest.mark.parametrize("is_far", [True, False])
def test_a_trial_without_slow_requests_holds_with_as_many_as_holding_is_said_to_take(is_far: bool) -> None:
    """``is_far``: none of 5,000 beyond half the limit; else all are."""
    needed = math.ceil(values_to_hold(P99, is_far=is_far))
    for n_eff, verdict in ((needed, HOLDS), (needed - 1, UNDECIDED)):
        found = find((P99,), [Count(0, 5000, n_eff, 0 if is_far else 5000)], Look(5000, 0.5, 0.4))
        assert found.verdict == verdict


def test_the_few_values_of_a_brief_trial_tell_a_p99_by_where_their_tail_leads() -> None:
    """The second largest of 60 is a p97, which on average lies at 0.85 of the p99."""
    rng = np.random.default_rng(8)
    found = [log_level(rng.exponential(1.0, 60), 99.0, 1.0) for _ in range(300)]
    assert np.exp(np.mean([level for level, _ in filter(None, found)])) == pytest.approx(-math.log(0.01), rel=0.2)


def test_a_percentile_that_is_infinite_or_of_a_handful_of_values_has_no_level() -> None:
    assert log_level(np.full(200, np.inf), 99.0, 1.0) is None
    assert log_level(np.ones(10), 99.0, 1.0) is None


def test_a_trial_s_good_requests_are_those_within_every_limit() -> None:
    requests = timed([50, 50, 500, 50] * 25, stream_ms=[10, 850, 10, 20] * 25)
    good, worth = count_good((slo("ttft", 99, 100), slo("e2e", 95, 800)), requests)
    assert good == 50
    assert 0 < worth <= 100


def served(rate: float, ceiling: float, count: int = 600) -> Served:
    rng = np.random.default_rng(4)
    due = np.cumsum(rng.exponential(1e9 / rate, count))
    done = np.zeros(count)
    for k, work in enumerate(rng.exponential(1e9 / ceiling, count)):
        done[k] = max(due[k], done[k - 1] if k else 0.0) + work
    return served_by(due, done)


def test_a_full_server_completes_its_ceiling_and_one_below_it_what_is_asked() -> None:
    full, free = served(200.0, 100.0), served(70.0, 100.0)
    assert full.saturated
    assert not free.saturated
    assert abs(math.log(full.rate / 100.0)) < 3 * full.error


@pytest.mark.parametrize(
    ("took_ms", "saturated"),
    [
        (np.linspace(100, 4000, 200), True),
        (np.linspace(100, 104, 200), False),
        (np.resize([110, 100], 200) + 4000 * (np.arange(200) > 190), False),
    ],
    ids=["grows throughout", "grows by next to nothing", "stalls at the end"],
)
def test_a_server_is_full_where_latencies_rise_with_the_load_and_throughout(took_ms: Floats, saturated: bool) -> None:
    due_ns = np.arange(200) * 5e7
    found = served_by(due_ns, due_ns + took_ms * 1e6)
    assert found.saturated == saturated


def test_answers_that_all_came_in_one_moment_tell_no_rate() -> None:
    due = np.arange(100.0) * 1e7
    assert served_by(due, np.full(100, 5e9)) is None


def queue_levels(capacity: float, rates: Sequence[float], error: float = 0.05) -> list[TrialLevel]:
    """Of a limit that a percentile of 1 / (1 - rho) reaches at ``capacity``, in long trials; the ceiling is 100."""
    return [TrialLevel(rate, math.log((1 - capacity / 100) / (1 - rate / 100)), error, 1_000_000) for rate in rates]


@pytest.mark.parametrize("capacity", [60.0, 80.0, 93.0])
def test_the_curve_finds_the_place_where_a_queue_meets_its_limit(capacity: float) -> None:
    rates = (50.0, 70.0, 80.0, 90.0)
    speeds = speeds_of([Pace(2.0, 0.01)] * len(rates), rates)
    known = fit(queue_levels(capacity, rates), [Ceiling(100.0, 0.01)], 0.01, 200.0, speeds)
    low, high = known.interval(0.95)
    assert low < capacity < high
    assert known.quantile(0.5) == pytest.approx(capacity, rel=0.04)
    assert known.spread(0.95) < 0.13


def test_the_curve_tells_what_to_expect_at_a_rate_and_is_as_unsure_of_it_as_of_the_capacity() -> None:
    """Of 0.2 / (1 - rate / 100), in units of its limit, which it meets at 80."""
    rates = (40.0, 55.0, 65.0, 75.0)
    known = fit(queue_levels(80.0, (50.0, 70.0, 80.0, 90.0)), [Ceiling(100.0, 0.01)], 0.01, 200.0)
    middle, low, high = known.grid.levels(rates, 0.95)
    truth = 0.2 / (1 - np.array(rates) / 100)
    assert (low < truth).all() and (truth < high).all()
    assert (np.diff(middle) > 0).all()
    assert middle[2] == pytest.approx(truth[2], rel=0.15)
    ends = known.interval(0.95)
    assert known.grid.levels([ends[0]], 0.95)[2, 0] == pytest.approx(1.0, rel=0.03), "its upper end, at the lower one"
    assert known.grid.levels([ends[1]], 0.95)[1, 0] == pytest.approx(1.0, rel=0.03)
    assert math.isinf(known.grid.levels([130.0], 0.95)[0, 0]), "beyond the ceiling"


@pytest.mark.parametrize("off", [1.0, -1.0])
def test_one_trial_that_is_far_off_moves_the_answer_by_little(off: float) -> None:
    """Its percentile is 2.7 times what the others tell, or as much too small."""
    rates = (50.0, 60.0, 70.0, 75.0, 80.0, 85.0, 90.0)
    levels = queue_levels(80.0, rates, 0.02)
    levels[3] = dataclasses.replace(levels[3], log=levels[3].log + off)
    known = fit(levels, [Ceiling(100.0, 0.01)], 0.01, 200.0, speeds_of([Pace(2.0, 0.01)] * len(rates), rates))
    low, high = known.interval(0.95)
    assert low < 80.0 < high
    assert known.quantile(0.5) == pytest.approx(80.0, rel=0.02)
    assert known.spread(0.95) < 0.04


def test_percentiles_that_are_known_exactly_do_not_tell_the_capacity_exactly() -> None:
    """No server follows the curve to a percent or two."""
    rates = (50.0, 60.0, 70.0, 75.0, 80.0, 85.0, 90.0)
    levels = queue_levels(80.0, rates, 0.0005)
    known = fit(levels, [Ceiling(100.0, 0.01)], 0.01, 200.0, speeds_of([Pace(2.0, 0.01)] * len(rates), rates))
    assert known.spread(0.95) > 0.01


@pytest.mark.parametrize("side", [1, -1])
def test_a_verdict_on_one_rate_is_wrong_in_one_case_of_some_fifty(side: int) -> None:
    """By so much it lowers the odds that the capacity is on the other side of the rate, the speed's drift aside."""
    odds = []
    for told in (0, side):
        known = fit([TrialLevel(60.0, 0.0, math.inf, 1000, told)], [Ceiling(100.0, 0.01)], 0.01, 200.0)
        below = float(np.interp(math.log(60.0), known.edges, np.concatenate([[0.0], np.cumsum(known.masses)])))
        odds.append(below / (1 - below))
    assert 25 < (odds[1] / odds[0]) ** side < 60


def test_trials_that_disagree_about_the_speed_widen_the_interval_and_are_told() -> None:
    rates = (50.0, 60.0, 70.0, 75.0, 80.0, 85.0)
    calm = queue_levels(80.0, rates, 0.02)
    wild = [
        dataclasses.replace(level, rate=level.rate * math.exp(0.08 * sign))
        for level, sign in zip(calm, itertools.cycle((1, -1)), strict=False)
    ]
    one, other = (fit(levels, [Ceiling(100.0, 0.01)], 0.01, 200.0) for levels in (calm, wild))
    assert other.drift > 1.5 * one.drift
    assert other.spread(0.95) > 1.3 * one.spread(0.95)


def test_an_overload_that_served_too_little_is_overruled_by_trials_that_were_served_more() -> None:
    known = fit(queue_levels(85.0, (60.0, 75.0, 82.0, 85.0, 88.0)), [Ceiling(84.0, 0.01)], 0.01, 200.0)
    assert known.quantile(0.5) > 82.0


@pytest.mark.parametrize("error", [0.0, 0.1, 0.3, 1.0])
def test_an_overload_that_was_served_unevenly_tells_the_ceiling_less_exactly(error: float) -> None:
    levels = queue_levels(80.0, (50.0, 70.0, 90.0))
    known = fit(levels, [Ceiling(100.0, error)], 0.01, 200.0)
    assert known.quantile(0.5) == pytest.approx(80.0, rel=0.1)
    assert known.spread(0.95) >= fit(levels, [Ceiling(100.0, 0.0)], 0.01, 200.0).spread(0.95) - 1e-3


def test_the_least_of_two_capacities_has_the_lower_quantiles() -> None:
    edges = np.log(np.array([50.0, 100.0]))
    one, other = (
        Posterior(edges + shift, np.array([1.0]), drift, 120.0) for shift, drift in ((0.0, 0.01), (0.3, 0.03))
    )
    for pair in ([one, other], [other, one]):
        both = least(pair)
        assert both.quantile(0.5) == pytest.approx(one.quantile(0.5))
        assert both.masses.sum() == pytest.approx(1.0)
        assert both.drift == 0.03, "the server's speed differs by as much as either tells"
        without = [dataclasses.replace(each, drift=0.0) if each is one else each for each in pair]
        assert least(without).drift == 0.0, "where the lower one has no curve, nothing is said of one"


def test_arrivals_in_bursts_tell_a_percentile_less_exactly() -> None:
    """They meet fewer spells of waiting, and longer ones, so a trial's own error and percentile are too small."""
    goal = Goal((P99,), 10.0)
    levels = {8.0: -1.2, 10.0: -0.9, 12.0: -0.4, 13.0: -0.1}
    ends = []
    for bunched in (1.0, 8.5):
        tried = [
            trial(rate, UNDECIDED, counts=(Count(9, 900, 90, log_level=(log, 0.1)),), measured=900, bunched=bunched)
            for rate, log in levels.items()
        ]
        known = posterior(goal, [*tried, trial(20, FAILS, counts=(Count(80, 90, 3),), measured=90, **FULL)])
        ends.append(known.interval(0.95))
    (low, high), (lower, higher) = ends
    assert lower < low and higher - lower > high - low


def test_a_limit_that_is_kept_even_while_the_queue_grows_leaves_the_capacity_below_the_ceiling() -> None:
    """Token times stop growing once the batch is full: no rate at which they are kept is above what is served."""
    goal = Goal((slo("tpot", 95.0, 30),), 10.0)
    count = Count(0, 900, 900, log_level=(-0.5, 0.05))
    tried = [trial(rate, HOLDS, 0.99, counts=(count,), measured=900) for rate in (5, 8, 10, 12)]
    known = posterior(goal, [*tried, trial(20, HOLDS, 0.99, counts=(count,), measured=900, **FULL)])
    assert known.interval(0.95)[1] < 20, "at which the queue grew"


def test_what_has_no_percentile_is_halved_between_a_rate_that_fails_and_one_that_holds() -> None:
    held = trial(10, HOLDS, 0.99, counts=(Count(0, 400, 400),))
    known = posterior(ERRORS_GOAL, [held, trial(20, FAILS, counts=(Count(90, 100, 100),))])
    assert known.quantile(0.5) == pytest.approx(math.sqrt(200))
    assert posterior(ERRORS_GOAL, [held]) is None


def test_a_rate_that_was_not_decided_is_no_end_of_an_interval() -> None:
    """A server that refuses a ninth request at a time: by Erlang's loss formula it loses 1 % at 19.55 a second."""
    seen = {10.0: (0, 67, 67), 20.0: (0, 75, 75), 23.2: (8, 607, 249), 21.6: (20, 1177, 615)}
    tried = [trial(rate, UNDECIDED, 0.6, counts=(Count(*count),)) for rate, count in seen.items()]
    tried.append(trial(29.9, FAILS, counts=(Count(20, 381, 221),)))
    known = posterior(ERRORS_GOAL, tried)
    low, high = known.interval(0.95)
    assert low < 19.55 < high
    assert known.spread(0.95) > ERRORS_GOAL.within, "nothing was proven below it"
    sure = posterior(ERRORS_GOAL, [*tried, trial(17.0, HOLDS, 0.99, counts=(Count(0, 600, 600),))])
    assert sure.interval(1.0)[0] >= 17.0 and sure.quantile(0.5) < 21.6, "where more failed than may"


def test_a_limit_on_errors_weighs_as_much_as_one_on_latency_in_the_lower_of_two_capacities() -> None:
    """Latency holds to about 37 a second; errors hold at 10 and fail at 20."""
    alone, both = list[Trial](), list[Trial]()
    for rate, verdict, log, over in ((10, HOLDS, -1.6, 0), (20, FAILS, -1.2, 60), (30, FAILS, -0.8, 90)):
        latency, errors = Count(0, 600, 300, log_level=(log, 0.1)), Count(over, 600, 600 / (over + 1))
        alone.append(trial(rate, verdict, 0.99, counts=(errors,)))
        both.append(trial(rate, verdict, 0.99, counts=(latency, errors)))
    of_errors, of_both = posterior(ERRORS_GOAL, alone), posterior(Goal((P99, ERRORS), 10.0), both)
    assert of_errors.masses.sum() == pytest.approx(1.0)
    assert of_both.interval(0.95) == pytest.approx(of_errors.interval(0.95), rel=0.02)
    assert of_both.quantile(0.5) == pytest.approx(of_errors.quantile(0.5), rel=0.02)


def test_errors_that_never_come_are_searched_for_below_the_rate_that_the_server_could_not_do() -> None:
    errors = Goal((slo("errors", None, 0.2),), 10.0, budget_s=400.0)
    tried = [trial(10, HOLDS, 0.99), trial(20, HOLDS, 0.99), trial(40, HOLDS, 0.99, **FULL)]
    assert 20 < next_rate(errors, tried) < 40
    known = posterior(errors, tried)
    assert known.interval(1.0) == pytest.approx((20, 40))
    alone = posterior(errors, [trial(30, UNDECIDED, **FULL)])
    assert alone.interval(1.0) == pytest.approx((15, 30)), "nothing lower was tried"


GOAL = Goal((P99,), 10.0, within=0.1, budget_s=4000.0)


def next_rate(goal: Goal, trials: Sequence[Trial]) -> float | str:
    ask = next_trial(goal, trials)
    return ask if isinstance(ask, str) else ask.rate


def test_the_first_rates_double_until_the_server_is_full_and_fall_until_one_leans_to_holding() -> None:
    assert next_rate(GOAL, []) == 10.0
    assert next_rate(GOAL, [trial(10, UNDECIDED, 0.5)]) == 20.0
    assert next_rate(GOAL, [trial(10, FAILS)]) == 5.0
    assert next_rate(GOAL, [trial(40, FAILS, **FULL)]) == pytest.approx(0.6 * 15), "of what it completed"


def test_a_rate_far_below_every_limit_is_quadrupled_whatever_the_limit_on_errors() -> None:
    both = dataclasses.replace(GOAL, slos=(P99, ERRORS))
    for log, rate in ((-3.0, 40.0), (-1.0, 20.0)):
        counts = (Count(0, 200, 200, log_level=(log, 0.1)), Count(0, 200, 200))
        assert next_rate(both, [trial(10, UNDECIDED, 0.5, counts=counts, measured=200)]) == rate


def measured(rate: float, log: float, count: int = 200, **more: object) -> dict[str, object]:
    return {"counts": (Count(0, count, count, log_level=(log, 0.1)),), "measured": count, **more}


BRACKET = [
    trial(10, UNDECIDED, 0.5, **measured(10, -1.5)),
    trial(20, FAILS, counts=(Count(150, 200, 3, log_level=(2.0, 0.1)),), **FULL),
]


def test_once_the_server_was_full_trials_for_the_curve_lie_around_its_estimate_and_below_the_ceiling() -> None:
    asked = next_trial(GOAL, BRACKET)
    assert asked.aim == "curve"
    assert 10 < asked.rate < 15
    brief = next_trial(GOAL, [])
    assert asked.most / asked.rate > 5 * brief.most / brief.rate


def test_a_rate_that_could_not_be_decided_is_not_asked_for_again_to_hold() -> None:
    close = [trial(rate, UNDECIDED, 0.5, **measured(rate, log, 2000)) for rate, log in ((11, -0.9), (13, -0.2))]
    first = next_trial(GOAL, [*BRACKET, *close])
    assert first.aim == "hold"
    assert first.rate < 11
    gone_on = trial(first.rate, UNDECIDED, 0.5, **measured(first.rate, -1.2, 3000))
    given_up = dataclasses.replace(trial(first.rate, UNDECIDED, 0.5, **measured(first.rate, -1.2, 60)), most=first.most)
    failed = trial(first.rate, FAILS, counts=(Count(9, 60, 60, log_level=(-1.2, 0.1)),))
    for tried in (gone_on, given_up, failed):
        second = next_trial(GOAL, [trial(4, UNDECIDED), *BRACKET, *close, tried])
        assert second.rate < first.rate * 0.95 or second.aim == "curve"


def test_while_every_rate_failed_nothing_is_said_of_where_one_would_hold() -> None:
    failed = [trial(rate, FAILS, counts=(Count(34, 60, 60),), **FULL) for rate in (10, 5, 2.5, 1.25)]
    assert posterior(GOAL, failed) is None
    near = trial(0.6, UNDECIDED, 0.6, FAILS, counts=(Count(3, 60, 60),))
    assert posterior(GOAL, [*failed, near]) is None, "it leans to failing as well"
    assert posterior(GOAL, [*failed, trial(0.6, UNDECIDED, 0.6, counts=(Count(0, 60, 60),))]) is not None


def test_errors_in_bursts_that_are_as_many_as_allowed_seldom_hold() -> None:
    """Whichever look claims it, of runs with twenty bursts on average; without their count, 12 % held."""
    share, burst, most = 0.05, 10, 4000
    limit, rng, held = slo("errors", None, share), np.random.default_rng(3), 0
    for _ in range(200):
        lasts = rng.geometric(np.resize([share / (1 - share) / burst, 1 / burst], most))  # calm, burst, calm ...
        failed = np.repeat(np.arange(most) % 2 == 1, lasts)[(begin := rng.integers(3 * burst / share)) : begin + most]
        requests = pd.DataFrame({"outcome": np.where(failed, "http_5xx", "ok"), "attempt": 0})
        looks = [look for look in plan_looks((limit,), most) if look.hold]
        counts = (count_all((limit,), requests.head(look.count), 20.0) for look in looks)
        held += any(find((limit,), own, look).verdict == HOLDS for own, look in zip(counts, looks, strict=True))
    assert held <= 0.085 * 200


def test_the_rate_held_is_the_highest_below_all_that_failed() -> None:
    assert held_rate([trial(10, HOLDS), trial(12, HOLDS), trial(14, UNDECIDED, 0.6), trial(16, FAILS)]) == 12
    assert held_rate([trial(10, HOLDS), trial(12, HOLDS), trial(11, FAILS)]) == 10
    assert held_rate([trial(10, FAILS)]) is None


def test_an_invalid_trial_is_repeated_once_then_the_client_was_the_limit() -> None:
    done = [trial(10, HOLDS), trial(20, HOLDS, **LIMITED)]
    assert next_rate(GOAL, done) == 20
    assert next_rate(GOAL, [*done, trial(20, HOLDS, **LIMITED)]) == capacity.CLIENT


@pytest.mark.parametrize(("over", "over_half", "is_far"), [(0, 3, True), (0, None, False), (5, 40, False)], ids=str)
def test_holding_takes_as_many_requests_as_one_of_a_trial_s_is_worth(
    over: int, over_half: int | None, is_far: bool
) -> None:
    """2,000 requests worth 400; fewer will do where none came near the limit."""
    seen = trial(10, UNDECIDED, 0.6, counts=(Count(over, 2000, 400, over_half),), measured=2000)
    assert requests_to_hold(GOAL, seen) == pytest.approx(5 * values_to_hold(P99, is_far=is_far))


def answer(manifest: SearchManifest, *tried: Trial) -> Search:
    return build_search(
        goal_of(manifest), [MeasuredTrial(at, each, None) for at, each in enumerate(tried, 1)], manifest
    )


DISTURBED: dict[tuple[str, str, float], int | None] = {  # by a warning, who had most of the cores, and how much
    ("cores", "another program", 0.03): 1,
    ("cores", "another program", 0.029): None,
    ("cores", "engine", 0.5): None,
    ("lag", "another program", 0.5): None,
    ("machine", "engine", 0.5): 1,
}


def test_a_trial_is_disturbed_by_a_program_that_had_a_notable_part_of_the_cores_waited_for(tmp_path: Path) -> None:
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0))
    run = RunResult.read(write_run(tmp_path / "run", count=60).path)
    for (code, process, share), disturbed in DISTURBED.items():
        held = CoreHolder(process=process, stage="", share=share, mean_ms=1.0, program="")
        warning = RunWarning(code=code, text="", cause="", flag="", touches=("core_wait",))
        ledger = run.ledger.model_copy(update={"core_held": (held,)})
        result = run.model_copy(update={"ledger": ledger, "warnings": (warning,)})
        found = build_search(goal_of(manifest), [MeasuredTrial(1, trial(10, HOLDS), result)], manifest)
        assert found.disturbed == disturbed, (code, process, share)


def ended_by(manifest: SearchManifest, how: Ended, *slos: Slo) -> SearchManifest:
    asked = manifest.capacity.model_copy(update={"ended": how})
    return manifest.model_copy(update={"slo": slos, "capacity": asked})


@pytest.mark.parametrize(
    ("target_rps", "verdict", "planned"),
    [(50.0, HOLDS, True), (50.0, FAILS, False), (None, HOLDS, False)],
    ids=["a target and a rate", "no rate", "no target"],
)
def test_a_fleet_is_planned_for_a_target_from_a_rate_that_holds(
    tmp_path: Path, target_rps: float | None, verdict: str, planned: bool
) -> None:
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0, target_rps=target_rps))
    found = answer(manifest, trial(10, verdict))
    assert (found.held, found.planning is not None) == (10.0 if verdict == HOLDS else None, planned)
    assert found.replicas == (found.planning.replicas if found.planning else None)


@pytest.mark.parametrize(("failed", "estimated"), [(8, False), (1, True)])
def test_where_no_rate_kept_a_limit_on_errors_and_all_together_broke_it_there_is_no_estimate(
    tmp_path: Path, failed: int, estimated: bool
) -> None:
    """2 % fail at every rate, where 1 % may: half of the lowest rate tried is no end of an interval."""
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0))
    counts = [Count(12, 400, 400), Count(failed, 400, 400), Count(0, 60, 60)]
    tried = [
        trial(rate, FAILS if rate == 40 else UNDECIDED, counts=(each,), measured=each.count)
        for rate, each in zip([40, 20, 10], counts, strict=True)
    ]
    found = answer(ended_by(manifest, BUDGET, slo("errors", None, 0.01)), *tried)
    assert ((found.rate, found.low) == (None, None)) is not estimated
    assert (found.high or 0) <= 40


def test_a_fleet_has_the_percentile_to_expect_at_its_rate_and_how_few_servers_may_do(tmp_path: Path) -> None:
    """A p99 of 100 / (1 - rate / 20) ms: 500 ms at 16 a second."""
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0, target_rps=50.0))
    tried = [
        trial(rate, UNDECIDED, counts=(Count(9, 9000, 900, log_level=(math.log(0.2 / (1 - rate / 20)), 0.05)),),
              measured=9000)
        for rate in (8.0, 12.0, 14.0, 17.0)
    ]  # fmt: skip
    overload = {"counts": (Count(300, 300, 3),), "measured": 300, "served": Served(20.0, 0.02, saturated=True)}
    found = answer(ended_by(manifest, capacity.FOUND, slo("ttft", 99, 500)), *tried, trial(40, FAILS, **overload))
    fleet, curve = found.planning, found.latency
    assert (curve.slo, curve.limit_ms) == ("ttft p99 <= 500 ms", 500.0)
    assert [point.rate for point in curve.points] == sorted({point.rate for point in curve.points})
    assert fleet.expected.rate == fleet.planned_rps == pytest.approx(0.8 * found.low)
    low, high = fleet.expected.ci_ms
    assert low < 100 / (1 - fleet.planned_rps / 20) < high
    assert fleet.needed_at_high == Fleet.plan(found.high, 50.0, 0.2, 1).needed < fleet.needed
    values = [each.slos[0].value_ms for each in found.trials]
    assert values == [pytest.approx(100 / (1 - each.rate / 20)) for each in tried] + [None], "its queue grew"


@dataclasses.dataclass(frozen=True, slots=True)
class Failing:
    """Fails each request by chance: at a rate, ``share`` of it. The others are far below any limit."""

    share: Callable[[float], float]
    slos: tuple[Slo, ...]
    seed: int

    def run(self, ask: Ask, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        failed = np.random.default_rng((self.seed, number)).random(looks[-1]) < self.share(ask.rate)
        rows = timed(np.full(len(failed), 5.0), attempt=0).assign(outcome=np.where(failed, "http_5xx", "ok"))
        for at, look in enumerate(looks):
            counts = count_all(self.slos, rows.head(look), ask.rate)
            if enough(at, counts):
                break
        good = int(look - failed[:look].sum())
        return Outcome(counts, look, look, look / ask.rate + 8.0, good, good, at + 1, lost=1 - good / look)


@pytest.mark.parametrize(
    ("share", "ends", "least"),
    [
        (lambda _: 0.05, (capacity.UNMEETABLE,), 9),
        (lambda _: 0.02, (capacity.UNMEETABLE,), 5),
        (lambda _: 0.012, (capacity.UNMEETABLE, BUDGET), 10),
        (lambda rate: max(0.0, 1 - 40 / rate), (capacity.FOUND, BUDGET), 10),
        (lambda rate: rate / (300 + rate), (BUDGET,), 9),  # a single place without a queue
    ],
)
@pytest.mark.parametrize("slos", [(slo("errors", None, 0.01),), (slo("e2e", 95.0, 2000), slo("errors", None, 0.01))])
def test_errors_at_all_rates_alike_are_told_from_those_of_a_full_server(
    share: Callable[[float], float], ends: tuple[str, ...], least: int, slos: tuple[Slo, ...]
) -> None:
    """Of ten searches each; where 5 % fail, two minutes are enough."""
    goal = Goal(slos, 16.0)
    done = [search(goal, Failing(share, slos, seed)) for seed in range(10)]
    assert sum(ended in ends for _, ended in done) >= least, [ended for _, ended in done]
    if share(16.0) == 0.05:
        assert np.mean([sum(each.outcome.seconds for each in trials) for trials, _ in done]) < 120


@pytest.mark.parametrize("limit", [slo("ttft", 95.0, 500), slo("errors", None, 0.05)], ids=lambda limit: limit.metric)
def test_a_server_that_refuses_most_of_a_high_rate_fails_there(limit: Slo) -> None:
    """It serves 40 a second. Bursts of failures were not seen, so ever higher rates were asked of it."""
    trials, _ = search(Goal((limit,), 100.0), Failing(lambda rate: max(0.0, 1 - 40 / rate), (limit,), 0))
    assert max(trial.rate for trial in trials) <= 200
    low, high = posterior(Goal((limit,), 100.0), trials).interval(0.95)
    assert low < 40 / 0.95 < high


def test_where_more_fail_at_higher_rates_a_limit_on_latency_has_its_capacity_where_as_many_fail_as_may() -> None:
    """1 % at 30 a second; the others take 5 ms. A curve through them lay above that in ten of ten searches."""
    limit = slo("ttft", 99.0, 500)
    goal = Goal((limit,), 16.0)
    found = [search(goal, Failing(lambda rate: min(0.01 * (rate / 30) ** 3, 0.9), (limit,), at))[0] for at in range(10)]
    ends = [posterior(goal, trials).interval(0.95) for trials in found]
    assert sum(low < 30 < high for low, high in ends) >= 9, ends


def test_the_answer_for_errors_at_all_rates_pools_the_trials_at_low_rates(tmp_path: Path) -> None:
    manifest = SearchManifest.read(write_search(tmp_path / "search", 16.0, None, None))
    manifest = ended_by(manifest, capacity.UNMEETABLE, slo("errors", None, 0.01))
    counts = {8.0: Count(1, 60, 60, bursts=1), 16.0: Count(6, 64, 64, bursts=6), 64.0: Count(13, 256, 256, bursts=13)}
    tried = [trial(rate, UNDECIDED, counts=(each,)) for rate, each in counts.items()]
    found = answer(manifest, *tried)
    assert next_trial(goal_of(manifest), tried) == capacity.UNMEETABLE
    assert headline(found)[0] == (
        "No rate meets every SLO: at 16 req/s and below as well as above, errors <= 1 % fails (7 of 124 values beyond "
        "its limit)."
    )


def test_the_goodput_of_an_overload_is_a_part_of_what_the_server_completes(tmp_path: Path) -> None:
    """Of 30 a second it completes 15; before the queue is long all are within their limits."""
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0))
    found = answer(manifest, trial(10, HOLDS), trial(30, FAILS, **FULL))
    assert [point.goodput_per_s for point in found.curve] == [10.0, 15.0]
    assert found.curve[1].goodput_ci == pytest.approx((15 * 0.025 ** (1 / 100), 15))


def test_the_slo_that_limits_is_the_one_with_the_lowest_capacity_and_not_what_an_overload_failed_of(
    tmp_path: Path,
) -> None:
    """At twice the ceiling every request is beyond both limits, of which the second is met at higher rates."""
    slos = (slo("ttft", 95.0, 300), slo("e2e", 90.0, 450))
    manifest = SearchManifest.read(write_search(tmp_path / "search", 10.0, 8.0, 12.0)).model_copy(update={"slo": slos})
    levels = {8.0: (-1.2, -1.6), 10.0: (-0.8, -1.4), 12.0: (-0.2, -1.1)}
    tried = [
        trial(rate, UNDECIDED, measured=900, counts=tuple(Count(9, 900, 90, log_level=(each, 0.1)) for each in logs))
        for rate, logs in levels.items()
    ]
    overload = trial(30, FAILS, measured=300, counts=(Count(300, 300, 3), Count(300, 300, 2)), **FULL)
    tried.append(dataclasses.replace(overload, finding=dataclasses.replace(overload.finding, slo=1)))
    assert answer(manifest, *tried).binding_slo == "ttft p95 <= 300 ms"


def test_below_the_client_s_own_limit_the_highest_rate_that_may_hold_is_looked_for() -> None:
    def below(limit: float, *tried: Trial) -> Ask | str:
        return next_trial(GOAL, [*tried, *[trial(limit, HOLDS, **LIMITED)] * 2])

    far = below(40, trial(10, HOLDS))
    assert (far.rate, far.aim) == (20, "ceiling")
    near = below(20, trial(10, UNDECIDED, 0.6))
    assert (near.rate, near.aim) == (10, "hold"), "no rate was surely held yet"
    assert below(20, trial(10, UNDECIDED, 0.6, measured=2000)) == capacity.CLIENT, "it could not be decided"
    assert below(20, trial(10, FAILS)).rate == 5, "the server is the limit"


def test_a_rate_below_the_client_s_own_limit_that_a_brief_trial_did_not_decide_is_asked_once_more_for_longer() -> None:
    tried = [trial(10, UNDECIDED, 0.6), trial(20, UNDECIDED, 0.6, FAILS), *[trial(40, HOLDS, **LIMITED)] * 2]
    longer = next_trial(GOAL, tried)
    assert (longer.rate, longer.aim) == (20, "curve")
    then = next_trial(GOAL, [*tried, trial(20, UNDECIDED, 0.6, FAILS, measured=longer.most)])
    assert (then.rate, then.aim) == (10, "hold"), "20 is asked no third time"
    after = next_trial(GOAL, [*tried, trial(20, FAILS, measured=longer.most, counts=(Count(300, 600, 60),))])
    assert after.rate < 20 and after.aim != "ceiling", "the server is the limit"


def test_time_that_ran_out_at_the_client_s_own_limit_says_so_unless_the_server_was_full() -> None:
    goal = dataclasses.replace(GOAL, budget_s=25.0)
    assert next_rate(goal, [trial(10, HOLDS), trial(20, HOLDS, **LIMITED)]) == capacity.CLIENT
    assert next_rate(goal, [*BRACKET, trial(80, HOLDS, **LIMITED)]) == capacity.BUDGET
    limited = trial(20, HOLDS, **LIMITED)
    assert next_rate(goal, [trial(10, HOLDS), limited, trial(20, HOLDS)]) == capacity.BUDGET, "not when asked again"
    assert next_rate(goal, [limited, trial(10, UNDECIDED, 0.6, FAILS)]) == capacity.BUDGET, "nothing held"


def test_a_trial_that_is_invalid_for_another_reason_twice_ends_the_search() -> None:
    broken = {"invalid": "records were dropped"}
    assert next_rate(GOAL, [trial(10, FAILS, **broken), trial(10, FAILS, **broken)]) == capacity.NOT_MEASURED


def test_an_slo_that_no_rate_meets_ends_the_search_after_eight_halvings() -> None:
    done = [trial(10 / 2**k, FAILS) for k in range(9)]
    assert next_rate(GOAL, done[:-1]) == pytest.approx(10 / 2**8)
    assert next_rate(GOAL, done) == capacity.UNMEETABLE


def test_a_server_that_answers_every_request_with_an_error_at_three_rates_meets_the_slos_at_none() -> None:
    refused = {"refused_all": True, "counts": (Count(64, 64, 64, bursts=0),)}
    tried = [trial(rate, FAILS, **refused) for rate in (10, 5, 2.5)]
    assert next_rate(GOAL, tried[:2]) == 2.5
    assert next_rate(GOAL, tried) == capacity.UNMEETABLE
    late = trial(2.5, FAILS, **{**refused, "refused_all": False})
    assert next_rate(GOAL, [*tried[:2], late]) == 1.25, "it may have been too much for it"


def test_a_trial_whose_fewest_requests_would_outlast_the_budget_is_not_begun() -> None:
    tried = [trial(rate, FAILS, counts=(Count(34, 60, 60),)) for rate in (1.0, 0.5)]
    assert next_rate(dataclasses.replace(GOAL, budget_s=100.0), tried) == capacity.BUDGET, "40 requests take 160 s"
    assert next_rate(dataclasses.replace(GOAL, budget_s=200.0), tried) == 0.25


def test_no_higher_rate_is_asked_of_a_server_that_is_beyond_its_median_s_limit_throughout() -> None:
    goal = dataclasses.replace(GOAL, slos=(P50,))
    for over, rate in ((64, 5.0), (40, 20.0)):
        slow = (Count(over, 64, 64, bursts=0),)
        assert next_rate(goal, [trial(10.0, UNDECIDED, 0.6, FAILS, counts=slow, measured=64)]) == rate


@pytest.mark.parametrize(("verdict", "then"), [(UNDECIDED, 5.0), (FAILS, capacity.UNMEETABLE)])
def test_a_single_hiccup_of_a_quick_server_does_not_show_that_no_rate_meets_an_slo(verdict: str, then: object) -> None:
    slow = (Count(1, 40, 40, bursts=1),)
    lowest = trial(10.0, verdict, 0.6, FAILS, counts=slow, in_flight=0.002, measured=40)
    assert next_rate(GOAL, [lowest, trial(20, FAILS, **FULL)]) == then


@pytest.mark.parametrize(
    ("last", "ended"), [({"died": "killed"}, capacity.DIED), ({"interrupted": True}, capacity.INTERRUPTED)]
)
def test_a_dead_server_and_ctrl_c_end_the_search(last: dict[str, object], ended: str) -> None:
    assert next_rate(GOAL, [trial(10, HOLDS), trial(20, FAILS, **last)]) == ended


def test_no_trial_begins_when_the_budget_is_spent_and_a_larger_one_goes_on() -> None:
    goal = dataclasses.replace(GOAL, budget_s=25.0)
    assert next_rate(goal, BRACKET) == capacity.BUDGET
    assert isinstance(next_rate(GOAL, BRACKET), float)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e5), st.floats(0, 0.9), st.integers(0, 3))
def test_a_fleet_carries_its_target_with_headroom_and_one_server_less_would_not(
    low: float, target: float, headroom: float, spare: int
) -> None:
    fleet = Fleet.plan(low, target, headroom, spare)
    assert fleet.needed * fleet.planned_rps >= target * (1 - 1e-6)
    assert fleet.needed == 1 or (fleet.needed - 1) * fleet.planned_rps < target
    assert fleet.replicas == fleet.needed + spare
