"""What a generator needs of gevent: its event loop, sockets, and a pool of connections."""

from __future__ import annotations

import asyncio
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

from gapmeter.loadgen.client import Connection, Pool
from gapmeter.loadgen.exchange import Address, Exchange

READ, WRITE = 1, 2
_MOST_READ = 1 << 16
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_BEFORE_READING = 2  # libev's highest: within one priority it takes what became ready last first, and a timer waits
_AFTER_READING = -2  # libev's lowest priority: within a round of the loop it comes after what has arrived


class GreenLoop:
    """Callbacks run in gevent's hub: they must not wait. What they raise goes to the hub's ``handle_error``."""

    def __init__(self) -> None:
        self.native = gevent.get_hub().loop
        self._readers: dict[int, Any] = {}

    def add_reader(self, fd: int, callback: Callable[[], Any]) -> None:
        watcher = self.native.io(fd, READ)
        watcher.priority = _BEFORE_READING
        watcher.start(callback)
        self._readers[fd] = watcher

    def remove_reader(self, fd: int) -> None:
        watcher = self._readers.pop(fd)
        watcher.stop()
        watcher.close()

    def call_soon(self, callback: Callable[[], Any]) -> None:
        """In the loop's next round, after the sockets: gevent's own callbacks would all run before they are read."""
        self.native.timer(0.0, 0.0, True, _AFTER_READING).start(callback)


class Transport(asyncio.Transport):
    """A connected socket: read without a greenlet, its bytes handed on the moment they are read.

    ``sock`` does not block; a TLS one has shaken hands.
    """

    def __init__(self, loop: GreenLoop, sock: socket.socket, connection: Connection) -> None:
        self._native, self._sock, self._connection = loop.native, sock, connection
        self._recv = sock.recv
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._unsent = b""
        self._closed = False
        self._reads = self._native.io(sock.fileno(), READ)
        self._writes: Any = None
        connection.connection_made(self)
        self._reads.start(self._readable)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is held back here: what the socket does not take at once follows as soon as it does."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = self._push(bytes(data)) if not self._unsent else b""
        self._unsent = rest if not self._unsent else self._unsent + bytes(data)
        if self._unsent and self._writes is None:
            self._writes = self._native.io(self._sock.fileno(), WRITE)
            self._writes.start(self._writable)

    def abort(self) -> None:
        self._lose(None)

    def _push(self, data: bytes) -> bytes:
        """What the socket did not take."""
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            return data
        except OSError as error:
            self._lose(error)
            return b""
        return data[sent:] if sent < len(data) else b""

    def _writable(self) -> None:
        self._unsent = self._push(self._unsent)
        if not self._unsent and self._writes is not None:
            self._writes.stop()
            self._writes = None
            self._connection.resume_writing()

    def _readable(self) -> None:
        more = True
        while more and not self._closed:
            try:
                data = self._recv(_MOST_READ)
            except _NOT_NOW:
                return
            except OSError as error:
                self._lose(error)
                return
            if not data:
                self._lose(None)
                return
            self._connection.data_received(data)
            more = self._secure  # more may have been decrypted already, of which the socket itself knows nothing

    def _lose(self, error: OSError | None) -> None:
        """The connection learns of it in the loop's next round, when the call that wrote or closed has returned."""
        if self._closed:
            return
        self._closed = True
        self._reads.stop()
        if self._writes is not None:
            self._writes.stop()
        self._sock.close()
        self._native.run_callback(self._connection.connection_lost, error)


class GreenPool(Pool):
    """A pool whose connections are opened by greenlets; what happens on them is the same as with asyncio."""

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
        addresses = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for family, _, _, _, address in addresses:
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
