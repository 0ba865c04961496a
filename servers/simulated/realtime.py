"""Real time: waiting until a moment, to the microsecond; and the engine loop's timeline of absolute deadlines.

One thread does all: what would be threads of their own in a real engine (its input and output threads, the worker)
are deadlines here, so that no interpreter lock stands between a deadline and its moment.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import select
import time
from collections.abc import Callable, Iterator
from time import monotonic_ns as now

from gapmeter.servers.engine_client import Channel, Message
from gapmeter.servers.simulated.engine_loop import Action

_SPIN_NS = 80_000  # the kernel may wake a sleeper this late, so the rest of a wait is spun
_LATE_NS = 100_000  # beyond this, what follows counts from the time itself, not from when it was due
_GLANCE_NS = 20_000  # how often a busy wait looks for messages
_LONG_NS = 300_000  # a wait in which there is time for something else
_PR_SET_TIMERSLACK = 29


def exact_timers() -> None:
    """Have the kernel wake this thread when asked, not up to 50 µs later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def go_first() -> bool:
    """Have this process run as soon as it wants to, ahead of all ordinary ones; False where that is not permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


def pause_until(moment_ns: int, *, busy: bool) -> None:
    """Return at ``moment_ns``, at once if that has passed. ``busy``: take the core all the while."""
    left_ns = moment_ns - now() - _SPIN_NS
    if left_ns > 0 and not busy:
        time.sleep(left_ns / 1e9)
    while now() < moment_ns:
        pass


class RealTimeline:
    """Calls actions at their deadlines, and ``take(message)`` for each message when it comes.

    ``busy``: waits take the whole core, as those of an engine that computes on it; else they sleep until shortly
    before the deadline. ``idle(ns)`` is called before a wait of ``ns`` (0: without an end), for what can be put off.
    """

    def __init__(
        self, channel: Channel, take: Callable[[Message], None], idle: Callable[[int], None], *, busy: bool
    ) -> None:
        self._channel, self._take, self._idle, self._busy = channel, take, idle, busy
        self._messages: Iterator[Message] = iter(())  # read from the channel, not yet taken
        self._due: list[tuple[int, int, Action]] = []
        self._order = 0
        self.worst_lateness_ns = 0

    def now(self) -> int:
        """The monotonic clock, ns."""
        return now()

    def at(self, due_ns: int, action: Action) -> None:
        """Call ``action`` at ``due_ns``."""
        self._order += 1
        heapq.heappush(self._due, (due_ns, self._order, action))

    def run(self) -> None:
        """Until the other side of the channel is gone."""
        exact_timers()
        due = self._due
        while not self._channel.closed:
            if not due or due[0][0] > now():
                self._wait()
                continue
            moment, _, action = heapq.heappop(due)
            if now() - moment >= _LATE_NS:
                self._take_one()  # else one that is always late would hear of nothing
            late = now() - moment
            self.worst_lateness_ns = max(self.worst_lateness_ns, late)
            action(moment if late < _LATE_NS else moment + late)

    def _wait(self) -> None:
        """Until the next deadline, or the next message."""
        if not self._due:
            self._idle(0)
            self._sleep(None)
            return
        moment = self._due[0][0]
        left = moment - now() - _SPIN_NS
        if left > _LONG_NS:
            self._idle(left)
            left = moment - now() - _SPIN_NS
        if left > 0 and not self._busy:
            if self._sleep(left / 1e9):
                return
        elif left > 0:
            glance = now() + min(left, _GLANCE_NS)
            if self._take_one():
                return
            moment = min(moment, glance)
        while now() < moment:
            pass

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep until a message comes, for ``seconds`` at most; whether one came."""
        if self._take_one():
            return True
        end = self._channel.socket
        writing = [end] if self._channel.unsent else []
        readable, writable, _ = select.select([end], writing, [], seconds)
        if writable:
            self._channel.flush()
        return bool(readable) and self._take_one()

    def _take_one(self) -> bool:
        """One message at a time, so that a burst of them does not put off what is due meanwhile."""
        message = next(self._messages, None)
        if message is None:
            self._messages = self._channel.receive()
            message = next(self._messages, None)
        if message is None:
            return False
        self._take(message)
        return True
