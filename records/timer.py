"""One absolute timer on CLOCK_MONOTONIC, watched by the event loop.

An event loop's own timers are good to a millisecond; a timerfd wakes within tens of microseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from gapmeter.records.process import libc

_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1


class Readers(Protocol):
    """The part of an event loop that watches file descriptors; asyncio's loops have it."""

    def add_reader(self, fd: int, callback: Callable[[], Any], /) -> Any: ...

    def remove_reader(self, fd: int, /) -> Any: ...


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class Timer:
    """Calls ``wake()`` on the loop once the time given to ``arm`` has come, once for each ``arm``.

    Raises OSError where the system has no timerfd.
    """

    def __init__(self, loop: Readers, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        if sys.version_info >= (3, 13):
            self._fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
        else:
            self._fd = int(libc().timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._pointer = ctypes.byref(self._spec)
        loop.add_reader(self._fd, self._expired)

    def arm(self, at_ns: int) -> None:
        """Wake at ``at_ns``, at once if that has passed. Replaces what was armed before."""
        at_ns = max(at_ns, 1)  # an all-zero time would disarm it
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self._fd, flags=os.TFD_TIMER_ABSTIME, initial=at_ns)
            return
        self._spec.at_s, self._spec.at_ns = divmod(at_ns, 1_000_000_000)
        if libc().timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # armed anew for later since the loop saw it expire
            return
        self._wake()
