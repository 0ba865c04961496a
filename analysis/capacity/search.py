"""Which rate to try next, and when to stop: doubling until there is a bracket, then probabilistic bisection.

The next rate is the posterior's median, unless a trial close by could not be decided: a longer one there would cost
without bound while saying little about where the capacity ends, so a quartile is asked instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.capacity.evidence import FIRST_LOOK, chances, find, look_counts
from analysis.capacity.posterior import Posterior, posterior
from analysis.capacity.trial import FAILS, HOLDS, INVALID, UNDECIDED, Count, Oracle, Promise, Trial

# How a search ended.
FOUND, BUDGET, UNMEETABLE, CLIENT, NOT_MEASURED, DIED, INTERRUPTED = (
    "found", "budget", "unmeetable", "client_limit", "not_measured", "died", "interrupted",
)  # fmt: skip
MOST_HALVINGS = 8
MOST_DOUBLINGS = 20
LARGEST_PART = 0.25
_LEAST_S = 10.0  # with less left no trial begins
_NEAR = 1.15  # how close below the load tester's own limit is close enough


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched. ``within``: done when the interval's ends lie within this share of the rate.

    ``start``: the first rate; ``longest``: the most requests of a trial that count; ``budget``: the most requests in
    all (or None), after which no trial begins; ``budget_s`` the same in seconds, of which no trial takes more than
    ``LARGEST_PART``; ``first_look``: after so many measured requests a trial is looked at for the first time.
    """

    promises: tuple[Promise, ...]
    start: float
    confidence: float = 0.95
    within: float = 0.05
    longest: int = 8000
    budget: int | None = None
    budget_s: float | None = None
    first_look: int = FIRST_LOOK

    def looks(self, rate: float, spent_s: float = 0.0) -> tuple[int, ...]:
        """When a trial at ``rate`` is looked at, with so much of the budget gone."""
        most = self.longest
        if self.budget_s is not None:
            left = min(self.budget_s * LARGEST_PART, self.budget_s - spent_s)
            most = min(most, max(int(rate * left), self.first_look))
        return look_counts(most, self.first_look)


def next_rate(goal: Goal, trials: Sequence[Trial]) -> float | str:
    """The rate to try next, or why there is none: one of the words above."""
    if not trials:
        return goal.start
    last = trials[-1].outcome
    if last.interrupted or last.died:
        return INTERRUPTED if last.interrupted else DIED
    if _spent(goal, trials):
        return BUDGET
    if last.invalid:
        return _after_invalid(trials)
    told = [trial for trial in trials if trial.verdict != INVALID]
    wider = _bracket(goal, told)
    if wider is not None:
        beyond = _twice_invalid(trials)
        limited = not isinstance(wider, str) and beyond and wider >= min(beyond)
        return _below_invalid(trials, told) if limited else wider
    known = posterior(told)
    if spread(known, goal.confidence) <= goal.within:
        return FOUND
    return _ask(known, told)


def spread(known: Posterior, confidence: float) -> float:
    """How far the interval's ends lie from the median, as a share of it; the farther one."""
    low, high = known.interval(confidence)
    middle = known.quantile(0.5)
    return max(1 - low / middle, high / middle - 1)


def search(goal: Goal, oracle: Oracle, trials: Sequence[Trial] = ()) -> tuple[list[Trial], str]:
    """Every trial until the search ends, and how it ended; ``trials`` are those that were run before."""
    done = list(trials)
    while not isinstance(rate := next_rate(goal, done), str):
        done.append(run_trial(goal, oracle, rate, len(done) + 1, sum(trial.outcome.seconds for trial in done)))
    return done, rate


def run_trial(goal: Goal, oracle: Oracle, rate: float, number: int, spent_s: float = 0.0) -> Trial:
    """One trial, only as long as its verdict needs."""
    looks = goal.looks(rate, spent_s)
    counted = chances(goal.promises, looks)

    def enough(counts: Sequence[Count]) -> bool:
        return find(goal.promises, counts, counted).verdict != UNDECIDED

    outcome = oracle.run(rate, looks, enough, number)
    return Trial(rate, outcome, find(goal.promises, outcome.counts, counted))


def _spent(goal: Goal, trials: Sequence[Trial]) -> bool:
    if goal.budget is not None and sum(trial.outcome.requests for trial in trials) >= goal.budget:
        return True
    if goal.budget_s is None:
        return False
    return sum(trial.outcome.seconds for trial in trials) > goal.budget_s - _LEAST_S


def _after_invalid(trials: Sequence[Trial]) -> float | str:
    """An invalid trial is repeated once; then it was no measurement, or the load tester's own limit is near."""
    last = trials[-1]
    if last.rate not in _twice_invalid(trials):
        return last.rate
    told = [trial for trial in trials if trial.verdict != INVALID]
    return _below_invalid(trials, told) if last.outcome.client_limit and told else NOT_MEASURED


def _twice_invalid(trials: Sequence[Trial]) -> set[float]:
    tried = [trial.rate for trial in trials if trial.outcome.invalid]
    return {rate for rate in tried if tried.count(rate) > 1}


def _below_invalid(trials: Sequence[Trial], told: Sequence[Trial]) -> float | str:
    """Between what held and what the load tester could not do; CLIENT once that is narrow, or nothing held."""
    beyond = min(_twice_invalid(trials))
    held = max((trial.rate for trial in told if trial.rate < beyond), default=0.0)
    return CLIENT if beyond <= held * _NEAR or not held else math.sqrt(held * beyond)


def _bracket(goal: Goal, told: Sequence[Trial]) -> float | str | None:
    """Twice the highest rate that held, or half the lowest that did not; None once there is one of each.

    Where a trial could not be decided the capacity is near: its neighbours at half and twice the rate decide.
    """
    low, high = min(trial.rate for trial in told), max(trial.rate for trial in told)
    lowest, highest = (next(trial for trial in told if trial.rate == rate) for rate in (low, high))
    if highest.finding.leaning == HOLDS:
        return highest.rate * 2 if high < goal.start * 2**MOST_DOUBLINGS else CLIENT
    if lowest.finding.leaning == FAILS:
        return UNMEETABLE if low <= goal.start / 2**MOST_HALVINGS or _fails_alone(goal, lowest) else lowest.rate / 2
    return None


def _fails_alone(goal: Goal, trial: Trial) -> bool:
    """Whether a promise fails whatever the load: too many values are beyond its limit even without all that overlap.

    With N requests in flight on average at most a share N of arrivals finds another one there, and as many are joined.
    """
    at = trial.finding.promise
    count = trial.outcome.counts[at]
    alone = count.over / count.count - 2 * trial.outcome.in_flight if count.count else 0.0
    return alone > goal.promises[at].share


def _ask(known: Posterior, told: Sequence[Trial]) -> float:
    """The median, or the quartile farthest from what could not be decided."""
    blind = [math.log(trial.rate) for trial in told if trial.verdict == UNDECIDED]
    low, high = known.quantile(0.25), known.quantile(0.75)
    radius = math.log(high / low) / 4
    middle = known.quantile(0.5)
    if all(abs(math.log(middle) - at) > radius for at in blind):
        return middle
    return max((low, high), key=lambda rate: min(abs(math.log(rate) - at) for at in blind))
