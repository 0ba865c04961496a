"""A connected socket on any event loop: bytes are read with the kernel's stamps and handed on at once.

The kernel stamps each packet as it comes in, by CLOCK_REALTIME (SO_TIMESTAMPNS), and hands the stamp of the last packet
in a read over with the bytes. TCP's rules of order make that an upper bound for all that the read brought, with one
exception: where a packet had overtaken another, the last one's stamp may be older than the one that completed the read.
``out_of_order`` counts those.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gapmeter.records.timer import Readers

if TYPE_CHECKING:
    from gapmeter.loadgen.connection import Connection

Received = Callable[[bytes, int, int], object]  # data, our CLOCK_MONOTONIC ns, the kernel's CLOCK_REALTIME ns (0: none)
Lost = Callable[[OSError | None], object]  # None: the peer has closed
_native: Callable[[int, Received, Lost], object] | None = None
with contextlib.suppress(ImportError):  # it was built where a compiler was
    from gapmeter.loadgen._receive import receive as _native
MOST_READ = 1 << 16
_TIMESTAMPNS = 35  # SO_TIMESTAMPNS and SCM_TIMESTAMPNS of <asm-generic/socket.h>
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_OUT_OF_ORDER_AT = 224  # tcpi_rcv_ooopack in <linux/tcp.h>'s struct tcp_info, since Linux 5.4
_TCP_INFO_BYTES = 232
MOST_WAIT_NS = (1 << 32) - 1
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def stamp_arrivals(sock: socket.socket) -> bool:
    """Ask for the kernel's stamps on this socket; False where the platform has none."""
    if sys.platform != "linux" or struct.calcsize("l") != 8:
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def reader(sock: socket.socket, received: Received, lost: Lost) -> Callable[[], object]:
    """What to call whenever a socket that does not block has something to read, or an error to tell."""
    if _native is not None:
        return partial(_native, sock.fileno(), received, lost)
    return partial(_in_python, sock, received, lost)


def _in_python(sock: socket.socket, received: Received, lost: Lost) -> None:
    try:
        data, parts, _, _ = sock.recvmsg(MOST_READ, _ANCILLARY)
    except BlockingIOError:
        return
    except OSError as error:
        lost(error)
        return
    now = monotonic_ns()
    if not data:
        lost(None)
        return
    arrived = 0
    for level, kind, stamp in parts:
        if level == socket.SOL_SOCKET and kind == _TIMESTAMPNS:
            seconds, rest = _TIMESPEC.unpack(stamp)
            arrived = seconds * 1_000_000_000 + rest
    received(data, now, arrived)


def out_of_order(sock: socket.socket) -> int:
    """Packets of this connection that came before one that should have preceded them; 0 where nobody counts them."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    if len(info) < _TCP_INFO_BYTES:
        return 0
    return int.from_bytes(info[_OUT_OF_ORDER_AT : _OUT_OF_ORDER_AT + 4], sys.byteorder)


class WallClock:
    """The kernel's clock on ours: CLOCK_REALTIME minus CLOCK_MONOTONIC, known ever more narrowly from pairs of reads.

    Linux slews both clocks alike, so that their difference is constant until somebody sets the wall clock. A read of it
    between two of the other bounds the difference; what all pairs allow is the result, ``width_ns`` wide. A pair that
    contradicts it tells that the clock was set: then it is known anew, from that moment on.
    """

    def __init__(self) -> None:
        self.steps = -1
        self._low = self._high = self._since_ns = 0
        self._begin(*self._pair())

    @property
    def width_ns(self) -> int:
        """The width of the interval in which the difference of the clocks lies."""
        return self._high - self._low

    def look(self) -> None:
        """Take another pair. Less than a microsecond, but not for the moment in which something is stamped."""
        low, high, now = self._pair()
        if low > self._high or high < self._low:
            self._begin(low, high, now)
        else:
            self._low, self._high = max(self._low, low), min(self._high, high)

    def waits(self, arrived: NDArray[np.int64], read: NDArray[np.int64], from_ns: int) -> NDArray[np.uint32]:
        """How long the bytes of each read had lain in the kernel, at least: uint32 ns, 0 where that is not known.

        ``arrived`` are the kernel's stamps (0: none), ``read`` ours, none of them before ``from_ns``. A piece has never
        arrived before an earlier one, so a stamp that is older than its predecessor's counts as that one's. Nothing is
        known of what came before the wall clock was last found to be set; and nothing of an answer whose stamps lie
        before its request: they are no stamps of this clock.
        """
        self.look()
        at = arrived - self._low  # the latest that it can have been
        known = (arrived != 0) & (read >= self._since_ns)
        # Bytes that lay in the kernel while the clock was set have a stamp of before, which would be seconds off.
        known &= (at >= self._since_ns) | (self.steps == 0)
        if not known.any() or at[known].min() < from_ns:
            return np.zeros(len(read), np.uint32)
        at = np.maximum.accumulate(np.where(known, at, 0))
        return np.where(known, np.clip(read - at, 1, MOST_WAIT_NS), 0).astype(np.uint32)

    def _begin(self, low: int, high: int, now: int) -> None:
        self.steps += 1
        self._low, self._high, self._since_ns = low, high, now

    @staticmethod
    def _pair() -> tuple[int, int, int]:
        """Bounds of the difference (a ns wider, for rounding), and when they were taken."""
        before = monotonic_ns()
        wall = time_ns()
        after = monotonic_ns()
        return wall - after - 1, wall - before + 1, after


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


class Transport:
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
        connection.transport = self
        if self._stamped:
            connection.disorder = self._disorder
        plain = reader(sock, connection.received, self._lose)
        loop.add_reader(self._fd, self._read_secured if self._secure else plain)

    def write(self, data: bytes) -> None:
        self._unsent = self._unsent + data if self._unsent else self._push(data)
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
            # Read on: more may have been decrypted, of which the socket knows nothing.
            self._connection.received(data, monotonic_ns(), 0)

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
