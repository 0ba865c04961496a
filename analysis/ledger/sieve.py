"""Which of a large run's spans of tokens are kept as they are read: all of them would fill the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from gapmeter.analysis.arrays import AnyArray, Bools, Ints, changes, runs
from gapmeter.records import Span

OF_TOKENS = (Span.EGRESS, Span.OUTPUT_RECEIVE, Span.DETOKENIZE)
STRANGER, _UNNAMED = -1, -2  # in place of a row
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

    How many tokens left with the first one is not known before that did, so until then all of a request pass.
    ``sure``: nothing was held back that may be asked for. It may have been where a process spoke of a request before it
    named it, or where its tokens are not in order.
    """

    def __init__(self, asked: AskedTokens, rows: Mapping[str, int]) -> None:
        self.sure = True
        self._first, self._rows = asked.first, rows
        self._asked = replace(asked, first=np.full(len(asked.first), _NONE_YET))
        self._row_of = np.full(1, _UNNAMED, np.int32)  # by ref, which counts from 1; the last: of any not yet named
        self._before = {int(code): np.zeros(len(asked.first), np.int64) for code in OF_TOKENS}

    def name(self, client_ids: Mapping[int, str]) -> None:
        """Take in the client's id behind each ref, "" for none: those that were named before, and more."""
        refs = list(islice(client_ids, len(self._row_of) - 1, None))
        self.sure &= refs == list(range(len(self._row_of), len(client_ids) + 1))
        new = [self._rows.get(client_ids[ref], STRANGER) for ref in refs]
        self._row_of = np.concatenate([self._row_of[:-1], np.array([*new, _UNNAMED], np.int32)])

    def passes(self, code: int, ref: AnyArray, n: AnyArray) -> Bools:
        """Which of the next spans of one kind do. Of EGRESS first: it says what left with a first token."""
        row = self._row_of.take(ref - 1, mode="clip")
        ours = np.flatnonzero(row >= 0)
        ours = ours[np.argsort(row[ours], kind="stable")]
        request, count, before = row[ours].astype(np.int64), n[ours].astype(np.int64), self._before[code]
        new, (_, last) = changes(request), runs(changes(request))
        in_order = count >= np.where(new, before[request], np.roll(count, 1))
        self.sure &= bool((row != _UNNAMED).all() and in_order.all())
        if code == Span.EGRESS:
            known = np.flatnonzero((count > 0) & (self._asked.first[request] == _NONE_YET))
            known = known[changes(request[known])]
            self._asked.first[request[known]] = np.maximum(self._first[request[known]], count[known])
        passing = np.zeros(len(ref), np.bool_)
        passing[ours] = self._asked.carried_by(request, count, before[request])
        before[request[last]] = count[last]
        return passing
