"""How a server's speed differed between the trials of a capacity search, by the pace of its tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.curve import DRIFTS, Ceiling, Pace, TrialLevel, fit, pace_of, speeds_of
from gapmeter.analysis.capacity.sample import Served
from gapmeter.analysis.capacity.search import Goal, posterior
from gapmeter.analysis.capacity.trial import Count, Finding, Outcome, Trial
from gapmeter.analysis.results.capacity import FAILS, HOLDS, UNDECIDED
from tests.kit.runs import slo

RATES = (16.0, 50.0, 60.0, 70.0, 75.0, 80.0, 85.0)
SLOWER = np.array([0.03, -0.08, 0.05, 0.06, -0.07, 0.09, -0.08])  # by trial: logarithms, mean 0


def paces(slower: Floats, elasticity: float = 0.0, error: float = 0.01) -> list[Pace]:
    return [Pace(2.0 + d + elasticity * math.log(rate), error) for rate, d in zip(RATES, slower, strict=True)]


@pytest.mark.parametrize("elasticity", [0.0, 0.4, 0.8])
def test_paces_tell_drift_from_what_the_load_does(elasticity: float) -> None:
    calm, wild = (speeds_of(paces(size * SLOWER, elasticity), RATES) for size in (0.0, 1.0))
    assert DRIFTS[calm.odds.argmax()] <= 0.02
    assert DRIFTS[wild.odds.argmax()] == 0.07
    assert np.abs(calm.slower).max() < 0.01
    assert np.abs(wild.slower[wild.odds.argmax()] - SLOWER).max() < 0.03


@pytest.mark.parametrize("error", [0.0, 0.03, 0.1])
def test_a_trial_s_slowness_counts_as_far_as_its_pace_is_known(error: float) -> None:
    """At one rate: of a pace off the mean, the part that drift rather than the pace's error explains."""
    known = speeds_of([Pace(2.0 + d, error) for d in SLOWER], [50.0] * len(SLOWER))
    unsure = error**2 + 0.02**2  # two hundredths, which no pace tells
    for drift, slower in zip(DRIFTS, known.slower, strict=True):
        assert slower == pytest.approx(drift**2 / (drift**2 + unsure) * (SLOWER - SLOWER.mean()), abs=1e-9)


def test_without_a_pace_a_trial_may_have_been_as_slow_as_any() -> None:
    known = speeds_of([None] * len(RATES), RATES)
    assert np.abs(known.slower).max() == 0
    assert known.variance + known.common[:, None] == pytest.approx(np.broadcast_to(DRIFTS[:, None] ** 2, (5, 7)))


def test_what_slowed_all_trials_alike_stays_unknown() -> None:
    known = speeds_of(paces(SLOWER, error=0.0), RATES)
    assert (known.common[2:] > 0.9 * DRIFTS[2:] ** 2 / len(RATES)).all()


def test_a_pace_s_error_is_what_it_scatters_by_and_a_handful_has_none() -> None:
    rng = np.random.default_rng(5)
    found = [pace_of(1e7 * rng.exponential(1.0, 2000)) for _ in range(100)]
    known = [each for each in found if each]
    assert np.median([each.error for each in known]) == pytest.approx(np.std([each.log for each in known]), rel=0.25)
    assert pace_of(np.full(39, 1e7)) is None
    assert pace_of(np.array([*[np.nan] * 30, *[0.0] * 30, *[1e7] * 39])) is None


def levels(slower: Floats) -> list[TrialLevel]:
    """As a queue's whose percentile meets its limit at 80 of 100, in trials at these speeds."""
    return [
        TrialLevel(rate, d + math.log(0.2 / (1 - rate * math.exp(d) / 100)), 0.02, 1_000_000)
        for rate, d in zip(RATES, slower, strict=True)
    ]


def test_known_speeds_bring_the_curve_s_trials_together() -> None:
    ceiling = [Ceiling(100.0, 0.01, 0)]
    told, untold = (
        fit(levels(SLOWER), ceiling, 0.01, 200.0, speeds_of(known, RATES)) for known in (paces(SLOWER), [None] * 7)
    )
    assert told.quantile(0.5) == pytest.approx(80.0, rel=0.03)
    assert told.spread(0.95) < 0.8 * untold.spread(0.95)


def test_equal_paces_narrow_a_search_s_interval_and_unequal_ones_widen_it() -> None:
    goal = Goal((slo("ttft", 99.0, 500),), 16.0)

    def known(slower: Floats | None) -> float:
        trials = [
            Trial(
                level.rate,
                Outcome(
                    (Count(0, 3000, 300, log_level=(level.log, level.error)),), 3000, 3000, 40.0, 3000, 300,
                    served=Served(level.rate, 0.01, saturated=False), pace=None if slower is None else pace,
                ),
                Finding(UNDECIDED, 0.6, HOLDS, 0),
                3000,
            )
            for level, pace in zip(levels(0 * SLOWER), paces(SLOWER if slower is None else slower), strict=True)
        ]  # fmt: skip
        full = dataclasses.replace(trials[0].outcome, served=Served(100.0, 0.01, saturated=True), pace=None)
        found = posterior(goal, [*trials, Trial(128.0, full, Finding(FAILS, 0.99, FAILS, 0), 512)])
        return found.spread(0.95)

    assert known(0 * SLOWER) < known(None) < known(SLOWER)
