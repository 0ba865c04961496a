"""What a run looks like while it runs: follows the generators' record files and shows one line."""

from __future__ import annotations

import bisect
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gapmeter.console.elsewhere import WorkersFollower
from gapmeter.console.follow import RATE_WINDOW_NS, Follower, phase
from gapmeter.console.progress import JsonLines, Progress, ProgressLine
from gapmeter.loadgen.plan import Plan
from gapmeter.scenarios import Scenario, Slo


class Watch:
    """Progress on standard error. It reads only when a line is due, and only the first token of each answer.

    ``as_json``: a JSON object a second, for a program that watches.
    """

    def __init__(
        self, paths: Sequence[Path], scenario: Scenario, plan: Plan, t0_ns: int, *, as_json: bool = False,
        follower: WorkersFollower | None = None,
    ) -> None:  # fmt: skip
        self._follower = follower or Follower(paths, t0_ns)
        self._line = JsonLines(sys.stderr) if as_json else ProgressLine(sys.stderr)
        self._plan, self._t0 = plan, t0_ns
        self._slo = next((slo for slo in scenario.slo if slo.metric == "ttft"), None)
        self._due = (plan.due_ns[plan.due_ns >= 0] + t0_ns).tolist()

    def update(self) -> None:
        """Show a line if one is due."""
        self._line.offer(self._snapshot)

    def close(self) -> None:
        self._line.close()

    def _snapshot(self) -> Progress:
        known = self._follower
        known.poll()
        now = time.monotonic_ns()
        percentile = self._slo.percentile if self._slo and self._slo.percentile else 99.0
        end_ns = self._t0 + self._plan.end_ns
        return Progress(
            phase=phase(now, self._t0, self._plan.warmup_ns, self._plan.end_ns),
            elapsed_s=(now - self._t0) / 1e9,
            remaining_s=max((end_ns - now) / 1e9, 0.0) if self._plan.end_ns else None,
            asked_per_s=self._asked(now),
            sent_per_s=known.sent_per_s(now),
            done_per_s=known.done_per_s(now),
            issued=known.issued,
            done=known.done,
            failed=known.failed.total(),
            in_flight=known.in_flight,
            slo=f"p{percentile:g} TTFT",
            value_ms=known.percentile("ttft", percentile),
            limit_ms=_limit_ms(self._slo),
            lag_p99_ms=known.percentile("lag", 99.0),
        )

    def _asked(self, now: int) -> float:
        """Planned rate over the last seconds; a closed loop asks for nothing of its own."""
        if not self._due:
            return self._follower.sent_per_s(now)
        since = max(now - RATE_WINDOW_NS, self._t0)
        count = bisect.bisect_right(self._due, now) - bisect.bisect_right(self._due, since)
        return count / max((now - since) / 1e9, 1e-9)


def _limit_ms(slo: Slo | None) -> float | None:
    return slo.limit_ns / 1e6 if slo is not None and slo.limit_ns is not None else None
