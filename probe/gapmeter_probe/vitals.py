"""The health of a process while it serves.

How late its event loop runs, how fast the machine is, its collections, and how long its threads wait for a core.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gapmeter_probe.records import Span
from gapmeter_probe.writer import RecordWriter

INTERVAL_NS = 20_000_000
CANARY_EVERY = 50  # lag samples to one canary: once a second
CANARY_ROUNDS = 4_000  # about 0.2 ms on a machine of 2024
_SHORT_COLLECTION_NS = 100_000
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_OWN = "/proc/thread-self/schedstat"
_TASKS = "/proc/self/task"
ZMQ_THREADS = "ZMQbg/IO"  # libzmq's own threads, which move messages between its sockets and the kernel's
MOMENT_NS = 1_000_000  # work so short is not told apart from the waking before it or after it
SHORTEST_NS = 10_000  # shorter waits are not worth a record


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


class _Thread(threading.local):
    """What a thread knew when it last looked: its waits, how long it had run, and when that was.

    ``at_ns`` 0: it has not looked yet. ``before`` are the files of threads that hand it messages and ``after`` of
    those that take what it sends, with their sums of waits.
    """

    fd = -1
    waited_ns = ran_ns = at_ns = woken_ns = 0
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    before_ns = after_ns = 0


class CoreWaits:
    """How long this process's threads wait for a core: what the kernel counts, read where such a wait has just ended.

    Linux adds up for each thread the time in which it could run but had no core, and that in which it ran (in
    /proc/PID/task/TID/schedstat). Read where a thread's own work ends and again where it has been woken, the difference
    is the wait between the two. Where the thread has run for more than a moment meanwhile, it may have lost its core in
    the middle of that work: such a wait lies somewhere in a call, and is left there. A process without these numbers
    (on other systems, or kernels built without them) records nothing, nor does one without a ``writer``: every method
    returns at once.

    A look costs a microsecond or two for each thread concerned (a read of a file that stays open), and ten or twenty
    behind a forward that has used the processor's caches.
    """

    def __init__(self, writer: RecordWriter | None) -> None:
        self._writer = writer if writer is not None and countable() else None
        self._thread = _Thread()
        if self._writer is not None:
            self._writer.json({"type": "core_waits", "shortest_ns": SHORTEST_NS})

    def helped(self, *, before: Iterable[int] = (), after: Iterable[int] = ()) -> None:
        """The ids of threads that bring this thread its messages, and of those that carry off what it sends."""
        if self._writer is not None:
            thread = self._thread
            thread.before, thread.after = [_open(tid) for tid in before], [_open(tid) for tid in after]
            thread.before_ns, thread.after_ns = _sum(thread.before), _sum(thread.after)

    def mark(self) -> None:
        """This thread's work is done for now: what it waits from here on belongs to what wakes it."""
        if self._writer is not None:
            self._look(self._thread, time.monotonic_ns())

    def done(self, at_ns: int) -> None:
        """The same at next to no cost, for a thread that does not work for long: it was last at work at ``at_ns``."""
        self._thread.at_ns = at_ns if self._thread.fd >= 0 else 0

    def woken(self, who: int, at_ns: int) -> None:
        """This thread was woken at ``at_ns``: record what it has waited since it last looked. ``who`` is a CoreThread.

        Its wait, and before it that of the threads that brought the message, is laid directly before ``at_ns``; the
        wait of those that carried off its last message is laid directly after its last look. A second call for the same
        moment does nothing.
        """
        if self._writer is None:
            return
        thread = self._thread
        if at_ns == thread.woken_ns:
            return
        thread.woken_ns = at_ns
        if thread.after:
            total = _sum(thread.after)
            wait, thread.after_ns = total - thread.after_ns, total
            if thread.at_ns and wait >= SHORTEST_NS:
                self._writer.span(Span.CORE_WAIT, 0, thread.at_ns, thread.at_ns + wait, who)
        brought = 0
        if thread.before:
            total = _sum(thread.before)
            brought, thread.before_ns = total - thread.before_ns, total
        since = thread.at_ns
        wait = self._look(thread, at_ns) + brought
        if since and wait >= SHORTEST_NS and since < at_ns:
            self._writer.span(Span.CORE_WAIT, 0, max(since, at_ns - wait), at_ns, who)

    def _look(self, thread: _Thread, at_ns: int) -> int:
        """What the thread has waited to run since it last looked; 0 where that was in the middle of its own work."""
        if thread.fd < 0:
            thread.fd = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        ran, waited, _ = map(int, os.pread(thread.fd, 64, 0).split())
        wait = waited - thread.waited_ns if ran - thread.ran_ns < MOMENT_NS else 0
        thread.ran_ns, thread.waited_ns, thread.at_ns = ran, waited, at_ns
        return wait


def countable() -> bool:
    """Whether this kernel counts: a thread that has run was given a core at least once."""
    try:
        with open(_OWN, encoding="ascii") as file:
            return any(int(number) for number in file.read().split())
    except (OSError, ValueError):
        return False


def threads_named(prefix: str) -> set[int]:
    """Ids of this process's threads whose name starts so; a thread that ends meanwhile is left out."""
    tids = set()
    for tid in os.listdir(_TASKS):
        try:
            with open(f"{_TASKS}/{tid}/comm", encoding="utf-8", errors="replace") as file:
                if file.read().startswith(prefix):
                    tids.add(int(tid))
        except OSError:
            continue
    return tids


def _open(tid: int) -> int:
    return os.open(f"{_TASKS}/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)


def _sum(fds: Sequence[int]) -> int:
    return sum(int(os.pread(fd, 64, 0).split()[1]) for fd in fds)
