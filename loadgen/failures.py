"""When a stream is given up as stalled, and which failed requests are sent again. Nothing here runs for each chunk."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from time import monotonic_ns

from gapmeter.loadgen.client import Connection
from gapmeter.loadgen.exchange import Exchange
from gapmeter.records import Outcome
from gapmeter.records.timer import Readers, Timer

_LONGEST_PAUSE_NS = 8_000_000_000
_NOT_NOW = (408, 425, 429)  # the 4xx that say so


class Stalls:
    """Streams that have begun and brought no token for ``limit_ns``.

    Each is checked once in so long, however many chunks it gets: the next check is due ``limit_ns`` after the last
    chunk that was there at the one before. Until the first token comes a request waits for the server's queue, which
    is no stall; comments that keep a connection alive are no tokens.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._checks: list[tuple[int, int, Exchange]] = []
        self._ticket = count()

    def watch(self, exchange: Exchange) -> None:
        """Watch it from now on, until it is done."""
        self._check_at(exchange.due_ns + self._limit_ns, exchange)

    def find(self, now_ns: int) -> list[Exchange]:
        """Those that have stalled. They are not watched any longer."""
        stalled: list[Exchange] = []
        checks = self._checks
        while checks and checks[0][0] <= now_ns:
            exchange = heapq.heappop(checks)[2]
            if exchange.done:
                continue
            carrier = exchange.carrier
            last_ns = carrier.last_data_ns() if isinstance(carrier, Connection) else 0
            if now_ns - last_ns < self._limit_ns:
                self._check_at(last_ns + self._limit_ns, exchange)
            elif isinstance(carrier, Connection) and carrier.has_token():
                stalled.append(exchange)
            else:
                self._check_at(now_ns + self._limit_ns, exchange)
        return stalled

    def _check_at(self, at_ns: int, exchange: Exchange) -> None:
        heapq.heappush(self._checks, (at_ns, next(self._ticket), exchange))


class Retries:
    """Failed requests that are sent again, up to ``most`` times each, after a pause that doubles every time.

    ``issue`` gets each when it is due. Every attempt is an exchange, and so a record, of its own.
    """

    def __init__(self, most: int, pause_ns: int, loop: Readers, issue: Callable[[Exchange, int], None]) -> None:
        self._most, self._pause_ns, self._loop, self._issue = most, pause_ns, loop, issue
        self._waiting: list[tuple[int, int, Exchange]] = []
        self._ticket = count()
        self._timer: Timer | None = None  # while something waits

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, failed: Exchange) -> bool:
        """Whether this one is sent again; if so, it is scheduled."""
        if failed.retry >= self._most or not is_retryable(failed):
            return False
        pause_ns = min(self._pause_ns << failed.retry, max(_LONGEST_PAUSE_NS, self._pause_ns))
        heapq.heappush(self._waiting, (failed.end_ns + pause_ns, next(self._ticket), failed.again()))
        self._arm()
        return True

    def clear(self) -> None:
        """Nothing is sent again any more: what has failed stays failed."""
        self._waiting.clear()
        self._arm()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= monotonic_ns():
            due_ns, _, exchange = heapq.heappop(self._waiting)
            self._issue(exchange, due_ns)
        self._arm()

    def _arm(self) -> None:
        if self._waiting:
            self._timer = self._timer or Timer(self._loop, self._wake)
            self._timer.arm(self._waiting[0][0])
        elif self._timer is not None:
            self._timer.close()
            self._timer = None


def is_retryable(failed: Exchange) -> bool:
    """Only where nothing of an answer had come: refused, 5xx, 408, 425 or 429, cut or timed out before its first byte.

    A user who has read half of an answer would notice if it started over; other statuses and malformed answers would
    come again.
    """
    if failed.outcome in (Outcome.REFUSED, Outcome.HTTP_5XX):
        return True
    if failed.outcome is Outcome.HTTP_4XX:
        return failed.status in _NOT_NOW
    return failed.outcome in (Outcome.CUT, Outcome.TIMEOUT) and not failed.parts
