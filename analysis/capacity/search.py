"""Which rate to try next and for how long, and when to stop.

1. *Bracket*: short trials, doubling or halving, then halving the gap. A server that is overloaded shows it within
   seconds; one that has not failed by then leans to holding, which is enough to go up.
2. *Hold*: one long trial below, at a rate where what it takes to hold (hundreds of independent requests; the trials so
   far told how many requests are worth one independent one) fits into its time. Where it could not be decided, lower,
   where requests are worth more.
3. *Probabilistic bisection* on log rate with what is left: the posterior's median, unless a trial close by could not be
   decided or none there could be in the time that is left: then a quartile.

The posterior: where the capacity lies, as a density over the logarithm of the rate (probabilistic bisection).

A trial at rate x that says "holds" with confidence p multiplies the density above x by 2p and that below by 2(1 - p);
one that says "fails", the other way round (Horstein 1963; Waeber, Frazier and Henderson 2013, Bisection search with
noisy responses, SIAM J. Control Optim. 51). The prior is uniform over the logarithm, from one doubling below the
lowest rate tried to one above the highest. Such a density is constant between neighbouring rates that were tried, so
it is kept exactly: its steps and their masses, no grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.trial import (
    FIRST_LOOK,
    Count,
    Oracle,
    Promise,
    Trial,
    find,
    hopeless,
    plan_looks,
    values_to_hold,
)
from gapmeter.analysis.results.capacity import (
    BUDGET,
    CLIENT,
    DIED,
    FAILS,
    FOUND,
    HOLDS,
    INTERRUPTED,
    INVALID,
    NOT_MEASURED,
    UNDECIDED,
    UNMEETABLE,
    Ended,
)

REACH = math.log(2)


@dataclass(frozen=True, slots=True)
class Posterior:
    """``edges``: logarithms of rates, shape (k + 1,), increasing; ``masses``: probability between them, shape (k,)."""

    edges: Floats
    masses: Floats

    def quantile(self, q: float) -> float:
        """The rate below which the capacity lies with probability ``q``."""
        below = np.concatenate([[0.0], np.cumsum(self.masses)])
        return float(np.exp(np.interp(q, below / below[-1], self.edges)))

    def interval(self, confidence: float) -> tuple[float, float]:
        """The central interval that holds the capacity with this probability."""
        tail = (1 - confidence) / 2
        return self.quantile(tail), self.quantile(1 - tail)


def posterior(trials: Sequence[Trial]) -> Posterior:
    """The density after ``trials``; those that are invalid say nothing. Raises ValueError without a valid one."""
    valid = [trial for trial in trials if trial.verdict != INVALID]
    if not valid:
        raise ValueError("no trial has said anything yet")
    tried = np.unique(np.log([trial.rate for trial in valid]))
    edges = np.concatenate([[tried[0] - REACH], tried, [tried[-1] + REACH]])
    middles = (edges[:-1] + edges[1:]) / 2
    weights = np.log(np.diff(edges))
    for trial in valid:
        sure = trial.finding.confidence
        above = sure if trial.finding.leaning == HOLDS else 1 - sure
        weights += np.where(middles > math.log(trial.rate), math.log(above), math.log(1 - above))
    masses = np.exp(weights - weights.max())
    return Posterior(edges, masses / masses.sum())


MOST_HALVINGS = 8
MOST_DOUBLINGS = 20
SHORT_PART = 0.03  # of the budget: a trial that only has to show an overload
LARGEST_PART = 0.5  # of what is left: a trial that is to decide
_SHORTEST_S = 3.0
_SPAN_S = 2.0  # of arrivals before the first look: a hiccup of the machine is no verdict
_LEAST_S = 10.0  # with less left no trial begins
_NEAR = 2.0  # how close below the load tester's own limit is close enough
_NARROW = 1.3  # a bracket of short trials
_BELOW = 0.85  # of the highest rate that did not fail: where holding is tried
_STEP = 0.9
_REACHED = 0.97  # of the highest rate that held: an interval that begins below wants a surer one
_SAME = 0.015  # of the logarithm: rates that are one
_CLOSE = 2.0  # times what holding takes without slow requests: near the capacity there are some
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """A trial to run: ``rate`` per second, at most ``most`` requests that count."""

    rate: float
    most: int


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched. ``within``: done when the interval's ends lie within this share of the rate.

    ``start``: the first rate; ``longest``: the most requests of a trial that count; ``budget_s``: how long all trials
    may take; ``lost_s``: how long a trial takes beside the requests that count; ``first_look``: after so many measured
    requests a trial is looked at for the first time.
    """

    promises: tuple[Promise, ...]
    start: float
    confidence: float = 0.95
    within: float = 0.05
    longest: int = 40_000
    budget_s: float = 420.0
    lost_s: float = 8.0
    first_look: int = FIRST_LOOK


def next_trial(goal: Goal, trials: Sequence[Trial]) -> Ask | Ended:
    """The trial to run next, or how the search has ended."""
    if not trials:
        return _short(goal, goal.start)
    last = trials[-1].outcome
    if last.interrupted or last.died:
        return INTERRUPTED if last.interrupted else DIED
    if _left(goal, trials) < _LEAST_S:
        return BUDGET
    if last.invalid:
        return _after_invalid(goal, trials)
    valid = [trial for trial in trials if trial.verdict != INVALID]
    wider = _bracket(goal, valid)
    if wider is not None:
        beyond = _twice_invalid(trials)
        if isinstance(wider, str):
            return wider
        return _below_invalid(goal, trials, valid) if beyond and wider >= min(beyond) else _short(goal, wider)
    known = posterior(valid)
    if _decided(valid, HOLDS) and _decided(valid, FAILS) and spread(known, goal.confidence) <= goal.within:
        return FOUND
    lost = [trial.outcome.seconds - trial.outcome.measured / trial.rate for trial in valid]  # beside what counts
    return _decide(goal, valid, known, _left(goal, trials) - max(goal.lost_s, float(np.median(lost))))


def spread(known: Posterior, confidence: float) -> float:
    """How far the interval's ends lie from the median, as a share of it; the farther one."""
    low, high = known.interval(confidence)
    middle = known.quantile(0.5)
    return max(1 - low / middle, high / middle - 1)


def search(goal: Goal, oracle: Oracle, trials: Sequence[Trial] = ()) -> tuple[list[Trial], Ended]:
    """Every trial until the search ends, and how it ended; ``trials`` are those that were run before."""
    done = list(trials)
    while not isinstance(ask := next_trial(goal, done), str):
        done.append(run_trial(goal, oracle, ask, len(done) + 1))
    return done, ask


def run_trial(goal: Goal, oracle: Oracle, ask: Ask, number: int) -> Trial:
    """One trial, only as long as its verdict needs, or can still come."""
    first = max(goal.first_look, math.ceil(ask.rate * _SPAN_S))
    looks = plan_looks(goal.promises, ask.most, first)

    def enough(at: int, counts: Sequence[Count]) -> bool:
        decided = find(goal.promises, counts, looks[at]).verdict != UNDECIDED
        return decided or hopeless(goal.promises, counts, looks[at], looks[-1])

    outcome = oracle.run(ask.rate, [look.count for look in looks], enough, number)
    return Trial(ask.rate, outcome, find(goal.promises, outcome.counts, looks[outcome.looks - 1]))


def requests_to_hold(goal: Goal, trial: Trial) -> float:
    """How many requests a trial at this one's rate takes to hold, if none is slow: what one of them was worth."""
    outcome = trial.outcome
    needed = [
        values_to_hold(promise, is_far=count.over_half is not None and not count.over) * outcome.measured / count.n_eff
        for promise, count in zip(goal.promises, outcome.counts, strict=True)
        if count.n_eff
    ]
    return max(needed, default=math.inf)


def _left(goal: Goal, trials: Sequence[Trial]) -> float:
    return goal.budget_s - sum(trial.outcome.seconds for trial in trials)


def _short(goal: Goal, rate: float) -> Ask:
    seconds = max(goal.budget_s * SHORT_PART, _SHORTEST_S)
    return Ask(rate, min(goal.longest, max(math.ceil(rate * seconds), 2 * goal.first_look)))


def _decide(goal: Goal, valid: Sequence[Trial], known: Posterior, left_s: float) -> Ask | Ended:
    """Between a rate that leans to holding and one that leans to failing."""
    held, failed = _decided(valid, HOLDS), _decided(valid, FAILS)
    low = max((t.rate for t in valid if t.finding.leaning == HOLDS), default=0.0)
    high = min((t.rate for t in valid if t.verdict == FAILS), default=math.inf)
    if not failed:
        return _short(goal, max(t.rate for t in valid) * 2)
    if not held and low < high and high / low > _NARROW:
        return _short(goal, math.sqrt(low * high))
    seconds = left_s * (1.0 if left_s < 2 * goal.lost_s else LARGEST_PART)
    if not held:
        return _hold(goal, valid, min(low, high), seconds)
    return _refine(goal, valid, known, seconds, left_s)


def _refine(goal: Goal, valid: Sequence[Trial], known: Posterior, seconds: float, left_s: float) -> Ask | Ended:
    """The posterior's median or quartile, if holding there fits into the time left; else what still moves an end.

    That is a surer hold below the highest (where requests are worth more), while the interval reaches below it, then
    one long trial at the upper quartile.
    """
    middle, held = _ask(known, valid), max(_decided(valid, HOLDS))
    options = [(middle, _CLOSE)]
    if known.interval(goal.confidence)[0] < held * _REACHED:
        options.append((held * _BELOW, 1.0))
    for rate, times in options:
        needed_s = times * _requests(goal, valid, rate) / rate
        ask = Ask(rate, _most(goal, rate, max(min(seconds, left_s), min(2 * needed_s, left_s))))
        if needed_s <= left_s and not _again(valid, ask):
            return ask
    ask = Ask(known.quantile(0.75), _most(goal, known.quantile(0.75), left_s))
    return BUDGET if left_s < goal.lost_s or _again(valid, ask) else ask


def _again(valid: Sequence[Trial], ask: Ask) -> bool:
    """Whether a trial at about this rate, at least half as long, could not be decided."""
    return any(
        trial.verdict == UNDECIDED
        and abs(math.log(trial.rate / ask.rate)) < _SAME
        and trial.outcome.measured >= ask.most / 2
        for trial in valid
    )


def _hold(goal: Goal, valid: Sequence[Trial], highest: float, seconds: float) -> Ask:
    """The highest rate at which holding fits into the time, below what did not fail and what could not be decided."""
    blind = [t.rate for t in valid if t.verdict == UNDECIDED and t.outcome.measured > 2 * _short(goal, t.rate).most]
    top = min([highest * _BELOW, *(at * _BELOW for at in blind)])
    rates = [top * _STEP**k for k in range(_STEPS)]
    needed_s = [_requests(goal, valid, rate) / rate for rate in rates]
    rate = next((rate for rate, needed in zip(rates, needed_s, strict=True) if needed <= seconds), None)
    if rate is None:
        rate = rates[needed_s.index(min(needed_s))]
    return Ask(rate, _most(goal, rate, seconds))


def _most(goal: Goal, rate: float, seconds: float) -> int:
    return min(goal.longest, max(int(rate * seconds), 2 * goal.first_look))


def _requests(goal: Goal, valid: Sequence[Trial], rate: float) -> float:
    """What holding at ``rate`` takes: on the line through the nearest trials, on logarithms of both."""
    longest: dict[float, Trial] = {}
    for trial in sorted(valid, key=lambda t: t.outcome.measured):
        longest[trial.rate] = trial
    points = [(math.log(at), math.log(max(requests_to_hold(goal, t), 1.0))) for at, t in sorted(longest.items())
              if t.finding.leaning == HOLDS]  # fmt: skip
    if not points:
        return 0.0
    rates, needed = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(rate), rates, needed)))


def _decided(valid: Sequence[Trial], verdict: str) -> list[float]:
    return [trial.rate for trial in valid if trial.verdict == verdict]


def _after_invalid(goal: Goal, trials: Sequence[Trial]) -> Ask | Ended:
    """An invalid trial is repeated once; then it was no measurement, or the load tester's own limit is near."""
    last = trials[-1]
    if last.rate not in _twice_invalid(trials):
        return _short(goal, last.rate)
    if not last.outcome.client_limit:
        return NOT_MEASURED
    valid = [trial for trial in trials if trial.verdict != INVALID]
    if valid:
        return _below_invalid(goal, trials, valid)
    return _short(goal, last.rate / 2) if last.rate > goal.start / 2**MOST_HALVINGS else NOT_MEASURED


def _twice_invalid(trials: Sequence[Trial]) -> set[float]:
    tried = [trial.rate for trial in trials if trial.outcome.invalid]
    return {rate for rate in tried if tried.count(rate) > 1}


def _below_invalid(goal: Goal, trials: Sequence[Trial], valid: Sequence[Trial]) -> Ask | Ended:
    """Between what held and what the load tester could not do; CLIENT once that is narrow and one rate surely held."""
    beyond = min(_twice_invalid(trials))
    best = max((t.rate for t in valid if t.rate < beyond and t.finding.leaning == HOLDS), default=0.0)
    if not best:
        return CLIENT
    if beyond > best * _NEAR * (1 + 1e-9):
        return _short(goal, math.sqrt(best * beyond))
    longer = Ask(best, _most(goal, best, LARGEST_PART * _left(goal, trials)))
    return CLIENT if _decided(valid, HOLDS) or _again(valid, longer) else longer


def _bracket(goal: Goal, valid: Sequence[Trial]) -> float | Ended | None:
    """Twice the highest rate that leans to holding, or half the lowest that fails; None once there is one of each."""
    low, high = min(trial.rate for trial in valid), max(trial.rate for trial in valid)
    lowest, highest = (next(trial for trial in valid if trial.rate == rate) for rate in (low, high))
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


def _ask(known: Posterior, valid: Sequence[Trial]) -> float:
    """The median, or the quartile farthest from what could not be decided."""
    blind = [math.log(trial.rate) for trial in valid if trial.verdict == UNDECIDED]
    low, high = known.quantile(0.25), known.quantile(0.75)
    radius = math.log(high / low) / 4
    middle = known.quantile(0.5)
    if all(abs(math.log(middle) - at) > radius for at in blind):
        return middle
    return max((low, high), key=lambda rate: min(abs(math.log(rate) - at) for at in blind))
