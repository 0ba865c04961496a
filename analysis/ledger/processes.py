"""What a process of the server recorded of its own work, by kind of work and by when it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from gapmeter.analysis.arrays import Ints, changes, runs
from gapmeter.analysis.ledger.critical_path import Times, at_least, union
from gapmeter.analysis.ledger.sieve import OF_TOKENS, Sieve
from gapmeter.records import RecordFile, Span, read_records
from gapmeter.records.reader import SPAN_DTYPE, Table

KINDS = {"api": "api", "worker": "engine", "engine": "engine", "core": "engine"}  # by the role in a file's head
_BLOCK = 2_000  # spans whose times are noted together
_FEW = 10_000  # spans
_TIMES = np.dtype([(name, "<i8") for name in ("queued_ns", "start_ns", "end_ns")])
_NO_SPANS: Table = np.empty(0, SPAN_DTYPE)
_TO_POOL = (Span.TEMPLATE, Span.TOKENIZE)
_IN_LOOP = (Span.REQUEST, Span.HANDOFF, Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS)


@dataclass(frozen=True)
class RecordedProcess:
    """``kinds``: its spans by what they time, each kind's in the order written; ``file``: what else it recorded.

    Of a kind whose tables are made only the times are left (``times_of``). Of a kind of which only some rows are kept,
    these are in ``kept``, and ``kinds`` has its times alone.
    """

    file: RecordFile
    kinds: dict[int, Table]
    kept: dict[int, Table] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, sieve: Sieve | None = None) -> RecordedProcess:
        """Of one file; with ``sieve``, of tokens' spans only what passes it. Raises as ``read_records``."""
        kinds, kept = defaultdict[int, bytearray](bytearray), defaultdict[int, bytearray](bytearray)

        def sort(spans: Table, named: Mapping[int, str]) -> None:
            if sieve is not None:
                sieve.learn(named)
            codes = np.ascontiguousarray(spans["code"])
            for code in sorted(np.flatnonzero(np.bincount(codes)).tolist(), key=lambda code: code != Span.EGRESS):
                own = spans.compress(codes == code)
                if sieve is not None and code in OF_TOKENS:
                    kept[code] += own.compress(sieve.passes(code, own["ref"], own["n"])).data
                    own = times_of(code, own)
                kinds[code] += own.data

        file = read_records(path, take_spans=sort)
        return cls(
            file,
            {code: np.frombuffer(kinds[code], _TIMES if code in kept else SPAN_DTYPE) for code in sorted(kinds)},
            {code: np.frombuffer(rows, SPAN_DTYPE) for code, rows in kept.items()},
        )

    @property
    def pid(self) -> int:
        return int(self.file.process.get("pid", -1))

    @property
    def role(self) -> str:
        return str(self.file.process.get("role"))

    @property
    def engine(self) -> int:
        """Of several engines which one."""
        return int(self.file.process.get("engine", 0))

    @property
    def kind(self) -> str:
        return KINDS[self.role]

    def spans(self, *codes: int) -> Table:
        """Of one kind after the other."""
        every = [self.kinds[code] for code in codes if code in self.kinds] or [_NO_SPANS]
        return every[0] if len(every) == 1 else np.concatenate(every)

    def take_requests(self, code: int) -> Table:
        """The spans of a kind that is recorded by request, all or those kept; only the times stay here."""
        found = self.kept.pop(code) if code in self.kept else self.kinds[code]
        self.kinds[code] = times_of(code, self.kinds[code])
        return found

    def times_alone(self) -> RecordedProcess:
        """The same process, of which nothing is left but its head and when its spans were; takes these from it."""
        tables = ("steps", "entries", "emits", "emissions", "device")
        file = replace(self.file, **{name: getattr(self.file, name)[:0].copy() for name in tables})
        return RecordedProcess(file, {code: times_of(code, self.kinds.pop(code)) for code in tuple(self.kinds)})

    def thinned(self, most: int) -> RecordedProcess:
        """The same process, with up to ``most`` spans of each kind, evenly: all of a kind may be half a gigabyte."""
        return replace(self, kinds={code: rows[:: len(rows) // most + 1] for code, rows in self.kinds.items()})

    def within(self, low: int, high: int) -> RecordedProcess:
        """The same process, with the spans alone that were going on between two moments."""
        kept = {}
        for code, every in self.kinds.items():
            begun, ended = self._times[code]
            inside, parts = (begun > low) & (ended < high), [every[:0]]
            for number in np.flatnonzero((begun < high) & (ended > low)).tolist():
                rows = every[_BLOCK * number : _BLOCK * (number + 1)]
                parts.append(rows if inside[number] else rows[(_begun(rows) < high) & (rows["end_ns"] > low)])
            kept[code] = np.concatenate(parts)
        return replace(self, kinds=kept)

    @cached_property
    def _times(self) -> dict[int, tuple[Ints, Ints]]:
        """From when to when the spans of each block were: they are written as they end, so of one time together."""
        found = {}
        for code, spans in self.kinds.items():
            blocks = [spans[at : at + _BLOCK] for at in range(0, len(spans), _BLOCK)]
            times = np.array([(_begun(rows).min(), rows["end_ns"].max()) for rows in blocks], np.int64).reshape(-1, 2)
            found[code] = times[:, 0], times[:, 1]
        return found


def times_of(code: int, spans: Table) -> Table:
    """When spans were, once each: what a step's tokens have in common is there for every one of them.

    Many of DETOKENIZE once a batch, from when that was ``queued`` to the last one's end: that is all that is asked of
    them, but for the few by which one sees whose a process is.
    """
    if spans.dtype == _TIMES:
        return spans
    queued, start, end = (spans[name] for name in _TIMES.names or ())
    by_batch = code == Span.DETOKENIZE and len(spans) > _FEW
    first, _ = runs(changes(queued) if by_batch else changes(queued, start, end))
    times = np.empty(len(first), _TIMES)
    times["queued_ns"], times["start_ns"] = queued[first], start[first]
    times["end_ns"] = np.maximum.reduceat(end, first)
    return times


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


def pool_awaited(process: RecordedProcess) -> Times:
    """When a template or a text was in a pool's queue."""
    spans = process.spans(*_TO_POOL)
    return union(spans["queued_ns"], spans["start_ns"])


def pool_full(process: RecordedProcess, threads: int) -> Times:
    """When every one of a pool's threads was at a template or at tokenizing."""
    spans = process.spans(*_TO_POOL)
    spans = spans[spans["queued_ns"] != spans["start_ns"]]
    return at_least(max(threads, 1), spans["start_ns"], spans["end_ns"])
