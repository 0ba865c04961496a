"""Looks a trace's rows up by request, by token and by step, for the events whose way is sought."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.ledger.launching import launch_waits
from gapmeter.analysis.ledger.trace import FIRST_PROCESS_CODE, FIRST_STEP_CODE, MISSING, Trace
from gapmeter.records import Span
from gapmeter.records.reader import Table

MOST_TOKENS = np.int64(1) << 40  # more tokens than any request has


@dataclass(frozen=True, slots=True)
class Events:
    """The ends of ledgers: token ``n`` (from 1) of row ``request`` received at ``end``, counted from ``start``."""

    request: Ints
    n: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.request)

    def rows(self, low: int, high: int) -> Events:
        """Some of them."""
        return Events(self.request[low:high], self.n[low:high], self.start[low:high], self.end[low:high])


class Index:
    """Looks a trace's rows up by request and code, by request and token, by step and code."""

    def __init__(self, trace: Trace, requests: int) -> None:
        self.rows = np.concatenate([np.arange(requests), trace.choices])  # of the client's table, by a request's number
        self.requests = len(self.rows)
        self._choices = trace.choices
        spans = trace.request_spans
        self.spans = spans if (spans["request"] >= 0).all() else spans[spans["request"] >= 0]
        self.evicted = self.spans[self.spans["code"] == Span.PREEMPT]
        emissions = trace.emissions[trace.emissions["request"] >= 0]
        emissions = emissions[np.lexsort((emissions["at"], emissions["request"]))]
        self.emission_key = emissions["request"] * MOST_TOKENS + _cumulative(emissions["request"], emissions["tokens"])
        self.emission_step = emissions["step"]
        self.scheduled_ns = np.sort(trace.steps["schedule_ns"])
        self.seqs = np.unique(trace.steps["seq"].astype(np.int64))
        last = np.searchsorted(self.seqs, trace.engine_steps, side="right").tolist() or [len(self.seqs)]
        self.engines = list(zip([0, *last[:-1]], last, strict=True))  # by position: each engine's steps, from .. to
        step_codes = [code for code in Span if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE]
        self.step_spans = {code: self._dense(trace.step_spans, code) for code in step_codes}
        stays = trace.step_spans[trace.step_spans["code"] == Span.DEVICE_STEP]
        stays = stays[np.isin(stays["step"], self.seqs)]
        self.device_width = np.zeros(len(self.seqs), np.int64)  # how far a step's device stamps may be off
        np.maximum.at(self.device_width, np.searchsorted(self.seqs, stays["step"]), stays["n"])
        steps, waits = launch_waits(trace)
        known = np.isin(steps, self.seqs)
        self.computing = self.step_spans[Span.FORWARD][0].copy()  # from when on a step's forward does not wait any more
        self.computing[np.searchsorted(self.seqs, steps[known])] += waits[known].astype(np.int64)
        calls = trace.step_spans.copy()
        calls["end"] = np.minimum(calls["end"], calls["start"] + calls["n"])
        self.call_ends = {code: self._dense(calls, code)[1] for code in (Span.EXECUTE, Span.SAMPLE_CALL)}
        entries = trace.entries[(trace.entries["request"] >= 0) & (trace.entries["tokens"] > 0)]
        key = entries["request"] * MOST_TOKENS + entries["step"]
        order = np.argsort(key, kind="stable")
        self.entry_key, self.entry_flags = key[order], entries["flags"][order]
        self.entries = entries[order]
        # Every block of events asks for the same. (A method's own cache would keep this alive beyond its use.)
        self._first: dict[int, Table] = {}
        self._by_token: dict[int, tuple[Ints, Ints]] = {}

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

    def computed_ns(self, steps: Ints) -> Ints:
        """How long each step's forward lasted, without what it waited for its launch."""
        at = np.searchsorted(self.seqs, steps)
        return self.step_spans[Span.FORWARD][1][at] - self.computing[at]

    def located(self, events: Events) -> Events:
        """The events of requests with several choices as those of the choice whose token it was.

        Chunks of one answer arrive in the order in which they were written.
        """
        if not len(self._choices):
            return events
        request, n = events.request.copy(), events.n.copy()
        several = self.spans[(self.spans["code"] == Span.EGRESS) & (self.spans["n"] > 0)]
        several = several[np.isin(self.rows[several["request"]], self._choices)]
        several = several[np.argsort(several["start"], kind="stable")]
        by_request = several[np.argsort(several["request"], kind="stable")]
        new = np.diff(by_request["n"], prepend=0)
        first = np.diff(by_request["request"], prepend=MISSING) != 0
        new[first] = by_request["n"][first]
        order = np.lexsort((by_request["start"], self.rows[by_request["request"]]))
        several, new = by_request[order], new[order]
        whose = self.rows[several["request"]]
        so_far = _cumulative(whose, new)
        at = np.searchsorted(whose * MOST_TOKENS + so_far, request * MOST_TOKENS + n)
        inside = np.flatnonzero(at < len(several))
        same = inside[whose[at[inside]] == request[inside]]
        found = at[same]
        n[same] += several["n"][found] - so_far[found]
        request[same] = several["request"][found]
        return Events(request, n, events.start, events.end)

    def of_request(self, code: int) -> Table:
        """The first span of ``code`` of each request (fields -1 where none)."""
        if code in self._first:
            return self._first[code]
        out = np.full(self.requests, MISSING, dtype=self.spans.dtype)
        rows = self.spans[self.spans["code"] == code]
        rows = rows[np.argsort(rows["start"], kind="stable")][::-1]
        out[rows["request"]] = rows
        self._first[code] = out
        return out

    def of_token(self, code: int, events: Events) -> Table:
        """The span of ``code`` that carried each event's token: the first whose count so far reaches it."""
        if code not in self._by_token:
            self._by_token[code] = self._in_order_of_tokens(code)
        rows, key = self._by_token[code]
        out = np.full(len(events), MISSING, dtype=self.spans.dtype)
        at = np.searchsorted(key, events.request * MOST_TOKENS + events.n)
        inside = np.flatnonzero(at < len(key))
        same = inside[key[at[inside]] // MOST_TOKENS == events.request[inside]]
        out[same] = self.spans[rows[at[same]]]
        return out

    def _in_order_of_tokens(self, code: int) -> tuple[Ints, Ints]:
        """The spans of ``code`` by request and count: their rows, and that as a key."""
        rows = np.flatnonzero(self.spans["code"] == code)
        key = self.spans["request"][rows] * MOST_TOKENS + self.spans["n"][rows]
        order = np.argsort(key, kind="stable")
        return rows[order], key[order]

    def step_of_token(self, events: Events) -> Ints:
        """Position in ``seqs`` of the step that made each event's token, or MISSING."""
        at = np.searchsorted(self.emission_key, events.request * MOST_TOKENS + events.n)
        inside = np.flatnonzero(at < len(self.emission_key))
        same = inside[self.emission_key[at[inside]] // MOST_TOKENS == events.request[inside]]
        positions = np.full(len(events), MISSING)
        positions[same] = self.position(self.emission_step[at[same]])
        return positions

    def position(self, seq: Ints) -> Ints:
        at = np.minimum(np.searchsorted(self.seqs, seq), len(self.seqs) - 1)
        return np.where(self.seqs[at] == seq, at, MISSING)

    @cached_property
    def first_step(self) -> Ints:
        """Position of the first step that carries tokens of each request, or MISSING."""
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
