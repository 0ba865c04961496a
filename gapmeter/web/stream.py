"""A run's folder, looked at once a second while its load goes on: what the live page is told."""

from __future__ import annotations

import time
from typing import Any

from gapmeter.console.follow import Answered, Follower, phase
from gapmeter.records import RunFolder

_DOTS = 2000  # the most that a page which comes later is given
_METRICS = ("ttft", "itl", "e2e")


class Stream:
    """Follows one run. ``look`` gives what is new, ``all_so_far`` what a page that has just come needs."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._plan: dict[str, Any] = {}
        self._slos: list[dict[str, Any]] = []
        self._rate: float | None = None
        self._follower: Follower | None = None
        self._dots: list[list[Any]] = []
        self._last: dict[str, Any] = {"phase": "starting"}

    def look(self) -> dict[str, Any]:
        """The state now; ``dots`` are those since the last look: [seconds, TTFT in ms or null, outcome]."""
        if self._follower is None and not self._begin():
            return {"phase": "starting", "dots": []}
        assert self._follower is not None
        dots = [self._dot(answered) for answered in self._follower.poll()]
        self._dots = _thinned(self._dots + dots)
        self._last = self._state(self._follower, time.monotonic_ns())
        return {**self._last, "dots": dots}

    def all_so_far(self) -> dict[str, Any]:
        """The last state, with every dot that is kept."""
        return {**self._last, "dots": self._dots}

    def _begin(self) -> bool:
        """Whether the load has begun; before, the manifest has no start."""
        try:
            manifest = self._folder.read_manifest()
        except (OSError, ValueError):
            return False
        self._plan, self._slos = manifest["plan"], manifest["slo"]
        self._rate = manifest["scenario"]["load"].get("rate")
        paths = self._folder.record_files(self._folder.requests)
        if "t0_ns" not in self._plan or not paths:
            return False
        self._follower = Follower(paths, self._plan["t0_ns"], whole=True)
        return True

    def _dot(self, answered: Answered) -> list[Any]:
        at = (answered.due_ns - self._plan["t0_ns"]) / 1e9
        ttft = None if answered.ttft_ms is None else round(answered.ttft_ms, 3)
        return [round(at, 3), ttft, answered.outcome.name.lower()]

    def _state(self, known: Follower, now: int) -> dict[str, Any]:
        t0, end = self._plan["t0_ns"], self._plan.get("end_ns", 0)
        return {
            "phase": phase(now, t0, self._plan["warmup_ns"], end),
            "elapsed_s": round((now - t0) / 1e9, 1),
            "end_s": end / 1e9 if end else None,
            "warmup_s": self._plan["warmup_ns"] / 1e9,
            "asked_per_s": self._rate,
            "sent_per_s": round(known.sent_per_s(now), 2),
            "done_per_s": round(known.done_per_s(now), 2),
            "in_flight": known.in_flight,
            "issued": known.issued,
            "done": known.done,
            "failed": dict(known.failed),
            "lag_p99_ms": known.percentile("lag", 99),
            "metrics": {name: {f"p{p}": known.percentile(name, p) for p in (50, 99)} for name in _METRICS},
            "slo": [_slo(known, slo) for slo in self._slos],
        }


def _slo(known: Follower, slo: dict[str, Any]) -> dict[str, Any]:
    """An SLO beside what has been seen of the last thousand requests: no verdict yet."""
    if slo["metric"] == "errors":
        share = known.failed.total() / known.done if known.done else None
        return {"text": slo["text"], "value_share": share, "limit_share": slo["limit_share"]}
    value = known.percentile(slo["metric"], slo["percentile"]) if slo["metric"] in _METRICS else None
    return {"text": slo["text"], "value_ms": value, "limit_ms": slo["limit_ns"] / 1e6}


def _thinned(dots: list[list[Any]]) -> list[list[Any]]:
    """At most so many: failures and the slowest stay, of the others every second one goes when there are too many."""
    while len(dots) > _DOTS:
        known = sorted(dot[1] for dot in dots if dot[1] is not None)
        slow = known[-len(known) // 10] if known else 0.0
        rest = [dot for dot in dots if dot[1] is not None and dot[1] < slow]
        dropped = {id(dot) for dot in rest[::2]}
        if not dropped:
            return dots[-_DOTS:]
        dots = [dot for dot in dots if id(dot) not in dropped]
    return dots
