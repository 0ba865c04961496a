"""Connections that are opened by greenlets; what happens on them is the same as with asyncio."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import gevent
from gevent.socket import wait_read, wait_write

from gapmeter.loadgen.address import Address
from gapmeter.loadgen.client import Connection, Pool
from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.locust.loop import GreenLoop
from gapmeter.loadgen.locust.transport import Transport


class GreenPool(Pool):
    """A pool whose connections are opened under gevent's loop."""

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        super().__init__(address, on_finished)
        self._loop = GreenLoop()
        self._family: int = socket.AF_INET

    def warm(self, connections: int) -> None:
        first = self._reach()
        others = [gevent.spawn(self._open) for _ in range(connections - 1)]
        gevent.joinall(others, raise_error=True)
        self._idle += [first, *(other.value for other in others)]

    def _reach(self) -> Connection:
        """The first connection; the address that took it is used for all others."""
        found = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for family, _, _, _, address in found:
            self._family, self._host = family, str(address[0])
            try:
                return self._open()
            except OSError as error:
                failure = failure or error
        raise failure or OSError(f"{self._address.host} has no address")

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
        exchange.carrier = _Opening(gevent.spawn(self._open_and_send, exchange))

    def _open_and_send(self, exchange: Exchange) -> None:
        try:
            connection = self._open()
        except OSError as error:
            self._not_opened(exchange, error)
        else:
            self._send_opened(connection, exchange)


class _Opening:
    """The greenlet that opens a connection."""

    def __init__(self, greenlet: Any) -> None:
        self._greenlet = greenlet

    def cancel(self) -> None:
        self._greenlet.kill(block=False)


def _connected(family: int, address: tuple[str, int]) -> socket.socket:
    """A socket that does not block. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    secure = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                secure.do_handshake()
            except ssl.SSLWantReadError:
                wait_read(secure.fileno())
            except ssl.SSLWantWriteError:
                wait_write(secure.fileno())
            else:
                return secure
    except BaseException:
        secure.close()
        raise
