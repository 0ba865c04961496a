"""The server's threads, by what they were at when the probes stamped: which steps an engine, which carries messages.

The probes say what was done and when, the kernel which thread was on a core then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, distinct
from gapmeter.analysis.ledger.cores import LIMIT, NOBODY, STOPPED, Culprit
from gapmeter.analysis.ledger.critical_path import FAR
from gapmeter.analysis.ledger.processes import RecordedProcess
from gapmeter.analysis.ledger.switches import ANOTHER, Watched
from gapmeter.records import Span
from gapmeter.records.reader import Table

_RUNS = 20_000  # that begin within a window
_LONGEST_HOLD_NS = 1_000_000_000  # of an interpreter, that is followed beyond a window's end
_MOST_STAMPS, _STRAY_STAMPS = 5_000, 0.02  # looked at for whose they are; the share that may be nobody's
_TELLING_STAMPS, _LEAST_ON_CORE = 100, 0.1  # of a process: where fewer of so many were on a core, it is another one

# What a thread was at, in the order in which overlapping spans own it, and whose stage that is: an API server's event
# loop and its pool, an engine's stepping thread and those that receive and send.
MAIN: dict[str, dict[Span, str]] = {
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
BESIDE: dict[str, dict[Span, str]] = {
    "api": {Span.TEMPLATE: "template", Span.TOKENIZE: "tokenize"},
    "engine": {Span.OUTPUT_SEND: "output", Span.CORE_RECEIVE: "handoff"},
}
_POOLED = tuple(BESIDE["api"].values())


class Threads:
    """Of the whole run: which threads do what, who may have a core, and the windows in which that is looked at."""

    def __init__(self, watched: Watched, processes: Sequence[RecordedProcess], cores: Sequence[int]) -> None:
        self.watched, self.runs, self.processes = watched, watched.runs, processes
        self.cores = sorted(set(cores) or set(self.runs["cpu"].tolist()))
        self.kind = {process.pid: process.kind for process in processes}
        self.main = {pid: pid if kind == "api" else self._busiest(pid) for pid, kind in self.kind.items()}
        self.pool = {process.pid: self._beside(process.pid, *_POOLED) for process in processes if process.kind == "api"}
        engines = {process.pid for process in processes if process.role in ("core", "engine")}
        self.sender, self.receiver = (
            {pid: self._beside(pid, stage) for pid in self.kind if pid in engines} for stage in ("output", "handoff")
        )
        self.computing = {pid: self._computing(pid) for pid in self.sender}
        self.helping = [tid for pid, kind in self.kind.items() if kind == "engine" for tid in self._helping(pid)]
        whose = {int(pid): self._whose(int(pid)) for pid in distinct(self.runs["pid"])}
        stages = [(kind, name) for of in (MAIN, BESIDE) for kind, codes in of.items() for name in codes.values()]
        every = [Culprit(STOPPED), *(Culprit(kind, stage) for kind, stage in stages), *whose.values()]
        known = list(dict.fromkeys(every))  # of several at a time the first counts
        self.number = {who: number for number, who in enumerate(known)}
        self.limit, self.unknown = len(known), len(known) + 1  # the last: known ones come before them
        self.culprits = (*known, Culprit(LIMIT), Culprit(NOBODY if watched.whole else ANOTHER))
        self.idle_at = {pid: self.number[who] for pid, who in whose.items()}  # where a process is at no stage
        self.forwards = [number for number, who in enumerate(self.culprits) if who.stage == "forward"]
        self._begun = np.ascontiguousarray(self.runs["start"])
        beside = itertools.chain(*self.pool.values(), *self.sender.values(), *self.receiver.values())
        self._by_thread = self._by("tid", {*self.main.values(), *beside})
        self._by_core = self._by("cpu", set(self.runs["cpu"].tolist()))

    def windows(self) -> Iterator[tuple[int, int]]:
        """From when to when each is; together they are all time."""
        return itertools.pairwise([-FAR, *self._begun[_RUNS::_RUNS].tolist(), FAR])

    def near(self, low: int, high: int) -> tuple[int, Ints]:
        """Until when to look, to say what kept a thread in a window, and at which runs.

        A thread that sleeps at the window's end may wait for an interpreter that is held beyond it. Of each thread and
        core the run before is among them, and of each thread the next.
        """
        begin, end = np.searchsorted(self._begun, (low, high)).tolist()
        following = [self._begun[own[np.searchsorted(own, end) :][:1]] for own in self._by_thread]
        until = min(high + _LONGEST_HOLD_NS, int(np.concatenate([[high], *following]).max()))
        after = int(np.searchsorted(self._begun, until))
        rows: list[Ints] = [np.arange(begin, after)]
        for own in (*self._by_thread, *self._by_core):
            rows.append(own[: np.searchsorted(own, begin)][-1:])
        for own in self._by_thread:
            rows.append(own[np.searchsorted(own, after) :][:1])
        return until, distinct(np.concatenate(rows))

    def _by(self, name: str, values: Iterable[int]) -> list[Ints]:
        """The runs of each, in order."""
        return [np.flatnonzero(self.runs[name] == value) for value in sorted(values)]

    def _whose(self, pid: int) -> Culprit:
        of, name = self.watched.programs.get(pid, (ANOTHER, ""))
        process = self.kind.get(pid, of)
        return Culprit(process, "", name if process == ANOTHER else "")

    def _busiest(self, pid: int) -> int:
        """The thread of a process that ran the longest: the one that steps an engine."""
        mine = self.runs[self.runs["pid"] == pid]
        tids, at = np.unique(mine["tid"], return_inverse=True)
        return int(tids[np.argmax(np.bincount(at, mine["end"] - mine["start"]))]) if len(tids) else pid

    def knows(self, pid: int) -> bool:
        """Whether the kernel's records are of the process that recorded as ``pid``: it was on a core at its stamps."""
        mine = [process.thinned(_MOST_STAMPS) for process in self.processes if process.pid == pid]
        moments = _stamps(mine, MAIN[self.kind[pid]], own=True)
        moments = moments[(moments >= self.runs["start"].min()) & (moments <= self.runs["end"].max())]
        then = self._on_core_at(pid, moments).get(self.main[pid])
        return len(moments) < _TELLING_STAMPS or (then is not None and float(then.mean()) > _LEAST_ON_CORE)

    def _on_core_at(self, pid: int, moments: Ints) -> dict[int, Bools]:
        """Of each of a process's threads, at which moments it was on a core."""
        mine, on_core = np.flatnonzero(self.runs["pid"] == pid), dict[int, Bools]()
        whose = self.runs["tid"][mine]
        for tid in distinct(whose).tolist():
            start, end = (self.runs[side][mine[whose == tid]] for side in ("start", "end"))
            run = np.maximum(np.searchsorted(start, moments, side="right") - 1, 0)
            on_core[tid] = (start[run] <= moments) & (moments <= end[run])
        return on_core

    def _computing(self, engine: int) -> list[int]:
        """The threads that compute an engine's forwards: of several ranks that of the one that answers."""
        every = [process for process in self.processes if process.role == "worker"]
        answering = [process for process in every if len(process.spans(Span.WORKER))] or every
        of = next((p.engine for p in self.processes if p.pid == engine and p.role == "core"), None)
        return [self.main[pid] for pid in sorted({p.pid for p in answering if p.engine == of})] or [self.main[engine]]

    def _helping(self, pid: int) -> list[int]:
        """A process's threads that compute forwards beside its main one: some were on a core in the middle of them."""
        every = [process.spans(Span.FORWARD) for process in self.processes if process.pid == pid]
        middle = np.concatenate([(spans["start_ns"] + spans["end_ns"]) // 2 for spans in every])
        middle = middle[:: len(middle) // _MOST_STAMPS + 1]
        least = _LEAST_ON_CORE * len(middle)
        on_core = self._on_core_at(pid, middle)
        return [tid for tid, then in on_core.items() if tid != self.main[pid] and int(then.sum()) > least]

    def _beside(self, pid: int, *stages: str) -> list[int]:
        """A process's threads other than the main one that stamped these stages: fewest that were on a core then."""
        codes = [code for code, stage in BESIDE[self.kind[pid]].items() if stage in stages]
        moments = _stamps([process for process in self.processes if process.pid == pid], codes, own=False)
        on_core = self._on_core_at(pid, moments)
        on_core.pop(self.main[pid], None)
        found, left = list[int](), np.ones(len(moments), np.bool_)
        while on_core and left.sum() > _STRAY_STAMPS * len(moments):
            best = max(on_core, key=lambda tid: int((on_core[tid] & left).sum()))
            if not (on_core[best] & left).any():
                break
            left &= ~on_core.pop(best)
            found.append(best)
        return sorted(found)


def _stamps(processes: Sequence[RecordedProcess], codes: Iterable[Span], *, own: bool) -> Ints:
    """When spans of these kinds began and ended, of main threads or of the others: some of the moments."""
    spans = [spans_of(process, code, own=own) for process in processes for code in codes]
    none = np.empty(0, np.int64)
    moments = np.concatenate([none, *(span[f"{side}_ns"] for span in spans for side in ("start", "end"))])
    return moments[:: len(moments) // _MOST_STAMPS + 1]


def spans_of(process: RecordedProcess, code: Span, *, own: bool) -> Table:
    """A process's spans of one kind: of its main thread, or of the others."""
    spans = process.spans(code)
    if code in (Span.TEMPLATE, Span.TOKENIZE):  # in the event loop, or handed to the pool
        return np.asarray(spans[(spans["queued_ns"] == spans["start_ns"]) == own])
    return spans
