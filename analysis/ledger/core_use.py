"""What kept the server's threads, by the best that a run has: the kernel's switches, its sums, or the probes' spans.

The kernel's records of switches (``who_ran``) say where a wait for a core lies and for whom; its sums (``Schedstat`` of
gapmeter.servers.telemetry.sources) say only how much. Of a thread that was at work for L of the time between two
samples and ran for R, at most L - R of what it waited lay in that work; it is spread evenly over it. The rest came
before it was woken, and stays in transit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapmeter.analysis.arrays import Ints, distinct, each_of
from gapmeter.analysis.ledger.cores import (
    CORE,
    UNKNOWN,
    WORK,
    Aside,
    CoreUse,
    Culprit,
    ManyStretches,
    Packed,
    Reason,
    Stretches,
)
from gapmeter.analysis.ledger.critical_path import FAR, Intervals, Times, covered, overlaps, pieces, union
from gapmeter.analysis.ledger.processes import KINDS, RecordedProcess, loop_work
from gapmeter.analysis.ledger.switches import MOST_LOST, TooManyLost, Watched, read_watched
from gapmeter.analysis.ledger.who_ran import who_ran
from gapmeter.analysis.samples import read_rows
from gapmeter.records import Span

_EVERY_NS = 200_000  # how finely a wait is spread
_MOMENT_NS = 100_000_000  # by which a watch may end before the last answer
_SAMPLES, _WRITES = 100, 100_000  # between which an event loop is looked at together
_LEAST_SHARE = 0.01  # of the work; less is noise of the counters


def core_use(telemetry: Path | None, processes: Sequence[RecordedProcess], cores: Sequence[int]) -> CoreUse:
    """What kept the server's threads, and for whom, by the best that a run's ``telemetry`` has.

    ``cores`` are the server's (none: all that it ran on).
    """
    known = [process for process in processes if process.role in KINDS]
    watched, lost_share = None, 0.0
    try:
        watched = read_watched(telemetry) if telemetry else None
    except TooManyLost as lost:
        lost_share = lost.share
    if watched is not None and (unseen := _unseen(watched, known)) > MOST_LOST:
        watched, lost_share = None, unseen
    if telemetry and watched and (use := who_ran(watched, known, cores, Aside(telemetry))) is not None:
        return use
    sums = read_sums(telemetry) if telemetry else {}
    if not {f.pid for f in known if f.kinds} <= {own.pid for own in sums.values()}:  # a container has its own ids
        sums = {}
    of = dict[tuple[str, int], ManyStretches]()
    for api in (f for f in known if f.kind == "api"):
        of |= {(kind, api.pid): kept for kind, kept in _of_loop(api, sums.get(api.pid)).items()}
    for engine in (f for f in known if f.role in ("core", "engine") and sums):
        beside = (f for f in known if f.role == "worker" and f.engine == engine.engine and f.pid != engine.pid)
        worker = next((f for f in beside if len(f.spans(Span.WORKER))), None)
        of["engine", engine.pid] = of["executor", engine.pid] = waits = _waits(sums, engine, Span.LOOP)
        waits = waits if worker is None else _waits(sums, worker, Span.WORKER)
        of |= {(kind, engine.pid): waits for kind in ("worker", "forward")}
    return CoreUse((Reason(CORE, Culprit(UNKNOWN)), Reason(WORK)), of, "sums" if sums else "spans", lost_share)


def _unseen(watched: Watched, processes: Sequence[RecordedProcess]) -> float:
    """The part of the time, up to the last write of an answer, in which nobody watched any more."""
    begun, ended = int(watched.runs["start"].min()), int(watched.runs["end"].max())
    last = max((int(rows["end_ns"].max()) for p in processes if len(rows := p.spans(Span.EGRESS))), default=ended)
    return (last - ended) / (last - begun) if last - ended > _MOMENT_NS else 0.0


def _of_loop(process: RecordedProcess, own: Sums | None) -> dict[str, ManyStretches]:
    """What kept an API server's event loop, by kind of thread; a part of the run at a time, as ``who_ran``."""
    found = defaultdict[str, list[Packed]](list)
    cuts = own.at[::_SAMPLES] if own is not None else process.spans(Span.EGRESS)["end_ns"][::_WRITES]
    for low, high in itertools.pairwise([-FAR, *distinct(cuts).tolist(), FAR]):
        work = overlaps(np.array([low]), np.array([high]), *loop_work(process.within(low, high)))[2:]
        waits = spread_waits(own and own.within(low, high), work)
        found["loop"] += _all_of(0, waits).packed()
        found["loop woken"] += _all_of(1, work).packed()
        found["loop turn"] += _in_order([waits, work]).packed()
    return {kind: ManyStretches(parts) for kind, parts in found.items()}


def _waits(sums: Mapping[int, Sums], process: RecordedProcess, code: Span) -> ManyStretches:
    """What a process's busiest thread waited for a core within its spans."""
    own, spans = sums.get(busiest(sums, process.pid)), process.spans(code)
    return ManyStretches(_all_of(0, spread_waits(own, union(spans["start_ns"], spans["end_ns"]))).packed())


def _all_of(reason: int, times: Times) -> Stretches:
    return Stretches(*times, np.full(len(times[0]), reason))


def _in_order(reasons: Sequence[Times]) -> Stretches:
    """Where several hold, the first; each one's place is its number."""
    rows = [Intervals.of_one(number, *times) for number, times in enumerate(reasons)]
    whole = pieces(Intervals.join(rows), 1, len(reasons))
    return Stretches(whole.start, whole.end, whole.cls)


# --- waits from sums


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one thread: samples in order of time, and what it had run and waited for a core by then, ns."""

    pid: int
    at: Ints
    ran: Ints
    waited: Ints

    def within(self, low: int, high: int) -> Sums:
        """The samples from one moment to another."""
        some = slice(np.searchsorted(self.at, low), np.searchsorted(self.at, high, side="right"))
        return Sums(self.pid, self.at[some], self.ran[some], self.waited[some])


def read_sums(folder: Path) -> dict[int, Sums]:
    """By thread, from a run's telemetry; empty where none were taken."""
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    for row in read_rows(folder / "schedstat.jsonl")[0]:
        sample = (int(row["pid"]), int(row["at_ns"]), int(row["ran_ns"]), int(row["waited_ns"]))
        rows.setdefault(int(row["tid"]), []).append(sample)
    return {tid: Sums(own[0][0], *np.array(own, np.int64)[:, 1:].T) for tid, own in rows.items()}


def busiest(sums: Mapping[int, Sums], pid: int) -> int:
    """The thread of a process that ran the longest; the process's first one where none was seen."""
    ran = {tid: int(own.ran[-1] - own.ran[0]) for tid, own in sums.items() if own.pid == pid}
    return max(ran, key=lambda tid: ran[tid], default=pid)


def spread_waits(own: Sums | None, work: Times) -> Times:
    """The waits of a thread within its ``work``: many short stretches, evenly; none where it was not sampled."""
    if own is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    low, high = own.at[:-1], own.at[1:]
    busy = covered(low, high, *work)
    share = np.clip(busy - np.diff(own.ran), 0, np.diff(own.waited)) / np.maximum(busy, 1)
    window, _, begins, ends = overlaps(low, high, *work)
    kept = share[window] >= _LEAST_SHARE
    begins, ends, part = begins[kept], ends[kept], share[window[kept]]
    whose, nth = each_of(-(-(ends - begins) // _EVERY_NS))
    tooth = begins[whose] + nth * _EVERY_NS
    return tooth, tooth + (np.minimum(_EVERY_NS, ends[whose] - tooth) * part[whose]).astype(np.int64)
