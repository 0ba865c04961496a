"""The health of a process while it serves: how late its event loop runs, how fast the machine is, its collections."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import struct
import time
from typing import Any

from gapmeter_probe.records import Span
from gapmeter_probe.writer import RecordWriter

INTERVAL_NS = 20_000_000
CANARY_EVERY = 50  # lag samples to one canary: once a second
CANARY_ROUNDS = 4_000  # about 0.2 ms on a machine of 2024
_SHORT_COLLECTION_NS = 100_000
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


def watch_loop(writer: RecordWriter) -> bool:
    """Sample the running event loop's lag from now on, and a canary once a second. False where there is no timerfd.

    A timer of the kernel says when; how much later its callback runs is the loop's doing alone.
    """
    loop = asyncio.get_running_loop()
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return False
    first = time.monotonic_ns() + INTERVAL_NS
    when = struct.pack("@4q", *divmod(INTERVAL_NS, 1_000_000_000), *divmod(first, 1_000_000_000))
    if libc.timerfd_settime(fd, _ABSOLUTE, when, None) < 0:
        os.close(fd)
        return False
    state = [first - INTERVAL_NS, 0]

    def ring() -> None:
        ran = time.monotonic_ns()
        rung = int.from_bytes(os.read(fd, 8), "little")
        due = state[0] + INTERVAL_NS
        state[0] += rung * INTERVAL_NS
        state[1] += rung
        writer.span(Span.LOOP_LAG, 0, ran, ran, rung, due)
        if state[1] >= CANARY_EVERY:
            state[1] = 0
            canary(writer)

    loop.add_reader(fd, ring)
    return True


def canary(writer: RecordWriter) -> None:
    """A fixed piece of work; n is the thread's CPU time in ns, which tells a slow machine from a taken one."""
    cpu, start = time.thread_time_ns(), time.monotonic_ns()
    value = 1
    for _ in range(CANARY_ROUNDS):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    end = time.monotonic_ns()
    writer.span(Span.CANARY, 0, start, end, time.thread_time_ns() - cpu)


def watch_collections(writer: RecordWriter) -> None:
    """Record the process's garbage collections that took 0.1 ms or more."""
    began = [0]

    def seen(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            began[0] = time.monotonic_ns()
            return
        end = time.monotonic_ns()
        if end - began[0] >= _SHORT_COLLECTION_NS:
            writer.span(Span.GC, 0, began[0], end, info["generation"])

    gc.callbacks.append(seen)
