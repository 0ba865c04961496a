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
