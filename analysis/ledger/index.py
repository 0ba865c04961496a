"""Looks a trace's rows up by request and by token, for the events whose way is sought."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, changes, places, ranges, running_sums
from gapmeter.analysis.ledger.steps import Steps
from gapmeter.analysis.ledger.trace import MISSING, MOST_TOKENS, REQUEST_SPAN, Trace, as_key, from_key
from gapmeter.records import EntryFlag, Span
from gapmeter.records.reader import Table


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
    """Looks a trace's rows up by request and code, by request and token, by request and step.

    A request is its number: a row of the client's table, or of a further choice one behind these, whose row is in
    ``rows``. In order are ``entry_key``, every request with each step that carried tokens of it (``entry_prompt``: of
    its prompt), and ``emission_key``, every request with its tokens so far when a step made some (``emission_step``).
    """

    def __init__(self, trace: Trace, requests: int) -> None:
        self.steps = Steps(trace)
        self.rows = np.concatenate([np.arange(requests), trace.choices])
        self.requests = len(self.rows)
        self._choices = trace.choices
        self._spans = {code: _without_strangers(spans) for code, spans in trace.request_spans.items()}
        emissions = _without_strangers(trace.emissions)
        self.emission_key = as_key(emissions["request"], emissions["n"])
        self.emission_step = emissions["step"].copy()  # a column alone, without the others in memory
        self.scheduled_ns = np.sort(trace.steps["schedule_ns"])
        entries = trace.entries
        some = (entries["request"] >= 0) & (entries["tokens"] > 0)
        entries = entries if some.all() else entries[some]
        key = entries["request"].astype(np.int64)
        key *= MOST_TOKENS
        key += entries["step"]
        order = np.argsort(key, kind="stable")
        self.entry_key = key[order]
        self.entry_prompt = ((entries["flags"] & EntryFlag.PROMPT) != 0)[order]
        # Every block of events asks for the same. (A method's own cache would keep this alive beyond its use.)
        self._first: dict[int, Table] = {}
        self._keys: dict[int, Ints] = {}
        self._by_time: dict[int, tuple[Ints, Ints]] = {}

    @property
    def has_engine(self) -> bool:
        return len(self.steps.seqs) > 0

    def spans(self, code: int) -> Table:
        """Of one kind, by request and count."""
        return self._spans.get(code, np.empty(0, REQUEST_SPAN))

    def located(self, events: Events) -> Events:
        """The events of requests with several choices as those of the choice whose token it was.

        Chunks of one answer arrive in the order in which they were written.
        """
        if not len(self._choices):
            return events
        request, n = events.request.copy(), events.n.copy()
        whose, so_far, writes = self._writes
        same, found = _reaching(as_key(whose, so_far), request, n)
        alone = self._leave_with[found] == found
        n[same] = np.where(alone, n[same] + writes["n"][found] - so_far[found], writes["n"][self._leave_with[found]])
        request[same] = writes["request"][self._leave_with[found]]
        return Events(request, n, events.start, events.end)

    def written(self, row: Ints, at_ns: Ints, behind: Ints | int = 0) -> Ints:
        """How many tokens of a row's answer had been written, or begun to be, at a moment: too many where none had.

        ``behind``: how many writes before the last one by then, as far as there were.
        """
        whose, so_far, writes = self._writes
        at = np.searchsorted(self._moment(whose, writes["start"]), self._moment(row, at_ns), side="right") - 1
        n = np.full(len(row), MOST_TOKENS - 1)
        found = np.flatnonzero(at >= 0)
        found = found[whose[at[found]] == row[found]]
        n[found] = so_far[np.maximum(at - behind, np.searchsorted(whose, row))[found]]
        return n

    def awaited(self, events: Events, written: Ints) -> Events:
        """The events of chunks with several tokens as those of the last, if the first was ready before that one came.

        ``written``: with how many tokens so far each chunk left. Nothing leaves before the last token where an answer
        is not streamed, or reasoning is hidden. A chunk whose tokens came together only waited for its turn.
        """
        if not (written > events.n).any():
            return events
        last = replace(events, n=np.maximum(events.n, written))
        ready, came = self.of_token(Span.DETOKENIZE, events)["end"], self.of_token(Span.OUTPUT_RECEIVE, last)["start"]
        return replace(events, n=np.where((ready != MISSING) & (came > ready), last.n, events.n))

    def of_request(self, code: int) -> Table:
        """The first span of ``code`` of each request (fields -1 where none)."""
        if code in self._first:
            return self._first[code]
        out = np.full(self.requests, MISSING, dtype=REQUEST_SPAN)
        rows = self.spans(code)
        rows = rows[np.argsort(rows["start"], kind="stable")][::-1]
        out[rows["request"]] = rows
        self._first[code] = out
        return out

    def all_of_request(self, code: int, events: Events) -> tuple[Ints, Table]:
        """Every span of ``code`` of each event's request: whose it is, and the spans."""
        key = self._key(code)
        event, at = ranges(*(np.searchsorted(key, as_key(events.request + one, 0)) for one in (0, 1)))
        return event, self.spans(code).take(at)

    def of_choices(self, code: int, row: Ints, low: Ints, high: Ints) -> tuple[Ints, Table]:
        """The spans of ``code`` of any choice that began about ``low`` to ``high``, behind the places of their rows.

        Empty where no request has several choices.
        """
        if not len(self._choices):
            return np.empty(0, np.int64), np.empty(0, REQUEST_SPAN)
        if code not in self._by_time:
            key = self._moment(self.rows[self.spans(code)["request"]], self.spans(code)["start"])
            order = np.argsort(key, kind="stable")
            self._by_time[code] = key[order], order
        key, order = self._by_time[code]
        after = np.searchsorted(key, self._moment(row, high), side="right")
        whose, at = ranges(np.searchsorted(key, self._moment(row, low)), after)
        return whose, self.spans(code).take(order[at])

    def of_token(self, code: int, events: Events) -> Table:
        """The span of ``code`` that carried each event's token: the first whose count so far reaches it."""
        there, at = _reaching(self._key(code), events.request, events.n)
        found = self.spans(code).take(at)  # several times as fast as by [at]
        if len(there) == len(events):
            return found
        out = np.full(len(events), MISSING, dtype=REQUEST_SPAN)
        out[there] = found
        return out

    def _moment(self, row: Ints, at_ns: Ints) -> Ints:
        """Rows and moments, to the microsecond, as one number each: in the order of both."""
        return as_key(row, np.maximum(at_ns - self._begun, 0) // 1000)

    @cached_property
    def _begun(self) -> int:
        return min((int(spans["start"].min()) for spans in self._spans.values() if len(spans)), default=0)

    def _key(self, code: int) -> Ints:
        """Of the spans of ``code``, their request and count."""
        if code not in self._keys:
            spans = self.spans(code)
            self._keys[code] = as_key(spans["request"], spans["n"])
        return self._keys[code]

    def step_of_token(self, events: Events) -> Ints:
        """The position of the step that made each event's token, or MISSING."""
        positions = np.full(len(events), MISSING)
        there, at = _reaching(self.emission_key, events.request, events.n)
        positions[there] = self.steps.position(self.emission_step[at])
        return positions

    def carried(self, request: Ints, position: Ints) -> tuple[Bools, Bools]:
        """Whether each step, by position, had tokens of a request, and whether of its prompt."""
        if not len(self.entry_key):
            return (none := np.zeros(len(request), np.bool_)), none
        at = places(self.entry_key, as_key(request, self.steps.seqs[position]))
        own = at >= 0
        return own, own & self.entry_prompt[at]

    @cached_property
    def _writes(self) -> tuple[Ints, Ints, Table]:
        """The writes of tokens by the client's row and time: whose they are, its tokens so far, and the spans."""
        spans = self.spans(Span.EGRESS)
        spans = spans[spans["n"] > 0]
        spans = spans[np.lexsort((spans["start"], spans["request"]))]
        new = np.diff(spans["n"], prepend=0)
        first = changes(spans["request"])
        new[first] = spans["n"][first]
        ready = spans["start"]
        if len(self._choices):  # several may leave in one write: the last that was ready is what it waited for
            choice = Events(spans["request"], spans["n"].astype(np.int64), spans["start"], spans["end"])
            ready = self.of_token(Span.DETOKENIZE, choice)["end"]
        order = np.lexsort((ready, spans["start"], self.rows[spans["request"]]))
        whose = self.rows[spans["request"][order]]
        return whose, running_sums(whose, new[order]), spans[order]

    @cached_property
    def _leave_with(self) -> Ints:
        """Of each write, the last of those that are one: choices of an answer that came whole leave with the last."""
        whose, _, writes = self._writes
        new = changes(whose, writes["start"].astype(np.int64))
        ends: Ints = np.append(np.flatnonzero(new)[1:], len(new)) - 1
        return ends.take(np.cumsum(new) - 1)

    @cached_property
    def first_step(self) -> Ints:
        """Of each request, the position of the first step that carries tokens of it, or MISSING."""
        out = np.full(self.requests, MISSING)
        request, step = from_key(self.entry_key)
        first = changes(request)
        out[request[first]] = self.steps.position(step[first])
        return out

    def scheduled_of(self, request: Ints) -> Ints:
        """When the first step with tokens of each request was scheduled, or MISSING."""
        first = self.first_step[request]
        if not self.has_engine:
            return first
        return np.where(first == MISSING, MISSING, self.steps.spans[Span.SCHEDULE][0][first])

    @cached_property
    def evictions(self) -> tuple[Ints, Ints, Ints]:
        """Of requests that were evicted and later scheduled again: whose, when, and when again; by request and time."""
        preempted = self.spans(Span.PREEMPT)
        request, step = from_key(self.entry_key)
        own = np.isin(request, preempted["request"])
        scheduled = self.steps.spans[Span.SCHEDULE][0][self.steps.position(step[own])]
        whose = np.concatenate([request[own], preempted["request"]])
        at = np.concatenate([scheduled, preempted["start"]])
        evicted = np.arange(len(whose)) >= len(scheduled)
        order = np.lexsort((evicted, at, whose))
        whose, at, evicted = whose[order], at[order], evicted[order]
        entries, rows = np.flatnonzero(~evicted), np.flatnonzero(evicted)
        after = np.searchsorted(entries, rows)
        rows, after = rows[after < len(entries)], entries[after[after < len(entries)]]
        again = whose[rows] == whose[after]  # else its last token was in flight already
        return whose[rows[again]], at[rows[again]], at[after[again]]

    @cached_property
    def decoded_from(self) -> Ints:
        """Of each request, the position of its last step with a part of its prompt, or MISSING."""
        out = np.full(self.requests, MISSING)
        request, step = from_key(self.entry_key[self.entry_prompt])
        out[request] = self.steps.position(step)  # in order: the last one stays
        return out


def _without_strangers(rows: Table) -> Table:
    """Of rows in the order of requests, without copying them."""
    return rows[np.searchsorted(rows["request"], 0) :]


def _reaching(key: Ints, request: Ints, n: Ints) -> tuple[Ints, Ints]:
    """The first row of each request whose count is ``n`` or more: for which there is one, and the row.

    ``key``: the rows' requests and counts, in order.
    """
    at = np.searchsorted(key, as_key(request, n))
    inside = np.flatnonzero(at < len(key))
    there = inside[key[at[inside]] < as_key(request[inside] + 1, 0)]  # else it is another request's
    return there, at[there]
