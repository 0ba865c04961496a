"""One trial of a capacity search: a rate, what its requests said about each SLO, who can run it, and how sure it is.

What it says holds although the trial stops as soon as it is decided.

"p99 <= limit" says that at most 1 % of values exceed the limit. How likely are the exceedances found if the opposite
were true? Few of them: an exact binomial p-value, with n_eff in place of n, since neighbors in a queue are alike. Many:
by the bursts that they came in (``chance_of_such_bursts``); n_eff would know how alike they are in this trial, not in
one that keeps the SLO. All SLOs hold only if each does, so the weakest counts (an intersection-union test,
Berger 1982); one that fails suffices, so the strongest counts, times the number of SLOs (Bonferroni).

*Far below the limit* less is needed (stats.exact). This way is given a quarter of the trial's chance to be
wrong, the plain one the rest.

*A queue that grows.* A server that completes requests more slowly than they are asked for has no steady state, and once
its latest values are beyond the limit they stay there (``sample.chance_if_stable``). This has two fifths of the chance.

*Optional stopping.* A trial that is looked at often and stopped when it looks decided would be wrong more often than a
single test. The looks are therefore fixed before it starts, and each has a share of the chance to be wrong: its
p-values are divided by that share. By Bonferroni's inequality, which asks nothing of the dependence between looks, the
chance that *any* look claims a confidence of c for the wrong side is at most 1 - c, whenever the trial is stopped.
Early looks find an overload, although they have little of the chance. Holding needs hundreds of independent values: it
has three looks, and half of its chance at the last. On top of this chance comes that of ``_fails_at_once``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from scipy import special

from gapmeter.analysis.capacity.curve import Pace
from gapmeter.analysis.capacity.sample import Served
from gapmeter.analysis.results.capacity import FAILS, HOLDS, INVALID_TRIAL, UNDECIDED, Leaning, TrialVerdict
from gapmeter.analysis.stats.estimate import MOST_SURE
from gapmeter.analysis.stats.exact import FEWEST_FAR, HALF_TIMES, chance_far_below, chance_of_so_few, far_applies
from gapmeter.scenarios.slo import Slo


@dataclass(frozen=True, slots=True)
class Count:
    """What a trial says about one SLO: ``over`` of ``count`` values exceed its limit; worth ``n_eff`` values.

    ``over_half`` exceed half of the limit (None: not asked). ``stable``: how likely a queue that does not grow is to
    complete requests so slowly. ``bursts``: in how many the exceedances came (None: each alone).
    ``log_level``: the logarithm of the percentile over its limit, with its standard error (None: it has none).
    ``in_doubt``: so many of the others may exceed it as well, and count where the SLO is to hold: requests that
    were sent a second time, since the server may have dropped them. ``in_bursts``: of errors, how likely so few in so
    few bursts are where the SLO is broken.
    """

    over: float
    count: int
    n_eff: float
    over_half: float | None = None
    stable: float = 1.0
    bursts: int | None = None
    log_level: tuple[float, float] | None = None
    in_doubt: float = 0.0
    in_bursts: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A trial's verdict and how sure it is: between 0.5 (says nothing) and 1.

    ``verdict`` is HOLDS, FAILS or UNDECIDED, ``leaning`` the side of an undecided one (HOLDS or FAILS), ``slo`` the
    number of the SLO that decided: the one that fails most surely, or that holds least surely.
    """

    verdict: TrialVerdict
    confidence: float
    leaning: Leaning
    slo: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an oracle hands back: the counts after the last request, one for each SLO, and what the trial cost.

    ``requests`` counts all that were issued, the warm-up's too; ``measured`` those that count. ``good`` of ``measured``
    kept every limit themselves; ``good_n_eff`` what they are worth. ``in_flight`` is the mean number of requests in
    flight (infinite: unknown); ``lost`` the share of ``measured`` that failed. ``invalid`` is why it is no measurement,
    "" if it is one; ``client_limit`` when that is the load tester's own limit. ``died``: the server did, or cannot be
    reached. ``served`` and ``pace``: None where too few came. ``refused_all``: the server answered every request with
    an error, which no queue explains. ``bunched``: by what factor arrivals in bursts have fewer, and longer, spells of
    waiting than Poisson's.
    """

    counts: tuple[Count, ...]
    requests: int
    measured: int
    seconds: float
    good: int
    good_n_eff: float
    looks: int = 1
    served: Served | None = None
    pace: Pace | None = None
    in_flight: float = math.inf
    lost: float = 0.0
    invalid: str = ""
    client_limit: bool = False
    died: str = ""
    interrupted: bool = False
    name: str = ""
    refused_all: bool = False
    bunched: float = 1.0


@dataclass(frozen=True, slots=True)
class Trial:
    """An outcome at a rate (requests per second), with what it was found to say. ``most``: the requests asked for."""

    rate: float
    outcome: Outcome
    finding: Finding
    most: int

    @property
    def verdict(self) -> TrialVerdict:
        """HOLDS, FAILS, UNDECIDED or INVALID."""
        return INVALID_TRIAL if self.outcome.invalid or self.outcome.died else self.finding.verdict

    @property
    def overloaded(self) -> bool:
        """Whether the server completed requests more slowly than they came."""
        return self.outcome.served is not None and self.outcome.served.saturated

    @property
    def beyond(self) -> bool:
        """Whether it fails, or has all values beyond a limit: of a median that proves nothing, but asks for no more."""
        count = self.outcome.counts[self.finding.slo]
        return self.verdict == FAILS or (self.finding.leaning == FAILS and 0 < count.count == count.over)


Enough = Callable[[int, Sequence[Count]], bool]  # given the number of the look, from 0, and the counts then


@dataclass(frozen=True, slots=True)
class Ask:
    """A trial to run: ``rate`` per second, at most ``most`` requests that count; ``aim``: what it is for.

    ceiling: brief, to find an overload and what is served then; curve: as long as planned, unless it surely fails;
    hold: until it is decided, or hopeless.
    """

    rate: float
    most: int
    aim: Literal["ceiling", "curve", "hold"] = "curve"


class Oracle(Protocol):
    """Runs trials: on virtual servers, or for real."""

    def run(self, ask: Ask, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        """Issue arrivals at the rate asked for and look at the counts when ``looks`` requests have been measured.

        Ends at the first look at which ``enough`` says so, at the latest with the last; the counts handed back are
        those of that look, whose number from 1 is the outcome's ``looks``. ``number`` is the trial's, from 1: each has
        arrivals of its own.
        """


FIRST_LOOK = 20  # requests that suffice to find an overload
GROWTH = 1.5
SURE = 0.95  # a trial stops at this confidence
HINT = 0.8  # what an undecided trial may count for by its last look alone
_LATE = (1 / 4, 1 / 2, 1.0)  # the late looks, as shares of the longest
_LATE_HOLD = (0.25, 0.25, 0.5)  # shares of the chance to claim wrongly that all holds
_LATE_FAIL = (0.2, 0.2, 0.4)  # of the chance to claim wrongly that something fails; what is left, early
_SIDE = 0.25  # of the chance of holding, for what is proven far below the limit
_SIDE_GROWTH = 0.4  # of the chance of failing, for a queue that grows
_UNEVEN = 2.0  # how much longer some bursts are than others, beyond the exponential law
_FEWEST_BEYOND = 30  # for a limit that all exceed: a brief trial has 40 or more on average
_MARKOV, _MOST_ALLOWED = 0.01 + 1e-9, 0.05 + 1e-9  # shares that may exceed a limit: p99 and beyond; p95


@dataclass(frozen=True, slots=True)
class Look:
    """After ``count`` measured requests. Shares of the chance to claim wrongly that all SLOs hold, or one fails."""

    count: int
    hold: float
    fail: float


def plan_looks(slos: Sequence[Slo], most: int, first: int = FIRST_LOOK) -> tuple[Look, ...]:
    """When a trial is looked at: from ``first`` on, growing by half; then at a quarter, a half and all of ``most``."""
    late = sorted({max(math.ceil(most * part), min(first, most)) for part in _LATE})
    early = [*itertools.takewhile(lambda n: n < late[0], (math.ceil(first * GROWTH**k) for k in itertools.count()))]
    possible = [n >= fewest(slos) for n in late]
    held = [weight * can for weight, can in zip(_LATE_HOLD[-len(late) :], possible, strict=True)]
    failed = _LATE_FAIL[-len(late) :]
    whole_held, whole_failed = sum(held) or 1.0, 1.0 if early else sum(failed)
    looks = [Look(n, 0.0, (1 - sum(failed)) / len(early)) for n in early]
    shares = zip(late, held, failed, strict=True)
    return (*looks, *(Look(n, hold / whole_held, fail / whole_failed) for n, hold, fail in shares))


def fewest(slos: Sequence[Slo]) -> float:
    """ln(1 - SURE) / ln(1 - share): with fewer values not even none beyond the limit could hold; 299 for a p99."""
    return _log_ratio(1 - SURE, min(slo.allowed for slo in slos))


def find(slos: Sequence[Slo], counts: Sequence[Count], look: Look) -> Finding:
    """What these counts say, one for each SLO, at this look."""
    holds = [chance_if_broken(count, slo.allowed) for slo, count in zip(slos, counts, strict=True)]
    fails = [chance_if_kept(count, slo.allowed) for slo, count in zip(slos, counts, strict=True)]
    weakest, worst = holds.index(max(holds)), fails.index(min(fails))
    leaning: Leaning = HOLDS if holds[weakest] <= len(slos) * fails[worst] else FAILS
    wrong, share, slo = (
        (holds[weakest], look.hold, weakest) if leaning == HOLDS else (len(slos) * fails[worst], look.fail, worst)
    )
    confidence = min(1 - wrong / share, MOST_SURE) if share else 0.0
    beyond = [at for at in range(len(counts)) if _fails_at_once(counts[at], slos[at].allowed)]
    if beyond and not (leaning == FAILS and confidence >= SURE):
        leaning, confidence = FAILS, SURE
        # A failed request is beyond every limit: where errors are among them, they are the cause.
        slo = min(beyond, key=lambda at: (slos[at].metric != "errors", fails[at]))
    verdict: TrialVerdict = leaning if confidence >= SURE else UNDECIDED
    return Finding(verdict, max(confidence, min(1 - wrong, HINT), 0.5), leaning, slo)


def hopeless(slos: Sequence[Slo], counts: Sequence[Count], now: Look, last: Look) -> bool:
    """Whether the trial would not be decided at its last look either, if it went on like this, twice as clearly."""
    if not now.hold or now.count >= last.count:
        return False
    factor = last.count / now.count
    later = [
        Count(c.over * factor, round(c.count * factor), 2 * factor * c.n_eff, c.over_half and c.over_half * factor,
              in_doubt=c.in_doubt * factor)
        for c in counts
    ]  # fmt: skip
    return find(slos, later, last).verdict == UNDECIDED


def chance_if_broken(count: Count, share: float) -> float:
    """P(so few slow values) where the true share beyond the limit is ``share``, the least that breaks the SLO."""
    plain = max(chance_of_so_few(count.over + count.in_doubt, count.count, count.n_eff, share), count.in_bursts)
    if count.over or count.over_half is None or not far_applies(count.n_eff, share):
        return plain
    below_half = chance_far_below(count.over_half, count.count, count.n_eff, share)
    return min(1.0, plain / (1 - _SIDE), below_half / _SIDE)


def chance_if_kept(count: Count, share: float) -> float:
    """P(so many slow values) where the true share beyond the limit is ``share``, the most that keeps the SLO."""
    bursts = count.over if count.bursts is None else count.bursts
    plain = chance_of_such_bursts(count.over, count.count, bursts, share)
    return min(1.0, plain / (1 - _SIDE_GROWTH), count.stable / _SIDE_GROWTH)


def _fails_at_once(count: Count, share: float) -> bool:
    """Whether so many values are beyond the limit that no look need pay for saying so, nor how they hang together.

    The maximal ergodic inequality is Markov's for all looks at once: a share of mean s ever exceeds x with a chance of
    at most s / x, 2 % for half of a p99's values. Below p99 it takes all of them, which queues at a p95's limit show in
    up to 4 % of trials, and at a p90's in too many.
    """
    most = count.over > count.count / 2 if share <= _MARKOV else count.over == count.count
    return most and share <= _MOST_ALLOWED and count.count >= _FEWEST_BEYOND


def chance_of_such_bursts(over: float, count: int, bursts: float, share: float) -> float:
    """P(so many of ``count`` values beyond a limit, in so many ``bursts``) if ``share`` of all were.

    Bursts and the calm between them take turns. Were both exponential, their mean lengths over the true ones would be
    F-distributed with twice as many degrees of freedom as there are bursts; some bursts are far longer than others, so
    fewer count. A calm that was cut off counts as one burst more. Of a single burst that is nearly Markov's
    inequality, which holds however requests hang together: a share of mean s exceeds x with a chance of s / x.
    """
    if not over or over <= share * count:
        return 1.0
    worth = max(1.0, bursts / (1 + _UNEVEN * (1 - bursts / over)))
    calm = (count - over) / over + 1 / worth
    return float(special.fdtr(2 * worth, 2 * worth, share / (1 - share) * calm))


def values_to_hold(slo: Slo, *, is_far: bool) -> float:
    """How many independent values an SLO takes to be held at the last look, without an exceedance.

    ``is_far``: where no value exceeds half the limit.
    """
    if is_far and HALF_TIMES * slo.allowed < 1:
        return max(FEWEST_FAR, _log_ratio((1 - SURE) * _SIDE * _LATE_HOLD[-1], HALF_TIMES * slo.allowed))
    return _log_ratio((1 - SURE) * (1 - _SIDE) * _LATE_HOLD[-1], slo.allowed)


def _log_ratio(chance: float, share: float) -> float:
    return math.log(chance) / math.log(1 - share) if 0 < share < 1 else 0.0


# --- errors that come at every rate alike, which no load explains: from what several trials say together


def fails_too_many(slos: Sequence[Slo], valid: Sequence[Trial], high: float) -> bool:
    """Whether no trial kept a limit on errors, and all up to the rate ``high`` broke it together: lower rates may."""
    for at, slo in enumerate(slos):
        counts = [trial.outcome.counts[at] for trial in valid if trial.rate <= high]
        together = _together(counts)
        broken = together.count and not slo.allows(together.over / together.count)
        if slo.metric == "errors" and broken and not _is_kept(counts, slo):
            return True
    return False


def fails_at_any_rate(slos: Sequence[Slo], valid: Sequence[Trial]) -> tuple[int, Count, float] | None:
    """The number of an SLO on errors that surely fails whatever the load, what low rates say of it, and the highest.

    It fails there, none kept it, and above no more fail. Of a full server's requests the more fail, the higher the
    rate: the least so with a single place and no queue, where failed ones over others are as many as the load (Erlang).
    """
    rates = sorted({trial.rate for trial in valid})
    for at, slo in enumerate(slos):
        counts = [(trial.rate, trial.outcome.counts[at]) for trial in valid]
        if slo.metric != "errors" or _is_kept([count for _, count in counts], slo):
            continue
        for most, top in itertools.combinations(rates, 2):
            low, lower = (_together([count for rate, count in counts if rate <= end]) for end in (most, most / 2))
            # A brief trial may end before the queue is full that a longer one at a lower rate filled.
            is_kept_lower = lower.count and slo.allows(lower.over / lower.count)
            if chance_if_kept(low, slo.allowed) > 1 - SURE or is_kept_lower:
                continue
            above, share = [(rate / most, count) for rate, count in counts if most < rate <= top], low.over / low.count
            both = _together([low, *(count for _, count in above)])
            grown = sum(count.count * times / (1 + (times - 1) * share) for times, count in above)
            part = grown / (grown + low.count)
            if chance_of_so_few(both.over - low.over, round(both.over), both.bursts or 0, part) <= 1 - MOST_SURE:
                return at, low, most
    return None


def _is_kept(counts: Sequence[Count], slo: Slo) -> bool:
    """Whether one of several trials surely kept it."""
    return any(chance_if_broken(count, slo.allowed) <= 1 - SURE for count in counts)


def _together(counts: Sequence[Count]) -> Count:
    """Of several trials."""
    over, count, n_eff = (sum(getattr(each, name) for each in counts) for name in ("over", "count", "n_eff"))
    bursts = sum(each.over if each.bursts is None else each.bursts for each in counts)
    return Count(over, count, n_eff, bursts=round(bursts))
