"""When requests are due: offsets from the start of the run, fixed before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.scenarios.model import MOST_REQUESTS, Load
from gapmeter.scenarios.shapes import Diurnal, OnOff, Ramp

Floats = NDArray[np.floating[Any]]
Source = Callable[[float], "Curve"]

# Drawn at a time, whatever the length of the run: a longer run begins with the same arrivals.
_CHUNK = 4096  # gaps
_SOJOURNS = 256  # times on and off
_SHORTEST_WARMUP_NS = 2_000_000_000
_LONGEST_WARMUP_NS = 30_000_000_000
_MOST_DRAWN = 10 * MOST_REQUESTS  # what a number of requests asks for, and what lies beyond it
_NEVER_NS = 2.0**62  # later than any run lasts, and still a 64-bit number


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """When requests are due, and what that was drawn from.

    ``due_ns``: int64, ascending, from the start of the run. ``knots``: the rate that they were drawn at as
    (ns, requests per second), straight lines between, two at once where it jumps; empty where it is the same
    throughout, or no rate at all (a trace). ``dispersion``: variance over mean of the number of measured requests.
    """

    due_ns: NDArray[np.int64]
    knots: tuple[tuple[int, float], ...]
    dispersion: float


def draw_arrivals(load: Load, rng: np.random.Generator, warmup_ns: int) -> Arrivals:
    """An open loop's arrivals: the warm-up's first, then the measured ones.

    They fill [0, warmup + duration), or [0, warmup) and then as many as ``load.requests`` says. Nothing is scaled or
    moved to meet the rate, so the count over a duration varies as real arrivals do.

    constant: k / rate. poisson: independent exponential gaps, mean 1 / rate. gamma: independent gaps of mean 1 / rate
    with shape 1 / burstiness, so that their squared coefficient of variation is the burstiness. onoff, ramp, steps,
    diurnal: a Poisson process whose rate λ(t) changes; with Λ(t) the integral of λ from 0 to t, arrival k is at
    Λ⁻¹(E₁ + … + E_k), E independent exponential with mean 1 (inversion: Çinlar 1975; Lewis and Shedler 1979). trace:
    its own times from its start on, divided by its speed, again and again where it loops.
    """
    gaps_rng, curve_rng = rng.spawn(2)
    curve = curve_of(load, warmup_ns, curve_rng)
    knots: list[tuple[int, float]] = []
    if load.trace is not None:
        count = load.trace.count_in(warmup_ns + (load.longest_ns or 0)) + (load.requests or 0)
        due = _cut(load, np.array(load.trace.issued(count).at_ns, np.float64) / load.trace.speed, warmup_ns)
    elif curve is not None:
        due, knots = _inverted(load, curve, gaps_rng, warmup_ns)
    elif load.arrivals == "constant":
        rate = load.rate or 0.0
        count = int(np.ceil((warmup_ns + (load.longest_ns or 0)) / 1e9 * rate)) + 1 + (load.requests or 0)
        due = _cut(load, np.arange(count) * (1e9 / rate), warmup_ns)
    else:
        due = _renewal(load, rng, warmup_ns)
    window_ns = load.longest_ns or (int(due[-1]) - warmup_ns if len(due) else 0)
    return Arrivals(due, tuple(knots), count_dispersion(load, max(window_ns, 1) / 1e9))


def warmup_span(load: Load) -> tuple[int, int]:
    """The warm-up as (ns from the start, requests); a request is measured when it lies beyond both."""
    if load.warmup_ns is not None:
        return load.warmup_ns, 0
    if load.duration_ns is not None:
        measured = load.duration_ns
    elif load.requests is not None and (rate := _expected_rate(load)):
        measured = round(load.requests / rate * 1e9)
    else:
        return 0, 2 * (load.concurrency or 0)
    return min(max(measured // 10, _SHORTEST_WARMUP_NS), _LONGEST_WARMUP_NS), 0


def _expected_rate(load: Load) -> float:
    """About how many requests per second there will be; 0 where that is not known beforehand."""
    if load.ramp is not None:
        return (load.ramp.start + load.ramp.end) / 2
    if load.steps is not None:
        return max(step.rate for step in load.steps)
    if load.trace is not None:
        return load.trace.rate
    return load.rate or 0.0


def _inverted(
    load: Load, curve: Source, rng: np.random.Generator, warmup_ns: int
) -> tuple[NDArray[np.int64], list[tuple[int, float]]]:
    """Arrivals and the rate they were drawn at. For a number of requests the horizon doubles until they are reached."""
    horizon_s = (warmup_ns + (load.longest_ns or 1_000_000_000)) / 1e9
    chunks: list[Floats] = []
    reached = 0.0
    while True:
        rates = curve(horizon_s)
        expected = rates.expected_by(horizon_s)
        if expected > _MOST_DRAWN:
            if load.requests is None:
                raise PlanError(f"so long a load.{load.arrivals} brings more than {_MOST_DRAWN:,} requests; write less")
            text = f"{load.requests:,} requests are reached after {horizon_s / 7200:,.0f} hours or later"
            raise PlanError(f"{text} with this load.{load.arrivals}; write load.duration instead of load.requests")
        while not chunks or reached <= expected:
            chunks.append(reached + np.cumsum(rng.exponential(1.0, _CHUNK)))
            reached = float(chunks[-1][-1])
        units = np.concatenate(chunks)
        at_ns = rates.invert(units[units <= expected]) * 1e9
        enough = int(np.count_nonzero((at_ns >= warmup_ns) & (at_ns < horizon_s * 1e9))) >= (load.requests or 0)
        if load.longest_ns is not None or enough:
            due = _cut(load, at_ns, warmup_ns)
            return due, rates.knots(horizon_s if load.longest_ns is not None or not len(due) else float(due[-1]) / 1e9)
        horizon_s *= 2


def _renewal(load: Load, rng: np.random.Generator, warmup_ns: int) -> NDArray[np.int64]:
    mean_ns, burstiness = 1e9 / (load.rate or 0.0), load.burstiness or 1.0
    end_ns = warmup_ns + (load.longest_ns or 0)
    chunks: list[Floats] = []
    reached, beyond = 0.0, 0
    while reached < end_ns or beyond < (load.requests or 1):
        if load.arrivals == "poisson":
            gaps = rng.exponential(mean_ns, _CHUNK)
        else:
            gaps = rng.gamma(1 / burstiness, mean_ns * burstiness, _CHUNK)
        chunks.append(reached + np.cumsum(gaps))
        reached = float(chunks[-1][-1])
        beyond += int(np.count_nonzero(chunks[-1] >= end_ns))
    return _cut(load, np.concatenate(chunks), warmup_ns)


def _cut(load: Load, at_ns: Floats, warmup_ns: int) -> NDArray[np.int64]:
    """Keep what the duration or the number of requests asks for."""
    due = np.rint(np.minimum(at_ns, _NEVER_NS)).astype(np.int64)
    if load.longest_ns is not None:
        return due[: np.searchsorted(due, warmup_ns + load.longest_ns)]
    return due[: int(np.searchsorted(due, warmup_ns)) + (load.requests or 0)]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A rate that changes with time, in straight pieces, and Poisson arrivals at it by exact inversion.

    Piece k goes from ``at_s[k]`` to ``at_s[k + 1]`` (n + 1 ends, ascending), and its rate from ``first[k]`` to
    ``last[k]`` requests per second (n each).
    """

    at_s: Floats
    first: Floats
    last: Floats

    def expected(self) -> Floats:
        """Requests expected from the start to each of ``at_s``: the integral of the rate, (n + 1,)."""
        counts = np.diff(self.at_s) * (self.first + self.last) / 2
        return np.concatenate([[0.0], np.cumsum(counts)])

    def expected_by(self, until_s: float) -> float:
        """Requests expected from the start to a time: pieces may reach far beyond what is asked for."""
        piece = int(np.clip(np.searchsorted(self.at_s, until_s, side="right") - 1, 0, len(self.first) - 1))
        length = float(self.at_s[piece + 1] - self.at_s[piece])
        inside = min(max(until_s - float(self.at_s[piece]), 0.0), length)
        slope = (self.last[piece] - self.first[piece]) / length
        return float(self.expected()[piece] + self.first[piece] * inside + slope * inside * inside / 2)

    def invert(self, counts: Floats) -> Floats:
        """When the expected count reaches each of ``counts`` (ascending, up to ``expected()[-1]``), in seconds.

        Within a piece of length L whose rate goes from a to b, y = a x + (b - a) x² / 2 L is solved for x in the form
        x = 2 y / (a + √(a² + 2 y (b - a) / L)), which loses no digits where b is near a.
        """
        reached = self.expected()
        # A piece without requests has equal ends here, so that the next one with some is rates.
        piece = np.clip(np.searchsorted(reached, counts, side="right") - 1, 0, len(self.first) - 1)
        y, a = counts - reached[piece], self.first[piece]
        length = np.diff(self.at_s)[piece]
        slope = (self.last[piece] - a) / length
        root = a + np.sqrt(np.maximum(a * a + 2 * y * slope, 0.0))
        inside = np.divide(2 * y, root, out=np.zeros_like(y), where=root > 0)
        return np.asarray(self.at_s[piece] + np.minimum(inside, length))  # rates too small to be squared overshoot

    def knots(self, until_s: float) -> list[tuple[int, float]]:
        """(ns, requests per second) at the ends of the pieces up to a time; two at once where the rate jumps."""
        out: list[tuple[int, float]] = []
        for start, end, first, last in zip(self.at_s, self.at_s[1:], self.first, self.last, strict=False):
            if start >= until_s:
                break
            stop = min(float(end), until_s)
            rate = float(first + (last - first) * (stop - start) / (end - start))
            for knot in ((round(float(start) * 1e9), float(first)), (round(stop * 1e9), rate)):
                if not out or out[-1] != knot:
                    out.append(knot)
        return out


def curve_of(load: Load, warmup_ns: int, rng: np.random.Generator) -> Source | None:
    """What gives the load's curve up to a time (seconds) or beyond; None for arrivals that have none."""
    warmup_s = warmup_ns / 1e9
    match load.onoff or load.ramp or load.steps or load.diurnal:
        case OnOff() as bursts:
            return _onoff(bursts, load.rate or 0.0, rng)
        case Ramp(start=start, end=end, over_ns=over_ns):
            over_s = (over_ns or load.longest_ns or 0) / 1e9
            return _pieces([warmup_s, over_s], [start, start], [start, end], end)
        case tuple() as steps:
            rates = [steps[0].rate, *(step.rate for step in steps)]
            return _pieces([warmup_s, *(step.for_ns / 1e9 for step in steps)], rates, rates, rates[-1])
        case Diurnal() as day:
            return _diurnal(day, load.rate or 0.0, warmup_s)
    return None


def count_dispersion(load: Load, window_s: float) -> float:
    """Variance over mean of the number of requests in a window of so many seconds: how far chance may take the rate.

    1 for Poisson arrivals at any given rate, 0 for constant ones and traces; for gamma the squared coefficient of
    variation of its gaps (the limit for many). On and off: the two-state Markov-modulated Poisson process's
    1 + 2 p q (a - b)² / (m s) · (1 - (1 - e^(-s t)) / (s t)), with rates a and b for shares p and q of the time, mean
    m = p a + q b, and s = 1 / on + 1 / off (Heffes and Lucantoni 1986; Fischer and Meier-Hellstern 1993).
    """
    if load.arrivals == "gamma":
        return load.burstiness or 1.0
    if load.onoff is None:
        return 0.0 if load.arrivals in ("constant", "trace") else 1.0
    high, low, share = _rates(load.onoff, load.rate or 0.0)
    speed = 1e9 / load.onoff.on_ns + 1e9 / load.onoff.off_ns
    mean = share * high + (1 - share) * low
    settled = 1 - (1 - np.exp(-speed * window_s)) / (speed * window_s)
    return float(1 + 2 * share * (1 - share) * (high - low) ** 2 / (mean * speed) * settled)


def _rates(bursts: OnOff, mean: float) -> tuple[float, float, float]:
    """The rate while on, while off, and the share of time on."""
    share = bursts.on_ns / (bursts.on_ns + bursts.off_ns)
    high = mean / (share + (1 - share) * bursts.quiet)
    return high, high * bursts.quiet, share


def _onoff(bursts: OnOff, mean: float, rng: np.random.Generator) -> Source:
    """Begins in the long run's state: on with the probability that it is on at any time."""
    high, low, share = _rates(bursts, mean)
    begins_on = bool(rng.random() < share)
    turns = ((high, bursts.on_ns), (low, bursts.off_ns)) if begins_on else ((low, bursts.off_ns), (high, bursts.on_ns))
    means_s = np.array([ns / 1e9 for _, ns in turns])
    ends: list[Floats] = [np.zeros(1)]

    def upto(until_s: float) -> Curve:
        while ends[-1][-1] < until_s:
            sojourns = rng.exponential(1.0, _SOJOURNS) * np.tile(means_s, _SOJOURNS // 2)
            ends.append(ends[-1][-1] + np.cumsum(sojourns))
        at_s = np.concatenate(ends)
        rates = np.tile([rate for rate, _ in turns], len(at_s) // 2)
        return Curve(at_s, rates, rates)

    return upto


def _pieces(lengths_s: Sequence[float], first: Sequence[float], last: Sequence[float], final: float) -> Source:
    """Straight pieces one after the other (those without length left out), and then the ``final`` rate."""
    kept = [k for k, length in enumerate(lengths_s) if length > 0]
    at_s = np.concatenate([[0.0], np.cumsum([lengths_s[k] for k in kept])])

    def upto(until_s: float) -> Curve:
        end_s = max(until_s, float(at_s[-1])) + 1.0
        return Curve(
            np.append(at_s, end_s),
            np.array([*(first[k] for k in kept), final]),
            np.array([*(last[k] for k in kept), final]),
        )

    return upto


def _diurnal(day: Diurnal, mean: float, warmup_s: float) -> Source:
    """The curve's start falls on the warm-up's end, so that the warm-up is the evening before."""
    hours = np.array(day.hours)
    rates = hours / hours.mean() * mean
    day_s = day.day_ns / 1e9
    hour_s = day_s / len(rates)

    def upto(until_s: float) -> Curve:
        before, after = int(np.ceil(warmup_s / hour_s)), int(np.ceil(max(until_s - warmup_s, 0.0) / hour_s)) + 1
        number = np.arange(-before, after + 1)
        at_s, values = warmup_s + number * hour_s, rates[number % len(rates)]
        first = values[:-1].copy()
        if before and at_s[0] < 0:
            first[0] += (values[1] - values[0]) * -at_s[0] / hour_s
            at_s[0] = 0.0
        return Curve(at_s, first, values[1:])

    return upto
