"""One generator process's requests: built beforehand, sent when due, given up or retried, recorded as they end."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic_ns
from typing import Any, Protocol
from weakref import ref

from gapmeter.loadgen.client import Client, Pool
from gapmeter.loadgen.connection import Connection
from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.transport import SocketLoop, WallClock
from gapmeter.records import Outcome, RecordWriter
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord, encode
from gapmeter.records.timer import Readers, Timer

_LONGEST_PAUSE_NS = 8_000_000_000
_NOT_NOW = (408, 425, 429)  # the 4xx that say so


class Event(Protocol):
    """What issuing needs of an event. ``wait`` is to be awaited with asyncio, and blocks the greenlet with gevent."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self) -> Any: ...

    def is_set(self) -> bool: ...


class Sender:
    """Everything that an issuer needs: bytes ready to be sent, the client, and the record file.

    ``on_finished`` may be set by an issuer that waits for answers. ``stopped`` is set when the run ends early,
    ``drained`` whenever nothing is in flight. Without a ``loop`` it is the running one of asyncio.
    """

    def __init__(
        self, plan: Plan, address: Address, writer: RecordWriter, *, loop: SocketLoop | None = None,
        client: Callable[[Address, Callable[[Exchange], None]], Pool] = Client,
        event: Callable[[], Event] = asyncio.Event,
    ) -> None:  # fmt: skip
        self.plan, self.writer = plan, writer
        self.loop = loop or asyncio.get_running_loop()
        self.client = client(address, self._finished)
        self.on_finished: Callable[[Exchange], None] | None = None
        self.issued = self.finished = 0
        self.stopped, self.drained = event(), event()
        self.wall = WallClock()
        self._address = address
        self._unwritten: deque[Exchange] = deque()
        self._stalls = Stalls(plan.stall_ns) if plan.stall_ns else None
        self._retries = Retries(plan.retries, plan.retry_pause_ns, self.loop, self._send_now) if plan.retries else None
        self._ready: list[Exchange | None] = [self._make(index) for index in range(len(plan))]

    def exchange(self, index: int) -> Exchange:
        """Request ``index`` of this process; beyond the planned ones it is built on the spot. Take each once."""
        if index >= len(self._ready):
            return self._make(index)
        exchange, self._ready[index] = self._ready[index], None
        assert exchange is not None
        return exchange

    def send(self, exchange: Exchange, due_ns: int) -> None:
        """Issue now what was due at ``due_ns``, and record that it left."""
        self.issued += 1
        self._send_now(exchange, due_ns)

    def compose(self, index: int, path: str, body: bytes, output_tokens: int, **more: int) -> Exchange:
        """A request under the plan's id for ``index``. 0 tokens: any number. ``more``: what a planned one has."""
        plan = self.plan
        name = plan.request_id(index)
        data = self._address.request(path, body, name, traced=plan.traceparent)
        return Exchange(plan.global_index(index), name, data, worker=plan.worker, output_tokens=output_tokens, **more)

    @property
    def awaited(self) -> int:
        """Requests that have not ended: in flight, or waiting to be sent again."""
        return self.client.in_flight + (len(self._retries) if self._retries is not None else 0)

    def abandon(self, index: int, due_ns: int) -> None:
        """Record that request ``index`` is never sent, since an earlier turn of its conversation failed."""
        exchange = self.exchange(index)
        exchange.due_ns = due_ns
        exchange.end(Outcome.ABANDONED, "an earlier turn of its conversation failed", due_ns)
        self.writer.blob(FINISHED, encode(exchange))

    def expire(self, now_ns: int) -> None:
        """Give up what has been in flight, or without a token, for longer than the plan allows; leave open bodies."""
        self.client.leave_unended(now_ns)
        timeout_ns = self.plan.timeout_ns
        self.client.expire(now_ns - timeout_ns, f"no complete answer in {timeout_ns / 1e9:g} s")
        if self._stalls is not None:
            for exchange in self._stalls.find(now_ns):
                self.client.give_up(exchange, Outcome.STALLED, f"no token for {self.plan.stall_ns / 1e9:g} s")

    def stop(self, reason: str) -> None:
        """End early: nothing more is issued, and what is in flight is recorded as aborted."""
        self.stopped.set()
        self.on_finished = None
        if self._retries is not None:
            self._retries.clear()
        self.client.abort(reason)
        if not self.awaited:
            self.drained.set()

    async def drain(self) -> None:
        """Wait until every request has been answered or has timed out, and all is on record."""
        while self.awaited:
            self.drained.clear()
            await self.drained.wait()
        self.write_all()

    def write_all(self) -> None:
        """Write what is not on record yet."""
        while self._unwritten:
            self._write_one()

    def _make(self, index: int) -> Exchange:
        plan, at = self.plan, index % len(self.plan)
        return self.compose(
            index, plan.path, plan.body(index), int(plan.output_tokens[at]),
            own_index=index, prompt_tokens=int(plan.prompt_tokens[at]), turn=plan.turn(index),
        )  # fmt: skip

    def _send_now(self, exchange: Exchange, due_ns: int) -> None:
        exchange.due_ns = due_ns
        self.client.issue(exchange)
        if self._stalls is not None:
            self._stalls.watch(exchange)
        self.writer.blob(ISSUED, encode(exchange))

    def _finished(self, exchange: Exchange) -> None:
        is_first = not self._unwritten
        self._unwritten.append(exchange)
        retries = self._retries if exchange.outcome is not Outcome.OK and not self.stopped.is_set() else None
        again = retries is not None and retries.take(exchange)
        exchange.data = b""  # it has been sent, and is not kept
        if not again:
            self.finished += 1
            if self.on_finished is not None:
                self.on_finished(exchange)
        if is_first:  # behind what follows an answer: a long one takes a millisecond to write
            self.loop.call_soon(self._write_next)
        if not self.awaited:
            self.drained.set()

    def _write_next(self) -> None:
        """Write one record and leave the others to the loop's next rounds: reading what has arrived comes first."""
        if self._unwritten:
            self._write_one()
        if self._unwritten:
            self.loop.call_soon(self._write_next)

    def _write_one(self) -> None:
        self.writer.blob(FINISHED, encode(self._unwritten.popleft().collect(self.wall)))


class Stalls:
    """Streams that have begun and brought no token for ``limit_ns``.

    Each is checked about once in that time, however many chunks it gets: the next check is ``limit_ns`` after the last
    chunk that had come by the check before. Until its first token a request waits in the server's queue, which is no
    stall; what keeps a connection alive without a token is none. One that has ended is not kept for its next check.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._checks: list[tuple[int, int, ref[Exchange]]] = []
        self._ticket = count()

    def watch(self, exchange: Exchange) -> None:
        """Watch it from now on, until it is done."""
        self._check_at(exchange.due_ns + self._limit_ns, exchange)

    def find(self, now_ns: int) -> list[Exchange]:
        """The streams that have stalled. They are not watched any longer."""
        stalled: list[Exchange] = []
        checks = self._checks
        while checks and checks[0][0] <= now_ns:
            exchange = heapq.heappop(checks)[2]()
            if exchange is None or exchange.done:
                continue
            carrier = exchange.carrier
            last_ns = 0
            if isinstance(carrier, Connection) and now_ns - (last_ns := carrier.last_text_ns()) >= self._limit_ns:
                last_ns = carrier.last_token_ns()
            if now_ns - last_ns < self._limit_ns:
                self._check_at(last_ns + self._limit_ns, exchange)
            elif last_ns:
                stalled.append(exchange)
            else:
                self._check_at(now_ns + self._limit_ns, exchange)
        return stalled

    def _check_at(self, at_ns: int, exchange: Exchange) -> None:
        heapq.heappush(self._checks, (at_ns, next(self._ticket), ref(exchange)))


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
        """Send nothing again any more: what has failed stays failed."""
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


def is_retryable(failed: RequestRecord) -> bool:
    """Whether nothing of an answer had come: refused, 5xx, 408, 425 or 429, cut or timed out before its first byte.

    A user who has read half of an answer would notice if it started over; other statuses and malformed answers would
    come again.
    """
    if failed.outcome in (Outcome.REFUSED, Outcome.HTTP_5XX):
        return True
    if failed.outcome is Outcome.HTTP_4XX:
        return failed.status in _NOT_NOW
    return failed.outcome in (Outcome.CUT, Outcome.TIMEOUT) and not failed.status
