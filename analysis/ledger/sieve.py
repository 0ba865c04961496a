"""Which of a large run's spans of tokens are kept as they are read: all of them would fill the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gapmeter.analysis.arrays import AnyArray, Bools, Ints, changes, runs
from gapmeter.records import Span

OF_TOKENS = (Span.EGRESS, Span.OUTPUT_RECEIVE, Span.DETOKENIZE)
_STRANGER, _UNNAMED = -1, -2  # in place of a row
_NONE_YET = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """Of which tokens of each request ledgers are made: of all (``every``), or up to ``first`` and from ``last`` on."""

    every: Bools
    first: Ints
    last: Ints

    def with_chunks(self, request: Ints, n: Ints) -> AskedTokens:
        """The same, and all tokens that left with the first one. Of writes by request and count: these."""
        known = np.flatnonzero((request >= 0) & (n > 0))
        begins = known[changes(request[known])]
        first = self.first.copy()
        first[request[begins]] = np.maximum(first[request[begins]], n[begins])
        return replace(self, first=first)

    def carried_by(self, request: Ints, n: Ints, before: Ints | int = 0) -> Bools:
        """Which spans a search by tokens finds. Of spans of one kind by request and count: these.

        ``before``: the count of the last one that came before the first of a request here.
        """
        counted = np.where(changes(request), before, np.roll(n, 1))
        return self.every[request] | (counted < self.first[request]) | (n >= self.last[request])


class Sieve:
    """Lets through what ``AskedTokens`` will ask for of a process's spans, and a little more.

    How many tokens left with the first one is not known before that did, so until then all of a request pass. Spans of
    tokens are written only where the client's ids are known, so what has another's, or none, is a stranger's.
    ``sure``: nothing was held back that may be asked for. It may have been where a process spoke of a request before it
    named it, or where its tokens are not in order.
    """

    def __init__(self, asked: AskedTokens, rows: Mapping[str, int]) -> None:
        self.sure = True
        self._first, self._rows = asked.first, rows
        self._asked = replace(asked, first=np.full(len(asked.first), _NONE_YET))
        self._row_of = np.full(1, _UNNAMED, np.int32)  # by ref; the last: of any that is not yet named
        self._before = {int(code): np.zeros(len(asked.first), np.int64) for code in OF_TOKENS}

    def learn(self, named: Mapping[int, str]) -> None:
        """The client's id, "" for none, behind each ref that has been named since the last call."""
        if not named:
            return
        row_of = np.full(max(len(self._row_of), max(named) + 2), _UNNAMED, np.int32)
        row_of[: len(self._row_of)] = self._row_of
        row_of[list(named)] = [self._rows.get(name, _STRANGER) for name in named.values()]
        self._row_of = row_of

    def passes(self, code: int, ref: AnyArray, n: AnyArray) -> Bools:
        """Which of the next spans of one kind do. Of EGRESS first: it says what left with a first token.

        Those without a token do: a chunk of them may leave at any moment.
        """
        row = self._row_of.take(ref, mode="clip")
        passing = np.asarray((row >= 0) & (n == 0))
        ours = np.flatnonzero((row >= 0) & (n > 0))
        ours = ours[np.argsort(row[ours], kind="stable")]
        request, count, before = row[ours].astype(np.int64), n[ours].astype(np.int64), self._before[code]
        new = changes(request)
        first, last = runs(new)
        in_order = count >= np.where(new, before[request], np.roll(count, 1))
        self.sure &= bool((row != _UNNAMED).all() and in_order.all())
        if code == Span.EGRESS:
            left = first[self._asked.first[request[first]] == _NONE_YET]
            self._asked.first[request[left]] = np.maximum(self._first[request[left]], count[left])
        passing[ours] = self._asked.carried_by(request, count, before[request])
        before[request[last]] = count[last]
        return passing
