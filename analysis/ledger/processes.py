"""What a process of the server recorded of its own work, by kind of work and by when it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.ledger.critical_path import Times, at_least, union
from gapmeter.records import RecordFile, Span
from gapmeter.records.reader import Table

KINDS = {"api": "api", "worker": "engine", "engine": "engine", "core": "engine"}  # by the role in a file's head
_BLOCK = 10_000  # spans whose times are noted together
_TO_POOL = (Span.TEMPLATE, Span.TOKENIZE)
_IN_LOOP = (Span.REQUEST, Span.HANDOFF, Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS)


@dataclass(frozen=True)
class RecordedProcess:
    """``engine``: of several engines which one; ``every``: its spans, in the order written."""

    pid: int
    role: str
    engine: int
    every: Table

    @classmethod
    def of(cls, file: RecordFile) -> RecordedProcess:
        head = file.process
        return cls(int(head["pid"]), str(head["role"]), int(head.get("engine", 0)), file.spans)

    @property
    def kind(self) -> str:
        return KINDS[self.role]

    def spans(self, *codes: Span) -> Table:
        """Of one kind after the other, in the order written."""
        return np.concatenate([self.every[self._codes == code] for code in codes])

    def thinned(self, most: int) -> RecordedProcess:
        """The same process, with up to ``most`` of its spans, evenly: all of a kind may be half a gigabyte."""
        return replace(self, every=self.every[:: len(self.every) // most + 1])

    def within(self, low: int, high: int) -> RecordedProcess:
        """The same process, with the spans alone that were going on between two moments."""
        begun, ended = self._times
        near = np.flatnonzero((begun < high) & (ended > low)).tolist()
        blocks = [self.every[_BLOCK * number : _BLOCK * (number + 1)] for number in near]
        kept = [rows[(_begun(rows) < high) & (rows["end_ns"] > low)] for rows in blocks]
        return replace(self, every=np.concatenate([self.every[:0], *kept]))

    @cached_property
    def _codes(self) -> NDArray[np.integer]:
        """Of each span, side by side: kinds are asked for many times."""
        return np.ascontiguousarray(self.every["code"])

    @cached_property
    def _times(self) -> tuple[Ints, Ints]:
        """From when to when the spans of each block were: they are written as they end, so of one time together."""
        blocks = [self.every[at : at + _BLOCK] for at in range(0, len(self.every), _BLOCK)]
        times = np.array([(_begun(rows).min(), rows["end_ns"].max()) for rows in blocks], np.int64).reshape(-1, 2)
        return times[:, 0], times[:, 1]


def _begun(spans: Table) -> Ints:
    """When each was begun, or asked for before that."""
    queued, start = spans["queued_ns"], spans["start_ns"]
    return np.where(queued > 0, np.minimum(queued, start), start)


def loop_work(process: RecordedProcess, also: Sequence[Span] = _IN_LOOP) -> Times:
    """What an API server's event loop did for anybody: templates and tokenizing that no pool does, and ``also``."""
    spans = [process.spans(code) for code in (*_TO_POOL, *also)]
    spans[:2] = [rows[rows["queued_ns"] == rows["start_ns"]] for rows in spans[:2]]
    begun = [rows["queued_ns" if code == Span.DETOKENIZE else "start_ns"]
             for code, rows in zip((*_TO_POOL, *also), spans, strict=True)]  # fmt: skip
    return union(np.concatenate(begun), np.concatenate([rows["end_ns"] for rows in spans]))


def pool_full(process: RecordedProcess, threads: int) -> Times:
    """When every one of a pool's threads was at a template or at tokenizing."""
    spans = process.spans(*_TO_POOL)
    spans = spans[spans["queued_ns"] != spans["start_ns"]]
    return at_least(max(threads, 1), spans["start_ns"], spans["end_ns"])
