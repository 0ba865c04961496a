"""The wire client: in the timed window it stamps and stores, nothing else.

A connection carries one request at a time. It stamps bytes as they are read and keeps the pieces of the body; what they
mean is derived after the run, from the recorded bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import ssl
from array import array
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, cast

import httptools

from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.transport import AsyncioLoop, Transport, handshake, new_socket, to_secure
from gapmeter.records import Outcome
from gapmeter.records.request import NO_FLAG, Flag
from gapmeter.records.stream import parse_answer

# A reused connection that closes so soon after our write, unanswered, had been closed by the server while it idled.
# Later than that the server had the request and dropped it: that is a failure, not a stale connection.
STALE_NS = 500_000_000
_MOST_ERROR_BODY = 300
_UPGRADED = 101  # nobody had asked for that
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|arguments)":\s*"[^"]')
_NO_STAMPS: array[int] = array("q")
_CUT = "the connection was closed before the answer was complete"


class Connection(asyncio.Protocol):
    """One socket. A piece has two stamps: when the kernel had its bytes, and when we did, before we look at them.

    A transport that reads with the kernel's stamps calls ``received`` and sets ``disorder``, which counts packets that
    came out of order; any other calls ``data_received``.
    """

    __slots__ = (
        "_arrive", "_arrived", "_client", "_complete", "_disordered", "_exchange", "_feed", "_final", "_framed",
        "_headed", "_keep", "_location", "_mark", "_marks", "_parser", "_parts", "_stamp", "_stamps", "_transport",
        "closed", "disorder", "number", "on_body",
    )  # fmt: skip

    def __init__(self, client: Pool, number: int) -> None:
        self._client, self.number, self.closed = client, number, False
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._stamps, self._arrived, self._marks, self._parts = array("q"), array("q"), list[int](), list[bytes]()
        # Bound methods of C objects: the parser and ``received`` store through them without a Python frame.
        self._stamp, self._arrive, self._mark = self._stamps.append, self._arrived.append, self._marks.append
        self.disorder: Callable[[], int] | None = None
        self._disordered = 0
        self.on_body = self._parts.append
        self._complete = -1  # body parts of the complete answer, -1 until it is
        self._headed = self._framed = False  # its head has been read; its head says where the body ends
        self._location = b""  # where its head points to
        self._keep = False  # whether the connection may carry another request
        self._final = 0  # status of the complete answer, 0 until it is
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def send(self, exchange: Exchange) -> None:
        """Hand the whole request to the socket in one write."""
        transport = cast(asyncio.Transport, self._transport)
        self._exchange, exchange.carrier, exchange.connection = exchange, self, self.number
        data = exchange.data
        exchange.write_ns = monotonic_ns()
        transport.write(data)
        exchange.sent_ns = monotonic_ns()

    def resume_writing(self) -> None:
        """The socket has taken the rest of a request that was too long for its buffer: only now it is sent."""
        if self._exchange is not None and not self._stamps:
            self._exchange.sent_ns = monotonic_ns()

    def data_received(self, data: bytes) -> None:
        self.received(data, monotonic_ns(), 0)

    def received(self, data: bytes, now: int, arrived: int) -> None:
        """``now``: when we had it; ``arrived``: when the kernel did, by CLOCK_REALTIME, 0 where it does not say."""
        if self._exchange is None:  # bytes that answer nothing: this connection cannot be trusted any more
            self.close()
            return
        self._stamp(now)
        self._arrive(arrived)
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._mark(len(self._parts))
            self._not_http(f"not HTTP: {error}: {data[:60]!r}", now)
            return
        self._mark(len(self._parts))
        if self._complete >= 0:
            self._answered(now)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        now = monotonic_ns()
        self.closed = True
        exchange = self._exchange
        if exchange is None:
            self._client.forget(self)
        elif self._is_stale(exchange, now):
            self._exchange = None
            self._client.resend(exchange)
        elif error is None and self._headed and not self._framed:
            exchange.mark(Flag.CLOSE_DELIMITED)
            self._complete = len(self._parts)
            self._answered(now)
        else:
            self._finish(Outcome.CUT, f"{_CUT}: {error}" if error else _CUT, now)
        self._parser = self._transport = self.disorder = None  # they hold on to us: nobody collects cycles here
        del self._feed

    def last_text_ns(self) -> int:
        """When the last read came that plainly held text; 0 if none did, as where texts are cut across reads."""
        for k in range(len(self._stamps) - 1, -1, -1):
            if _TEXT.search(b"".join(self._parts[self._marks[k - 1] if k else 0 : self._marks[k]])):
                return self._stamps[k]
        return 0

    def last_token_ns(self) -> int:
        """When the last token came, 0 before the first. Parses all that is there: not to be called for each chunk."""
        if self._exchange is None:
            return 0
        self._exchange.keep(self._stamps, self._arrived, self._marks, self._parts)
        return max(parse_answer(self._exchange.collect()).chunk_ns.tolist(), default=0)

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """End the request that is under way from our side; what has arrived of its answer is kept."""
        self._finish(outcome, reason, monotonic_ns())

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._headed = self._framed = self._keep = False
        self._location = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-length" or (lowered == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        elif lowered == b"location":
            self._location = value

    def on_headers_complete(self) -> None:
        if self._status() >= 200:  # an interim answer (100 Continue) has a head of its own
            self._headed = True

    def on_message_complete(self) -> None:
        if self._complete < 0 and self._parser is not None and self._status() >= 200:
            self._complete = len(self._parts)
            # The parser forgets both with the next byte.
            self._keep, self._final = self._parser.should_keep_alive(), self._parser.get_status_code()

    def _status(self) -> int:
        return self._final or (self._parser.get_status_code() if self._parser is not None else 0)

    def _trusted(self) -> array[int]:
        """The kernel's stamps of this answer; none where a packet overtook another, since a stamp may be too early."""
        before, self._disordered = self._disordered, self.disorder() if self.disorder is not None else 0
        return self._arrived if self._disordered <= before and self.disorder is not None else _NO_STAMPS

    def _is_stale(self, exchange: Exchange, now: int) -> bool:
        reused = Flag.REUSED in exchange.flags and exchange.attempt == 0
        return reused and not self._stamps and now - exchange.sent_ns < STALE_NS

    def _not_http(self, error: str, now: int) -> None:
        """The parser gave up: on the answer, or on bytes that came behind a complete one."""
        if self._complete < 0:
            self._finish(Outcome.MALFORMED, error, now)
        else:
            self._answered(now, stray=True)

    def _answered(self, now: int, *, stray: bool = False) -> None:
        """A whole answer is here; what came behind it in the same read is not part of it."""
        stray = stray or len(self._parts) > self._complete
        del self._parts[self._complete :]
        self._marks[-1:] = [min(mark, self._complete) for mark in self._marks[-1:]]
        keep = self._keep and not stray and not self.closed
        outcome = _by_status(self._status())
        error = "" if outcome is Outcome.OK else b"".join(self._parts)[:_MOST_ERROR_BODY].decode(errors="replace")
        if 300 <= self._status() < 400:
            error = f"it points to {self._location.decode(errors='replace') or 'nowhere'}"
        self._finish(outcome, error, now, keep=keep)

    def _finish(self, outcome: Outcome, error: str, now: int, *, keep: bool = False) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        status = self._status()
        if self._stamps and (status >= 200 or status == _UPGRADED):  # an interim one is none of the answer
            exchange.status = status
        exchange.keep(self._stamps, self._trusted(), self._marks, self._parts)
        exchange.end(outcome, error, now)
        if keep:
            self._parts.clear()
            self._marks.clear()
            del self._stamps[:], self._arrived[:]
            self._complete, self._final = -1, 0
            self._parser = httptools.HttpResponseParser(self)  # the old one would give this status to what is no answer
            self._feed = self._parser.feed_data
        else:
            self.close()
        self._client.finished(self, exchange)


def reason(error: OSError) -> str:
    """The system's own words for a failure, whichever event loop reports it."""
    if error.errno == errno.EMFILE:
        return "this process may open no more files: raise its limit (ulimit -Hn), or use more generator processes"
    has_number = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if has_number else error.strerror or str(error)


def _by_status(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.OK
    return Outcome.HTTP_5XX if status >= 500 else Outcome.HTTP_4XX


def numeric(address: Sequence[Any]) -> str:
    """The host of a socket's address; of a link-local one with the interface that it is on."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{scope}" if scope and "%" not in address[0] else str(address[0])


class Pool:
    """Connections to one address, kept alive and reused, the most recently used first. A subclass says how to open one.

    ``on_finished`` is called once for every request that was issued, whatever became of it.
    """

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        self._address, self._on_finished = address, on_finished
        self._host = address.host  # numeric once ``warm`` has found one that answers
        self._family: int = socket.AF_INET  # of that one
        self._idle: list[Connection] = []
        self._flying: dict[Exchange, None] = {}  # in the order of issue
        self._in_order, self._last_due_ns = True, 0  # whether each was due after those that were issued before it
        self._opened = 0
        self._fresh = Flag.TLS if address.tls else NO_FLAG
        self._reused = self._fresh | Flag.REUSED

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def issue(self, exchange: Exchange) -> None:
        """Send a request now: on an idle connection, or on a new one as soon as that is open. Never waits."""
        self._flying[exchange] = None
        self._in_order = self._in_order and exchange.due_ns >= self._last_due_ns
        self._last_due_ns = exchange.due_ns
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.closed:
                exchange.flags = self._reused
                connection.send(exchange)
                return
        exchange.flags = self._fresh
        self._send_on_new(exchange)

    def resend(self, exchange: Exchange) -> None:
        """Send it once more, on a new connection: the server had closed the idle one without an answer."""
        exchange.attempt += 1
        exchange.flags = self._fresh | Flag.RESENT
        exchange.connect_start_ns = exchange.write_ns  # we were ready then: what was missing is a connection
        self._send_on_new(exchange)

    def finished(self, connection: Connection, exchange: Exchange) -> None:
        if not connection.closed:
            self._idle.append(connection)
        self._end(exchange)

    def forget(self, connection: Connection) -> None:
        """An idle connection was closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def expire(self, due_before_ns: int, reason: str) -> None:
        """Give up every request in flight that was due before then."""
        late = list[Exchange]()
        for exchange in self._flying:
            if exchange.due_ns < due_before_ns:
                late.append(exchange)
            elif self._in_order:
                break
        for exchange in late:
            self.give_up(exchange, Outcome.TIMEOUT, reason)

    def abort(self, reason: str) -> None:
        """Give up everything that is in flight."""
        for exchange in list(self._flying):
            self.give_up(exchange, Outcome.ABORTED, reason)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def warm(self, connections: int) -> Any:
        """Look the host up and open connections, at least one. Raises OSError when the server cannot be reached.

        To be awaited with asyncio; with gevent it has happened when the call returns.
        """
        raise NotImplementedError

    def _send_on_new(self, exchange: Exchange) -> None:
        """Open a connection and send there, without waiting for either."""
        raise NotImplementedError

    def _send_opened(self, connection: Connection, exchange: Exchange) -> None:
        if exchange.done:  # given up meanwhile: a greenlet that is to be killed may still come to this
            connection.close()
            return
        exchange.connect_end_ns = monotonic_ns()
        if connection.closed:
            self._never_sent(exchange, Outcome.CUT, _CUT)
        else:
            connection.send(exchange)

    def _not_opened(self, exchange: Exchange, error: OSError) -> None:
        if exchange.done:
            return
        if isinstance(error, ssl.SSLError):
            self._never_sent(exchange, Outcome.TLS, f"the TLS handshake failed: {error.reason or error}")
            return
        in_handshake = self._address.tls and isinstance(error, (ConnectionResetError, ConnectionAbortedError))
        self._never_sent(exchange, Outcome.TLS if in_handshake else Outcome.REFUSED, reason(error))

    def give_up(self, exchange: Exchange, outcome: Outcome, reason: str) -> None:
        """End a request from our side; what has arrived of its answer is kept."""
        carrier = exchange.carrier
        if isinstance(carrier, Connection):
            carrier.give_up(outcome, reason)
        else:
            if carrier is not None:
                carrier()
            self._never_sent(exchange, outcome, f"{reason}: the server had not accepted the connection")

    def _never_sent(self, exchange: Exchange, outcome: Outcome, reason: str) -> None:
        exchange.end(outcome, reason, monotonic_ns())
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        del self._flying[exchange]
        self._on_finished(exchange)


class Client(Pool):
    """A pool whose connections are opened by asyncio's running loop."""

    _loop: AsyncioLoop | None = None

    def close(self) -> None:
        super().close()
        if self._loop is not None:
            self._loop.close()

    async def warm(self, connections: int) -> None:
        first = await self._reach()
        others = [self._open() for _ in range(connections - 1)]
        self._idle += [first, *await asyncio.gather(*others)]

    async def _reach(self) -> Connection:
        """The first connection; the address that took it is used for all others."""
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(self._address.host, self._address.port, type=1)  # SOCK_STREAM
        failure: OSError | None = None
        for family, _, _, _, address in addresses:
            self._family, self._host = family, numeric(address)
            try:
                return await self._open()
            except OSError as error:
                failure = failure or error
        raise failure or OSError(f"{self._address.host} has no address")

    async def _open(self) -> Connection:
        self._opened += 1
        number, address = self._opened, self._address
        loop = asyncio.get_running_loop()
        sock = new_socket(self._family)
        try:
            await loop.sock_connect(sock, (self._host, address.port))
            if address.tls is not None:
                sock = await _secured(sock, address.tls, address.host)
        except BaseException:
            sock.close()
            raise
        connection = Connection(self, number)
        if self._loop is None:
            self._loop = AsyncioLoop(loop)
        Transport(self._loop, sock, connection)
        return connection

    def _send_on_new(self, exchange: Exchange) -> None:
        exchange.connect_start_ns = exchange.connect_start_ns or monotonic_ns()
        exchange.carrier = asyncio.get_running_loop().create_task(self._connect_and_send(exchange)).cancel

    async def _connect_and_send(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            self._not_opened(exchange, error)
        else:
            self._send_opened(connection, exchange)


async def _secured(sock: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Shake hands. Raises OSError, ssl.SSLError among them."""
    loop, secure = asyncio.get_running_loop(), to_secure(sock, tls, host)
    with contextlib.closing(handshake(secure)) as steps:
        for wanted in steps:
            watch, leave = (
                (loop.add_reader, loop.remove_reader) if wanted == "read" else (loop.add_writer, loop.remove_writer)
            )
            ready = asyncio.Event()
            watch(secure.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                leave(secure.fileno())
    return secure
