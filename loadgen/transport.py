"""A connected socket on any event loop: bytes are read with the kernel's stamps and handed on at once."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from gapmeter.loadgen.receive import MOST_READ, out_of_order, reader, stamp_arrivals
from gapmeter.records.timer import Readers

if TYPE_CHECKING:
    from gapmeter.loadgen.connection import Connection

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketLoop(Readers, Protocol):
    """What sockets need of an event loop; asyncio's loops have it."""

    def add_writer(self, fd: int, callback: Callable[[], Any], /) -> Any: ...

    def remove_writer(self, fd: int, /) -> Any: ...

    def call_soon(self, callback: Callable[..., Any], /, *arguments: Any) -> Any: ...


class AsyncioLoop:
    """asyncio's loop, for sockets that are read.

    libuv stops watching a socket that its peer has reset, even if bytes are left to read. So an epoll of our own, which
    watches for errors only and costs no read anything, calls the reader until it has seen the error.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._readers: dict[int, Callable[[], Any]] = {}
        self._errors = select.epoll()
        self.add_writer, self.remove_writer, self.call_soon = loop.add_writer, loop.remove_writer, loop.call_soon
        loop.add_reader(self._errors.fileno(), self._failed)

    def add_reader(self, fd: int, callback: Callable[[], Any]) -> None:
        self._readers[fd] = callback
        self._errors.register(fd, 0)
        self._loop.add_reader(fd, callback)

    def remove_reader(self, fd: int) -> None:
        del self._readers[fd]
        self._errors.unregister(fd)
        self._loop.remove_reader(fd)

    def close(self) -> None:
        """Once no socket is read any more; before that nothing happens."""
        if not self._readers and not self._errors.closed:
            self._loop.remove_reader(self._errors.fileno())
            self._errors.close()

    def _failed(self) -> None:
        for fd, _ in self._errors.poll(0):
            if (reader := self._readers.get(fd)) is not None:  # one that came before it may have ended it
                reader()


class Transport(asyncio.Transport):
    """``sock`` does not block; a TLS one has shaken hands.

    A TLS record's packets are not the packets that ``recv`` returns: there, bytes have our own stamps alone.
    """

    def __init__(self, loop: SocketLoop, sock: socket.socket, connection: Connection) -> None:
        self._loop, self._sock, self._connection = loop, sock, connection
        self._fd = sock.fileno()
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._stamped = not self._secure and stamp_arrivals(sock)
        self._disordered = 0
        self._unsent = b""
        self._closed = self._writing = False
        connection.connection_made(self)
        if self._stamped:
            connection.disorder = self._disorder
        plain = reader(sock, connection.received, self._lose)
        loop.add_reader(self._fd, self._read_secured if self._secure else plain)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = self._push(bytes(data)) if not self._unsent else b""
        self._unsent = rest if not self._unsent else self._unsent + bytes(data)
        if self._unsent and not self._writing and not self._closed:
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def abort(self) -> None:
        self._lose(None)

    def _push(self, data: bytes) -> bytes:
        """Write; returns what the socket did not take."""
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
        if not self._unsent and self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
            self._connection.resume_writing()

    def _read_secured(self) -> None:
        while not self._closed:
            try:
                data = self._sock.recv(MOST_READ)
            except _NOT_NOW:
                return
            except OSError as error:
                self._lose(error)
                return
            if not data:
                self._lose(None)
                return
            self._connection.data_received(data)  # more may have been decrypted, of which the socket knows nothing

    def _disorder(self) -> int:
        if not self._closed:
            self._disordered = out_of_order(self._sock)
        return self._disordered

    def _lose(self, error: OSError | None) -> None:
        """The connection learns of it in the loop's next round, when the call that wrote or closed has returned."""
        if self._closed:
            return
        if self._stamped:
            self._disorder()
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self._loop.call_soon(self._connection.connection_lost, error)
