"""Asks the kernel to let this process run as soon as it wakes, also where the engine keeps the same core busy.

Since Linux 6.12 a normal process may name the time slice that it wants; one that wants short slices is let in ahead of
one that runs long ones. It gets no more of the core for it, and needs no privilege. Older kernels ignore it.
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


def ask_for_short_slices() -> bool:
    """Whether the kernel took the wish of the calling thread; its children start without it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = _ATTR.pack(_ATTR.size, _SCHED_NORMAL, _RESET_ON_FORK, os.nice(0), 0, _SLICE_NS, 0, 0)
    return bool(libc.syscall(number, 0, attributes, 0) == 0)
