"""What kept the server's threads, by the best that a run has: the kernel's switches, its sums, or the probes' spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gapmeter.analysis.ledger.cores import CORE, UNKNOWN, WORK, CoreUse, Culprit, Reason, Stretches
from gapmeter.analysis.ledger.critical_path import Intervals, Times, pieces, union
from gapmeter.analysis.ledger.processes import KINDS, RecordedProcess, loop_work
from gapmeter.analysis.ledger.schedstat import busiest, read_sums, spread_waits
from gapmeter.analysis.ledger.switches import read_watched
from gapmeter.analysis.ledger.who_ran import who_ran
from gapmeter.records import RecordFile, Span


def core_use(telemetry: Path | None, files: Sequence[RecordFile], cores: Sequence[int]) -> CoreUse:
    """What kept the server's threads, and for whom, by the best that a run's ``telemetry`` has.

    ``files`` of the server's probes; ``cores`` are the server's (none: all that it ran on).
    """
    known = [RecordedProcess.of(file) for file in files if file.process.get("role") in KINDS]
    watched = read_watched(telemetry) if telemetry else None
    if watched is not None:
        return who_ran(watched, known, cores)
    sums = read_sums(telemetry) if telemetry else {}
    work = {f.pid: loop_work(f) for f in known if f.kind == "api"}
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
