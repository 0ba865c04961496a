"""Every 20 ms while a generator process runs: its loop's lag, its CPU time, and requests whose time is up."""

from __future__ import annotations

import resource
import time
from time import monotonic_ns

from gapmeter.loadgen.session import Session
from gapmeter.records import Span
from gapmeter.records.timer import Timer

EVERY_NS = 20_000_000
_SECOND = 50  # beats


class Heartbeat:
    """Starts at ``t0_ns``. ``usage`` notes hold CPU and wall time since then, until ``stop_counting``."""

    def __init__(self, session: Session, t0_ns: int) -> None:
        self._session, self._t0 = session, t0_ns
        self._due = t0_ns
        self._beats = 0
        self._cpu0: int | None = None
        self._counting = True
        self._timer = Timer(session.loop, self._beat)
        self._timer.arm(self._due)

    def stop_counting(self) -> None:
        """The timed window is over: from here on only answers are awaited."""
        self._note_usage()
        self._counting = False

    def close(self) -> None:
        self._timer.close()

    def _beat(self) -> None:
        now = monotonic_ns()
        writer = self._session.writer
        writer.span(Span.LOOP_LAG, 0, now, now, queued_ns=self._due)
        if self._cpu0 is None:
            self._cpu0 = time.process_time_ns()
        self._session.expire(now)
        if writer.dropped:
            self._session.stop("the disk is full")
        self._beats += 1
        if self._beats % _SECOND == 0:
            self._each_second()
        self._due += EVERY_NS * max(1, (monotonic_ns() - self._due) // EVERY_NS)
        self._timer.arm(self._due)

    def _each_second(self) -> None:
        begun = monotonic_ns()
        sum(range(1500))  # the canary: how fast the machine is just now, some 20 µs
        self._session.writer.span(Span.CANARY, 0, begun, monotonic_ns())
        if self._counting:
            self._note_usage()

    def _note_usage(self) -> None:
        session, now = self._session, monotonic_ns()
        if self._cpu0 is None or now <= self._t0:
            return
        session.writer.json(
            {
                "type": "usage",
                "cpu_ns": time.process_time_ns() - self._cpu0,
                "wall_ns": now - self._t0,
                "issued": session.issued,
                "finished": session.finished,
                "in_flight": session.client.in_flight,
                "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            }
        )
