"""Real time for the engine loop: absolute deadlines on the monotonic clock, messages taken in while waiting for them.

One thread does all: what would be threads of their own in a real engine (its input and output threads, the worker)
are deadlines here, so that no interpreter lock stands between a deadline and its moment.
"""

from __future__ import annotations

import heapq
import select
import socket
from collections import deque
from collections.abc import Callable

from gapmeter.servers.simulated.loop import Action
from gapmeter.servers.simulated.pause import SPIN_NS, exact_timers, now

_LATE_NS = 100_000  # beyond this, what follows counts from the time itself, not from when it was due
_GLANCE_NS = 20_000  # how often a busy wait looks for messages
_LONG_NS = 300_000  # a wait in which there is time for something else
_LARGEST = 1 << 20  # bytes of a message


class Channel:
    """Whole messages over a socket pair; sending never waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.backlog: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        """Send, or keep for ``flush`` when the other side does not read."""
        self.backlog.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as there is room. What the other side can no longer get is dropped."""
        while self.backlog:
            try:
                self.socket.send(self.backlog[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.backlog.clear()  # its end is noticed where messages are received
                return
            self.backlog.popleft()

    def receive(self) -> bytes | None:
        """The next message; None when there is none now. Raises EOFError when the other side is gone."""
        try:
            message = self.socket.recv(_LARGEST)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            message = b""
        if not message:
            raise EOFError
        return message


class RealTimeline:
    """Calls actions at their deadlines, and ``heard(message)`` for each message when it comes.

    ``busy``: waits take the whole core, as those of an engine that computes on it; else they sleep until shortly
    before the deadline. ``idle(ns)`` is called before a wait of ``ns`` (0: without an end), for what can be put off.
    """

    def __init__(
        self, channel: Channel, heard: Callable[[bytes], None], idle: Callable[[int], None], *, busy: bool
    ) -> None:
        self._channel, self._heard, self._idle, self._busy = channel, heard, idle, busy
        self._due: list[tuple[int, int, Action]] = []
        self._order = 0
        self.latest_ns = 0  # the worst lateness so far

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
        try:
            while True:
                if not due or due[0][0] > now():
                    self._wait()
                    continue
                moment, _, action = heapq.heappop(due)
                late = now() - moment
                self.latest_ns = max(self.latest_ns, late)
                action(moment if late < _LATE_NS else moment + late)
        except EOFError:
            return

    def _wait(self) -> None:
        """Until the next deadline, or the next message."""
        if not self._due:
            self._idle(0)
            self._sleep(None)
            return
        moment = self._due[0][0]
        left = moment - now() - SPIN_NS
        if left > _LONG_NS:
            self._idle(left)
            left = moment - now() - SPIN_NS
        if left > 0 and not self._busy:
            if self._sleep(left / 1e9):
                return
        elif left > 0:
            glance = now() + min(left, _GLANCE_NS)
            if self._take():
                return
            moment = min(moment, glance)
        while now() < moment:
            pass

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep until a message comes, for ``seconds`` at most; whether one came."""
        end = self._channel.socket
        writing = [end] if self._channel.backlog else []
        readable, writable, _ = select.select([end], writing, [], seconds)
        if writable:
            self._channel.flush()
        return bool(readable) and self._take()

    def _take(self) -> bool:
        message = self._channel.receive()
        if message is None:
            return False
        self._heard(message)
        return True
