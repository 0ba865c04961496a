"""Think times: how long a user waits between an answer's end and the next request. Nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FixedPause:
    """Always the same."""

    ns: int


@dataclass(frozen=True, slots=True)
class ExponentialPause:
    """Exponential with this mean."""

    mean_ns: int


@dataclass(frozen=True, slots=True)
class UniformPause:
    """From low to high, each equally likely."""

    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class LognormalPause:
    """Log-normal with this median and 95th percentile; ``max_ns`` caps what lies above it."""

    median_ns: int
    p95_ns: int
    max_ns: int | None = None


Pause = FixedPause | ExponentialPause | UniformPause | LognormalPause


def seconds(ns: int) -> int | float:
    """Nanoseconds as seconds, whole where they are."""
    return ns // 1_000_000_000 if ns % 1_000_000_000 == 0 else ns / 1e9


def spell_pause(pause: Pause) -> object:
    """A think time as a scenario file would spell it."""
    match pause:
        case FixedPause(ns):
            return seconds(ns)
        case ExponentialPause(mean_ns):
            return {"exponential": seconds(mean_ns)}
        case UniformPause(low_ns, high_ns):
            return {"uniform": [seconds(low_ns), seconds(high_ns)]}
        case LognormalPause(median_ns, p95_ns, max_ns):
            shape: dict[str, object] = {"median": seconds(median_ns), "p95": seconds(p95_ns)}
            return {"lognormal": shape if max_ns is None else shape | {"max": seconds(max_ns)}}
