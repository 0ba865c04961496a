"""How far another machine's clock is from ours, from messages that went there and back. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Trip:
    """One message there and its answer: sent and heard on our clock, ``there_ns`` on theirs in between."""

    sent_ns: int
    there_ns: int
    heard_ns: int


@dataclass(frozen=True, slots=True)
class Offset:
    """Their clock minus ours. The truth lies within ``half_width_ns`` of it, however long either way took."""

    offset_ns: int
    half_width_ns: int

    @classmethod
    def of(cls, trips: list[Trip]) -> Offset:
        """From the shortest round trip (Cristian 1989): the remote stamp was made at some moment of it.

        Raises ValueError without a trip.
        """
        best = min(trips, key=lambda trip: trip.heard_ns - trip.sent_ns)
        middle = (best.sent_ns + best.heard_ns) // 2
        return cls(best.there_ns - middle, (best.heard_ns - best.sent_ns + 1) // 2)


SAME = Offset(0, 0)


def clock_name() -> str:
    """Equal where CLOCK_MONOTONIC is the same clock: the kernel's boot and its time namespace; "" when unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""
