"""Which rate to try next and for how long, and when to stop.

1. *Ceiling*: brief trials, each at twice the rate of the one before, until the server completes requests more slowly
   than they come. What it completes then is its ceiling.
2. *Curve*: a few trials below, around where the curve (curve.py) puts the capacity by then.
3. *Hold*: one trial at the highest rate at which a sequential test can prove in the time left that every SLO holds.
   What that takes is known from the trials so far: they show how many requests are worth one independent one. If it
   could not be decided, a lower rate is tried, where requests are worth more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapmeter.analysis.capacity.curve import Ceiling, Posterior, TrialLevel, fit, least, speeds_of
from gapmeter.analysis.capacity.trial import (
    FIRST_LOOK,
    SURE,
    Ask,
    Count,
    Oracle,
    Trial,
    chance_if_broken,
    chance_if_kept,
    fails_at_any_rate,
    fails_too_many,
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
    INVALID_TRIAL,
    NOT_MEASURED,
    UNDECIDED,
    UNMEETABLE,
    Ended,
)
from gapmeter.analysis.stats.estimate import MOST_SURE
from gapmeter.analysis.stats.exact import chance_of_so_few_in_bursts
from gapmeter.scenarios.slo import Slo

MOST_HALVINGS = 8
_REFUSING = 3  # rates, at each of which every request was refused: a lower one would be, too
MOST_DOUBLINGS = 20
_UP = 4  # times a rate with too many errors, to see whether more fail there
BRIEF_S = 4.0  # of arrivals: a trial that only has to show an overload
_FAR = math.log(0.25)  # a percentile over its limit
_FEWEST = 60  # requests of such a trial
_LONGEST_BRIEF_S = 12.0
_PLENTY = 400  # requests of an overload tell the ceiling
_CURVE_PART = 0.17  # of the budget: a trial for the curve
_PLACES = (0.82, 0.98, 0.9, 1.02, 0.94)  # of the estimate: where the curve's trials lie
_BELOW = 0.72  # of the estimate, at most: where holding is tried
_STEP = 0.9
_NARROW = 0.4  # of the width asked: where a search ends before its budget
_LOWEST = 0.45  # of the estimate: a rate held below that is worth going on for
_NEAREST_CEILING = 0.97
_COLLAPSED = 0.5  # of a rate that was served without a queue: an overload that serves less tells no ceiling
_LEAST_S = 10.0  # with less left no trial begins
_NEAR = 2.0  # how close below the load tester's own limit is close enough
_CLOSE = 1.5  # times what holding takes without slow requests: near the capacity there are some


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched. ``within``: found when half the interval's width is no larger a share of the rate.

    While the budget lasts the search goes on until it is 0.4 of that, and a rate was held. ``start``: the first rate;
    ``longest``: the most requests of a trial that count; ``budget_s``: how long all trials may take; ``lost_s``: how
    long a trial takes beside the requests that count.
    """

    slos: tuple[Slo, ...]
    start: float
    confidence: float = 0.95
    within: float = 0.2
    longest: int = 40_000
    budget_s: float = 240.0
    lost_s: float = 8.0


def least_budget_s(goal: Goal) -> float:
    """What a search from the first rate takes, where the second trial overloads the server, and all goes well then.

    An overload at four times what the server can do lasts four times as long as its arrivals. Then follow two trials
    for the curve and one that is to hold.
    """
    to_hold = max(values_to_hold(slo, is_far=True) for slo in goal.slos) / goal.start
    return 5 * _brief_s(goal.start) + 2 * _LEAST_S + max(_LEAST_S, to_hold) + 5 * goal.lost_s


def next_trial(goal: Goal, trials: Sequence[Trial]) -> Ask | Ended:
    """The trial to run next, or how the search has ended."""
    if not trials:
        return _brief(goal.start)
    last = trials[-1].outcome
    if last.interrupted or last.died:
        return INTERRUPTED if last.interrupted else DIED
    if fails_at_any_rate(goal.slos, valid_of(trials)):
        return UNMEETABLE
    left_s = goal.budget_s - sum(trial.outcome.seconds for trial in trials)
    ask = _next(goal, trials, left_s) if left_s >= _LEAST_S else None
    # At a low rate even the fewest requests take long.
    if ask is None or (isinstance(ask, Ask) and ask.most / ask.rate > max(left_s, _LONGEST_BRIEF_S)):
        return _out_of_time(goal, trials)
    return ask


def _next(goal: Goal, trials: Sequence[Trial], left_s: float) -> Ask | Ended:
    """What to try in the time left, after some trial."""
    if trials[-1].outcome.invalid:
        return _after_invalid(goal, trials, left_s)
    valid = valid_of(trials)
    beyond = min(_twice_invalid(trials), default=math.inf)
    wider = _bracket(goal, valid, beyond)
    if isinstance(wider, str):
        return wider
    if wider is not None:
        return _below_invalid(goal, trials, valid, left_s) if wider >= beyond else _brief(wider)
    lost_s = float(np.median([trial.outcome.seconds - trial.outcome.measured / trial.rate for trial in valid]))
    return _narrow(goal, valid, left_s - max(goal.lost_s, lost_s))


def valid_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that were a measurement."""
    return [trial for trial in trials if trial.verdict != INVALID_TRIAL]


def posterior(goal: Goal, trials: Sequence[Trial]) -> Posterior | None:
    """Where the capacity lies by what ``trials`` found; None before one failed, was beyond a limit, or overloaded.

    None too while all lean to failing: the curve would put a place below them where its shape likes, and there may be
    none.
    """
    valid = valid_of(trials)
    kept = max((trial.rate for trial in valid if trial.outcome.served and not trial.overloaded), default=0.0)
    ceilings = [
        Ceiling(served.rate, served.error, at)
        for at, trial in enumerate(valid)
        if (served := trial.outcome.served) and served.saturated and served.rate > _COLLAPSED * kept
    ]
    most = min((trial.rate for trial in valid if trial.beyond or trial.overloaded), default=None)
    if most is None or all(trial.finding.leaning == FAILS for trial in valid):
        return None
    speeds = speeds_of(
        [trial.outcome.pace for trial in valid],
        [trial.outcome.served.rate if trial.outcome.served else trial.rate for trial in valid],
    )
    found = []
    for at, slo in enumerate(goal.slos):
        levels = [_level(trial, at, slo.allowed) for trial in valid]
        if any(math.isfinite(level.error) for level in levels):
            known = fit(levels, ceilings, slo.allowed, most, speeds)
            if not all(slo.allows(trial.outcome.lost) for trial in valid):  # no percentile, so no place on the curve
                alike = slo.metric == "itl"  # token gaps of one request are
                known = least([known, _divided(valid, levels, at, slo.allowed, most, alike=alike)])
        elif failed := [level.rate for level in levels if level.side > 0]:
            known = _divided(valid, levels, at, slo.allowed, min(failed))
        else:
            continue
        found.append(replace(known, slo=at))
    if not found:  # errors alone, and none came: the server was full
        share = goal.slos[0].allowed
        found = [_divided(valid, [_level(trial, 0, share) for trial in valid], 0, share, most)]
    return least(found)


def _divided(
    trials: Sequence[Trial], levels: Sequence[TrialLevel], at: int, share: float, high: float, *, alike: bool = True
) -> Posterior:
    """Without a curve: from the highest rate that surely holds (none: half of the lowest tried) to ``high``.

    Between them a place is as likely as what the trials found if those below it hold and those above it fail.
    ``alike``: neighbors are, and n_eff says how much; otherwise only the bursts beyond the limit are.
    """
    held = [level.rate for level in levels if level.side < 0 and level.rate < high]
    low = max(held, default=min(level.rate for level in levels) / 2)
    leans = dict[float, float]()
    for trial in trials:
        if low < trial.rate < high and not trial.overloaded:
            count = trial.outcome.counts[at]
            if not alike:
                few = chance_of_so_few_in_bursts(count.over, count.count, count.bursts or count.over, share)
                count = replace(count, n_eff=count.count, over_half=None, in_bursts=few)
            kept, broken = chance_if_kept(count, share), max(chance_if_broken(count, share), 1 - MOST_SURE)
            leans[trial.rate] = leans.get(trial.rate, 0.0) + math.log(kept / broken)
    edges = np.log([low, *sorted(leans), high])
    likely = np.cumsum([0.0, *(leans[rate] for rate in sorted(leans))])
    masses = np.diff(edges) * np.exp(likely - likely.max())
    return Posterior(edges, masses / masses.sum(), 0.0, high)


def run_trial(goal: Goal, oracle: Oracle, ask: Ask, number: int) -> Trial:
    """One trial, only as long as what it is for needs."""
    first = max(FIRST_LOOK, math.ceil(ask.rate * (1.0 if ask.aim == "ceiling" else 2.0)))
    looks = plan_looks(goal.slos, ask.most, first)

    def enough(at: int, counts: Sequence[Count]) -> bool:
        verdict = find(goal.slos, counts, looks[at]).verdict
        if verdict == FAILS:
            return ask.aim != "ceiling" or looks[at].count >= _PLENTY
        return ask.aim == "hold" and (verdict == HOLDS or hopeless(goal.slos, counts, looks[at], looks[-1]))

    outcome = oracle.run(ask, [look.count for look in looks], enough, number)
    return Trial(ask.rate, outcome, find(goal.slos, outcome.counts, looks[outcome.looks - 1]), ask.most)


def held_rate(trials: Sequence[Trial]) -> float | None:
    """The highest rate at which every SLO surely held, below every rate that surely failed."""
    failed = min((trial.rate for trial in trials if trial.verdict == FAILS), default=math.inf)
    return max((t.rate for t in trials if t.verdict == HOLDS and t.rate < failed and not t.overloaded), default=None)


def requests_to_hold(goal: Goal, trial: Trial) -> float:
    """How many requests a trial at this one's rate takes to hold, if none is slow: what one of them was worth."""
    outcome = trial.outcome
    needed = [
        values_to_hold(slo, is_far=count.over_half is not None and not count.over) * outcome.measured / count.n_eff
        for slo, count in zip(goal.slos, outcome.counts, strict=True)
        if count.n_eff
    ]
    return max(needed, default=math.inf)


def _level(trial: Trial, at: int, share: float) -> TrialLevel:
    """What a trial says of one percentile; without a value, only on which side; of a queue that grows, if it fails.

    A limit on token times may be kept there too, but such a rate is none that the server holds.
    """
    count, full = trial.outcome.counts[at], trial.overloaded
    worth = trial.outcome.measured / trial.outcome.bunched
    if count.log_level is not None and not full:
        return TrialLevel(trial.rate, *count.log_level, worth)
    wrong = 1 - SURE
    holds = not full and chance_if_broken(count, share) <= wrong
    side = 1 if chance_if_kept(count, share) <= wrong else -1 if holds else 0
    return TrialLevel(trial.rate, 0.0, math.inf, worth, side)


def _brief_s(rate: float) -> float:
    return min(max(BRIEF_S, _FEWEST / rate), _LONGEST_BRIEF_S)


def _brief(rate: float) -> Ask:
    return Ask(rate, max(math.ceil(rate * _brief_s(rate)), 2 * FIRST_LOOK), "ceiling")


def _is_brief(trial: Trial) -> bool:
    """Whether it was only to show an overload, and could decide nothing else."""
    return trial.most <= _brief(trial.rate).most


def _narrow(goal: Goal, valid: Sequence[Trial], left_s: float) -> Ask | Ended:
    """Trials for the curve and one that is to hold, until the interval is narrow and a rate was held.

    ``left_s`` of load.
    """
    if (known := posterior(goal, valid)) is None:
        return BUDGET
    middle, held, spread = known.quantile(0.5), held_rate(valid), _spread(goal, valid, known)
    long = [trial for trial in valid if trial.outcome.measured > 1.5 * _brief(trial.rate).most]
    seconds = min(_CURVE_PART * goal.budget_s, left_s)
    if len(long) >= 2 and (held is None or held < _LOWEST * middle) and (ask := _hold(goal, valid, middle, left_s)):
        return ask
    if seconds < _LEAST_S or (len(long) >= 2 and spread <= _NARROW * goal.within):
        return FOUND if spread <= goal.within else BUDGET
    rate = min(middle * _PLACES[len(long) % len(_PLACES)], known.ceiling * _NEAREST_CEILING)
    return Ask(rate, _most(goal, rate, seconds))


def _out_of_time(goal: Goal, trials: Sequence[Trial]) -> Ended:
    """Found, or not; the load tester's own limit where nothing below it failed: more time would not help then."""
    known = posterior(goal, trials)
    if known is None:
        held = [t.rate if t.finding.leaning == HOLDS else math.inf for t in valid_of(trials)]
        limited = max((t.rate for t in trials if t.outcome.client_limit), default=0.0)
        return CLIENT if limited > max(held, default=0.0) else BUDGET
    return FOUND if _spread(goal, valid_of(trials), known) <= goal.within else BUDGET


def _spread(goal: Goal, valid: Sequence[Trial], known: Posterior) -> float:
    """Half the interval's width over the rate; infinite where its lower end is in doubt."""
    high = known.interval(goal.confidence)[1]
    return math.inf if fails_too_many(goal.slos, valid, high) else known.spread(goal.confidence)


def _hold(goal: Goal, valid: Sequence[Trial], middle: float, left_s: float) -> Ask | None:
    """The highest rate at which holding fits into the time, below what failed and what could not be decided."""
    if left_s < _LEAST_S:
        return None
    blind = [t.rate for t in valid if t.verdict == FAILS or (t.verdict == UNDECIDED and not _is_brief(t))]
    rate = min([middle * _BELOW, *(rate * _STEP for rate in blind)])
    while rate >= _LOWEST * middle:
        needed_s = _CLOSE * _requests(goal, valid, rate) / rate
        if needed_s <= left_s:
            return Ask(rate, _most(goal, rate, min(left_s, 2 * needed_s)), "hold")
        rate *= _STEP
    return None


def _most(goal: Goal, rate: float, seconds: float) -> int:
    return min(goal.longest, max(int(rate * seconds), _brief(rate).most + 1))


def _requests(goal: Goal, valid: Sequence[Trial], rate: float) -> float:
    """What holding at ``rate`` takes: on the line through the nearest trials, on logarithms of both."""
    longest = {trial.rate: trial for trial in sorted(valid, key=lambda t: t.outcome.measured)}
    points = [(math.log(at), math.log(max(requests_to_hold(goal, t), 1.0))) for at, t in sorted(longest.items())
              if t.finding.leaning == HOLDS]  # fmt: skip
    if not points:
        return 0.0
    rates, needed = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(rate), rates, needed)))


def _after_invalid(goal: Goal, trials: Sequence[Trial], left_s: float) -> Ask | Ended:
    """An invalid trial is repeated once; then it was no measurement, or the load tester's own limit is near."""
    last = trials[-1]
    if last.rate not in _twice_invalid(trials):
        return _brief(last.rate)
    if not last.outcome.client_limit:
        return NOT_MEASURED
    if valid := valid_of(trials):
        return _below_invalid(goal, trials, valid, left_s)
    return _brief(last.rate / 2) if last.rate > goal.start / 2**MOST_HALVINGS else NOT_MEASURED


def _twice_invalid(trials: Sequence[Trial]) -> set[float]:
    tried = [trial.rate for trial in trials if trial.outcome.invalid]
    return {rate for rate in tried if tried.count(rate) > 1}


def _below_invalid(goal: Goal, trials: Sequence[Trial], valid: Sequence[Trial], left_s: float) -> Ask | Ended:
    """Between what held and what the load tester could not do; CLIENT once that is narrow and one rate surely held.

    While none held, below what failed. A rate between them that a brief trial left undecided gets a longer trial.
    """
    beyond = min(_twice_invalid(trials))
    best = max((t.rate for t in valid if t.rate < beyond and t.finding.leaning == HOLDS), default=0.0)
    if not best:
        lower = _bracket(goal, valid, beyond)
        if isinstance(lower, str):
            return lower
        return _brief(lower) if lower and lower < beyond else CLIENT
    if above := [t for t in valid if best < t.rate < beyond]:  # all lean to failing
        lowest = min(above, key=lambda t: (t.rate, -t.most))
        beyond = lowest.rate
        if lowest.verdict == UNDECIDED and _is_brief(lowest):
            return Ask(beyond, _most(goal, beyond, min(_CURVE_PART * goal.budget_s, left_s)))
    if beyond > best * _NEAR * (1 + 1e-9):
        return _brief(math.sqrt(best * beyond))
    tried = any(t.rate == best and not _is_brief(t) for t in valid)
    return CLIENT if tried or held_rate(valid) else Ask(best, _most(goal, best, left_s / 2), "hold")


def _bracket(goal: Goal, valid: Sequence[Trial], beyond: float) -> float | Ended | None:
    """The next brief trial's rate, or how it ends without a bracket; None once there is one.

    Upwards until the server is full or the SLOs fail, four times as high where all percentiles were far below their
    limits, else twice; then down to a rate that does not fail. Where the first has too many errors, first up all the
    same, below what is ``beyond`` the load tester: whether more fail there.
    """
    lowest = min(valid, key=lambda trial: (trial.rate, -trial.outcome.measured))  # of a rate the longest trial
    highest = max(valid, key=lambda trial: (trial.rate, trial.outcome.measured))
    full = any(trial.overloaded for trial in valid)
    if not full and not highest.beyond:
        pairs = zip(goal.slos, highest.outcome.counts, strict=True)
        levels = [count.log_level for slo, count in pairs if slo.metric != "errors"]
        far = bool(levels) and all(level is not None and level[0] < _FAR for level in levels)
        return highest.rate * (4 if far else 2) if highest.rate < goal.start * 2**MOST_DOUBLINGS else CLIENT
    if lowest.finding.leaning == HOLDS and not lowest.overloaded:
        return None
    refuses = len({t.rate for t in valid}) >= _REFUSING and all(trial.outcome.refused_all for trial in valid)
    if lowest.rate <= goal.start / 2**MOST_HALVINGS or refuses or _fails_alone(goal, lowest):
        return UNMEETABLE
    at, alone = lowest.finding.slo, _UP * lowest.rate
    count = lowest.outcome.counts[at]
    if goal.slos[at].metric == "errors" and highest.rate < alone < beyond and 2 * count.over < count.count:
        return alone
    served = lowest.outcome.served
    return min(lowest.rate / 2, served.rate * 0.6 if lowest.overloaded and served else math.inf)


def _fails_alone(goal: Goal, trial: Trial) -> bool:
    """Whether an SLO surely fails whatever the load: too many values are beyond its limit without all that overlap.

    With N requests in flight on average at most a share N of arrivals finds another one there, and as many are joined.
    """
    at = trial.finding.slo
    count = trial.outcome.counts[at]
    alone = count.over / count.count - 2 * trial.outcome.in_flight if count.count else 0.0
    return trial.verdict == FAILS and not goal.slos[at].allows(alone)
