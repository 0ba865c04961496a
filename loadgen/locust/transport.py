"""What a generator needs of gevent: its event loop, and a pool of connections."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

import gevent
from gevent.socket import wait_read, wait_write

from gapmeter.loadgen.client import AHEAD_S, Pool, numeric
from gapmeter.loadgen.connection import Connection
from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.transport import Transport, handshake, new_socket, to_secure

READ, WRITE = 1, 2
_BEFORE_READING = 2  # libev's highest: within one priority it takes what became ready last first, and a timer waits
_AFTER_READING = -2  # libev's lowest priority: within a round of the loop it comes after what has arrived


class GreenLoop:
    """Callbacks run in gevent's hub: they must not wait. What they raise goes to the hub's ``handle_error``.

    Those of timers come before those of sockets, which have ``priority`` 0.
    """

    def __init__(self, priority: int = _BEFORE_READING) -> None:
        self.native = gevent.get_hub().loop
        self._priority = priority
        self._watchers: dict[tuple[int, int], Any] = {}

    def add_reader(self, fd: int, callback: Callable[[], Any]) -> None:
        self._watch(fd, READ, callback)

    def remove_reader(self, fd: int) -> None:
        self._leave(fd, READ)

    def add_writer(self, fd: int, callback: Callable[[], Any]) -> None:
        self._watch(fd, WRITE, callback)

    def remove_writer(self, fd: int) -> None:
        self._leave(fd, WRITE)

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call it in the loop's next round, after the sockets; gevent itself would call it before they are read."""
        self.native.timer(0.0, 0.0, True, _AFTER_READING).start(callback, *arguments)

    def _watch(self, fd: int, what: int, callback: Callable[[], Any]) -> None:
        watcher = self.native.io(fd, what)
        watcher.priority = self._priority
        watcher.start(callback)
        self._watchers[fd, what] = watcher

    def _leave(self, fd: int, what: int) -> None:
        watcher = self._watchers.pop((fd, what))
        watcher.stop()
        watcher.close()


class GreenPool(Pool):
    """A pool whose connections are opened by greenlets; what happens on them is the same as with asyncio."""

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        super().__init__(address, on_finished)
        self._loop = GreenLoop(priority=0)

    def warm(self, connections: int) -> None:
        first = self._reach()
        others = [gevent.spawn(self._try_open) for _ in range(connections - 1)]
        gevent.joinall(others, timeout=AHEAD_S, raise_error=True)
        self._add_idle([first, *(other.value for other in others if other.ready())])
        gevent.killall(others)

    def _reach(self) -> Connection:
        """The first connection; the address that took it is used for all others."""
        addresses = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        failure = OSError(f"{self._address.host} has no address")
        for family, _, _, _, address in addresses:
            self._family, self._host = family, numeric(address)
            try:
                return self._open()
            except OSError as error:
                failure = error
        raise failure

    def _try_open(self) -> Connection | OSError:
        try:
            return self._open()
        except OSError as error:
            return error

    def _open(self) -> Connection:
        self._opened += 1
        connection, address = Connection(self, self._opened), self._address
        sock = _connected(self._family, (self._host, address.port))
        if address.tls is not None:
            sock = _secured(sock, address.tls, address.host)
        Transport(self._loop, sock, connection)
        return connection

    def _send_on_new(self, exchange: Exchange) -> None:
        exchange.connect_start_ns = exchange.connect_start_ns or monotonic_ns()
        exchange.carrier = partial(gevent.spawn(self._open_and_send, exchange).kill, block=False)

    def _open_and_send(self, exchange: Exchange) -> None:
        try:
            connection = self._open()
        except OSError as error:
            self._not_opened(exchange, error)
        else:
            self._send_opened(connection, exchange)


def _connected(family: int, address: tuple[str, int]) -> socket.socket:
    """A socket that does not block. Raises OSError."""
    sock = new_socket(family)
    try:
        code = sock.connect_ex(address)
        if code in (errno.EINPROGRESS, errno.EAGAIN):
            wait_write(sock.fileno())
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))  # its constructor picks ConnectionRefusedError and its like
    except BaseException:
        sock.close()
        raise
    return sock


def _secured(sock: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Shake hands. Raises OSError, ssl.SSLError among them."""
    secure = to_secure(sock, tls, host)
    with contextlib.closing(handshake(secure)) as steps:
        for wanted in steps:
            (wait_read if wanted == "read" else wait_write)(secure.fileno())
    return secure
