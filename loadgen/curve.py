"""Rates that change with time, and Poisson arrivals at them by exact inversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.arrivals import Diurnal, OnOff, Ramp, Step
from gapmeter.scenarios.model import Load

Floats = NDArray[np.floating[Any]]

_SOJOURNS = 256  # drawn at a time, whatever the length of the run: a longer run begins with the same ones
Source = Callable[[float], "Curve"]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A rate in pieces of straight lines.

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
        # A piece without requests has equal ends here, so that the next one with some is found.
        piece = np.clip(np.searchsorted(reached, counts, side="right") - 1, 0, len(self.first) - 1)
        y, a = counts - reached[piece], self.first[piece]
        slope = (self.last[piece] - a) / np.diff(self.at_s)[piece]
        root = a + np.sqrt(np.maximum(a * a + 2 * y * slope, 0.0))
        inside = np.divide(2 * y, root, out=np.zeros_like(y), where=root > 0)
        return np.asarray(self.at_s[piece] + inside)

    def knots(self, until_s: float) -> list[tuple[int, float]]:
        """(ns, requests per second) at the ends of the pieces up to a time; two at once where the rate jumps."""
        out: list[tuple[int, float]] = []
        for start, end, first, last in zip(self.at_s, self.at_s[1:], self.first, self.last, strict=False):
            if start >= until_s:
                break
            stop = min(float(end), until_s)
            there = float(first + (last - first) * (stop - start) / (end - start))
            for knot in ((round(float(start) * 1e9), float(first)), (round(stop * 1e9), there)):
                if not out or out[-1] != knot:
                    out.append(knot)
        return out


def source(load: Load, warmup_ns: int, rng: np.random.Generator) -> Source | None:
    """What gives the load's curve up to a time (seconds) or beyond; None for arrivals that have none."""
    warmup_s = warmup_ns / 1e9
    match load.onoff or load.ramp or load.steps or load.diurnal:
        case OnOff() as bursts:
            return _onoff(bursts, load.rate or 0.0, rng)
        case Ramp(start=start, end=end, over_ns=over_ns):
            over_s = (over_ns or load.duration_ns or 0) / 1e9
            return _held([warmup_s, over_s], [start, start], [start, end], end)
        case tuple() as steps:
            return _steps(steps, warmup_s)
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
    """Begins in the long run's state: on with the share of time that it is on."""
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


def _held(lengths_s: Sequence[float], first: Sequence[float], last: Sequence[float], held: float) -> Source:
    """Pieces one after the other (those without length left out), and then a rate that stays."""
    kept = [k for k, length in enumerate(lengths_s) if length > 0]
    at_s = np.concatenate([[0.0], np.cumsum([lengths_s[k] for k in kept])])

    def upto(until_s: float) -> Curve:
        end_s = max(until_s, float(at_s[-1])) + 1.0
        return Curve(
            np.append(at_s, end_s),
            np.array([*(first[k] for k in kept), held]),
            np.array([*(last[k] for k in kept), held]),
        )

    return upto


def _steps(steps: tuple[Step, ...], warmup_s: float) -> Source:
    rates = [steps[0].rate, *(step.rate for step in steps)]
    return _held([warmup_s, *(step.for_ns / 1e9 for step in steps)], rates, rates, rates[-1])


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
