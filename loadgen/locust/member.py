"""What the master knows of one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from gapmeter.loadgen.locust.clocks import SAME, Offset, Trip
from gapmeter.loadgen.locust.messages import Pull

WAITING, READY, DONE, HANDED_IN, FAILED, LOST = "waiting", "ready", "done", "handed in", "failed", "lost"
OVER = (HANDED_IN, FAILED, LOST)


@dataclass(slots=True)
class Member:
    """``number`` is its place among the plan's shares, given by us: Locust numbers a worker that returns anew."""

    number: int
    client_id: str
    about: dict[str, Any]
    pull: Pull
    planned: int = 0
    state: str = WAITING
    why: str = ""
    heard_ns: int = field(default_factory=monotonic_ns)
    trips: list[Trip] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)
    same_clock: bool = False

    @property
    def name(self) -> str:
        return f"worker {self.number} ({self.about['host']}, process {self.about['pid']})"

    @property
    def offset(self) -> Offset:
        """Its clock minus ours: nothing where both read the same clock."""
        return SAME if self.same_clock else self.estimate

    @property
    def estimate(self) -> Offset:
        return Offset.of(self.trips) if self.trips else SAME

    def silent_ns(self) -> int:
        return monotonic_ns() - self.heard_ns

    def describe(self, report: dict[str, Any]) -> dict[str, Any]:
        """For the manifest. ``report`` is its last; what it had issued after that, nobody knows."""
        return {
            "worker": self.number, "host": self.about["host"], "pid": self.about["pid"], "state": self.state,
            "why": self.why, "planned": self.planned, "reports": report["sequence"], "issued": report["issued"],
            "finished": report["finished"], "failed": report["failed"],
            "test_restarts": self.done.get("restarts", 0), "same_clock": self.same_clock,
            "clock_offset_ns": self.offset.offset_ns, "clock_half_width_ns": self.offset.half_width_ns,
            "estimated_offset_ns": self.estimate.offset_ns, "estimated_half_width_ns": self.estimate.half_width_ns,
            "round_trips": len(self.trips),
        }  # fmt: skip
