"""What the steps of an engine own of all requests that they decode, told once for all of them.

From the end of the last step with a part of its prompt to the beginning of the one that makes its last token, nothing
acts for most requests but the steps between, each of which decodes it. What those own of a nanosecond is then the same
for all of them: for each it is what had come by one moment less what had come by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, distinct, ranges
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.critical_path import FAR, Intervals, Times
from gapmeter.analysis.ledger.index import Events, Index
from gapmeter.analysis.ledger.intervals import ClientStamps, Maker, Parts, StepRows
from gapmeter.analysis.ledger.portions import AT_ONCE, blocks
from gapmeter.analysis.ledger.shares import SHARES, Processes, Sharer, Shares
from gapmeter.analysis.ledger.trace import MISSING, as_key, filled


@dataclass(frozen=True, slots=True)
class DecodeStretches:
    """Of each event a stretch of nothing but decoding, ``since`` to ``until``, ns: empty, at its end, where none is.

    ``place`` and ``process``: its engine's.
    """

    since: Ints
    until: Ints
    place: Ints
    process: Ints


def stretches_of(index: Index, client: ClientStamps, events: Events, dropped: frozenset[str]) -> DecodeStretches:
    """Where ``Maker`` would lay nothing but the steps of ``decode_steps``."""
    maker = Maker(index, client, events)
    maker.beside_steps()
    first, step = filled(index.decoded_from[maker.events.request], maker.first), maker.step
    known = (first != MISSING) & (step > first)
    first, step = np.where(known, first, 0), np.where(known, step, 0)
    steps, request = index.steps, maker.events.request
    own = [np.searchsorted(index.entry_key, as_key(request, steps.seqs[at])) for at in (first, step)]
    since, until, place = steps.over[first], steps.untouched[step], steps.engine_of(step)
    known &= (place == steps.engine_of(first)) & (own[1] - own[0] == step - first)  # it is in every step between
    known &= (events.start <= since) & (since < until) & (until <= events.end)
    known &= (maker.scheduled <= since) & (until <= filled(maker.arrived, FAR))
    since, until = (np.where(known, at, events.end) for at in (since, until))
    between = Maker(index, client, Events(events.request, events.n, since, until))
    between.beside_steps()
    disturbed = distinct(between.whole(dropped).event)
    since[disturbed] = until[disturbed] = events.end[disturbed]
    return DecodeStretches(since, until, place, maker.processes.engine)


def decode_steps(index: Index, start: Ints, end: Ints, place: int, dropped: frozenset[str]) -> Intervals:
    """What the steps of an engine do within windows for a request that is decoded in all of them."""
    steps, nobody = index.steps, np.full(len(start), MISSING)
    parts = Parts(index, Events(nobody, nobody, start, end))
    event, position = ranges(steps.first_of(place, steps.over, start), steps.first_of(place, steps.untouched, end))
    none, never = np.zeros(len(event), np.bool_), np.full(len(event), FAR)
    rows = StepRows(
        event, position, own=~none, prompt=none, makes_it=none, since=-never, work_until=never, code_until=never
    )
    parts.add_steps(rows)
    return parts.whole(dropped)


def decoded(
    index: Index, sharer: Sharer, stretches: DecodeStretches, counted: Bools, dropped: frozenset[str]
) -> Shares:
    """What the stages own of each event's stretch. ``counted``: the events of ``core_holders``."""
    ns, core_holders = np.zeros((len(counted), SHARES), np.int64), Counter[Culprit]()
    some = np.flatnonzero(stretches.since < stretches.until)
    engines = np.stack([stretches.place[some], stretches.process[some]], axis=1)
    for engine in np.unique(engines, axis=0).tolist():
        mine = some[(engines == engine).all(axis=1)]
        moments = distinct(np.concatenate([stretches.since[mine], stretches.until[mine]]))
        begun, ended = (np.searchsorted(moments, at[mine]) for at in (stretches.since, stretches.until))
        under_way, often = (_under_way(begun[rows], ended[rows], len(moments)) for rows in (slice(None), counted[mine]))
        at = np.flatnonzero(under_way)
        shares = _between(index, sharer, (moments[at], moments[at + 1]), engine, often[at], dropped)
        so_far = np.zeros((len(moments), SHARES), np.int64)
        so_far[at + 1] = shares.ns
        np.cumsum(so_far, axis=0, out=so_far)
        ns[mine] = so_far[ended] - so_far[begun]
        core_holders.update(shares.core_holders)
    return Shares(ns, core_holders)


def _under_way(begun: Ints, ended: Ints, moments: int) -> Ints:
    """How many are, from each moment on."""
    return np.cumsum(np.bincount(begun, minlength=moments) - np.bincount(ended, minlength=moments))


def _between(
    index: Index, sharer: Sharer, times: Times, engine: Sequence[int], often: Ints, dropped: frozenset[str]
) -> Shares:
    """The same of an engine's windows, each counted so ``often``."""
    place, process = engine

    def made(rows: tuple[int, int]) -> Shares:
        start, end, counted = (of[slice(*rows)] for of in (*times, often))
        intervals = decode_steps(index, start, end, place, dropped)
        processes = Processes(*(np.full(len(start), pid) for pid in (MISSING, process)))
        return sharer.shares(intervals, processes, counted)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(made, blocks(index, times)))
    core_holders = Counter[Culprit]()
    for part in parts:
        core_holders.update(part.core_holders)
    return Shares(np.concatenate([part.ns for part in parts]), core_holders)
