"""A server's trace looked up by request, by token and by step, for the events whose way is sought."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.ledger.trace import Table, Trace
from gapmeter.records import Span

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MISSING = -1
FAR = np.int64(1) << 40  # more tokens than any request has


@dataclass(frozen=True, slots=True)
class Events:
    """The ends of ledgers: token ``n`` (from 1) of row ``request`` received at ``end``, counted from ``start``."""

    request: Ints
    n: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.request)


class Index:
    """Looks a trace's rows up by request and code, by request and token, by step and code."""

    def __init__(self, trace: Trace, requests: int) -> None:
        self.requests = requests
        spans = trace.request_spans
        self.spans = spans[spans["request"] >= 0]
        emissions = trace.emissions[trace.emissions["request"] >= 0]
        emissions = emissions[np.lexsort((emissions["at"], emissions["request"]))]
        self.emission_key = emissions["request"] * FAR + _cumulative(emissions["request"], emissions["tokens"])
        self.emission_step = emissions["step"]
        self.seqs = np.unique(trace.steps["seq"].astype(np.int64))
        self.step_spans = {code: self._dense(trace.step_spans, code) for code in Span if 100 <= code < 200}
        entries = trace.entries[(trace.entries["request"] >= 0) & (trace.entries["tokens"] > 0)]
        key = entries["request"] * FAR + entries["step"]
        order = np.argsort(key, kind="stable")
        self.entry_key, self.entry_flags = key[order], entries["flags"][order]
        self.entries = entries[order]

    def _dense(self, table: Table, code: int) -> tuple[Ints, Ints]:
        """Start and end of a step's span, by the step's position in ``seqs``; several of one step are joined."""
        start = np.full(len(self.seqs), np.iinfo(np.int64).max)
        end = np.full(len(self.seqs), MISSING)
        rows = table[(table["code"] == code) & np.isin(table["step"], self.seqs)]
        at = np.searchsorted(self.seqs, rows["step"])
        np.minimum.at(start, at, rows["start"])
        np.maximum.at(end, at, rows["end"])
        start[end == MISSING] = MISSING
        return start, end

    def of_request(self, code: int, pick: str = "first") -> Table:
        """One span of ``code`` for each client row (fields -1 where none)."""
        out = np.full(self.requests, MISSING, dtype=self.spans.dtype)
        rows = self.spans[self.spans["code"] == code]
        rows = rows[np.argsort(rows["start"], kind="stable")]
        out[rows["request"][:: -1 if pick == "first" else 1]] = rows[:: -1 if pick == "first" else 1]
        return out

    def of_token(self, code: int, events: Events) -> Table:
        """The span of ``code`` that carried each event's token: the first whose count so far reaches it."""
        rows = self.spans[self.spans["code"] == code]
        key = rows["request"] * FAR + rows["n"]
        order = np.argsort(key, kind="stable")
        return _take(rows[order], key[order], events)

    def step_of_token(self, events: Events) -> Ints:
        """Position in ``seqs`` of the step that made each event's token, or MISSING."""
        wanted = events.request * FAR + events.n
        at = np.searchsorted(self.emission_key, wanted)
        found = np.full(len(events), MISSING)
        inside = at < len(self.emission_key)
        same = inside.copy()
        same[inside] = self.emission_key[at[inside]] // FAR == events.request[inside]
        found[same] = self.position(self.emission_step[at[same]])
        return found

    def position(self, seq: Ints) -> Ints:
        if not len(self.seqs):
            return np.full(len(seq), MISSING)
        at = np.minimum(np.searchsorted(self.seqs, seq), len(self.seqs) - 1)
        return np.where(self.seqs[at] == seq, at, MISSING)

    def first_step(self) -> Ints:
        """Position of the first step that carries tokens of each client row, or MISSING."""
        out = np.full(self.requests, MISSING)
        out[self.entries["request"][::-1]] = self.position(self.entries["step"][::-1])
        return out


def _cumulative(groups: Ints, values: Ints) -> Ints:
    """Running sum of ``values`` within runs of equal ``groups``."""
    total = np.cumsum(values)
    starts = np.flatnonzero(np.diff(groups, prepend=np.int64(MISSING - 1)))
    before = np.zeros(len(groups), dtype=np.int64)
    before[starts] = np.diff(total[starts] - values[starts], prepend=np.int64(0)) if len(starts) else 0
    return np.asarray(total - np.cumsum(before), dtype=np.int64)


def _take(rows: Table, key: Ints, events: Events) -> Table:
    out = np.full(len(events), MISSING, dtype=rows.dtype)
    at = np.searchsorted(key, events.request * FAR + events.n)
    inside = np.flatnonzero(at < len(key))
    same = inside[rows["request"][at[inside]] == events.request[inside]]
    out[same] = rows[at[same]]
    return out
