"""How long the threads of this process wait for a core: what the kernel counts, read where such a wait has just ended.

Linux adds up for each thread the time in which it could run but had no core (the second number in
/proc/PID/task/TID/schedstat). Read where a thread's own work ends and again where it has been woken, the difference is
the wait between the two. A process without that number (other systems, kernels built without it) records nothing.
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns

from gapmeter_probe.records import Span
from gapmeter_probe.writer import RecordWriter

_OWN = "/proc/thread-self/schedstat"
SHORTEST_NS = 10_000  # shorter waits are not worth a record


class _Thread(threading.local):
    """What a thread knew when it last looked: its sum of waits, and when that was. 0: it has not looked yet."""

    fd = -1
    waited_ns = 0
    at_ns = 0
    woken_ns = 0


class CoreWaits:
    """One process's waits for a core. ``writer`` None: every method returns at once.

    A call costs about a microsecond: one read of a file that stays open for each thread.
    """

    def __init__(self, writer: RecordWriter | None) -> None:
        self._writer = writer if writer is not None and countable() else None
        self._thread = _Thread()
        if self._writer is not None:
            self._writer.json({"type": "core_waits", "shortest_ns": SHORTEST_NS})

    def mark(self) -> None:
        """This thread's work is done for now: what it waits from here on belongs to what wakes it."""
        if self._writer is not None:
            thread = self._thread
            thread.waited_ns, thread.at_ns = _read(thread), monotonic_ns()

    def woken(self, who: int, at_ns: int = 0) -> None:
        """This thread has just been woken (at ``at_ns``, or now): record what it has waited since it last looked.

        ``who`` is a CoreThread. The wait is laid directly before the moment at which the thread ran again. A second
        call for the same moment does nothing.
        """
        writer = self._writer
        if writer is None:
            return
        thread = self._thread
        if at_ns and at_ns == thread.woken_ns:
            return
        thread.woken_ns = at_ns
        waited, before, since = _read(thread), thread.waited_ns, thread.at_ns
        now = monotonic_ns()
        thread.waited_ns, thread.at_ns = waited, now
        if since and waited - before >= SHORTEST_NS:
            end = at_ns or now
            writer.span(Span.CORE_WAIT, 0, max(since, end - (waited - before)), end, who)


def countable() -> bool:
    """Whether this kernel counts: a thread that has run was given a core at least once."""
    try:
        with open(_OWN, encoding="ascii") as file:
            return any(int(number) for number in file.read().split())
    except (OSError, ValueError):
        return False


def _read(thread: _Thread) -> int:
    if thread.fd < 0:
        thread.fd = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    return int(os.pread(thread.fd, 64, 0).split()[1])
