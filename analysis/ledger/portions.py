"""Of which events ledgers are made (first tokens, last tokens, gaps between tokens), and in which portions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Bools, Ints, changes, each_of, running_sums
from gapmeter.analysis.ledger.critical_path import FAR, Times
from gapmeter.analysis.ledger.index import Events, Index
from gapmeter.analysis.ledger.shares import Shares
from gapmeter.analysis.ledger.sieve import AskedTokens
from gapmeter.analysis.requests.metrics import arrivals_of, flattened

_BLOCK = 20_000  # events and steps within them whose ledgers are made at once
AT_ONCE = 2  # blocks that are looked at side by side
_REQUESTS = 1_000  # whose gaps are looked for at once
_MOST_GAPS, _SEED = 500_000, 20  # of a run, that are divided: five hundred tell of the slowest thousandth
MOST_SHOWN = 2000  # requests one by one: a run of a million has no page and no trace file for all of them


def chosen(requests: pd.DataFrame, most: int = MOST_SHOWN) -> Bools:
    """All answered requests up to ``most``; beyond, a quarter each slowest to first and last token, and an even sample.

    ``requests`` is the client's table; bool, a row each.
    """
    good = answered(requests)
    if good.sum() <= most:
        return good
    kept = np.zeros(len(requests), dtype=np.bool_)
    for end in ("first_token_ns", "last_token_ns"):
        waited = (requests[end] - requests["due_ns"]).to_numpy(np.float64, na_value=np.nan)
        waited[~good] = -1.0
        kept[np.argsort(-waited, kind="stable")[: most // 4]] = True
    others = np.flatnonzero(good & ~kept)
    kept[others[np.linspace(0, len(others) - 1, most - int(kept.sum())).astype(int)]] = True
    return kept


def answered(requests: pd.DataFrame) -> Bools:
    return np.asarray((requests["outcome"] == "ok") & requests["first_token_ns"].notna(), dtype=np.bool_)


def first_tokens(requests: pd.DataFrame, rows: Ints, index: Index | None) -> Events:
    """Of these requests, from when each was due."""
    return _until(requests, rows, "first_token_ns", np.ones(len(rows), np.int64), index, first=True)


def last_tokens(requests: pd.DataFrame, rows: Ints, index: Index | None) -> Events:
    """Of these requests, from when each was due."""
    counted = requests["output_tokens"].iloc[rows].astype("Int64").to_numpy(np.int64, na_value=0)
    return _until(requests, rows, "last_token_ns", counted, index)


def _until(
    requests: pd.DataFrame, rows: Ints, end: str, n: Ints, index: Index | None, *, first: bool = False
) -> Events:
    start, ended = (np.asarray(requests[name].iloc[rows], dtype=np.int64) for name in ("due_ns", end))
    return _counted(requests, Events(rows, n, start, ended), index, first=first)


def _counted(requests: pd.DataFrame, events: Events, index: Index | None, *, first: bool = False) -> Events:
    """The same; of answers that do not say how many tokens a chunk holds, as many as the server had written by then.

    Chunks alone don't tell: one may hold several, and one without text none. With ``first``: of k chunks that were read
    together the first one, before k - 1 writes.
    """
    if index is None or "counted" not in requests:
        return events
    unknown = np.flatnonzero((requests["counted"] == "unmeasured").to_numpy(np.bool_)[events.request])
    if len(unknown):
        rows = events.request[unknown]
        behind = read_together(requests[["token_ns"]].iloc[rows]) - 1 if first else 0
        events.n[unknown] = index.written(rows, events.end[unknown], behind)
    return events


def arrived(requests: pd.DataFrame, rows: Ints) -> Ints:
    """How many chunks with tokens came."""
    came = [0 if stamps is None else len(stamps) for stamps in requests["token_ns"].iloc[rows]]
    return np.array(came, np.int64)


def read_together(requests: pd.DataFrame) -> Ints:
    """How many tokens of each answer (chunks, of one that does not count tokens) have the stamp of its first."""
    at_ns, counts = flattened(requests, "token_ns")
    some = np.flatnonzero(counts)
    begins = (np.cumsum(counts) - counts)[some]
    together = np.zeros(len(counts), np.int64)
    if len(some):
        together[some] = np.add.reduceat(at_ns == np.repeat(at_ns[begins], counts[some]), begins, dtype=np.int64)
    return together


def tokens_together(requests: pd.DataFrame, index: Index) -> Ints:
    """Up to which token of each answer the read reached in which its first came."""
    together, good = read_together(requests), np.flatnonzero(answered(requests))
    together[good] = _until(requests, good, "first_token_ns", together[good], index).n
    return together


def drawn_of(requests: pd.DataFrame, good: Ints) -> Ints:
    """Places in ``good`` of requests whose gaps are divided: all, or of a large run some with enough, at least one."""
    came = arrived(requests, good)
    if came.sum() <= _MOST_GAPS:
        return np.arange(len(good))
    order = np.random.default_rng(_SEED).permutation(len(good))
    return np.sort(order[: max(int(np.searchsorted(np.cumsum(came[order]), _MOST_GAPS)), 1)])


def asked_tokens(requests: pd.DataFrame) -> AskedTokens | None:
    """Of which tokens a run's ledgers are made; None: of all."""
    good = np.flatnonzero(answered(requests))
    drawn = drawn_of(requests, good)
    if len(drawn) == len(good):
        return None
    every = np.array(requests["counted"] == "unmeasured", np.bool_)
    every[good[drawn]] = True
    last = requests["output_tokens"].to_numpy(np.int64, na_value=0)
    return AskedTokens(every, read_together(requests), last)


def gaps_between(requests: pd.DataFrame, good: Ints, drawn: Ints, index: Index | None) -> Iterator[Portion]:
    """The gaps between the moments at which tokens of one answer arrived, and what names them, some requests at a time.

    ``drawn``: whose, as places in ``good``, as ``request_id`` is.
    """
    for low in range(0, max(len(drawn), 1), _REQUESTS):
        places = drawn[low : low + _REQUESTS]
        some = good[places]
        whose, at_ns, tokens = arrivals_of(requests.iloc[some], np.ones(len(some), np.bool_))
        n = running_sums(whose, tokens)
        later = np.flatnonzero(~changes(whose))
        _, nth = each_of(np.bincount(whose[later], minlength=len(some)))
        events = _counted(requests, Events(some[whose[later]], n[later], at_ns[later - 1], at_ns[later]), index)
        names = {"request_id": places[whose[later]], "k": nth + 1, "tokens": n[later] - n[later - 1]}
        narrow = {name: values.astype(np.int32) for name, values in names.items()}
        yield Portion(events, narrow | {"end_ns": events.end})


def blocks(index: Index | None, *windows: Times, request: Ints | None = None) -> Iterator[tuple[int, int]]:
    """Of events, by their windows' starts and ends, some at a time, from which to which: all would fill the memory.

    ``request``: whose they are. Steps before its first own one are not in its ledger: however many, it only waits.
    """
    steps = np.empty(0, np.int64) if index is None else index.scheduled_ns
    scheduled = -FAR if index is None or request is None else index.scheduled_of(request)

    def within(start: Ints, end: Ints) -> Ints:
        begun = np.minimum(np.maximum(start, scheduled), end)
        return 1 + np.searchsorted(steps, end) - np.searchsorted(steps, begun)

    cuts = np.flatnonzero(np.diff(np.cumsum(sum(within(*each) for each in windows)) // _BLOCK)) + 1
    return itertools.pairwise([0, *cuts.tolist(), len(windows[0][0])])


@dataclass(frozen=True, slots=True)
class KnownShares:
    """Whose the stretches of events from ``since`` to ``until`` are, where that is known already."""

    since: Ints
    until: Ints
    shares: Shares

    def rows(self, low: int, high: int) -> KnownShares:
        """Of some of them; who held the cores is known of all together."""
        return KnownShares(self.since[low:high], self.until[low:high], Shares(self.shares.ns[low:high], {}))


@dataclass(frozen=True, slots=True)
class Portion:
    """Some events, columns that name them, and whose parts of their time are, as far as that is known already."""

    events: Events
    names: Mapping[str, AnyArray] = field(default_factory=dict)
    known: KnownShares | None = None

    def blocks(self, index: Index | None) -> Iterator[Portion]:
        """The same in portions that are not too large."""
        events, known = self.events, self.known
        windows = [(events.start, events.end)]
        if known is not None:
            windows = [(events.start, known.since), (known.until, events.end)]
        for low, high in blocks(index, *windows, request=events.request):
            names = {name: of[low:high] for name, of in self.names.items()}
            yield Portion(events.rows(low, high), names, known.rows(low, high) if known else None)
