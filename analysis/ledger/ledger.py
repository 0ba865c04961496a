"""The ledger: for every request and token, the stages that add up to what the user waited, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.ledger.classes import CLASS, CLASSES, FORWARD_CLASSES, HOST_CLASSES, THREADS, WOKEN
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.critical_path import Intervals, overlaps, pieces, sweep, with_holes
from gapmeter.analysis.ledger.interference import Interference, decode_excess, fit_interference
from gapmeter.analysis.ledger.intervals import Causes, Client, build
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.ledger.trace_index import MISSING, Events
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column

Ints = NDArray[np.int64]

CLOCK_ERROR_NS = 1_000  # one host, one clock: stamps of different processes agree to well below a microsecond

_CLIENT_STAGES = frozenset({"retry", "generator_lag", "connect"})
_API_STAGES = frozenset(
    {"network_in", "accept_wait", "ingress", "template", "tokenize", "detokenize", "egress", "network_out"}
)
# A stage that could not be stamped lies inside another's stamps: that one's time is then ambiguous and joins the rest.
_SPOILS: dict[str, tuple[str, ...]] = {
    "template": ("ingress",),
    "tokenize": ("ingress",),
    "detokenize": ("egress",),
    "prefill": ("worker", "executor", "loop"),
    "decode": ("worker", "executor", "loop"),
    "input_prep": ("worker", "executor", "loop"),
    "sampling": ("worker", "executor", "loop"),
}


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledgers of a run.

    ``rows``: two rows a successful request (event ``first_token`` and ``last_token``); ``gaps``: one row a gap between
    two chunks with tokens (``request_id``, ``k`` from 1, ``tokens``, ``gap_ns``, ``first_step``, ``last_step``). Both
    have a ``<stage>_ns`` column a stage (NaN = unmeasured), ``unexplained_ns``, ``transit_ns``, ``strict_ns`` (their
    sum), ``total_ns`` and ``hidden_host_ns``. ``refused`` says why no row may be shown, if so. ``held``: who had the
    core while something of these requests waited for it, in ns over all of them, to the last token.
    """

    rows: pd.DataFrame
    gaps: pd.DataFrame
    refused: tuple[str, ...]
    unmeasured: tuple[str, ...]
    clipped: dict[str, int]
    interference: Interference | None
    held: Mapping[Culprit, int]


def make_ledger(requests: pd.DataFrame, trace: Trace | None) -> Ledger:
    """Ledgers of all requests that succeeded.

    ``requests`` is the client's table (see gapmeter.analysis.tables); ``trace`` None when no server process recorded.
    """
    client = _client(requests)
    due = client.due if client.first_due is None else client.first_due
    good = np.flatnonzero((requests["outcome"] == "ok").to_numpy() & requests["first_token_ns"].notna().to_numpy())
    unmeasured = _unmeasured(trace)
    fit = fit_interference(trace) if trace is not None and trace.has_engine else None
    if fit is None:
        unmeasured |= {"interference"}
    ends = _token_ends(requests, good)
    first = _events(good, due, requests, "first_token_ns", np.ones(len(good), np.int64))
    last = _events(good, due, requests, "last_token_ns", _tokens(requests, good))
    gap_events, gap_index = _gap_events(requests, good, ends)
    tables, causes = [], []
    for events in (first, last, gap_events):
        table, cause = _table(trace, client, events, unmeasured, fit)
        tables.append(table)
        causes.append(cause)
    names = requests["request_id"].to_numpy()
    for table, event in ((tables[0], "first_token"), (tables[1], "last_token")):
        table.insert(0, "request_id", names[good])
        table.insert(1, "event", event)
    gaps = pd.concat([gap_index, tables[2]], axis=1)
    refused, clipped = _checks(trace, causes[:2])
    return Ledger(
        rows=pd.concat(tables[:2], ignore_index=True),
        gaps=gaps,
        refused=refused,
        unmeasured=tuple(s.name for s in STAGES if s.name in unmeasured),
        clipped=clipped,
        interference=fit,
        held=_held(trace, causes[1].intervals, len(last)),
    )


def _held(trace: Trace | None, intervals: Intervals, events: int) -> dict[Culprit, int]:
    """By culprit, the most time first: what the events waited for a core that it had."""
    if trace is None or trace.cores is None:
        return {}
    owned = pieces(intervals, events, len(CLASSES))
    total = np.zeros(len(trace.cores.culprits))
    for name, thread in (THREADS | WOKEN).items():
        mine, waits = owned.cls == CLASS[f"{name}_core"], trace.cores.waits[thread]
        _, at, low, high = overlaps(owned.start[mine], owned.end[mine], waits.start, waits.end)
        total += np.bincount(waits.culprit[at], high - low, len(total))
    order = np.argsort(-total, kind="stable")
    return {trace.cores.culprits[one]: int(total[one]) for one in order if total[one] > 0}


def _client(requests: pd.DataFrame) -> Client:
    def stamps(name: str) -> Ints:
        return np.asarray(requests[name].fillna(MISSING), dtype=np.int64)

    return Client(
        due=stamps("attempt_due_ns" if "attempt_due_ns" in requests else "due_ns"),
        connect_start=stamps("connect_start_ns"),
        connect_end=stamps("connect_end_ns"),
        write=stamps("write_ns"),
        sent=stamps("sent_ns"),
        first_due=stamps("due_ns"),
    )


def _unmeasured(trace: Trace | None) -> set[str]:
    """Stages that nobody could stamp in this run."""
    engine = {s.name for s in STAGES} - _CLIENT_STAGES - _API_STAGES
    if trace is None:
        return engine | _API_STAGES
    missing = set(trace.unmeasured)
    if not trace.has_api:
        missing |= _API_STAGES | {"handoff", "output"}
    if not trace.has_engine:
        missing |= engine
    if not trace.counts_core_waits:
        missing |= {"core_wait"}
    return missing | {"launch_gap"}  # known only where kernels were sampled


def _events(good: Ints, due: Ints, requests: pd.DataFrame, end: str, n: Ints) -> Events:
    return Events(good, n, due[good], requests[end].to_numpy(dtype=np.float64, na_value=np.nan)[good].astype(np.int64))


def _tokens(requests: pd.DataFrame, rows: Ints) -> Ints:
    """Which token was each answer's last: by the server's count, or where it gave none, by the chunks that came."""
    told = requests["output_tokens"].iloc[rows].astype("Int64")
    came = [0 if stamps is None else len(stamps) for stamps in requests["token_ns"].iloc[rows]]
    return np.asarray(told.fillna(pd.Series(came, told.index, dtype="Int64")), dtype=np.int64)


def _token_ends(requests: pd.DataFrame, good: Ints) -> list[tuple[Ints, Ints]]:
    """Per request: when each chunk with tokens arrived, and the tokens received by then."""
    out = []
    for stamps in requests["token_ns"].to_numpy()[good]:
        arrivals = np.asarray(stamps if stamps is not None else [], dtype=np.int64)
        chunk_ends = np.flatnonzero(np.diff(arrivals, append=np.iinfo(np.int64).max))
        out.append((arrivals[chunk_ends], chunk_ends + 1))
    return out


def _gap_events(requests: pd.DataFrame, good: Ints, ends: list[tuple[Ints, Ints]]) -> tuple[Events, pd.DataFrame]:
    counts = np.array([max(len(stamps) - 1, 0) for stamps, _ in ends], dtype=np.int64)

    def flat(pick: slice, which: int) -> Ints:
        parts = [pair[which][pick] for pair in ends if len(pair[0]) > 1]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    rows = np.repeat(good, counts)
    events = Events(rows, flat(slice(1, None), 1), flat(slice(None, -1), 0), flat(slice(1, None), 0))
    index = pd.DataFrame(
        {
            "request_id": requests["request_id"].to_numpy()[rows],
            "k": np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + 1,
            "tokens": events.n - flat(slice(None, -1), 1),
            "end_ns": events.end,
            "gap_ns": events.end - events.start,
        }
    )
    return events, index


def _table(
    trace: Trace | None, client: Client, events: Events, unmeasured: set[str], fit: Interference | None
) -> tuple[pd.DataFrame, Causes]:
    spoilt, dropped = _dropped(unmeasured)
    causes = build(trace, client, events, dropped)
    owned, hidden = sweep(causes.intervals, len(events), len(CLASSES), over=FORWARD_CLASSES, under=HOST_CLASSES)
    total = events.end - events.start
    stages = {stage.name: np.zeros(len(events), dtype=np.float64) for stage in STAGES}
    for number, cls in enumerate(CLASSES):
        stages[cls.stage] += owned[:, number]
    if fit is not None and trace is not None:
        excess = decode_excess(trace, fit, events.request, causes.first_seq, causes.last_seq)
        excess = np.minimum(excess, stages["decode"])
        stages["interference"] = excess
        stages["decode"] = stages["decode"] - excess
    gone = unmeasured | {cls.stage for cls in CLASSES if cls.name in spoilt and cls.stage != "scheduling"}
    for name in gone:
        stages[name] = np.full(len(events), np.nan)
    transit = owned[:, [c.transit for c in CLASSES]].sum(axis=1)
    unexplained = total - owned.sum(axis=1)
    table = pd.DataFrame({column(name): values for name, values in stages.items()})
    table["unexplained_ns"] = unexplained
    table["transit_ns"] = transit
    table["strict_ns"] = unexplained + transit
    table["total_ns"] = total
    table["hidden_host_ns"] = hidden
    table["joined"] = causes.joined
    table["first_step"] = causes.first_seq
    table["last_step"] = causes.last_seq
    return table, causes


def _dropped(unmeasured: set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Classes that an unmeasured stage spoils, and all that may own no time."""
    spoilt = frozenset(name for stage in unmeasured for name in _SPOILS.get(stage, ()))
    return spoilt, spoilt | {c.name for c in CLASSES if c.stage in unmeasured}


def timelines(requests: pd.DataFrame, trace: Trace | None, chosen: NDArray[np.bool_]) -> pd.DataFrame:
    """The ledgers to the last token of some requests, as stretches of time: who owned which nanoseconds.

    ``chosen``: bool, a row of ``requests`` each; those without an answer are passed over. Columns ``request_id``,
    ``stage``, ``kind`` (measured, transit, unexplained), ``start_ns``, ``end_ns``, in order, without overlap or hole
    from due to the last token. Summed by stage they are the ledger's row, but for ``interference``: how much of a
    decode step it took is estimated, not when, so it is in ``decode`` here.
    """
    due = requests["due_ns"].to_numpy(np.int64)
    answered = (requests["outcome"] == "ok").to_numpy() & requests["first_token_ns"].notna().to_numpy()
    rows = np.flatnonzero(chosen & answered)
    events = _events(rows, due, requests, "last_token_ns", _tokens(requests, rows))
    causes = build(trace, _client(requests), events, _dropped(_unmeasured(trace))[1])
    owned = with_holes(pieces(causes.intervals, len(events), len(CLASSES)), events.start, events.end)
    stages = np.array([*(c.stage for c in CLASSES), UNEXPLAINED])
    kinds = np.array([*("transit" if c.transit else "measured" for c in CLASSES), UNEXPLAINED])
    return pd.DataFrame(
        {
            "request_id": requests["request_id"].to_numpy()[rows][owned.event],
            "stage": stages[owned.cls],
            "kind": kinds[owned.cls],
            "start_ns": owned.start,
            "end_ns": owned.end,
        }
    )


def _checks(trace: Trace | None, causes: list[Causes]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Why the tables must be refused, and how many stamps were out of order by less than the clocks' error."""
    if trace is None:
        return (), {}
    refused = list(trace.problems)
    strangers = int(np.count_nonzero(~causes[1].joined))
    if strangers:
        refused.append(f"{strangers} of {len(causes[1].joined)} successful requests were not found in every process")
    clipped: dict[str, int] = {}
    for cause in causes:
        for name, gap in cause.gaps.items():
            wrong = int(np.count_nonzero(gap < -CLOCK_ERROR_NS))
            if wrong:
                refused.append(f"{name}: {wrong} negative intervals, the worst {gap.min() / 1e6:.3f} ms")
            if small := int(np.count_nonzero(gap < 0)) - wrong:
                clipped[name] = clipped.get(name, 0) + small
    return tuple(dict.fromkeys(refused)), clipped
