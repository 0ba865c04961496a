"""The wire client: connections to one server, each used again when it is free."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic_ns
from typing import Any, Literal

from gapmeter.loadgen.connection import CUT, Connection
from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.transport import AsyncioLoop, SocketLoop, Transport
from gapmeter.records import Outcome
from gapmeter.records.request import NO_FLAG, Flag

# Why no connection can be opened though the server may take it; after the first of them no more is measured.
_OUR_LACK = {
    errno.EMFILE: "this process may open no more files: raise its limit (ulimit -Hn), or use more generator processes",
    errno.ENFILE: "this machine may open no more files: raise its limit (sysctl fs.file-max)",
    errno.EADDRNOTAVAIL: (
        "this machine has no port left to connect from: allow it more (sysctl net.ipv4.ip_local_port_range), or send "
        "from several machines"
    ),
    errno.ENOBUFS: "this machine has no room for another connection",
    errno.ENOMEM: "this machine has no memory for another connection",
}


def reason(error: OSError) -> str:
    """The system's own words for a failure, whichever event loop reports it; OpenSSL's for one of its own."""
    if isinstance(error, ssl.SSLError):  # its number is no errno
        return f"the TLS handshake failed: {error.reason or error}"
    has_number = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if has_number else error.strerror or str(error)


def lack_of(error: OSError) -> str:
    """What this machine lacks for a connection, "" where it is not that."""
    return _OUR_LACK.get(error.errno or 0, "")


def numeric(address: Sequence[Any]) -> str:
    """The host of a socket's address; of a link-local one with the interface that it is on."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{scope}" if scope and "%" not in address[0] else str(address[0])


# A body that ends behind its answer does so at once; 20 ms once a server has been found not to end any.
_AWAIT_END_NS, _AWAIT_NO_END_NS = 1_000_000_000, 20_000_000
FIRST_S = 10.0  # for the first connection, at each of the server's addresses
AHEAD_S = 2.0  # for all connections opened ahead but the first: a server with one thread shakes hands on one at a time


class Pool:
    """Connections to one address, kept alive and reused, the most recently used first. A subclass says how to open one.

    ``on_finished`` is called once for every request that was issued, whatever became of it. ``lack``: what this machine
    lacked for a connection, "" while it has it: such a request has not failed, and the run has to end.
    """

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        self._address, self._on_finished = address, on_finished
        self._loop: SocketLoop
        self._host = address.host  # numeric once ``warm`` has found one that answers
        self._family: int = socket.AF_INET  # of that one
        self._idle: list[Connection] = []
        self._flying: dict[Exchange, None] = {}  # in the order of issue
        self._in_order, self._last_due_ns = True, 0  # whether each was due after those that were issued before it
        self._marked: dict[Exchange, int] = {}  # whose end mark is here, and their body's end is not; since when
        self._await_end_ns = _AWAIT_END_NS
        self._opened = 0
        self.lack = ""
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
            self._await_end_ns = _AWAIT_END_NS
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

    def await_end(self, exchange: Exchange, now_ns: int) -> None:
        """Note that the answer's end mark may have come, with more of the body to follow."""
        self._marked.setdefault(exchange, now_ns)  # comments behind it do not put its end off

    def leave_unended(self, now_ns: int) -> None:
        """End every request whose answer is there while the server holds its body open: its user goes on."""
        for exchange, since_ns in list(self._marked.items()):
            if since_ns < now_ns - self._await_end_ns:
                self._leave(exchange)

    def _leave(self, exchange: Exchange) -> bool:
        """End it if its answer is there but for the body's end; whether it was."""
        marked = self._marked.pop(exchange, None) is not None
        left = marked and isinstance(exchange.carrier, Connection) and exchange.carrier.leave_unended()
        if left:
            self._await_end_ns = _AWAIT_NO_END_NS
        return left

    def abort(self, reason: str) -> None:
        """Give up everything that is in flight."""
        for exchange in list(self._flying):
            self.give_up(exchange, Outcome.ABORTED, reason)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _add_idle(self, opened: Sequence[Connection | OSError]) -> None:
        """Keep connections opened ahead, first opened first used: a server with few threads serves the first ones.

        One that the server did not take is left to the request that will need it; what this machine lacks is raised.
        """
        self._idle += [one for one in reversed(opened) if isinstance(one, Connection)]
        for error in opened:
            if isinstance(error, OSError) and lack_of(error):
                raise error

    def warm(self, connections: int) -> Any:
        """Look the host up and open connections, at least one, and as many as the server takes in ``AHEAD_S``.

        Raises OSError when it takes none. To be awaited with asyncio; with gevent it has happened when
        the call returns.
        """
        raise NotImplementedError

    # -- opening: coroutines, which gevent's pool runs too, where what they await blocks the greenlet

    async def _reach(self) -> Connection:
        """The first connection; the address that took it is used for all others."""
        failure = OSError(f"{self._address.host} has no address")
        for family, _, _, _, address in await self._look_up():
            self._family, self._host = family, numeric(address)
            try:
                return await self._in_time(self._open())
            except OSError as error:
                failure = error
        raise failure

    async def _in_time(self, opening: Coroutine[Any, Any, Connection]) -> Connection:
        """The connection. Raises OSError (ETIMEDOUT) where it takes longer than ``FIRST_S``, and as ``opening``."""
        raise NotImplementedError

    async def _try_open(self) -> Connection | OSError:
        try:
            return await self._open()
        except OSError as error:
            return error

    async def _open(self) -> Connection:
        """Raises OSError, ssl.SSLError among them."""
        self._opened += 1
        number, address = self._opened, self._address
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex((self._host, address.port))
            if code in (errno.EINPROGRESS, errno.EAGAIN):
                await self._until(sock.fileno(), "writable")
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))  # its constructor picks ConnectionRefusedError and its like
            if address.tls is not None:
                sock = address.tls.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
                await self._shake_hands(sock)
        except BaseException:
            sock.close()
            raise
        connection = Connection(self, number)
        Transport(self._loop, sock, connection)
        return connection

    async def _shake_hands(self, secure: ssl.SSLSocket) -> None:
        while True:
            try:
                secure.do_handshake()
                return
            except ssl.SSLWantReadError:
                what: Literal["readable", "writable"] = "readable"
            except ssl.SSLWantWriteError:
                what = "writable"
            await self._until(secure.fileno(), what)

    def _send_on_new(self, exchange: Exchange) -> None:
        """Open a connection and send there, without waiting for either."""
        exchange.connect_start_ns = exchange.connect_start_ns or monotonic_ns()
        exchange.carrier = self._begin(exchange)

    async def _open_and_send(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            self._not_opened(exchange, error)
        else:
            self._send_opened(connection, exchange)

    def _begin(self, exchange: Exchange) -> Callable[[], object]:
        """Have ``_open_and_send`` run; returns what ends it."""
        raise NotImplementedError

    async def _look_up(self) -> Sequence[Any]:
        """The server's addresses, as getaddrinfo gives them."""
        raise NotImplementedError

    async def _until(self, fd: int, what: Literal["readable", "writable"]) -> None:
        """Wait until it is."""
        raise NotImplementedError

    def _send_opened(self, connection: Connection, exchange: Exchange) -> None:
        if exchange.done:  # given up meanwhile: a greenlet that is to be killed may still come to this
            connection.close()
            return
        exchange.connect_end_ns = monotonic_ns()
        if connection.closed:
            self._never_sent(exchange, Outcome.CUT, CUT)
        else:
            connection.send(exchange)

    def _not_opened(self, exchange: Exchange, error: OSError) -> None:
        if exchange.done:
            return
        if lack := lack_of(error):
            self.lack = self.lack or lack
            self._never_sent(exchange, Outcome.ABORTED, lack)
            return
        in_handshake = isinstance(error, ssl.SSLError) or (
            self._address.tls and isinstance(error, (ConnectionResetError, ConnectionAbortedError))
        )
        self._never_sent(exchange, Outcome.TLS if in_handshake else Outcome.REFUSED, reason(error))

    def give_up(self, exchange: Exchange, outcome: Outcome, reason: str) -> None:
        """End a request from our side; what has arrived of its answer is kept. Time is not up for one that is there."""
        if outcome is not Outcome.ABORTED and self._leave(exchange):
            return
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
        self._marked.pop(exchange, None)
        self._on_finished(exchange)


class Client(Pool):
    """A pool whose connections are opened by asyncio's running loop."""

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        super().__init__(address, on_finished)
        self._asyncio = asyncio.get_running_loop()
        self._loop = self._sockets = AsyncioLoop(self._asyncio)

    def close(self) -> None:
        super().close()
        self._sockets.close()

    async def warm(self, connections: int) -> None:
        first = await self._reach()
        others = [asyncio.ensure_future(self._try_open()) for _ in range(connections - 1)]
        if others:
            await asyncio.wait(others, timeout=AHEAD_S)
        self._add_idle([first, *(other.result() for other in others if other.done())])
        for other in others:
            other.cancel()

    def _begin(self, exchange: Exchange) -> Callable[[], object]:
        return self._asyncio.create_task(self._open_and_send(exchange)).cancel

    async def _look_up(self) -> Sequence[Any]:
        return await self._asyncio.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)

    async def _in_time(self, opening: Coroutine[Any, Any, Connection]) -> Connection:
        try:
            async with asyncio.timeout(FIRST_S):
                return await opening
        except TimeoutError as error:  # which asyncio raises without a number
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error

    async def _until(self, fd: int, what: Literal["readable", "writable"]) -> None:
        loop, ready = self._asyncio, asyncio.Event()
        watch, leave = (
            (loop.add_reader, loop.remove_reader) if what == "readable" else (loop.add_writer, loop.remove_writer)
        )
        watch(fd, ready.set)
        try:
            await ready.wait()
        finally:
            leave(fd)
