"""A connected socket under gevent's loop: it reads without a greenlet, and hands bytes on the moment they are read."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from gapmeter.loadgen.client import Connection
from gapmeter.loadgen.locust.loop import READ, WRITE, GreenLoop

_MOST_READ = 1 << 16
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Transport(asyncio.Transport):
    """What a ``Connection`` needs of a transport. ``sock`` does not block; a TLS one has shaken hands."""

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
        """The connection is told in the loop's next round, so that whoever wrote or closed has finished."""
        if self._closed:
            return
        self._closed = True
        self._reads.stop()
        if self._writes is not None:
            self._writes.stop()
        self._sock.close()
        self._native.run_callback(self._connection.connection_lost, error)
