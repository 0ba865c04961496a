"""Who had the cores while a thread would have gone on, from the kernel's records of every switch.

From the records (gapmeter.servers.telemetry.switches) come, for each thread, the stretches in which it ran, in which it
had been put off its core while it would have gone on, and in which it slept; from the probes' spans what it was at.
A run is looked at some seconds at a time: all at once would fill the memory, and overflow the processor's caches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, distinct
from gapmeter.analysis.ledger.cores import (
    CORE,
    LOCK,
    STOPPED,
    WORK,
    Aside,
    CoreUse,
    Culprit,
    ManyStretches,
    Packed,
    Reason,
    Stretches,
)
from gapmeter.analysis.ledger.critical_path import Intervals, Times, at_least, covered, outside, overlaps, pieces, union
from gapmeter.analysis.ledger.processes import RecordedProcess, loop_work, pool_awaited, pool_full
from gapmeter.analysis.ledger.switches import Watched
from gapmeter.analysis.ledger.threads import BESIDE, MAIN, Threads, spans_of
from gapmeter.records import Span

_AT_ONCE = 2  # windows that are looked at side by side
_WAKES_NS = 100_000_000  # within this a thread that was woken gets a core; what it slept before that had another cause
_LETS_GO_NS = 100_000  # within this a thread runs again that waited for its interpreter


def who_ran(
    watched: Watched, processes: Sequence[RecordedProcess], cores: Sequence[int], aside: Aside
) -> CoreUse | None:
    """What kept each of the server's threads. ``cores`` are the server's (none: all that it ran on).

    None where the kernel's records name other processes by these ids: the server is in a container of its own.
    """
    threads = Threads(watched, processes, cores)
    if not all(map(threads.knows, threads.kind)):
        return None
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        parts = defaultdict[tuple[str, int], list[Packed]](list)
        for part in pool.map(lambda times: _Window(threads, *times).found(), threads.windows()):
            for key, packed in part.items():
                parts[key] += map(aside.kept, packed)
    of = {key: ManyStretches(each) for key, each in parts.items()}
    for pid, computing in threads.computing.items():
        alone = computing == [threads.main[pid]]
        of["worker", pid] = of["engine" if alone else "forward", pid]
        if alone:
            of["executor", pid] = of["engine", pid]
    reasons = (*(Reason(CORE, who) for who in threads.culprits), Reason(LOCK), Reason(WORK))
    return CoreUse(reasons, of, "switches")


class _Window:
    """Who was at what on which core in a part of the run, and from it what kept each thread then."""

    def __init__(self, threads: Threads, low: int, high: int) -> None:
        until, near = threads.near(low, high)
        self.threads, self.low, self.high, self.watched = threads, low, high, threads.watched
        runs = threads.runs[near]
        names = ("pid", "tid", "cpu", "start", "end", "preempted")
        self.runs = {name: np.ascontiguousarray(runs[name]) for name in names}
        self.by_thread = np.argsort(self.runs["tid"], kind="stable")  # and in order of time
        self.processes = [process.within(low, until) for process in threads.processes]
        self.work = self._at_work()  # every run, cut into what it was at: the run's row, and the culprit's number
        self.forwards = np.isin(self.work.cls, threads.forwards)

    def found(self) -> dict[tuple[str, int], list[Packed]]:
        """By kind of thread and process id, ``packed``."""
        of: dict[tuple[str, int], Stretches] = {}
        for process in self.processes:
            if process.kind == "api":
                of |= {(kind, process.pid): kept for kind, kept in self._of_api(process).items()}
        for pid in self.threads.computing:
            of |= {(kind, pid): kept for kind, kept in self._of_engine(pid).items()}
        return {key: kept.packed() for key, kept in of.items()}

    def _of_api(self, process: RecordedProcess) -> dict[str, Stretches]:
        main, pool = [self.threads.main[process.pid]], self.threads.pool[process.pid]
        running, pooled = self._on_core(main), self._on_core(pool)
        preempted, locked, pool_preempted = self._preempted(main), self._locked(main, pool), self._preempted(pool)
        held = self._all_held(~self._of(main + pool))
        # Who sleeps in the middle of a call takes no message, whoever has the cores.
        called, full = loop_work(process, (Span.DETOKENIZE,)), pool_full(process, len(pool))
        stopped = self._stopped(process.pid)
        at_work = union(*map(np.concatenate, zip(running, called, strict=True)))
        locked_out = outside(*pooled, *running)[1:]  # a loop that runs itself has the interpreter
        busy = outside(*running, *full)[1:]
        return {
            "loop": self._join(stopped, preempted, lock=locked),
            "loop turn": self._join(stopped, preempted, lock=locked, work=loop_work(process)),
            "pool": self._join(stopped, pool_preempted, lock=self._locked(pool, main)),
            "loop woken": self._join(
                stopped, preempted, held.outside(*called).outside(*self._asleep(main)), lock=locked_out, work=at_work
            ),
            "pool woken": self._join(
                stopped, pool_preempted, held.outside(*full).outside(*self._asleep(pool)), lock=busy, work=full
            ).meeting(*pool_awaited(process)),
        }

    def _of_engine(self, pid: int) -> dict[str, Stretches]:
        threads = self.threads
        main, sender, receiver = [threads.main[pid]], threads.sender[pid], threads.receiver[pid]
        rows = self._of(main) & ~self.forwards  # a forward leaves the interpreter to others
        python, stopped = union(self.work.start[rows], self.work.end[rows]), self._stopped(pid)
        computing = [self._stopped(one) for one, tid in threads.main.items() if tid in threads.computing[pid]]
        held = self._all_held(~rows).outside(*self._asleep([*sender, *receiver] or main))
        preempted, locked = self._preempted(main), self._locked(main, [*sender, *receiver])
        kept = {
            "engine": self._join(stopped, preempted, lock=locked),
            "forward": self._join(*computing, self._preempted(threads.computing[pid])),
            "sender": self._join(stopped, self._preempted(sender), lock=self._locked(sender, main, python)),
            "receiver": self._join(stopped, self._preempted(receiver), lock=self._locked(receiver, main, python)),
            "engine woken": self._join(stopped, held, lock=python),
        }
        if threads.computing[pid] != main:  # one of both should take the message between them
            both = [*main, *threads.computing[pid]]
            awaited = self._all_held(~self._of(both)).outside(*self._asleep(both))
            kept["executor"] = self._join(stopped, preempted, awaited, lock=locked)
        return kept

    def _at_work(self) -> Intervals:
        runs, main = self.runs, np.isin(self.runs["tid"], list(self.threads.main.values()))
        pids, at = np.unique(runs["pid"], return_inverse=True)
        idle = np.array([self.threads.idle_at[pid] for pid in pids.tolist()], np.int64)
        parts = [Intervals(np.arange(len(at)), runs["start"], runs["end"], idle[at])]
        for process in self.processes:
            own = runs["pid"] == process.pid
            for stages_of, rows in ((MAIN, np.flatnonzero(own & main)), (BESIDE, np.flatnonzero(own & ~main))):
                for code, stage in stages_of[process.kind].items():
                    number = self.threads.number[Culprit(process.kind, stage)]
                    parts.append(self._within(process, code, rows, own=stages_of is MAIN, number=number))
        return pieces(Intervals.join(parts), len(at), len(self.threads.culprits))

    def _within(self, process: RecordedProcess, code: Span, rows: Ints, *, own: bool, number: int) -> Intervals:
        """Parts of these runs, of a process's main thread (or of its others), that lie in its spans of one kind."""
        spans = spans_of(process, code, own=own)
        begun = spans["start_ns"] if code == Span.OUTPUT_SEND or not own else spans["queued_ns"]
        stretches = union(np.where(begun > 0, begun, spans["start_ns"]), spans["end_ns"])
        run, _, low, high = overlaps(self.runs["start"][rows], self.runs["end"][rows], *stretches)
        return Intervals(rows[run], low, high, np.full(len(run), number))

    # -- threads

    def _of(self, tids: Sequence[int]) -> Bools:
        """Which work is of these threads."""
        return np.asarray(np.isin(self.runs["tid"], tids)[self.work.event])

    def _on_core(self, tids: Sequence[int]) -> Times:
        mine = np.isin(self.runs["tid"], tids)
        return union(self.runs["start"][mine], self.runs["end"][mine])

    def _locked(self, tids: Sequence[int], holders: Sequence[int], python: Times | None = None) -> Times:
        """When one thread slept until ``holders`` of its interpreter, who ran Python, let it go.

        Never, where the thread may have been one of several. A sleep that ends long after they ran had another cause.
        ``python``: when they ran Python; all that they ran, if None.
        """
        ran = self._on_core(holders)
        _, start, end, _ = self._gaps(tids if len(tids) == 1 else (), preempted=False)
        _, since, until, _ = self._gaps(holders, preempted=True)  # a holder that is put off its core holds on
        held = union(np.concatenate([ran[0], since]), np.concatenate([ran[1], until]) + _LETS_GO_NS)
        row, _, low, high = overlaps(start, end, *held)
        last = high == end[row]
        _, _, start, end = overlaps(low[last], high[last], *(python or ran))
        return start, end

    def _gaps(self, tids: Sequence[int], *, preempted: bool) -> tuple[Ints, Ints, Ints, Ints]:
        """Between each run of these threads and its next, by how the former ended: thread, start, end, its core."""
        mine = np.isin(self._between[0], tids) & (self._between[-1] == preempted)
        thread, start, end, cpu = (column[mine] for column in self._between[:-1])
        return thread, start, end, cpu

    @cached_property
    def _between(self) -> tuple[Ints, Ints, Ints, Ints, Bools]:
        """Of every thread, between each run and its next: thread, start, end; of the former its core, if preempted."""
        former, later, tid = self.by_thread[:-1], self.by_thread[1:], self.runs["tid"]
        again = tid[former] == tid[later]
        former, later = former[again], later[again]
        start, end = self.runs["end"][former], self.runs["start"][later]
        known = covered(start, end, *self.watched.lost) == 0
        former = former[known]
        return tid[former], start[known], end[known], self.runs["cpu"][former], self.runs["preempted"][former]

    # -- reasons

    def _join(self, *cores: Intervals, lock: Times | None = None, work: Times | None = None) -> Stretches:
        """One list of the window's stretches; of several reasons a wait for a core comes first, then the lock."""
        known = len(self.threads.culprits)
        others = [Intervals.of_one(known + at, *times) for at, times in enumerate((lock, work)) if times is not None]
        whole = pieces(Intervals.join([*cores, *others]), 1, known + 2)
        mine = Stretches(whole.start, whole.end, whole.cls.astype(np.int16)).within(self.low, self.high)
        start, end = (np.clip(at, self.low, self.high) for at in (mine.start, mine.end))
        return Stretches(start, end, mine.reason)

    def _stopped(self, pid: int) -> Intervals:
        stopped = self.watched.stopped.get(pid, (np.empty(0, np.int64),) * 2)
        return Intervals.of_one(self.threads.number[Culprit(STOPPED)], *stopped)

    def _preempted(self, tids: Sequence[int]) -> Intervals:
        """When threads waited for a core, each wait divided among those who ran on it; rows of event 0."""
        return self._instead(*self._gaps(tids, preempted=True)[1:])

    def _instead(self, start: Ints, end: Ints, cpu: Ints) -> Intervals:
        """Stretches of waiting for a core, each divided among those who ran on it; rows of event 0."""
        parts = list[Intervals]()
        for one in distinct(cpu).tolist():
            waits = start[cpu == one], end[cpu == one]
            ran = self._on_cpu.get(one, Intervals.join([]))
            _, at, low, high = overlaps(*waits, ran.start, ran.end)
            left = outside(*waits, ran.start, ran.end)[1:]
            parts += [
                Intervals.of_one(ran.cls[at], low, high),
                Intervals.of_one(self.threads.limit, *overlaps(*left, *self.watched.limited)[2:]),
                Intervals.of_one(self.threads.unknown, *outside(*left, *self.watched.limited)[1:]),
            ]
        return Intervals.join(parts)

    @cached_property
    def _on_cpu(self) -> dict[int, Intervals]:
        """``work`` by core, in order."""
        cpu = self.runs["cpu"][self.work.event]
        rows = {int(one): np.flatnonzero(cpu == one) for one in distinct(self.runs["cpu"])}
        return {one: self.work.rows(at[np.argsort(self.work.start[at], kind="stable")]) for one, at in rows.items()}

    def _asleep(self, tids: Sequence[int]) -> Times:
        """When all of these threads slept, and none was soon to run: that is no wait for a core, whoever has them."""
        _, slept, woken, _ = self._gaps(tids, preempted=False)
        return at_least(max(len(tids), 1), slept, woken - _WAKES_NS)

    def _all_held(self, rows: Bools) -> Intervals:
        """When each of the server's cores was held by ``rows`` of work; the first core's is named. And at a CPU limit.

        Threads of the server that carry messages don't count: they may bring the very one that is waited for.
        """
        held = rows & self._may_hold
        start, end = at_least(len(self.threads.cores), self.work.start[held], self.work.end[held])
        return Intervals.join([self._instead(start, end, np.full(len(start), self.threads.cores[0])), self._at_limit])

    @cached_property
    def _at_limit(self) -> Intervals:
        """When one of the main threads was off its core at the control group's limit: then all were."""
        waits = self._preempted(list(self.threads.main.values()))
        return waits.rows(waits.cls == self.threads.limit)

    @cached_property
    def _may_hold(self) -> Bools:
        """Work on the server's cores, but for that which carries messages.

        The server's processes do that in other threads than the main ones, who computes with these, and pools.
        """
        working = itertools.chain(self.threads.main.values(), self.threads.helping, *self.threads.pool.values())
        carries = np.isin(self.runs["pid"], list(self.threads.kind)) & ~np.isin(self.runs["tid"], list(working))
        return np.asarray((~carries & np.isin(self.runs["cpu"], self.threads.cores))[self.work.event])
