"""When the kernel had the bytes: its stamp with every read, and its clock on ours.

The kernel stamps each packet as it comes in, by CLOCK_REALTIME (SO_TIMESTAMPNS), and hands the stamp of the last
packet in a read over with the bytes. TCP's rules of order make that an upper bound for all that the read brought,
with one exception: where a packet had overtaken another, the last one's stamp may be older than the one that completed
the read. ``out_of_order`` counts those.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic_ns, time_ns

import numpy as np
from numpy.typing import NDArray

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
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, known ever more narrowly from pairs of reads.

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
