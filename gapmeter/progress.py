"""Progress of a run on standard error: one redrawn line on a terminal, a plain line every 10 s elsewhere, or JSON.

It shares the generator's machine, so it reads the records for a part of the time at most. Of what is more than that it
counts the answers without reading them, and where even that takes too long it says as of when its figures are.
"""

from __future__ import annotations

import bisect
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO

from gapmeter.analysis.numbers import duration, significant
from gapmeter.loadgen.plan import Plan
from gapmeter.records.follow import RATE_WINDOW_NS, Follower, phase
from gapmeter.scenarios.model import Scenario

REDRAW_S = 0.25
PLAIN_S = 10.0
_READING_S = 0.2
_WORTH_SAYING_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known at one moment of a run. Rates are requests per second over the last few seconds.

    ``phase`` is a word (warm-up, load, drain); ``remaining_s`` the most that is left, None when the end is not known (a
    count of requests), and ``least_s`` the least, where the load may end before;
    ``slo`` names the rolling percentile, for instance ``p99 TTFT``, ``value_ms`` is None until there is one.
    All but the phase and its times are as of ``behind_s`` ago: what was recorded since has not been read yet.
    ``unread`` answers were only counted: they are in no latency, nor in ``failed`` if only their content would tell.
    """

    phase: str
    elapsed_s: float
    remaining_s: float | None
    asked_per_s: float
    sent_per_s: float
    done_per_s: float
    issued: int
    done: int
    failed: int
    in_flight: int
    slo: str = "p99 TTFT"
    value_ms: float | None = None
    limit_ms: float | None = None
    lag_p99_ms: float | None = None
    behind_s: float = 0.0
    unread: int = 0
    least_s: float | None = None


def line(now: Progress, width: int) -> str:
    """One line of at most ``width`` columns; what matters least is left off first."""
    left = ""
    if now.remaining_s is not None:
        least = "" if now.least_s is None else f"{_clock(now.least_s)} to " if now.least_s else "at most "
        left = f", {least}{_clock(now.remaining_s)} left"
    rates = "/".join(
        significant(rate, 2) if rate < 10 else f"{rate:,.0f}"
        for rate in (now.asked_per_s, now.sent_per_s, now.done_per_s)
    )
    latency = f"{now.slo} {duration(now.value_ms)}"
    if now.limit_ms is not None and now.value_ms is not None:
        latency += f" {'>' if now.value_ms > now.limit_ms else '≤'} {duration(now.limit_ms)}"
    behind = f" (as of {now.behind_s:.0f} s ago)" if now.behind_s >= _WORTH_SAYING_S else ""
    parts = [
        f"{now.phase} {_clock(now.elapsed_s)}{left}{behind}",
        f"asked/sent/done {rates} per s",
        f"in flight {now.in_flight:,}",
        latency,
        f"{now.failed:,} failed" if now.failed else "no errors",
        f"lag p99 {duration(now.lag_p99_ms, 2)}",
        f"{now.done:,} of {now.issued:,} done",
    ]
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 3 + len(part) <= width:
            text += f" · {part}"
    return text[:width]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class ProgressLine:
    """Writes snapshots to a stream, no oftener than they can be read; ``as_json``: an object a second for a program."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, as_json: bool = False) -> None:
        self._stream, self._clock, self._as_json = stream, clock, as_json
        self._redrawn = stream.isatty() and not as_json
        self._every_s = 1.0 if as_json else REDRAW_S if self._redrawn else PLAIN_S
        self._next_s = clock() + (PLAIN_S if self._every_s == PLAIN_S else 0.0)
        self._drawn = False

    def offer(self, take: Callable[[], Progress]) -> None:
        """Show a snapshot if one is due; ``take`` is called only then."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + self._every_s
        if self._as_json:
            text = json.dumps({"type": "progress", **asdict(take())}) + "\n"
        elif self._redrawn:
            text = f"\r{line(take(), shutil.get_terminal_size().columns - 1)}\x1b[K"
        else:
            text = f"{line(take(), 200)}\n"
        self._drawn = self._redrawn
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """Clear the redrawn line, so that what follows starts on a clean one."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


class Watch:
    """Progress on standard error."""

    def __init__(self, follower: Follower, scenario: Scenario, plan: Plan, t0_ns: int, *, as_json: bool) -> None:
        self._follower = follower
        self._line = ProgressLine(sys.stderr, as_json=as_json)
        self._plan, self._t0 = plan, t0_ns
        load = scenario.load
        self._least_ns = plan.warmup_ns + (load.duration_ns or 0) if load.may_last_longer else None
        self._slo = next((slo for slo in scenario.slo if slo.metric == "ttft"), None)
        # Of a conversation only the first turn has a time of its own, so that no rate of requests is asked for.
        self._due = [] if len(plan.turns) else (plan.due_ns[plan.due_ns >= 0] + t0_ns).tolist()

    def update(self) -> None:
        """Read on in the records, not for long; show a line if one is due. To be called a few times a second."""
        self._follower.poll(_READING_S)
        self._line.offer(self._snapshot)

    def close(self) -> None:
        self._line.close()

    def _snapshot(self) -> Progress:
        seen = self._follower
        now = time.monotonic_ns()
        percentile = self._slo.percentile if self._slo and self._slo.percentile else 99.0
        end_ns = self._t0 + self._plan.end_ns
        return Progress(
            phase=phase(now, self._t0, self._plan.warmup_ns, self._plan.end_ns),
            elapsed_s=(now - self._t0) / 1e9,
            remaining_s=max((end_ns - now) / 1e9, 0.0) if self._plan.end_ns else None,
            asked_per_s=self._asked(seen.as_of_ns),
            sent_per_s=seen.sent_per_s(),
            done_per_s=seen.done_per_s(),
            issued=seen.issued,
            done=seen.done,
            failed=seen.failed.total(),
            in_flight=seen.in_flight,
            slo=f"p{percentile:g} TTFT",
            value_ms=seen.percentile("ttft", percentile),
            limit_ms=self._slo.limit_ns / 1e6 if self._slo and self._slo.limit_ns is not None else None,
            lag_p99_ms=seen.percentile("lag", 99.0),
            behind_s=(now - seen.as_of_ns) / 1e9,
            unread=seen.unread,
            least_s=None if self._least_ns is None else max((self._t0 + self._least_ns - now) / 1e9, 0.0),
        )

    def _asked(self, now: int) -> float:
        """Planned rate over the last seconds; a closed loop asks for nothing of its own."""
        if not self._due:
            return self._follower.sent_per_s()
        since = max(now - RATE_WINDOW_NS, self._t0)
        if now <= since:
            return 0.0
        count = bisect.bisect_right(self._due, now) - bisect.bisect_right(self._due, since)
        return count / ((now - since) / 1e9)
