"""Waiting until a moment, to the microsecond."""

from __future__ import annotations

import ctypes
import os
import time

SPIN_NS = 80_000  # the kernel may wake a sleeper this late, so the rest of a wait is spun
_PR_SET_TIMERSLACK = 29

now = time.monotonic_ns


def exact_timers() -> None:
    """Have the kernel wake this thread when asked, not up to 50 µs later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def go_first() -> bool:
    """Have this process run as soon as it wants to, ahead of all ordinary ones; False where that is not permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


class Pause:
    """Ends at a moment. ``busy``: takes the core all the while, else sleeps until shortly before."""

    def __init__(self, *, busy: bool) -> None:
        self._busy = busy

    def until(self, moment_ns: int) -> None:
        """Return at ``moment_ns``, at once if that has passed."""
        left = moment_ns - now() - SPIN_NS
        if left > 0 and not self._busy:
            time.sleep(left / 1e9)
        while now() < moment_ns:
            pass
