"""How much slower or faster a server was in one trial than in another, by the pace of its tokens.

A machine's speed drifts from trial to trial, and percentiles are too noisy to tell by how much: each of the five or six
of a search met bursts of its own. But a slower server takes longer over every token, and a thousand requests tell that
within a per cent or two. With y the mean logarithm of the time per token after the first, in a trial that was served r
requests per second,

    y = y0 + e log(r / r0) + d + error

where d, by how much the server was slower, is normal with standard deviation s (the drift), and e, how pace grows with
load, is normal with ``_ELASTICITY``. Given s, y0 and every d follow by generalised least squares, and the likelihood of
s by that of the residuals (REML: Patterson and Thompson 1971). What slowed all trials alike shows in no residual: it
stays, as a variance of about s^2 / n that they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gapmeter.analysis.arrays import Floats

DRIFTS: Final = np.array([0.005, 0.02, 0.04, 0.07, 0.12])  # each as likely as another before any trial
_ELASTICITY = 1.0
_UNTOLD = 0.02  # of a pace, beside its own error: no server follows the line exactly
_UNKNOWN = 1e3  # the error of a trial without a pace
_BATCHES, _FEWEST = 20, 40


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean logarithm of the time per token after the first, ns, with its standard error."""

    log: float
    error: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the paces of n trials say, for each of ``DRIFTS`` (k).

    ``odds``: log-likelihood, shape (k,). ``slower``: by how much each trial was slower than their mean, a logarithm,
    and ``variance`` of that, shape (k, n). ``common``: variance of what slowed all of them alike, shape (k,).
    """

    odds: Floats
    slower: Floats
    variance: Floats
    common: Floats


def pace_of(times_ns: Floats) -> Pace | None:
    """The pace of times per token, in due order; None of too few. The error is that of batches' means."""
    known = times_ns[times_ns > 0]
    if len(known) < _FEWEST:
        return None
    logs = np.log(known)
    means = np.array([part.mean() for part in np.array_split(logs, _BATCHES)])
    return Pace(float(logs.mean()), float(means.std(ddof=1)) / math.sqrt(_BATCHES))


def speeds_of(paces: Sequence[Pace | None], served: Sequence[float]) -> Speeds:
    """What each trial's pace (None: it has none) says, at the requests per second that it was ``served``."""
    y = np.array([pace.log if pace else 0.0 for pace in paces])
    errors = np.array([math.hypot(pace.error, _UNTOLD) if pace else _UNKNOWN for pace in paces])
    load = np.log(np.array(served))
    load -= load.mean()
    known = np.diag(errors**2) + _ELASTICITY**2 * np.outer(load, load)
    odds, slower, variance, common = [], [], [], []
    for s in DRIFTS:
        own = s**2 * np.eye(len(y))
        inverse = np.linalg.inv(known + own)
        ones = inverse.sum(axis=1)
        residual = inverse - np.outer(ones, ones) / ones.sum()
        odds.append(0.5 * (np.linalg.slogdet(inverse)[1] - math.log(ones.sum()) - y @ residual @ y))
        slower.append(s**2 * residual @ y)
        covariance = own - s**4 * residual
        weights = 1 / (errors**2 + s**2)
        weights /= weights.sum()
        common.append(weights @ covariance @ weights)
        variance.append(np.maximum(np.diag(covariance) - common[-1], 0.0))
    return Speeds(*(np.array(each) for each in (odds, slower, variance, common)))
