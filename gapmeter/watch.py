"""What a run looks like while it runs: follows the generators' record files and shows one line."""

from __future__ import annotations

import bisect
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gapmeter.progress import Progress, ProgressLine
from loadgen.plan import Plan
from recording import Outcome
from recording.stream import parse_answer
from recording.tail import RecordTail
from recording.wire import ISSUED, WireRecord
from scenarios import Scenario, Slo

_RATE_WINDOW_NS = 5_000_000_000
_RECENT = 1000


class Watch:
    """Progress on standard error. It reads only when a line is due, and only the first token of each answer."""

    def __init__(self, paths: Sequence[Path], scenario: Scenario, plan: Plan, t0_ns: int) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._line = ProgressLine(sys.stderr)
        self._plan, self._t0 = plan, t0_ns
        self._slo = next((slo for slo in scenario.slo if slo.metric == "ttft"), None)
        self._due = (plan.due_ns[plan.due_ns >= 0] + t0_ns).tolist()
        self._sent: deque[int] = deque()
        self._done: deque[int] = deque()
        self._ttft: deque[float] = deque(maxlen=_RECENT)
        self._lag: deque[float] = deque(maxlen=_RECENT)
        self._issued = self._answered = self._failed = 0

    def update(self) -> None:
        """Show a line if one is due."""
        self._line.offer(self._snapshot)

    def close(self) -> None:
        self._line.close()

    def _snapshot(self) -> Progress:
        for tail in self._tails:
            for code, record in tail.poll():
                self._take(code, record)
        now = time.monotonic_ns()
        percentile = self._slo.percentile if self._slo and self._slo.percentile else 99.0
        end_ns = self._t0 + self._plan.end_ns
        return Progress(
            phase=self._phase(now, end_ns),
            elapsed_s=(now - self._t0) / 1e9,
            remaining_s=max((end_ns - now) / 1e9, 0.0) if self._plan.end_ns else None,
            asked_per_s=self._asked(now),
            sent_per_s=_rate(self._sent, now, self._t0),
            done_per_s=_rate(self._done, now, self._t0),
            issued=self._issued,
            done=self._answered,
            failed=self._failed,
            in_flight=self._issued - self._answered,
            slo=f"p{percentile:g} TTFT",
            value_ms=_percentile(self._ttft, percentile),
            limit_ms=_limit_ms(self._slo),
            lag_p99_ms=_percentile(self._lag, 99.0),
        )

    def _take(self, code: int, record: WireRecord) -> None:
        if code == ISSUED:
            self._issued += 1
            self._sent.append(record.sent_ns or record.due_ns)
            return
        self._answered += 1
        self._done.append(record.end_ns)
        if record.outcome is not Outcome.OK:
            self._failed += 1
            return
        arrived = parse_answer(record, first_token_only=True).token_ns
        if len(arrived):
            self._ttft.append((int(arrived[0]) - record.due_ns) / 1e6)
        connecting = record.connect_end_ns - record.connect_start_ns
        self._lag.append((record.sent_ns - record.due_ns - connecting) / 1e6)

    def _phase(self, now: int, end_ns: int) -> str:
        if now - self._t0 < self._plan.warmup_ns:
            return "warm-up"
        return "drain" if self._plan.end_ns and now > end_ns else "load"

    def _asked(self, now: int) -> float:
        """Planned rate over the last seconds; a closed loop asks for nothing of its own."""
        if not self._due:
            return _rate(self._sent, now, self._t0)
        since = max(now - _RATE_WINDOW_NS, self._t0)
        count = bisect.bisect_right(self._due, now) - bisect.bisect_right(self._due, since)
        return count / max((now - since) / 1e9, 1e-9)


def _rate(stamps: deque[int], now: int, t0_ns: int) -> float:
    since = max(now - _RATE_WINDOW_NS, t0_ns)
    while stamps and stamps[0] < since:
        stamps.popleft()
    return len(stamps) / max((now - since) / 1e9, 1e-9)


def _percentile(values: deque[float], percentile: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100))]


def _limit_ms(slo: Slo | None) -> float | None:
    return slo.limit_ns / 1e6 if slo is not None and slo.limit_ns is not None else None
