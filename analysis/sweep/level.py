"""What a point settled at, with what that is known to: mean latencies, and throughput over blocks of time.

Neighbors in a queue are alike, so a mean of n values is known less well than s / sqrt n. Its variance is taken twice,
and the larger counts: from the first twelve cosine coefficients of the series in time order (Mueller 2007, A theory of
robust long-run variance estimation; Lazarus, Lewis, Stock and Watson 2018, HAR inference), which sees what lasts,
drifts and differences between repeats included, and from the autocorrelation time (Geyer 1992), which sees what is
strong and short. Both with Student's t for twelve coefficients, since a variance that was estimated is itself
uncertain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from gapmeter.analysis.requests.metrics import issued, stamps_ns, succeeded
from gapmeter.analysis.stats.dependence import first_cosines
from gapmeter.analysis.stats.quantiles import TAIL, Floats, autocorrelation_time

FEWEST = 12  # values below which a mean has no interval
BLOCKS = 48  # of a run's window


@dataclass(frozen=True, slots=True)
class Level:
    """A positive figure of a point, the standard error of its logarithm, and the degrees of freedom behind that."""

    value: float
    log_error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, on the logarithm: never below zero."""
        reach = math.exp(float(special.stdtrit(self.freedom, 1 - TAIL)) * self.log_error)
        return self.value / reach, self.value * reach

    def drawn(self, rng: np.random.Generator, count: int) -> Floats:
        """What it might as well have been: shape (count,)."""
        return self.value * np.exp(self.log_error * rng.standard_t(self.freedom, count))


def of_interval(value: float, low: float, high: float) -> Level:
    """A percentile from its 95 % interval, taken for normal on the logarithm."""
    return Level(value, math.log(max(high, value) / min(low, value)) / (2 * 1.96), math.inf)


def of_mean(series: Floats) -> Level | None:
    """The mean of a series in time order, any unit; None for fewer than twelve values, or a mean not above 0."""
    n = len(series)
    if n < FEWEST or not math.isfinite(mean := float(series.mean())) or mean <= 0:
        return None
    low = first_cosines(series - mean)
    lasting = float(np.mean(low**2)) / n
    brief = float(series.var(ddof=1)) * autocorrelation_time(series) / n
    return Level(mean, math.sqrt(max(lasting, brief)) / mean, len(low))


def block_rates(requests: pd.DataFrame) -> Floats | None:
    """Output tokens a second in 48 equal blocks of a run, from the first due time that counts to the last.

    ``requests``: all of the run. Tokens of warm-up requests that arrive within that time count, those that arrive after
    it do not: how a load begins and ends is not what the server settled at. A request's tokens are spread evenly over
    the arrivals that were stamped. None where an answer's tokens are not known.
    """
    counted = requests[requests["measured"].to_numpy(bool) & issued(requests)]
    due = stamps_ns(counted, "due_ns")
    if len(due) < 2 or due.max() <= due.min():
        return None
    good = requests[succeeded(requests)]
    counts = np.array([0 if each is None else len(each) for each in good["token_ns"]])
    tokens = good["output_tokens"].to_numpy(np.float64, na_value=np.nan)
    if not counts.any() or np.isnan(tokens).any():
        return None
    at = np.concatenate([np.asarray(each, dtype=np.float64) for each in good["token_ns"] if each is not None])
    edges = np.linspace(due.min(), due.max(), BLOCKS + 1)
    found, _ = np.histogram(at, bins=edges, weights=np.repeat(tokens / np.maximum(counts, 1), counts))
    return np.asarray(found / ((edges[1] - edges[0]) / 1e9), dtype=np.float64)


def difference(one: Level, two: Level) -> tuple[float, float, float]:
    """``two`` - ``one``: value and 95 % interval, with the fewer degrees of freedom of both."""
    error = math.hypot(one.log_error * one.value, two.log_error * two.value)
    half = float(special.stdtrit(min(one.freedom, two.freedom), 1 - TAIL)) * error
    gain = two.value - one.value
    return gain, gain - half, gain + half


def ratio_interval(one: Level, two: Level) -> tuple[float, float]:
    """The 95 % interval of ``two`` over ``one``."""
    half = float(special.stdtrit(min(one.freedom, two.freedom), 1 - TAIL)) * math.hypot(one.log_error, two.log_error)
    ratio = two.value / one.value
    return ratio * math.exp(-half), ratio * math.exp(half)
