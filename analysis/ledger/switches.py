"""The kernel's records of every switch, as a run's telemetry has them: who ran on which core, and when.

gapmeter.servers.telemetry.switches records them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.ledger.critical_path import Times, union
from gapmeter.analysis.samples import read_rows
from gapmeter.records.compression import open_record, with_compressed
from gapmeter.records.reader import NotRecords

_LOST, _SWITCH, _SWITCH_OF_CORE, _OUT, _PREEMPTED = 2, 14, 15, 0x2000, 0x4000  # PERF_RECORD_*, and switches' misc bits
_HEAD = np.dtype([("type", "<u4"), ("misc", "<u2"), ("size", "<u2")])
_ID = [("pid", "<i4"), ("tid", "<i4"), ("time", "<i8"), ("cpu", "<u4"), ("pad", "<u4")]
_RECORDS = {_SWITCH: np.dtype([*_HEAD.descr, *_ID]), _SWITCH_OF_CORE: np.dtype([*_HEAD.descr, ("other", "<i8"), *_ID])}
RUN = np.dtype([("pid", "<i4"), ("tid", "<i4"), ("cpu", "<i4"), ("start", "<i8"), ("end", "<i8"), ("preempted", "?")])

_BLOCK = 1 << 25
_FEW = 8  # records that are looked at together at first, behind one of another kind
MOST_LOST = 0.01  # of the time; beyond, nothing is said of who had the cores
ANOTHER = "another program"  # whose a process is, where it is neither the server's nor the load tester's


class TooManyLost(ValueError):
    """The kernel had no room for its records in ``share`` of the time, so nobody is known."""

    def __init__(self, share: float) -> None:
        super().__init__(f"the kernel's records of who ran were lost in {share:.0%} of the time")
        self.share = share


@dataclass(frozen=True, slots=True)
class Watched:
    """What was recorded of the cores, ``whole``: whoever ran there; else of the server and the load tester alone.

    ``lost``: when the kernel had no room for records of some core. ``programs``: by process id, whose it is (server,
    load tester, another program) and its name. ``limited``: when the server's control group may have been at its CPU
    limit. ``stopped``: by process id, when a signal or a debugger had stopped it.
    """

    runs: NDArray[np.void]
    lost: Times
    whole: bool
    programs: Mapping[int, tuple[str, str]]
    limited: Times
    stopped: Mapping[int, Times]


def read_watched(folder: Path) -> Watched | None:
    """From a run's telemetry; None where the kernel's records could not be had. Raises TooManyLost."""
    every, holes, whole = list[NDArray[np.void]](), list[Times](), False
    for path in with_compressed(folder, "switches-*.bin"):
        own, lost, others_too = _of_core(path)
        every.append(own)
        holes.append(lost)
        whole |= others_too
    if not any(map(len, every)):
        return None
    runs = _in_order(every)
    lost = union(*(np.concatenate(side) for side in zip(*holes, strict=True)))
    share = float((lost[1] - lost[0]).sum() / (runs["end"].max() - runs["start"].min()))
    if share > MOST_LOST:
        raise TooManyLost(share)
    named, _ = read_rows(folder / "switches.jsonl")
    programs = {int(row["pid"]): (row["of"], row["name"]) for row in named}
    stopped = _stopped(folder / "processes.jsonl", runs)
    return Watched(runs, lost, whole, programs, _limited(folder / "limits.jsonl"), stopped)


def _of_core(path: Path) -> tuple[NDArray[np.void], Times, bool]:
    """Of one core, whose records go before the next one's are read: runs, holes, and whether all who ran are there."""
    runs, begun, ended = [np.empty(0, RUN)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    records = np.empty(0, _RECORDS[_SWITCH])
    for part in read_switches(path):
        known = np.flatnonzero(records["type"] != _LOST)[-1:].tolist()
        records = np.concatenate([records[known[0] :], part]) if known else part  # on from the last that is no hole
        runs.append(_runs(records))
        hole = _holes(records)
        begun.append(hole[0])
        ended.append(hole[1])
    return np.concatenate(runs), (np.concatenate(begun), np.concatenate(ended)), "other" in (records.dtype.names or ())


def _in_order(parts: list[NDArray[np.void]]) -> NDArray[np.void]:
    """All runs by when they began; takes them from ``parts``, so that they are not in memory three times."""
    runs = np.concatenate(parts)
    parts.clear()
    return runs.take(np.argsort(runs["start"], kind="stable"))


def _runs(every: NDArray[np.void]) -> NDArray[np.void]:
    """Of one core: a thread that is put on it and the next record, which says that it leaves. Thread 0: it idles."""
    out = (every["misc"] & _OUT) != 0
    at = np.flatnonzero(~out[:-1] & out[1:] & (every["tid"][:-1] == every["tid"][1:]) & (every["tid"][:-1] > 0))
    table = np.empty(len(at), RUN)
    for name in ("pid", "tid", "cpu"):
        table[name] = every[name][at]
    table["start"], table["end"] = every["time"][at], every["time"][at + 1]
    table["preempted"] = (every["misc"][at + 1] & _PREEMPTED) != 0
    return table


def _holes(every: NDArray[np.void]) -> Times:
    """From the record before to the one after those of a core that the kernel lost: a thread may have come and gone."""
    lost = np.flatnonzero(every["type"] == _LOST)
    known = np.flatnonzero(every["type"] != _LOST)
    after = np.searchsorted(known, lost)
    inside = (after > 0) & (after < len(known))
    return every["time"][known[after[inside] - 1]], every["time"][known[after[inside]]]


def read_switches(path: Path) -> Iterator[NDArray[np.void]]:
    """The switches in a file of the kernel's records, and what it lost, some at a time; other kinds are passed over.

    Raises NotRecords.
    """
    with open_record(path) as file:
        try:
            head = file.read(_HEAD.itemsize)
            first = int.from_bytes(head[:4], "little")
            kind = first if first in _RECORDS else _SWITCH
            raw: bytes | None = head
            while raw is not None and (block := file.read(_BLOCK)):
                records, raw = _switches(raw + block, kind)
                yield records
        except ValueError as error:
            raise NotRecords(f"{path}: {error}") from error


def _switches(raw: bytes, kind: int) -> tuple[NDArray[np.void], bytes | None]:
    """Those of one kind, and of holes, that are whole; and what is left, None where it is no record."""
    heads, layout = np.frombuffer(raw, _HEAD, len(raw) // 8), _RECORDS[kind]
    parts, at, many = [np.empty(0, layout)], 0, len(raw)  # most are alike: so many are looked at together
    while at + 8 <= len(raw):
        rows = np.frombuffer(raw, layout, min((len(raw) - at) // layout.itemsize, many), at)
        others = np.flatnonzero((rows["type"] != kind) | (rows["size"] != layout.itemsize))
        alike, many = (int(others[0]), _FEW) if len(others) else (len(rows), 2 * many)
        if alike:
            parts.append(rows[:alike])
            at += alike * layout.itemsize
            continue
        head = heads[at // 8]
        if head["size"] < 8:
            return np.concatenate(parts), None
        if at + max(int(head["size"]), layout.itemsize) > len(raw):
            break
        if head["type"] in (kind, _LOST):
            parts.append(np.frombuffer(raw, layout, 1, at))
        at += int(head["size"]) // 8 * 8
    return np.concatenate(parts), raw[at:]


def _limited(path: Path) -> Times:
    """Between two samples in which a control group was kept from running longer than before."""
    last: dict[str, tuple[int, int]] = {}
    found = []
    for row in read_rows(path)[0]:
        group, at, total = row["group"], int(row["at_ns"]), int(row["throttled_ns"])
        before = last.get(group, (at, total))
        if total > before[1]:
            found.append((before[0], at))
        last[group] = (at, total)
    start, end = np.array(found, np.int64).reshape(-1, 2).T
    return union(start, end)


def _stopped(path: Path, runs: NDArray[np.void]) -> dict[int, Times]:
    """Around each sample that found a process stopped: from the last that its threads ran until they ran again."""
    seen = defaultdict[int, list[int]](list)
    for row in read_rows(path)[0]:
        if row.get("stopped"):
            seen[int(row["pid"])].append(int(row["at_ns"]))
    found = {}
    for pid, moments in seen.items():
        mine, at = runs[runs["pid"] == pid], np.array(moments, np.int64)
        ran = union(mine["start"], mine["end"])
        after = np.searchsorted(ran[0], at, side="right")
        off = (after > 0) & (after < len(ran[0]))
        off[off] = ran[1][after[off] - 1] <= at[off]
        found[pid] = union(ran[1][after[off] - 1], ran[0][after[off]])
    return found
