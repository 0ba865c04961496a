"""The ledger: for every request and token, the stages that add up to what the user waited, and what is left over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Bools, Columns, Floats, Ints, changes, folded, places, runs
from gapmeter.analysis.ledger.classes import CLASSES
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.critical_path import with_holes
from gapmeter.analysis.ledger.decoding import decoded, stretches_of
from gapmeter.analysis.ledger.index import Events, Index
from gapmeter.analysis.ledger.interference import Interference, fit_interference
from gapmeter.analysis.ledger.intervals import Causes, ClientStamps, build
from gapmeter.analysis.ledger.portions import (
    AT_ONCE,
    MOST_SHOWN,
    KnownShares,
    Portion,
    answered,
    arrived,
    blocks,
    chosen,
    drawn_of,
    first_tokens,
    gaps_between,
    last_tokens,
    tokens_together,
)
from gapmeter.analysis.ledger.shares import Sharer, Shares
from gapmeter.analysis.ledger.support import support_of
from gapmeter.analysis.ledger.trace import MISSING, Trace, as_key, from_key
from gapmeter.analysis.requests.metrics import handed_ns
from gapmeter.analysis.results.run import REFUSED, Supported
from gapmeter.analysis.stages import OF_THE_CLIENT, STAGE_NAMES, STAGES, UNEXPLAINED, column
from gapmeter.records import Span
from gapmeter.records.process import give_back_memory

CLOCK_ERROR_NS = 1_000  # one host, one clock: stamps of different processes agree to well below a microsecond

_MOST_STRETCHES = 4_000_000  # in the table of timelines
_FEWEST_SENT = 20  # of fewer, all may have waited for the server
_BEYOND_LOOPBACK_NS = 1_000_000
_KINDS = ("measured", "transit", UNEXPLAINED)
_FEW = 100  # requests that tell how many stretches a request has

_API_STAGES = frozenset(
    {"network_in", "accept_wait", "ingress", "template", "tokenize", "detokenize", "egress", "network_out"}
)
# A stage that could not be stamped lies inside another's stamps: that one's time is then ambiguous and joins the rest.
_SPOILS: dict[str, tuple[str, ...]] = {
    "template": ("ingress", "ingress_part", "ingress_inline"),
    "tokenize": ("ingress", "ingress_part", "ingress_inline"),
    "detokenize": ("egress", "egress_turn"),
    **dict.fromkeys(("prefill", "decode", "input_prep", "sampling"), ("worker", "executor", "executor_call", "loop")),
}


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledgers of a run.

    ``rows``: two rows a successful request (event ``first_token`` and ``last_token``); ``gaps``: one row a gap between
    two chunks with tokens (``request_id``, ``k`` from 1, ``tokens``, ``gap_ns``, ``first_step``, ``last_step``). Both
    have a ``<stage>_ns`` column a stage (NaN = unmeasured), ``unexplained_ns``, ``transit_ns``, ``strict_ns`` (their
    sum), ``unstamped_ns`` (what lay in a stamped call that no stamp within it tells), ``total_ns`` and
    ``hidden_host_ns``. ``refused`` says why no row may be shown, if so. ``core_holders``: who had the core while
    something of the measured requests waited for it, in ns over all of them, to the last token.
    ``gaps_of``: of how many requests, drawn at random, ``gaps`` are, where not of all.
    """

    rows: pd.DataFrame
    gaps: pd.DataFrame
    refused: tuple[str, ...]
    unmeasured: tuple[str, ...]
    clipped: dict[str, int]
    interference: Interference | None
    core_holders: Mapping[Culprit, int]
    gaps_of: int | None = None
    support: tuple[Supported, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerInputs:
    """What the ledgers of a run are made from.

    ``requests`` is the client's table (see gapmeter.analysis.tables); ``trace`` None when no server process recorded.
    ``excess``: what others' prompts took of decode, by the requests' own steps. ``measured``: which requests are.
    """

    requests: pd.DataFrame
    trace: Trace | None
    index: Index | None
    client: ClientStamps
    unmeasured: frozenset[str]
    interference: Interference | None
    excess: _OwnSteps | None
    sharer: Sharer
    measured: Bools

    @classmethod
    def of(
        cls, requests: pd.DataFrame, trace: Trace | None, *, attached: bool = False, looked_ns: Ints | None = None
    ) -> LedgerInputs:
        """``attached``: a proxy or a network may lie before the server; one that was launched is on loopback.

        ``looked_ns``: until when the load tester had read whatever was there, before each first token came.
        """
        unmeasured = _unmeasured(trace)
        fit = None if trace is None or "decode" in unmeasured else fit_interference(trace)  # it is a part of that
        unmeasured |= {"interference"} if fit is None else set()
        index = Index(trace, len(requests)) if trace is not None else None
        excess = _excess(index, fit) if index is not None and fit is not None else None
        measured = requests["measured"].to_numpy(np.bool_)
        client = _client(requests, looked_ns, index)
        if attached and index is not None:
            client = replace(client, network_ns=_network_ns(index, client))
        sharer, trace = Sharer(trace), trace and trace.without_tokens()  # the index has them in its own way
        return cls(requests, trace, index, client, unmeasured, fit, excess, sharer, measured)

    @property
    def spoilt(self) -> frozenset[str]:
        """Classes whose time an unmeasured stage spoils."""
        return frozenset(name for stage in self.unmeasured for name in _SPOILS.get(stage, ()))

    @property
    def dropped(self) -> frozenset[str]:
        """Classes that may own no time: these, and those of unmeasured stages."""
        return self.spoilt | {c.name for c in CLASSES if c.stage in self.unmeasured}

    def causes(self, events: Events) -> Causes:
        """What led to events."""
        return build(self.index, self.client, events, self.dropped)


def make_ledger(inputs: LedgerInputs) -> Ledger:
    """Ledgers of all requests that succeeded."""
    requests, trace = inputs.requests, inputs.trace
    good = np.flatnonzero(answered(requests))
    to_first, to_last = (tokens(requests, good, inputs.index) for tokens in (first_tokens, last_tokens))
    first = _tables(inputs, [Portion(to_first)], len(good))
    known = _shares_of_decoding(inputs, to_last)
    last = _tables(inputs, [Portion(to_last, known=known)], len(good))
    give_back_memory()
    some = drawn_of(requests, good)
    between = gaps_between(requests, good, some, inputs.index)
    gaps = _tables(inputs, between, int(arrived(requests, good[some]).sum())).columns
    ids = requests["request_id"].to_numpy()[good]
    whose = pd.Categorical.from_codes(gaps.pop("request_id"), pd.Index(ids))
    named = {"request_id": whose} | {name: gaps.pop(name) for name in ("k", "tokens", "end_ns")}
    rows = [
        pd.DataFrame({"request_id": ids, "event": event} | each.columns)
        for each, event in ((first, "first_token"), (last, "last_token"))
    ]
    support = support_of(trace) if trace is not None else ()
    refused, clipped = _checks(trace, (first, last), support)
    core_holders = Counter(last.core_holders) + Counter(known.shares.core_holders if known else {})
    return Ledger(
        rows=pd.concat(rows, ignore_index=True),
        gaps=pd.DataFrame(named | {"gap_ns": gaps["total_ns"]} | gaps, copy=False),
        refused=refused,
        unmeasured=tuple(s.name for s in STAGES if s.name in inputs.unmeasured),
        clipped=clipped,
        interference=inputs.interference,
        gaps_of=len(some) if len(some) < len(good) else None,
        core_holders=dict(core_holders.most_common()),
        support=support,
    )


def shown_timelines(inputs: LedgerInputs) -> pd.DataFrame:
    """``timelines`` of as many requests as ``chosen`` has, or of fewer where each went through very many stretches."""
    some = chosen(inputs.requests, _FEW)
    few = timelines(inputs, some)
    most = max(_FEW * _MOST_STRETCHES // max(len(few), 1), 1)
    shown = chosen(inputs.requests, min(most, MOST_SHOWN))
    return few if (shown == some).all() else timelines(inputs, shown)


def timelines(inputs: LedgerInputs, shown: Bools) -> pd.DataFrame:
    """The ledgers to the last token of some requests, as stretches of time: who owned which nanoseconds.

    ``shown``: bool, a row of ``requests`` each; those without an answer are passed over. Columns ``request_id``,
    ``stage``, ``kind`` (measured, transit, unexplained), ``start_ns``, ``end_ns``, in order, without overlap or hole
    from due to the last token. Summed by stage they are the ledger's row, but for ``interference``: how much of a
    decode step it took is estimated, not when, so it is in ``decode`` here.
    """
    requests = inputs.requests
    rows = np.flatnonzero(shown & answered(requests))
    events = last_tokens(requests, rows, inputs.index)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        between = blocks(inputs.index, (events.start, events.end), request=events.request)
        parts = pool.map(partial(_stretches, inputs, events), between)
        request, stage, kind, start, end = map(np.concatenate, zip(*parts, strict=True))
    return pd.DataFrame(
        {
            "request_id": pd.Categorical.from_codes(request, pd.Index(requests["request_id"].to_numpy()[rows])),
            "stage": pd.Categorical.from_codes(stage, list(STAGE_NAMES)),
            "kind": pd.Categorical.from_codes(kind, _KINDS),
            "start_ns": start,
            "end_ns": end,
        }
    )


def _stretches(
    inputs: LedgerInputs, events: Events, between: tuple[int, int]
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]:
    """Of the events from one place to another: place, number of the stage, of the kind, start and end, of each."""
    low, high = between
    block = events.rows(low, high)
    causes = inputs.causes(block)
    owned = inputs.sharer.cut(causes.intervals, causes.processes)
    owned = with_holes(owned, block.start, block.end)
    named = owned.cls >= 0
    stage = np.where(named, owned.cls // 2, len(STAGE_NAMES) - 1).astype(np.int8)
    kind = np.where(named, owned.cls % 2, len(_KINDS) - 1).astype(np.int8)
    # Waits for a core behind one and behind another are one stretch.
    first, last = runs(changes(owned.event, stage, kind))
    whose = (low + owned.event[first]).astype(np.int32)
    return whose, stage[first], kind[first], owned.start[first], owned.end[last]


def _client(requests: pd.DataFrame, looked_ns: Ints | None, index: Index | None) -> ClientStamps:
    due = "attempt_due_ns" if "attempt_due_ns" in requests else "due_ns"
    names = (due, "connect_start_ns", "connect_end_ns", "write_ns", "due_ns")
    at = {name: requests[name].to_numpy(np.int64, na_value=MISSING) for name in names}
    return ClientStamps(
        due=at[due], connect_start=at["connect_start_ns"], connect_end=at["connect_end_ns"], write=at["write_ns"],
        sent=handed_ns(requests), first_due=at["due_ns"], looked=looked_ns,
        together=tokens_together(requests, index) if index is not None else None,
    )  # fmt: skip


def _network_ns(index: Index, client: ClientStamps) -> int:
    """The least that any request took until the server saw it; 0 where it is loopback, or few may all have waited."""
    seen = index.of_request(Span.INGRESS)["start"][: len(client.sent)]  # behind these are further choices
    took = (seen - client.sent)[(seen != MISSING) & (client.sent != MISSING)]
    least = int(took.min()) if len(took) >= _FEWEST_SENT else 0
    return least if least >= _BEYOND_LOOPBACK_NS else 0


def _unmeasured(trace: Trace | None) -> frozenset[str]:
    """Stages that nobody could stamp in this run."""
    engine = frozenset(s.name for s in STAGES) - OF_THE_CLIENT - _API_STAGES
    if trace is None:
        return engine | _API_STAGES
    missing = trace.unmeasured
    if not trace.has_api:
        missing |= _API_STAGES | {"handoff", "output"}
    if not trace.has_engine:
        missing |= engine - {"core_wait", "lock_wait"}
    known = trace.cores.known_from
    missing |= {"switches": set[str](), "sums": {"lock_wait"}, "spans": {"core_wait", "lock_wait"}}[known]
    if trace.on_device and not (trace.spans_of(Span.FORWARD)["n"] == 1).any():  # it did not tell its own times
        missing |= {"launch_gap"}
    return missing


def _shares_of_decoding(inputs: LedgerInputs, events: Events) -> KnownShares | None:
    """What the engine's steps own of those that they only decode."""
    index = inputs.index
    if index is None or not index.has_engine:
        return None
    found = stretches_of(index, inputs.client, events, inputs.dropped)
    shares = decoded(index, inputs.sharer, found, inputs.measured[events.request], inputs.dropped)
    return KnownShares(found.since, found.until, shares)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of some events: their ledgers; causal pairs of stamps out of order, by how many ns; who had the core."""

    columns: dict[str, AnyArray]
    negative: dict[str, Ints]
    core_holders: Mapping[Culprit, int]


def _tables(inputs: LedgerInputs, portions: Iterable[Portion], most: int) -> _Tables:
    """Of events, up to ``most``, that come some at a time."""
    columns, negative, core_holders = Columns(most), dict[str, list[Ints]](), Counter[Culprit]()
    for made in _in_turn(inputs, (block for portion in portions for block in portion.blocks(inputs.index))):
        columns.add(made.columns)
        for name, gap in made.negative.items():
            negative.setdefault(name, []).append(gap)
        core_holders.update(made.core_holders)
    gaps = {name: np.concatenate(parts) for name, parts in negative.items()}
    return _Tables(columns.whole(), gaps, core_holders)


def _in_turn(inputs: LedgerInputs, blocks: Iterable[Portion]) -> Iterator[_Tables]:
    """Their tables, in order, with the next ones under way: NumPy mostly leaves Python's lock to others."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = deque[Future[_Tables]]()
        for block in blocks:
            under_way.append(pool.submit(_table, inputs, block))
            if len(under_way) > AT_ONCE:
                yield under_way.popleft().result()
        yield from (each.result() for each in under_way)


def _shares(inputs: LedgerInputs, portion: Portion) -> tuple[Causes, Shares]:
    """What led to events, and whose their time is: to what is known, and from there."""

    def of(events: Events) -> tuple[Causes, Shares]:
        causes = inputs.causes(events)
        return causes, inputs.sharer.shares(causes.intervals, causes.processes, inputs.measured[events.request])

    known = portion.known
    if known is None:
        return of(portion.events)
    head, before = of(replace(portion.events, end=known.since))
    causes, after = of(replace(portion.events, start=known.until))
    return replace(causes, first_seq=head.first_seq), before + known.shares + after


def _table(inputs: LedgerInputs, block: Portion) -> _Tables:
    unmeasured, spoilt, events = inputs.unmeasured, inputs.spoilt, block.events
    causes, shares = _shares(inputs, block)
    total = events.end - events.start
    by_stage = shares.by_stage
    stages = {stage.name: by_stage[:, at].astype(np.float64) for at, stage in enumerate(STAGES)}
    if inputs.excess is not None:
        stages["interference"] = np.minimum(inputs.excess.sums(causes), stages["decode"])
        stages["decode"] = stages["decode"] - stages["interference"]
    for name in unmeasured | {cls.stage for cls in CLASSES if cls.name in spoilt and cls.stage != "scheduling"}:
        stages[name] = np.full(len(events), np.nan)
    explained = by_stage.sum(axis=1)
    unexplained = total - explained if explained.any() else total
    strict = unexplained + shares.transit if shares.transit.any() else unexplained
    table = dict(block.names)
    table |= {column(name): values for name, values in stages.items()}
    table |= {
        "unexplained_ns": unexplained,
        "transit_ns": shares.transit,
        "strict_ns": strict,
        "unstamped_ns": shares.unstamped,
        "total_ns": total,
        "hidden_host_ns": shares.hidden,
        "joined": causes.joined,
        "first_step": causes.first_seq,
        "last_step": causes.last_seq,
    }
    below = {name: gap[gap < 0] for name, gap in causes.gaps.items()}
    return _Tables({name: folded(values) for name, values in table.items()}, below, shares.core_holders)


@dataclass(frozen=True, slots=True)
class _OwnSteps:
    """What a request's own steps add up to, ns: ``total`` until before each step, by ``key`` of both."""

    key: Ints
    total: Ints

    def sums(self, causes: Causes) -> Floats:
        """Over the steps behind each event."""
        low, high, request = causes.first_seq, causes.last_seq, causes.request
        begin = np.searchsorted(self.key, as_key(request, np.maximum(low, 0)), side="left")
        end = np.searchsorted(self.key, as_key(request, high), side="right")
        return np.where(high >= low, self.total[np.maximum(end, begin)] - self.total[begin], 0).astype(np.float64)


def _excess(index: Index, fit: Interference) -> _OwnSteps:
    """What others' prompts took of the steps that decode a request, at most what these computed."""
    ns = np.minimum(fit.excess_ns, index.steps.computed_ns(fit.seqs))
    at = places(fit.seqs, from_key(index.entry_key)[1])
    own = np.flatnonzero(~index.entry_prompt & (at != MISSING))
    total = np.concatenate([[0], np.cumsum(ns[at[own]])])
    return _OwnSteps(index.entry_key[own], total)


def _checks(
    trace: Trace | None, tables: tuple[_Tables, _Tables], support: Sequence[Supported]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Why the tables must be refused, and how many stamps were out of order by less than the clocks' error."""
    if trace is None:
        return (), {}
    if unsupported := [f"{one.feature} ({one.detail}): {one.text}" for one in support if one.level == REFUSED]:
        return tuple(unsupported), {}
    refused = list(trace.problems)
    joined = tables[1].columns["joined"]
    if strangers := int(np.count_nonzero(~joined)):
        refused.append(f"{strangers} of {len(joined)} successful requests were not found in every process")
    clipped: dict[str, int] = {}
    for table in tables:
        for name, gap in table.negative.items():
            if table is not tables[0] and np.array_equal(gap, tables[0].negative.get(name, ())):
                continue  # the same stamps, on the way in
            wrong = int(np.count_nonzero(gap < -CLOCK_ERROR_NS))
            if wrong:
                refused.append(f"{name}: {wrong} negative intervals, the worst {gap.min() / 1e6:.3f} ms")
            if small := len(gap) - wrong:
                clipped[name] = clipped.get(name, 0) + small
    return tuple(dict.fromkeys(refused)), clipped
