"""Who had the cores: where a thread could have run and did not, and who ran there instead.

From the kernel's records of every switch (gapmeter.servers.telemetry.switches) come, for each thread, the stretches in
which it ran and those in which it had been put off its core while it would have gone on. A stage's own nanoseconds in
which its thread was so preempted are no work of that stage: the ledger takes them out of it (``core_wait``), whatever
stage it is. Between two processes' stamps the message is there and the thread that should take it sleeps or was
preempted; it could have run from the message's sending on, so what counts there is the time in which every core of the
server was held by somebody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.ledger.critical_path import Intervals, overlaps, pieces, union
from gapmeter.records import RecordFile, Span

_LOST, _SWITCH, _OUT, _PREEMPTED = 2, 14, 0x2000, 0x4000  # PERF_RECORD_LOST and _SWITCH, and the latter's misc bits
_RECORD = np.dtype(
    [("type", "<u4"), ("misc", "<u2"), ("size", "<u2"), ("pid", "<i4"), ("tid", "<i4"), ("time", "<i8"),
     ("cpu", "<u4"), ("pad", "<u4")]
)  # fmt: skip
RUN = np.dtype([("pid", "<i8"), ("tid", "<i8"), ("cpu", "<i8"), ("start", "<i8"), ("end", "<i8"), ("preempted", "?")])


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who ran instead, and the stage that it was at ("" where it was at none of its stages).

    ``process``: ``api``, ``engine``, ``server`` (another of its processes), ``load tester`` or ``another program``.
    """

    process: str
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """Stretches of waiting for a core, in order, none overlapping; ``culprit``: who ran, a number in a CoreUse."""

    start: Ints
    end: Ints
    culprit: Ints

    def whole(self) -> tuple[Ints, Ints]:
        """Starts and ends, whoever ran: stretches that follow one another are one."""
        return union(self.start, self.end)


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The waits of each kind of thread, and who they may have been for.

    ``loop``, ``engine``, ``pool``: put off its core while it would have gone on. ``loop woken``, ``engine woken``: all
    cores of the server were held by others, so that a message could not have woken it.
    """

    culprits: tuple[Culprit, ...]
    waits: Mapping[str, Waits]


def read_switches(folder: Path) -> NDArray[np.void]:
    """Every stretch in which a watched thread ran, in order of time (``RUN``).

    Empty where nothing was recorded, or where the kernel lost records: a thread would seem to run, or to wait, through
    what is missing.
    """
    records = [_records(path) for path in sorted(folder.glob("switches-*.bin"))]
    if not sum(map(len, records)) or any((part["type"] == _LOST).any() for part in records):
        return np.empty(0, RUN)
    every = np.concatenate(records)
    every = every[np.lexsort((every["time"], every["tid"]))]
    out = (every["misc"] & _OUT) != 0
    runs = np.flatnonzero(~out[:-1] & out[1:] & (every["tid"][:-1] == every["tid"][1:]))
    table = np.empty(len(runs), RUN)
    for name in ("pid", "tid", "cpu"):
        table[name] = every[name][runs]
    table["start"], table["end"] = every["time"][runs], every["time"][runs + 1]
    table["preempted"] = (every["misc"][runs + 1] & _PREEMPTED) != 0
    return np.sort(table, order="start")


def _records(path: Path) -> NDArray[np.void]:
    """The switches in a file of the kernel's records, and what it lost; other kinds are passed over."""
    raw = path.read_bytes()
    raw = raw[: len(raw) // 8 * 8]
    whole = np.frombuffer(raw[: len(raw) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    if (whole["type"] == _SWITCH).all() and (whole["size"] == _RECORD.itemsize).all():
        return whole
    heads = np.frombuffer(raw, np.dtype([("type", "<u4"), ("misc", "<u2"), ("size", "<u2")]))
    places, at = [], 0
    while at < len(heads) and heads["size"][at] >= 8:
        if heads["type"][at] in (_SWITCH, _LOST):
            places.append(raw[8 * at : 8 * at + _RECORD.itemsize])
        at += int(heads["size"][at]) // 8
    return np.frombuffer(b"".join(places), _RECORD)


# What a process's main thread was at, in the order in which overlapping spans own it, and whose stage that is.
_ACTIVITIES: dict[str, dict[Span, str]] = {
    "api": {
        Span.DETOKENIZE: "detokenize", Span.EGRESS: "egress", Span.TEMPLATE: "template", Span.TOKENIZE: "tokenize",
        Span.OUTPUT_RECEIVE: "output", Span.HANDOFF: "handoff", Span.INGRESS: "ingress",
    },
    "engine": {
        Span.FORWARD: "forward", Span.SAMPLING: "sampling", Span.INPUT_PREP: "input_prep", Span.OUTPUT_PUT: "output",
        Span.OUTPUT_SEND: "output", Span.LOOP: "scheduling",
    },
}  # fmt: skip
_ROLES = {"api": "api", "worker": "engine", "engine": "engine", "core": "engine"}


def read_core_use(folder: Path, files: Sequence[RecordFile], cores: Sequence[int]) -> CoreUse | None:
    """``core_use`` from a run's telemetry; None where the kernel's records could not be had."""
    runs = read_switches(folder)
    listed = folder / "processes.jsonl"
    if not len(runs) or not listed.exists():
        return None
    lines = listed.read_text().splitlines()
    server = {int(row["pid"]) for row in map(_row, lines) if "pid" in row}
    return core_use(runs, files, cores, set(np.unique(runs["pid"]).tolist()) - server)


def _row(line: str) -> dict[str, Any]:
    """A line of telemetry; nothing, where a killed sampler broke it off."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def core_use(runs: NDArray[np.void], files: Sequence[RecordFile], cores: Sequence[int], ours: Set[int]) -> CoreUse:
    """Who waited for a core, and for whom.

    ``runs`` as from ``read_switches``; ``files`` of the server's probes; ``cores`` are the server's (none: all that it
    ran on); ``ours`` the process ids of the load tester. Of several API servers, or several engine processes, it is not
    known whose wait held up which request: those kinds of thread have no waits here.
    """
    role = {int(f.process["pid"]): _ROLES[str(f.process["role"])] for f in files if f.process.get("role") in _ROLES}
    main = {pid: pid if kind == "api" else _busiest(runs, pid) for pid, kind in role.items()}
    culprits: list[Culprit] = []
    event, start, end, cls = [], [], [], []
    for kind, codes in _ACTIVITIES.items():
        for code, stage in codes.items():
            number = len(culprits)
            culprits.append(Culprit(kind, stage))
            for file in files:
                pid = int(file.process.get("pid", 0))
                if role.get(pid) == kind:
                    rows = np.flatnonzero(runs["tid"] == main[pid])
                    spans = file.spans[file.spans["code"] == code]
                    begun = np.where(spans["queued_ns"] > 0, spans["queued_ns"], spans["start_ns"])
                    if code in (Span.TEMPLATE, Span.TOKENIZE):
                        spans, begun = spans[begun == spans["start_ns"]], begun[begun == spans["start_ns"]]
                    _, at, low, high = overlaps(begun, spans["end_ns"], runs["start"][rows], runs["end"][rows])
                    event.append(rows[at])
                    start.append(low)
                    end.append(high)
                    cls.append(np.full(len(at), number))
    rest = {kind: len(culprits) + at for at, kind in enumerate(("api", "engine", "load tester", "server"))}
    culprits += [*map(Culprit, rest), Culprit("another program")]
    whose = {pid: rest["load tester" if pid in ours else role.get(pid, "server")] for pid in np.unique(runs["pid"])}
    event.append(np.arange(len(runs)))
    start.append(runs["start"])
    end.append(runs["end"])
    cls.append(np.array([whose[pid] for pid in runs["pid"]], dtype=np.int64))
    at_work = pieces(Intervals(*map(np.concatenate, (event, start, end, cls))), len(runs), len(culprits))
    held = _Held(at_work, runs["cpu"][at_work.event], len(culprits))
    mains = {kind: [main[pid] for pid in main if role[pid] == kind] for kind in _ACTIVITIES}
    alone = {kind: tids if len(tids) == 1 else [] for kind, tids in mains.items()}  # whose wait it was is known
    helpers = [
        tid for pid, kind in role.items() if kind == "api"
        for tid in np.unique(runs["tid"][runs["pid"] == pid]) if tid != main[pid]
    ]  # fmt: skip
    waits = {
        "loop": held.instead(*_preempted(runs, alone["api"])),
        "engine": held.instead(*_preempted(runs, alone["engine"])),
        "pool": held.instead(*_preempted(runs, helpers if alone["api"] else [])),
    }
    others = np.isin(runs["pid"], list(role)) & ~np.isin(runs["tid"], [t for tids in mains.values() for t in tids])
    allowed = sorted(set(cores) or set(runs["cpu"].tolist()))
    for kind, name in (("api", "loop woken"), ("engine", "engine woken")):
        foreign = ~others & ~np.isin(runs["tid"], mains[kind])
        waits[name] = held.instead(*_all_held(runs[foreign & bool(alone[kind])], allowed))
    return CoreUse(tuple(culprits), waits)


class _Held:
    """Who held each core when."""

    def __init__(self, at_work: Intervals, cpu: Ints, culprits: int) -> None:
        self._of = {int(one): np.flatnonzero(cpu == one) for one in np.unique(cpu)}
        for one, rows in self._of.items():
            self._of[one] = rows[np.argsort(at_work.start[rows], kind="stable")]
        self._at_work, self._culprits = at_work, culprits

    def instead(self, start: Ints, end: Ints, cpu: Ints) -> Waits:
        """Stretches of waiting (some may overlap) for a core, each divided among those who ran on it."""
        unknown = self._culprits - 1
        parts = [Intervals(np.arange(len(start)), start, end, np.full(len(start), unknown))]
        for one, rows in self._of.items():
            mine = np.flatnonzero(cpu == one)
            work = self._at_work
            row, at, low, high = overlaps(start[mine], end[mine], work.start[rows], work.end[rows])
            parts.append(Intervals(mine[row], low, high, work.cls[rows][at]))
        owned = pieces(Intervals.join(parts), len(start), self._culprits)
        order = np.argsort(owned.start, kind="stable")
        begun, ended, who = owned.start[order], owned.end[order], owned.cls[order]
        begun = np.maximum(begun, np.concatenate([[0], np.maximum.accumulate(ended)[:-1]])) if len(begun) else begun
        kept = ended > begun
        return Waits(begun[kept], ended[kept], who[kept])


def _preempted(runs: NDArray[np.void], tids: Iterable[int]) -> tuple[Ints, Ints, Ints]:
    """Starts, ends and cores of the stretches in which these threads were off their core and would have gone on."""
    parts = []
    for tid in tids:
        mine = runs[runs["tid"] == tid]
        off = np.flatnonzero(mine["preempted"][:-1])
        parts.append((mine["end"][off], mine["start"][off + 1], mine["cpu"][off]))
    if not parts:
        return (np.empty(0, np.int64),) * 3
    start, end, cpu = (np.concatenate(side).astype(np.int64) for side in zip(*parts, strict=True))
    return start, end, cpu


def _all_held(runs: NDArray[np.void], cores: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """When each of ``cores`` was held by one of ``runs``; the core that is named is the first of them."""
    inside = runs[np.isin(runs["cpu"], cores)]
    time = np.concatenate([inside["start"], inside["end"]])
    step = np.repeat([1, -1], len(inside))
    order = np.lexsort((step, time))
    held = np.cumsum(step[order]) >= len(cores)
    moments = time[order]
    whole = np.flatnonzero(held[:-1] & (np.diff(moments) > 0)) if len(moments) else np.empty(0, np.int64)
    start, end = union(moments[whole], moments[whole + 1])
    return start, end, np.full(len(start), cores[0] if cores else 0)


def _busiest(runs: NDArray[np.void], pid: int) -> int:
    """The thread of a process that ran the longest: the one that steps an engine."""
    mine = runs[runs["pid"] == pid]
    tids, at = np.unique(mine["tid"], return_inverse=True)
    return int(tids[np.argmax(np.bincount(at, mine["end"] - mine["start"]))]) if len(tids) else pid
