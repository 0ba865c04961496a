"""TTFT, ITL, TPOT, E2E and goodput from the client's table, by the definitions that every figure here uses.

TTFT = first token - due; E2E = last token - due; TPOT = (last - first) / (output tokens - 1), one a request, without
tokens of reasoning that were never sent; ITL = every gap between two token arrivals, pooled over requests. An answer
whose tokens all arrived at once has neither of the two. The same from *sent* (``origin="sent"``) is what clients that
forget their own lateness report. A chunk of k tokens ends one gap, with k recorded.

Failed requests count as answers that never came: infinite TTFT, E2E and TPOT, and one infinite gap for every token
that was asked for and did not arrive. Figures over successes alone stand beside, never instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Bools, Floats, Ints, changes, runs
from gapmeter.analysis.results.requests import ENDED_BY_US
from gapmeter.analysis.stats.hdr import at_rank
from gapmeter.analysis.stats.series import Series, time_blocks
from gapmeter.records.histograms import nearest_rank
from gapmeter.records.request import Flag
from gapmeter.scenarios.slo import BETWEEN_TOKENS, LATENCIES, Slo

_LONGEST_IS_P99 = 50  # gaps, at most
_BLOCK = 1_000  # requests


@dataclass(frozen=True, slots=True)
class Gaps:
    """Every gap between two arrivals of tokens: shape (n,) each, in the order of arrival.

    ``row`` is the request's row in the table that was given.
    """

    row: Ints
    at_ns: Ints
    gap_ns: Floats


def measured_requests(requests: pd.DataFrame) -> pd.DataFrame:
    """The issued requests after the warm-up, in the order they were due."""
    return requests[requests["measured"].to_numpy(bool) & issued(requests)].sort_values(
        "due_ns", kind="stable", ignore_index=True
    )


def final(requests: pd.DataFrame) -> pd.DataFrame:
    """The last attempt of every request: a row a request."""
    return requests[~requests["superseded"].to_numpy(bool)]


def issued(requests: pd.DataFrame) -> Bools:
    """Which were asked at all: not when an earlier turn of the conversation failed."""
    return np.asarray(requests["outcome"] != "abandoned", dtype=bool)


def succeeded(requests: pd.DataFrame) -> Bools:
    return np.asarray(requests["outcome"] == "ok", dtype=bool)


def ended_by_us(requests: pd.DataFrame) -> Bools:
    """Which no server ended: they were in flight when the run was stopped, or when their recorder died."""
    return np.asarray(requests["outcome"].isin(ENDED_BY_US), dtype=bool)


def failures_of(requests: pd.DataFrame) -> Bools:
    """Which the server failed: neither answered, nor ended by us."""
    return ~(succeeded(requests) | ended_by_us(requests))


def outcomes_of(requests: pd.DataFrame) -> dict[str, int]:
    """How many had each outcome, the most frequent first."""
    return {str(name): int(count) for name, count in requests["outcome"].value_counts().items()}


def resent_once(requests: pd.DataFrame) -> Bools:
    """Which were sent a second time, since the server closed the connection: an idle one, or what it had read."""
    return stamps_ns(requests, "attempt") > 0


def percentile_of(values: Floats, percentile: float) -> float | None:
    """A plain percentile that describes this run's own instrument, not a population: no interval, any sample size."""
    return percentiles_of(values, percentile)[0]


def percentiles_of(values: Floats, *percentiles: float) -> list[float | None]:
    """Several of the same values."""
    ordered = np.sort(values[~np.isnan(values)])
    return [at_rank(ordered, percentile) if len(ordered) else None for percentile in percentiles]


def elapsed_ns(requests: pd.DataFrame, start: str, end: str) -> Floats:
    """``end`` - ``start`` for each request, NaN where either was not stamped (missing or negative)."""
    first, last = stamps_ns(requests, start), stamps_ns(requests, end)
    known = (first >= 0) & (last >= 0)
    return np.where(known, (last - first).astype(np.float64), np.nan)


def request_values_ns(requests: pd.DataFrame, metric: str, origin: str = "due") -> Floats:
    """TTFT, TPOT or E2E of every request, NaN where it has none. Raises ValueError for any other metric."""
    if metric == "ttft":
        return elapsed_ns(requests, f"{origin}_ns", "first_token_ns")
    if metric == "e2e":
        return elapsed_ns(requests, f"{origin}_ns", "last_token_ns")
    if metric != "tpot":
        raise ValueError(f"{metric!r} is not one figure a request; known are ttft, tpot and e2e")
    tokens = sent_tokens(requests)
    span = elapsed_ns(requests, "first_token_ns", "last_token_ns")
    return np.where((tokens >= 2) & (span > 0), span / np.maximum(tokens - 1, 1), np.nan)


def sent_tokens(requests: pd.DataFrame) -> Floats:
    """Output tokens that a stream can have brought, NaN where they are not known: without hidden reasoning."""
    return numbers_of(requests, "output_tokens") - np.nan_to_num(numbers_of(requests, "hidden_tokens"))


def generator_lag_ns(requests: pd.DataFrame) -> Floats:
    """How late each attempt was handed to the socket, a new connection's time left out.

    A prompt that the socket takes in pieces waits for the network, or for a server that does not read.
    """
    connecting = elapsed_ns(requests, "connect_start_ns", "connect_end_ns")
    waited = stamps_ns(requests, "sent_ns") - handed_ns(requests)
    return elapsed_ns(requests, "attempt_due_ns", "sent_ns") - np.nan_to_num(connecting) - waited


def handed_ns(requests: pd.DataFrame) -> Ints:
    """When the load tester had done its part of sending each attempt; negative where it was not sent."""
    sent = stamps_ns(requests, "sent_ns")
    if "flags" not in requests:
        return sent
    in_pieces = (requests["flags"].to_numpy(np.int64) & Flag.WAITED) != 0
    return np.where(in_pieces, stamps_ns(requests, "write_ns"), sent)


def receive_waits_ns(requests: pd.DataFrame) -> tuple[Floats, int]:
    """How long each piece of an answer that the kernel stamped waited to be read, and the number of all pieces.

    Pieces of answers without any such stamp are counted by their chunks with tokens.
    """
    waits, counts = flattened(requests, "receive_wait_ns")
    _, chunks = flattened(requests, "chunk_tokens", counts == 0)
    return waits[waits > 0].astype(np.float64), int(counts.sum() + chunks.sum())


def last_waits_ns(requests: pd.DataFrame) -> Ints:
    """How long the end of each answer waited to be read; 0 where the kernel did not stamp it."""
    waits, counts = flattened(requests, "receive_wait_ns")
    return np.where(counts > 0, np.append(waits, 0)[np.cumsum(counts) - 1], 0)


def arrivals_of(requests: pd.DataFrame, rows: Bools) -> tuple[Ints, Ints, Ints]:
    """When tokens came, of the requests that ``rows`` marks: the row, the moment, ns, and how many came then.

    In the order of rows, and of time in each.
    """
    at_ns, counts = flattened(requests, "token_ns", rows)
    return _together(np.repeat(np.flatnonzero(rows).astype(np.int32), counts), at_ns)


def in_blocks(requests: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """A thousand requests after the other, at least none: what all their tokens at once take, a large run has not."""
    for low in range(0, max(len(requests), 1), _BLOCK):
        yield requests.iloc[low : low + _BLOCK]


def reads_of(requests: pd.DataFrame) -> tuple[Ints, Ints, Ints]:
    """As ``arrivals_of``, of all rows, how many chunks with tokens came."""
    (at_ns, _), (tokens, counts) = flattened(requests, "token_ns"), flattened(requests, "chunk_tokens")
    return _together(np.repeat(np.arange(len(counts), dtype=np.int32), counts), at_ns[np.cumsum(tokens) - tokens])


def _together(whose: Ints, at_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Stamps of each row, those that are the same as one: the row, the stamp, and how many were the same."""
    if not len(whose):
        return whose, at_ns, whose
    another = whose[1:] != whose[:-1]
    if ((at_ns[1:] < at_ns[:-1]) & ~another).any():
        at_ns = at_ns[np.lexsort((at_ns, whose))]
    another |= at_ns[1:] != at_ns[:-1]
    if another.all():
        return whose, at_ns, np.broadcast_to(np.int64(1), len(whose))
    first = np.concatenate([[0], np.flatnonzero(another) + 1, [len(whose)]])
    return whose[first[:-1]], at_ns[first[:-1]], first[1:] - first[:-1]


def flattened(requests: pd.DataFrame, name: str, rows: Bools | slice = slice(None)) -> tuple[Ints, Ints]:
    """The arrays of a column as one, and the length of each; a missing one is empty."""
    none = np.empty(0, np.int64)
    column = requests[name].to_numpy(object)[rows] if name in requests else [None] * len(requests[rows])
    cells = [
        cell if isinstance(cell, np.ndarray) else np.asarray(cell) if isinstance(cell, list) else none
        for cell in column
    ]
    together = np.concatenate([none, *cells], dtype=np.int64, casting="unsafe")
    return together, np.fromiter(map(len, cells), np.int64, len(cells))


def metric_series(requests: pd.DataFrame, metric: str, origin: str = "due", *, failures: bool = False) -> Series:
    """A metric over the requests that succeeded; with ``failures``, those that the server failed count as infinite.

    ``requests`` as from ``measured_requests``.
    """
    if failures and (ours := ended_by_us(requests)).any():
        requests = requests[~ours]
    good = succeeded(requests)
    if metric == "itl":
        return Series(*pooled_gaps(requests, good, failures=failures))
    values = request_values_ns(requests, metric, origin)
    if not failures:
        return Series(values[good & ~np.isnan(values)])
    values = with_failed(requests, metric, values, good)
    return Series(values[~np.isnan(values)])


def with_failed(requests: pd.DataFrame, metric: str, values: Floats, good: Bools) -> Floats:
    """``values`` with infinity for those that failed, and NaN for TPOT where a single token was asked for."""
    values = np.where(good, values, np.inf)
    if metric == "tpot":
        values[~good & (numbers_of(requests, "output_tokens_asked") == 1)] = np.nan
    return values


class MetricSeries:
    """Every series of ``metric_series`` over some requests, each made once."""

    def __init__(self, requests: pd.DataFrame) -> None:
        self._made = functools.cache(functools.partial(metric_series, requests))
        self._failed = bool(failures_of(requests).any())

    def prepare(self) -> None:
        """Make what takes long: what every metric's values are worth."""
        for metric in LATENCIES:
            _ = self(metric).worth

    def __call__(self, metric: str, origin: str = "due", *, failures: bool = False) -> Series:
        origin = "due" if metric in BETWEEN_TOKENS else origin
        return self._made(metric, origin, failures=failures and self._failed)


def limits_of(slos: Sequence[Slo]) -> dict[str, float]:
    """The limit that goodput takes for each metric: the tightest at the highest percentile that an SLO names."""
    limits: dict[str, tuple[float, float]] = {}
    for slo in slos:
        if slo.metric in LATENCIES and slo.limit_ns is not None and slo.percentile is not None:
            entry = (float(slo.percentile), float(slo.limit_ns))
            limits[slo.metric] = max(limits.get(slo.metric, entry), entry, key=lambda e: (e[0], -e[1]))
    return {metric: limit for metric, (_, limit) in limits.items()}


def good_requests(requests: pd.DataFrame, limits_ns: Mapping[str, float]) -> Bools:
    """Which requests succeeded with their own TTFT, TPOT, E2E and own p99 of ITL within the limits given.

    A request with one token has no gap, so no gap of it is too long.
    """
    good = succeeded(requests)
    for metric, limit in limits_ns.items():
        own = itl_p99_ns(requests) if metric == "itl" else request_values_ns(requests, metric)
        good = good & (~(own > limit) if metric in BETWEEN_TOKENS else own <= limit)
    return good


def itl_p99_ns(requests: pd.DataFrame) -> Floats:
    """Each request's 99th percentile of its own gaps (its longest, up to 50 gaps); NaN without a gap."""
    if "itl_p99_ns" in requests:
        return numbers_of(requests, "itl_p99_ns")
    return np.concatenate([_own_p99_ns(block) for block in in_blocks(requests)])


def _own_p99_ns(requests: pd.DataFrame) -> Floats:
    whose, at_ns, _ = arrivals_of(requests, np.ones(len(requests), np.bool_))
    later = np.flatnonzero(~changes(whose))
    row, gap_ns = whose[later], at_ns[later] - at_ns[later - 1]
    first, last = runs(changes(row))
    counts = last - first + 1
    own = np.full(len(requests), np.nan)
    if len(row):
        own[row[first]] = np.maximum.reduceat(gap_ns, first)
    for count in np.unique(counts[counts > _LONGEST_IS_P99]).tolist():
        begin, rank = first[counts == count], nearest_rank(99, count) - 1
        own[row[begin]] = np.partition(gap_ns[begin[:, None] + np.arange(count)], rank, axis=1)[:, rank]
    return own


def window_s(requests: pd.DataFrame) -> float:
    """The seconds that the measured requests stand for: their span of due times, and one mean gap more."""
    if len(requests) < 2:
        return 0.0
    due = stamps_ns(requests, "due_ns")
    return float(due.max() - due.min()) / 1e9 * len(due) / (len(due) - 1)


def pooled_gaps(requests: pd.DataFrame, good: Bools, *, failures: bool) -> tuple[Floats, list[AnyArray]]:
    """All gaps, ns, in time order, and two numberings of them, by request and by moment.

    ``good``: who succeeded; with ``failures``, the gaps that others owe are there too, infinite.
    """
    gaps = gaps_of(requests, good, failures=failures)
    if not len(gaps.row):
        return np.zeros(0), []
    present = np.zeros(len(requests), np.int32)
    present[gaps.row] = 1
    return gaps.gap_ns, [(np.cumsum(present, dtype=np.int32) - 1)[gaps.row], time_blocks(gaps.at_ns, gaps.gap_ns)]


def gaps_of(requests: pd.DataFrame, good: Bools, *, failures: bool) -> Gaps:
    """The gaps of the requests that succeeded; with ``failures``, also those that others had or owe, infinite.

    Tokens that arrived together are one arrival. Of several runs one's come after the other's (``later_ns``).
    """
    whose, at_ns, _ = arrivals_of(requests, np.ones(len(requests), bool) if failures else good)
    at_ns = _later(requests, whose, at_ns)
    ends = np.flatnonzero(~changes(whose))
    ends = ends[np.argsort(at_ns[ends], kind="stable")]
    ended = at_ns[ends]
    gaps = Gaps(whose[ends], ended, (ended - at_ns[ends - 1]).astype(np.float64))
    if not failures or good.all():
        return gaps
    row, at_ns = _missing_gaps(requests, ~good)
    row, at_ns = np.concatenate([gaps.row, row]), np.concatenate([gaps.at_ns, at_ns])
    gap_ns = np.concatenate([gaps.gap_ns, np.full(len(row) - len(gaps.row), np.inf)])
    order = np.argsort(at_ns, kind="stable")
    return Gaps(row[order], at_ns[order], gap_ns[order])


def _missing_gaps(requests: pd.DataFrame, failed: Bools) -> tuple[Ints, Ints]:
    """Row and time of every gap that failed requests owe: tokens asked for, less those that came, or the first.

    At least one a request that did not ask for a single token.
    """
    rows, (_, came) = np.flatnonzero(failed), flattened(requests, "token_ns", failed)
    asked = np.nan_to_num(numbers_of(requests, "output_tokens_asked"))[rows]
    owed = np.maximum(asked - np.maximum(came, 1), asked != 1).astype(np.int64)
    ended = stamps_ns(requests, "end_ns")
    at_ns = np.where(ended >= 0, ended, stamps_ns(requests, "due_ns"))[rows]
    return np.repeat(rows, owed), np.repeat(_later(requests, rows, at_ns), owed)


def _later(requests: pd.DataFrame, row: Ints, at_ns: Ints) -> Ints:
    return at_ns + stamps_ns(requests, "later_ns")[row] if "later_ns" in requests else at_ns


def stamps_ns(requests: pd.DataFrame, name: str) -> Ints:
    """A column of nanoseconds as integers, -1 where nothing was stamped or the column is not there."""
    if name not in requests:
        return np.full(len(requests), -1, dtype=np.int64)
    column = requests[name]
    if column.dtype == object:
        column = pd.to_numeric(column)
    return np.asarray(column.astype("Int64").fillna(-1), dtype=np.int64)


def numbers_of(requests: pd.DataFrame, name: str) -> Floats:
    """A column of counts as floats, NaN where it is not known."""
    if name not in requests:
        return np.full(len(requests), np.nan)
    return np.asarray(pd.to_numeric(requests[name]).astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan))
