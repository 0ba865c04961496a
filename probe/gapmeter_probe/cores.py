"""How long the threads of this process wait for a core: what the kernel counts, read where such a wait has just ended.

Linux adds up for each thread the time in which it could run but had no core, and that in which it ran (in
/proc/PID/task/TID/schedstat). Read where a thread's own work ends and again where it has been woken, the difference is
the wait between the two. Where the thread has run for more than a moment meanwhile, it may have lost its core in the
middle of that work: such a wait lies somewhere in a call, and is left there. A process without these numbers (on other
systems, or kernels built without them) records nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from time import monotonic_ns

from gapmeter_probe.records import Span
from gapmeter_probe.writer import RecordWriter

_OWN = "/proc/thread-self/schedstat"
_TASKS = "/proc/self/task"
ZMQ_THREADS = "ZMQbg/IO"  # libzmq's own threads, which move messages between its sockets and the kernel's
MOMENT_NS = 1_000_000  # work so short is not told apart from the waking before it or after it
SHORTEST_NS = 10_000  # shorter waits are not worth a record


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
    """One process's waits for a core. ``writer`` None: every method returns at once.

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
            self._look(self._thread, monotonic_ns())

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
            self._carried_off(thread, who)
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

    def _carried_off(self, thread: _Thread, who: int) -> None:
        total = _sum(thread.after)
        wait, thread.after_ns = total - thread.after_ns, total
        if thread.at_ns and wait >= SHORTEST_NS:
            assert self._writer is not None
            self._writer.span(Span.CORE_WAIT, 0, thread.at_ns, thread.at_ns + wait, who)


def countable() -> bool:
    """Whether this kernel counts: a thread that has run was given a core at least once."""
    try:
        with open(_OWN, encoding="ascii") as file:
            return any(int(number) for number in file.read().split())
    except (OSError, ValueError):
        return False


def threads_named(prefix: str) -> set[int]:
    """Ids of this process's threads whose name starts so; a thread that ends meanwhile is left out."""
    found = set()
    for tid in os.listdir(_TASKS):
        try:
            with open(f"{_TASKS}/{tid}/comm", encoding="utf-8", errors="replace") as file:
                if file.read().startswith(prefix):
                    found.add(int(tid))
        except OSError:
            continue
    return found


def _open(tid: int) -> int:
    return os.open(f"{_TASKS}/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)


def _waited(fd: int) -> int:
    return int(os.pread(fd, 64, 0).split()[1])


def _sum(fds: Sequence[int]) -> int:
    return sum(map(_waited, fds))
