"""Why a thread did not go on: who had the cores, who held its interpreter, what an event loop was at instead.

From the kernel's records of every switch (gapmeter.servers.telemetry.switches) come, for each thread, the stretches in
which it ran, in which it had been put off its core while it would have gone on, and in which it slept. Laid beside the
probes' spans they tell what took the time of a stage from it:

- its own thread was off its core and would have gone on: a wait for the core (``core_wait``), whatever the stage;
- its own thread slept in the middle of Python code while another thread of the process ran Python: a wait for the
  interpreter's lock (``lock_wait``);
- a message was there, and the thread that should take it had no core, as all were held by others (``core_wait``), had
  to wait for the interpreter that another thread of its process held (``lock_wait``), or was an event loop at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Ints
from gapmeter.analysis.ledger.critical_path import Intervals, Times, at_least, covered, outside, overlaps, pieces, union
from gapmeter.analysis.ledger.schedstat import busiest, read_sums, spread_waits
from gapmeter.analysis.ledger.switches import ANOTHER, Watched, read_watched
from gapmeter.records import RecordFile, Span
from gapmeter.records.reader import Table

CORE, LOCK, WORK = "core_wait", "lock_wait", "at work"  # what a Reason may be
LIMIT, NOBODY, UNKNOWN = "CPU limit", "nobody", "unknown"
_LETS_GO_NS = 100_000  # within this a thread runs again that waited for its interpreter
_MOST_STAMPS, _STRAY_STAMPS = 5_000, 0.02  # looked at for whose they are; the share that may be nobody's
KnownFrom = Literal["switches", "sums", "spans"]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who ran instead, and the stage that it was at ("" where it was at none of its stages).

    ``process``: ``api``, ``engine``, ``server`` (another of its processes), ``load tester``, ``another program`` (its
    name is ``program``, where known), ``CPU limit`` (the control group's share was used up), ``nobody`` (it was about
    to run), or ``unknown``.
    """

    process: str
    stage: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """``what``: CORE with its ``culprit``, LOCK, or WORK: the thread was at work, if not at this."""

    what: str
    culprit: Culprit | None = None


@dataclass(frozen=True, slots=True)
class Stretches:
    """In order, none overlapping; ``reason``: a number in a CoreUse."""

    start: Ints
    end: Ints
    reason: Ints


@dataclass(frozen=True, slots=True)
class CoreUse:
    """By kind of thread and process id: what kept it, and when.

    Kinds within a stage: of an API server ``loop``, ``loop turn`` (where a request may be waiting for its turn on the
    loop) and ``pool``; of an engine ``engine`` (the thread that steps it),
    ``receiver`` and ``sender`` (beside it), ``worker`` (the stepping thread or a worker process's, at Python code) and
    ``forward`` (the same at computing). Between two threads' stamps, by who should take the message: ``loop woken``,
    ``pool woken``, ``engine woken`` (its receiver or sender).

    ``known_from``: the kernel's switches; its sums of waits (no culprits, no waits between stamps, no locks); or the
    probes' spans alone (only what an event loop was at).
    """

    reasons: tuple[Reason, ...]
    of: Mapping[tuple[str, int], Stretches]
    known_from: KnownFrom

    def stretches(self, kind: str, process: int) -> Stretches:
        none = np.empty(0, np.int64)
        return self.of.get((kind, process), Stretches(none, none, none))


# What a thread was at, in the order in which overlapping spans own it, and whose stage that is: an API server's event
# loop and its pool, an engine's stepping thread and those that receive and send.
_MAIN: dict[str, dict[Span, str]] = {
    "api": {
        Span.DETOKENIZE: "detokenize", Span.EGRESS: "egress", Span.TEMPLATE: "template", Span.TOKENIZE: "tokenize",
        Span.OUTPUT_RECEIVE: "output", Span.HANDOFF: "handoff", Span.INGRESS: "ingress",
    },
    "engine": {
        Span.FORWARD: "forward", Span.HOST_LAUNCH: "forward", Span.SAMPLING: "sampling", Span.INPUT_PREP: "input_prep",
        Span.OUTPUT_PUT: "output",
        Span.LOOP: "scheduling",
    },
}  # fmt: skip
_BESIDE: dict[str, dict[Span, str]] = {
    "api": {Span.TEMPLATE: "template", Span.TOKENIZE: "tokenize"},
    "engine": {Span.OUTPUT_SEND: "output", Span.CORE_RECEIVE: "handoff"},
}
_TO_POOL = (Span.TEMPLATE, Span.TOKENIZE)
_POOLED = tuple(_BESIDE["api"].values())
_IN_LOOP = (Span.REQUEST, Span.HANDOFF, Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS)
_KIND = {"api": "api", "worker": "engine", "engine": "engine", "core": "engine"}


def core_use(telemetry: Path | None, files: Sequence[RecordFile], cores: Sequence[int]) -> CoreUse:
    """What kept the server's threads, and for whom, by the best that a run's ``telemetry`` has.

    ``files`` of the server's probes; ``cores`` are the server's (none: all that it ran on).
    """
    known = [_Process(file) for file in files if file.process.get("role") in _KIND]
    watched = read_watched(telemetry) if telemetry else None
    if watched is not None:
        return _Use(watched, known, cores).found()
    sums = read_sums(telemetry) if telemetry else {}
    work = {f.pid: _loop_work(f) for f in known if f.kind == "api"}
    of = {("loop woken", pid): _all_of(1, spans) for pid, spans in work.items()}
    for pid, spans in work.items():
        own = spread_waits([sums[pid]] if pid in sums else [], spans)
        of["loop", pid] = _all_of(0, own)
        of["loop turn", pid] = _in_order([own, spans])
    for file in (f for f in known if f.role in ("core", "engine") and sums):
        pid, steps = file.pid, file.spans(Span.LOOP)
        main = [sums[tid] for tid in (busiest(sums, pid),) if tid in sums]
        waits = _all_of(0, spread_waits(main, union(steps["start_ns"], steps["end_ns"])))
        workers = any(f.role == "worker" and f.pid != pid for f in known)
        of |= {(kind, pid): waits for kind in (("engine",) if workers else ("engine", "worker", "forward"))}
    return CoreUse((Reason(CORE, Culprit(UNKNOWN)), Reason(WORK)), of, "sums" if sums else "spans")


def _all_of(reason: int, times: Times) -> Stretches:
    return Stretches(*times, np.full(len(times[0]), reason))


def _in_order(reasons: Sequence[Times]) -> Stretches:
    """Where several hold, the first; each one's place is its number."""
    rows = [Intervals(np.zeros(len(start), np.int64), start, end, np.full(len(start), number))
            for number, (start, end) in enumerate(reasons)]  # fmt: skip
    whole = pieces(Intervals.join(rows), 1, len(reasons))
    return Stretches(whole.start, whole.end, whole.cls.astype(np.int16))


class _Process:
    """A process's records, its spans by their kind."""

    def __init__(self, file: RecordFile) -> None:
        self.pid, self.role = int(file.process["pid"]), str(file.process["role"])
        self.kind, self.engine = _KIND[self.role], int(file.process.get("engine", 0))  # of several engines which one
        codes = file.spans["code"].astype(np.int16)  # which numpy sorts by radix
        self._spans, self._order = file.spans, np.argsort(codes, kind="stable")
        self._ends = np.cumsum(np.bincount(codes, minlength=max(Span) + 1))

    def spans(self, *codes: Span) -> Table:
        """Of one kind after the other, in the order written."""
        rows = [self._order[self._ends[code - 1] : self._ends[code]] for code in codes]
        return self._spans[np.concatenate(rows)]


def _loop_work(file: _Process, also: Sequence[Span] = _IN_LOOP) -> Times:
    """What an API server's event loop did for anybody: templates and tokenizing that no pool does, and ``also``."""
    spans = [file.spans(code) for code in (*_TO_POOL, *also)]
    spans[:2] = [rows[rows["queued_ns"] == rows["start_ns"]] for rows in spans[:2]]
    begun = [rows["queued_ns" if code == Span.DETOKENIZE else "start_ns"]
             for code, rows in zip((*_TO_POOL, *also), spans, strict=True)]  # fmt: skip
    return union(np.concatenate(begun), np.concatenate([rows["end_ns"] for rows in spans]))


def _pool_full(file: _Process, threads: int) -> Times:
    """When every one of a pool's threads was at a template or at tokenizing."""
    spans = file.spans(*_TO_POOL)
    spans = spans[spans["queued_ns"] != spans["start_ns"]]
    return at_least(max(threads, 1), spans["start_ns"], spans["end_ns"])


class _Use:
    """Who was at what on which core, and from it the reasons of each thread."""

    def __init__(self, watched: Watched, files: Sequence[_Process], cores: Sequence[int]) -> None:
        self.watched, self.runs, self.files = watched, watched.runs, files
        self.cores = sorted(set(cores) or set(self.runs["cpu"].tolist()))
        self.kind = {file.pid: file.kind for file in files}
        self.main = {pid: pid if kind == "api" else self._busiest(pid) for pid, kind in self.kind.items()}
        self.culprits: list[Culprit] = []
        self.work = self._at_work()  # every run, cut into what it was at: the run's row, and the culprit's number
        self.tid, self.cpu = self.runs["tid"][self.work.event], self.runs["cpu"][self.work.event]
        self.reasons = (*(Reason(CORE, who) for who in self.culprits), Reason(LOCK), Reason(WORK))

    def found(self) -> CoreUse:
        every = [f for f in self.files if f.role == "worker"]
        answering = [f for f in every if len(f.spans(Span.WORKER))]  # of several ranks the one that answers
        workers = {f.pid: f.engine for f in answering or every}
        number = {f.pid: f.engine for f in self.files if f.role == "core"}
        engines = [pid for pid, kind in self.kind.items() if kind == "engine" and self._schedules(pid)]
        of: dict[tuple[str, int], Stretches] = {}
        for file in (file for file in self.files if file.role == "api"):
            pid = file.pid
            main, pool = [self.main[pid]], self._beside(pid, *_POOLED)
            running, pooled = self._on_core(main), self._on_core(pool)
            preempted, locked = self._preempted(main), self._locked(main, pool)
            held = self._all_held(~np.isin(self.tid, [*main, *pool]))
            # Who sleeps in the middle of a call takes no message, whoever has the cores.
            called, full = _loop_work(file, (Span.DETOKENIZE,)), _pool_full(file, len(pool))
            of["loop", pid] = self._join(preempted, lock=locked)
            of["loop turn", pid] = self._join(preempted, lock=locked, work=_loop_work(file))
            of["pool", pid] = self._join(self._preempted(pool), lock=self._locked(pool, main))
            of["loop woken", pid] = self._join(
                preempted,
                held.outside(*called),
                lock=pooled,
                work=union(*map(np.concatenate, zip(running, called, strict=True))),
            )
            of["pool woken", pid] = self._join(
                self._preempted(pool), held.outside(*full), lock=outside(*running, *full)[1:], work=full
            )
        for pid in engines:
            main, sender, receiver = [self.main[pid]], self._beside(pid, "output"), self._beside(pid, "handoff")
            computing = [self.main[one] for one in sorted(workers) if workers[one] == number.get(pid)] or main
            stepping, python = np.isin(self.tid, main), self._python(main)
            preempted = self._preempted(main)
            of["engine", pid] = self._join(preempted, lock=self._locked(main, [*sender, *receiver]))
            of["forward", pid] = self._join(preempted if computing == main else self._preempted(computing))
            of["worker", pid] = of["engine", pid] if computing == main else of["forward", pid]
            of["sender", pid], of["receiver", pid] = (
                self._join(self._preempted(one), lock=self._locked(one, main, python)) for one in (sender, receiver)
            )
            held = self._all_held(~stepping | np.isin(self.work.cls, self._computing))
            of["engine woken", pid] = self._join(held, lock=python)
        return CoreUse(self.reasons, of, "switches")

    # -- who was at what

    def _at_work(self) -> Intervals:
        parts = []
        for stages_of, own in ((_MAIN, True), (_BESIDE, False)):
            for kind, stages in stages_of.items():
                for code, stage in stages.items():
                    number = self._number(kind, stage)
                    mine = [file for file in self.files if file.kind == kind]
                    parts += [self._within(file, code, own=own, number=number) for file in mine]
        pids, at = np.unique(self.runs["pid"], return_inverse=True)
        whose = np.array([self._number(*self._whose(int(pid))) for pid in pids], np.int64)  # where it is at no stage
        every = Intervals(np.arange(len(self.runs)), self.runs["start"], self.runs["end"], whose[at])
        self.limit, self.unknown = len(self.culprits), len(self.culprits) + 1  # the last: known ones come before them
        self.culprits += [Culprit(LIMIT), Culprit(NOBODY if self.watched.whole else ANOTHER)]
        return pieces(Intervals.join([*parts, every]), len(self.runs), len(self.culprits))

    def _within(self, file: _Process, code: Span, *, own: bool, number: int) -> Intervals:
        """Parts of the runs of a process's main thread (or of its others) that lie in its spans of one kind."""
        pid = file.pid
        rows = np.flatnonzero((self.runs["pid"] == pid) & ((self.runs["tid"] == self.main[pid]) == own))
        spans = self._of(file, code, own=own)
        begun = spans["start_ns"] if code == Span.OUTPUT_SEND or not own else spans["queued_ns"]
        stretches = union(np.where(begun > 0, begun, spans["start_ns"]), spans["end_ns"])
        run, _, low, high = overlaps(self.runs["start"][rows], self.runs["end"][rows], *stretches)
        return Intervals(rows[run], low, high, np.full(len(run), number))

    @staticmethod
    def _of(file: _Process, code: Span, *, own: bool) -> NDArray[np.void]:
        """A process's spans of one kind: of its main thread, or of the others."""
        spans = file.spans(code)
        if code in (Span.TEMPLATE, Span.TOKENIZE):  # in the event loop, or handed to the pool
            return np.asarray(spans[(spans["queued_ns"] == spans["start_ns"]) == own])
        return np.asarray(spans)

    def _whose(self, pid: int) -> tuple[str, str, str]:
        of, name = self.watched.programs.get(pid, (ANOTHER, ""))
        process = self.kind.get(pid, of)
        return process, "", name if process == ANOTHER else ""

    def _number(self, process: str, stage: str = "", program: str = "") -> int:
        who = Culprit(process, stage, program)
        if who not in self.culprits:
            self.culprits.append(who)
        return self.culprits.index(who)

    def _busiest(self, pid: int) -> int:
        """The thread of a process that ran the longest: the one that steps an engine."""
        mine = self.runs[self.runs["pid"] == pid]
        tids, at = np.unique(mine["tid"], return_inverse=True)
        return int(tids[np.argmax(np.bincount(at, mine["end"] - mine["start"]))]) if len(tids) else pid

    def _schedules(self, pid: int) -> bool:
        return any(f.pid == pid and f.role != "worker" for f in self.files)

    # -- threads

    def _on_core(self, tids: Sequence[int]) -> Times:
        mine = self.runs[np.isin(self.runs["tid"], tids)]
        return union(mine["start"], mine["end"])

    def _beside(self, pid: int, *stages: str) -> list[int]:
        """A process's threads other than the main one that stamped these stages: fewest that were on a core then."""
        codes = [code for code, stage in _BESIDE[self.kind[pid]].items() if stage in stages]
        spans = [self._of(file, code, own=False) for file in self.files for code in codes if file.pid == pid]
        none = np.empty(0, np.int64)
        moments = np.concatenate([none, *(span[f"{side}_ns"] for span in spans for side in ("start", "end"))])
        moments = moments[:: len(moments) // _MOST_STAMPS + 1]
        mine = self.runs[(self.runs["pid"] == pid) & (self.runs["tid"] != self.main[pid])]
        on_core: dict[int, Bools] = {}
        for tid in np.unique(mine["tid"]):
            runs = mine[mine["tid"] == tid]
            run = np.maximum(np.searchsorted(runs["start"], moments, side="right") - 1, 0)
            on_core[int(tid)] = (runs["start"][run] <= moments) & (moments <= runs["end"][run])
        found, left = list[int](), np.ones(len(moments), np.bool_)
        while on_core and left.sum() > _STRAY_STAMPS * len(moments):
            best = max(on_core, key=lambda tid: int((on_core[tid] & left).sum()))
            if not (on_core[best] & left).any():
                break
            left &= ~on_core.pop(best)
            found.append(best)
        return sorted(found)

    @cached_property
    def _computing(self) -> list[int]:
        return [number for number, who in enumerate(self.culprits) if who.stage == "forward"]

    def _python(self, main: Sequence[int]) -> Times:
        """When an engine's thread ran anything but a forward, which leaves the interpreter to others."""
        rows = np.isin(self.tid, main) & ~np.isin(self.work.cls, self._computing)
        return union(self.work.start[rows], self.work.end[rows])

    def _locked(self, tids: Sequence[int], holders: Sequence[int], python: Times | None = None) -> Times:
        """When one thread slept until ``holders`` of its interpreter, who ran Python, let it go.

        Never, where the thread may have been one of several. A sleep that ends long after they ran had another cause.
        ``python``: when they ran Python; all that they ran, if None.
        """
        ran = self._on_core(holders)
        start, end, _, preempted = self._gaps(tids if len(tids) == 1 else ())
        since, until, _, put_off = self._gaps(holders)  # a holder that is put off its core holds on
        held = union(np.concatenate([ran[0], since[put_off]]), np.concatenate([ran[1], until[put_off]]) + _LETS_GO_NS)
        row, _, low, high = overlaps(start[~preempted], end[~preempted], *held)
        last = high == end[~preempted][row]
        _, _, start, end = overlaps(low[last], high[last], *(python or ran))
        return start, end

    def _gaps(self, tids: Iterable[int]) -> tuple[Ints, Ints, Ints, Bools]:
        """Between each run of these threads and its next: start, end, core of the former, whether it was preempted."""
        start, end, cpu, preempted = ([np.empty(0, kind)] for kind in (np.int64, np.int64, np.int64, np.bool_))
        for tid in tids:
            mine = self.runs[self.runs["tid"] == tid]
            start.append(mine["end"][:-1])
            end.append(mine["start"][1:])
            cpu.append(mine["cpu"][:-1])
            preempted.append(mine["preempted"][:-1])
        begun, ended = np.concatenate(start), np.concatenate(end)
        known = covered(begun, ended, *self.watched.lost) == 0
        return begun[known], ended[known], np.concatenate(cpu)[known], np.concatenate(preempted)[known]

    # -- reasons

    def _join(self, *cores: Intervals, lock: Times | None = None, work: Times | None = None) -> Stretches:
        """One list of stretches; where several reasons hold, waiting for a core comes first, then the lock."""
        rows = list(cores)
        for number, times in ((len(self.culprits), lock), (len(self.culprits) + 1, work)):
            if times is not None:
                rows.append(Intervals(np.zeros(len(times[0]), np.int64), *times, np.full(len(times[0]), number)))
        whole = pieces(Intervals.join(rows), 1, len(self.reasons))
        return Stretches(whole.start, whole.end, whole.cls.astype(np.int16))

    def _preempted(self, tids: Iterable[int]) -> Intervals:
        start, end, cpu, preempted = self._gaps(tids)
        return self._instead(start[preempted], end[preempted], cpu[preempted])

    def _instead(self, start: Ints, end: Ints, cpu: Ints) -> Intervals:
        """Stretches of waiting for a core, each divided among those who ran on it; rows of event 0."""
        row, _, low, high = overlaps(start, end, *self.watched.limited)
        parts = [Intervals(row, low, high, np.full(len(row), self.limit))]
        for one, rows in self._on_cpu.items():
            mine = np.flatnonzero(cpu == one)
            row, at, low, high = overlaps(start[mine], end[mine], self.work.start[rows], self.work.end[rows])
            parts.append(Intervals(mine[row], low, high, self.work.cls[rows][at]))
        parts.append(Intervals(np.arange(len(start)), start, end, np.full(len(start), self.unknown)))
        owned = pieces(Intervals.join(parts), len(start), len(self.culprits))
        return Intervals(np.zeros(len(owned.start), np.int64), owned.start, owned.end, owned.cls)

    @cached_property
    def _on_cpu(self) -> dict[int, Ints]:
        """Rows of ``work`` by core, in order."""
        rows = {int(one): np.flatnonzero(self.cpu == one) for one in np.unique(self.cpu)}
        return {one: at[np.argsort(self.work.start[at], kind="stable")] for one, at in rows.items()}

    def _all_held(self, rows: Bools) -> Intervals:
        """When each of the server's cores was held by ``rows`` of work; the first core's is named. And at a CPU limit.

        Threads of the server that carry messages don't count: they may bring the very one that is waited for.
        """
        held = np.flatnonzero(rows & ~self._carries & np.isin(self.cpu, self.cores))
        start, end = at_least(len(self.cores), self.work.start[held], self.work.end[held])
        return Intervals.join([self._instead(start, end, np.full(len(start), self.cores[0])), self._at_limit])

    @cached_property
    def _at_limit(self) -> Intervals:
        """When one of the main threads was off its core at the control group's limit: then all were."""
        rows = self._preempted(self.main.values())
        at = rows.cls == self.limit
        return Intervals(rows.event[at], rows.start[at], rows.end[at], rows.cls[at])

    @cached_property
    def _carries(self) -> Bools:
        """Work of the server's processes by other threads than the main ones and an API server's pool."""
        pools = [tid for pid, kind in self.kind.items() if kind == "api" for tid in self._beside(pid, *_POOLED)]
        own = np.isin(self.runs["pid"][self.work.event], list(self.kind))
        return own & ~np.isin(self.tid, [*self.main.values(), *pools])
