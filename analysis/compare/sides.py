"""The runs that are compared: each one's measured requests in the order they were due, as arrays, and its results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import (
    ended_by_us,
    gaps_of,
    measured_requests,
    request_values_ns,
    stamps_ns,
    succeeded,
    with_failed,
)
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.stages import STAGE_NAMES, column
from gapmeter.analysis.stats.series import Series, time_blocks
from gapmeter.analysis.tables import read_table, table_in
from gapmeter.scenarios.slo import LATENCIES

PER_REQUEST: tuple[str, ...] = ("ttft", "tpot", "e2e")
_UNREAD = frozenset({"chunk_tokens", "receive_wait_ns"})  # half of a table of requests
_UNKNOWN_NS = 3600e9  # that a failed request took, where nothing says how long it was given: an hour, beyond any limit


@dataclass(frozen=True, slots=True, eq=False)
class RunColumns:
    """A run's measured requests, index i of every column the same one; times in ns.

    ``planned``: shape (n, 5), what the plan says of each (index, turn, due after the run's t0, prompt and output tokens
    asked for); ``values[metric]``: shape (n,), infinite where a request failed, NaN where it has none (it had one
    token); ``given_ns``: how long a request that failed was given, which it took at least; ``gaps_ns`` and
    ``gap_owner`` (row of the request) in the order the gaps ended, at ``gap_at_ns``, infinite for those that a failed
    request owes; ``ledgers[event]``: shape (n, stages) by ``STAGE_NAMES``, NaN rows where there is no ledger, NaN
    columns where a stage is unmeasured. ``open_loop``: arrivals did not wait for answers. ``down``: the server failed
    from a moment on.
    """

    name: str
    open_loop: bool
    planned: Ints
    good: Bools
    given_ns: Floats
    values: Mapping[str, Floats]
    gaps_ns: Floats
    gap_at_ns: Ints
    gap_owner: Ints
    ledgers: Mapping[str, Floats]
    down: bool = False

    @property
    def count(self) -> int:
        return len(self.planned)

    def digest(self) -> bytes:
        """A digest of what was measured: it seeds this run's resampling, which so is the same on either side."""
        parts = (self.planned, self.values["e2e"], self.values["ttft"])
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).digest()

    def at_least_ns(self, metric: str) -> Floats:
        """A metric of every request, shape (n,): of one that failed, what it took at least."""
        values = self.values[metric]
        return np.where(np.isinf(values), self.given_ns, values)

    def gaps_at_least_ns(self) -> Floats:
        """The gaps: of those that a failed request owes, what it took at least."""
        return np.where(np.isinf(self.gaps_ns), self.given_ns[self.gap_owner], self.gaps_ns)

    def sums(self) -> tuple[Floats, Floats]:
        """What each request adds to every metric's sum, and to its number of values: shapes (n, metrics).

        What failed adds nothing: it waited longer than any success, so a mean of all is at least that of successes.
        """
        amounts, counts = np.zeros((2, self.count, len(LATENCIES)))
        for at, metric in enumerate(LATENCIES):
            values = self.gaps_ns if metric == "itl" else self.values[metric]
            owner = self.gap_owner if metric == "itl" else np.arange(self.count)
            there = np.isfinite(values)
            amounts[:, at] = np.bincount(owner[there], values[there], minlength=self.count)
            counts[:, at] = np.bincount(owner[there], minlength=self.count)
        return amounts, counts

    def series(self, metric: str) -> Series:
        """A metric's values and what they are worth; what failed is infinite."""
        if metric != "itl":
            values = self.values[metric]
            return Series(values[~np.isnan(values)])
        if not len(self.gaps_ns):
            return Series(np.zeros(0))
        owners = np.unique(self.gap_owner, return_inverse=True)[1].astype(np.int64)
        return Series(self.gaps_ns, [owners, time_blocks(self.gap_at_ns, self.gaps_ns)])

    def rows(self, keep: Ints) -> RunColumns:
        """The same run with only these requests, in this order."""
        place = np.full(self.count, -1, dtype=np.int64)
        place[keep] = np.arange(len(keep))
        owner = place[self.gap_owner]
        kept = owner >= 0
        return RunColumns(
            self.name, self.open_loop, self.planned[keep], self.good[keep], self.given_ns[keep],
            {metric: values[keep] for metric, values in self.values.items()},
            self.gaps_ns[kept], self.gap_at_ns[kept], owner[kept],
            {event: table[keep] for event, table in self.ledgers.items()}, self.down,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AnalysedRun:
    """A run with its manifest and its results."""

    run: RunColumns
    manifest: Manifest
    result: RunResult


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a comparison: runs of the same thing."""

    runs: tuple[AnalysedRun, ...]

    @property
    def first(self) -> AnalysedRun:
        return self.runs[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.run.name for each in self.runs)

    @property
    def requests(self) -> int:
        return sum(each.run.count for each in self.runs)

    @property
    def failed(self) -> int:
        return sum(int((~each.run.good).sum()) for each in self.runs)


def read_run(path: Path) -> AnalysedRun:
    """A run's folder that has been analysed.

    Raises FileNotFoundError when manifest, summary or tables are not there, NotReadable when they are not as this
    version writes them.
    """
    manifest, result = Manifest.read(path), RunResult.read(path)
    columns = pq.read_schema(path / "requests.parquet").names
    requests = read_table(path / "requests.parquet", columns=[name for name in columns if name not in _UNREAD])
    ledger = None if result.ledger.refused else table_in(path, "ledger")
    plan = manifest.plan
    own = path.resolve()
    name = f"{own.parent.name}/{own.name}" if own.parent.parent.name == "points" else own.name  # of a sweep's point
    run = run_of(requests, ledger, name, open_loop=plan.loop == "open", t0_ns=plan.t0_ns or 0)
    return AnalysedRun(replace(run, down=result.outage is not None), manifest, result)


def run_of(
    requests: pd.DataFrame, ledger: pd.DataFrame | None, name: str, *, open_loop: bool, t0_ns: int = 0
) -> RunColumns:
    """A run from its tables, as ``requests.parquet`` and ``ledger.parquet`` have them."""
    measured = measured_requests(requests)
    measured = measured[~ended_by_us(measured)].reset_index(drop=True)  # no server failed these
    good = succeeded(measured)
    gaps = gaps_of(measured, good, failures=True)
    names = ("index", "turn", "prompt_tokens_asked", "output_tokens_asked")
    index, turn, prompt, output = (stamps_ns(measured, name) for name in names)
    values = {
        metric: with_failed(measured, metric, request_values_ns(measured, metric), good) for metric in PER_REQUEST
    }
    given = stamps_ns(measured, "censored_ns").astype(np.float64)
    longest = max(values["e2e"][good], default=0.0)
    return RunColumns(
        name=name,
        open_loop=open_loop,
        planned=np.stack([index, turn, measured["due_ns"].to_numpy(np.int64) - t0_ns, prompt, output], axis=1),
        good=good,
        given_ns=np.maximum(np.where(given < 0, _UNKNOWN_NS, given), longest),
        values=values,
        gaps_ns=gaps.gap_ns,
        gap_at_ns=gaps.at_ns,
        gap_owner=gaps.row,
        ledgers={event: _ledger_of(ledger, measured, event) for event in fig.LEDGER_OF.values()},
    )


def _ledger_of(ledger: pd.DataFrame | None, measured: pd.DataFrame, event: str) -> Floats:
    """Shape (n, stages). What is unmeasured in every ledger stays NaN; in a few, its time is in their remainder."""
    out = np.full((len(measured), len(STAGE_NAMES)), np.nan)
    rows = fig.ledgers_of(ledger, measured, event)
    there = measured["request_id"].isin(rows["request_id"]).to_numpy(bool)
    for number, name in enumerate(STAGE_NAMES):
        if column(name) in rows:
            values = rows[column(name)].to_numpy(np.float64, na_value=np.nan)
            out[there, number] = values if np.isnan(values).all() else np.nan_to_num(values)
    return out
