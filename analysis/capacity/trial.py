"""One trial of a capacity search: a rate, what its requests said about each SLO, and who can run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gapmeter.analysis.capacity.result import INVALID, Side, TrialVerdict


@dataclass(frozen=True, slots=True)
class Promise:
    """An SLO as a share: at most ``share`` of its values may exceed the limit (0.01 for a p99; the errors' own).

    ``text`` is the SLO as written, ``metric`` ttft, itl, tpot, e2e or errors.
    """

    text: str
    metric: str
    share: float


@dataclass(frozen=True, slots=True)
class Count:
    """What a trial says about one promise: ``over`` of ``count`` values exceed its limit; worth ``n_eff`` values.

    ``over_half`` exceed half of the limit (None: not asked). ``stable``: how likely a queue that does not grow is to
    complete requests so slowly. ``n_eff_over``: what they are worth as evidence of failing (None: ``n_eff``).
    """

    over: float
    count: int
    n_eff: float
    over_half: float | None = None
    stable: float = 1.0
    n_eff_over: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A trial's verdict and how sure it is: between 0.5 (says nothing) and 1.

    ``verdict`` is HOLDS, FAILS or UNDECIDED, ``leaning`` the side of an undecided one (HOLDS or FAILS), ``promise`` the
    number of the promise that decided: the one that fails most surely, or that holds least surely.
    """

    verdict: TrialVerdict
    confidence: float
    leaning: Side
    promise: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an oracle hands back: the counts after the last request, one a promise, and what the trial cost.

    ``requests`` counts all that were issued, the warm-up's too; ``measured`` those that count. ``good`` of ``measured``
    kept every limit themselves; ``good_n_eff`` what they are worth. ``in_flight`` is the mean number of requests in
    flight (infinite: unknown). ``invalid`` is why it is no measurement, "" if it is one; ``client_limit`` when that is
    the load tester's own limit. ``died``: the server did, or cannot be reached.
    """

    counts: tuple[Count, ...]
    requests: int
    measured: int
    seconds: float
    good: int
    good_n_eff: float
    looks: int = 1
    in_flight: float = math.inf
    invalid: str = ""
    client_limit: bool = False
    died: str = ""
    interrupted: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """An outcome at a rate (requests per second), with what it was found to say."""

    rate: float
    outcome: Outcome
    finding: Finding

    @property
    def verdict(self) -> TrialVerdict:
        """HOLDS, FAILS, UNDECIDED or INVALID."""
        return INVALID if self.outcome.invalid or self.outcome.died else self.finding.verdict


Enough = Callable[[int, Sequence[Count]], bool]  # given the number of the look, from 0, and the counts then


class Oracle(Protocol):
    """Runs trials: in virtual time on the simulated engine's scheduler, or for real."""

    def run(self, rate: float, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        """Issue Poisson arrivals at ``rate`` and look at the counts when ``looks`` requests have been measured.

        Ends at the first look at which ``enough`` says so, at the latest with the last; the counts handed back are
        those of that look, whose number from 1 is the outcome's ``looks``. ``number`` is the trial's, from 1: each has
        arrivals of its own.
        """
