"""Known delays in real engines, and where the ledger finds them.

``delays/sitecustomize.py`` adds the delays and logs them; here they are planned and compared with the ledger. The
case changes from request to request, so that what disturbs the machine disturbs all cases, and the requests without
any delay between them, alike.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bench.engine import Engine, Setting, environment, running
from gapmeter.analysis.arrays import Bools, Ints
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.index import Events, Index
from gapmeter.analysis.ledger.intervals import ClientStamps, build
from gapmeter.analysis.ledger.ledger import LedgerInputs, make_ledger
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.shares import Sharer
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.results import Manifest
from gapmeter.analysis.stages import STAGES, UNEXPLAINED
from gapmeter.analysis.tables import read_requests
from gapmeter.machine.hardware import place
from gapmeter.machine.instrument import NotMeasured
from gapmeter.records import RunFolder

_PATCHES = Path(__file__).with_name("delays")
_WARM = 4
_NOW_BYTES = 16
_ADDED = np.dtype([("case", "<i8"), ("request", "<i8"), ("start", "<i8"), ("end", "<i8"), ("own", "<i8")])
_NAMES = (*(stage.name for stage in STAGES if stage.name != "launch_gap"), UNEXPLAINED)


@dataclass(frozen=True, slots=True)
class Case:
    """A delay at ``point`` (several: joined by +), busy or asleep: ``once`` a request (at the first call), or at each.

    It belongs to ``stages``, in the ledger to ``event``.
    """

    point: str
    how: str
    stages: tuple[str, ...]
    event: str
    once: bool
    delay_ns: int

    @property
    def name(self) -> str:
        return f"{self.point}, {self.how}"


@dataclass(frozen=True, slots=True)
class Found:
    """Where a case's delays went, as medians over the requests that it delayed (``requests`` is how many).

    ``owned``: the share of what was added on an event's way that the ledger gave to the case's stages; ``elsewhere``:
    to each other stage, ``unexplained`` among them. ``seen``: the ledger's figure for the case's stages over what was
    added; ``added_ns``: what was added. ``true``: the share of it in which the delayed thread slept on purpose or, by
    its own CPU clock, ran; in the rest it could have gone on and did not.
    """

    owned: float
    elsewhere: dict[str, float]
    seen: float
    requests: int
    added_ns: float
    true: float


@dataclass(frozen=True, slots=True)
class Delayed:
    """An engine with the patch in it, which adds nothing but while ``measure`` loads it."""

    engine: Engine
    folder: Path
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return self.engine.name

    def measure(self, schedule: Sequence[Case | None], users: int, output_tokens: int, think: str) -> Measured:
        """A closed loop with the delay of each request that ``schedule`` says."""
        inject = self.folder / "inject"
        numbers = [0 if case is None else self.cases.index(case) + 1 for case in schedule]
        (inject / "schedule.json").write_text(json.dumps(numbers))
        closed = ("load.arrivals=closed", "load.rate=null", "load.duration=null", "load.warmup=0s")
        sizes = ("workload.prompt_tokens=64", f"workload.output_tokens={output_tokens}")
        how = (f"load.concurrency={users}", f"load.requests={len(numbers)}", f"load.think_time={think}")
        try:
            with _patched(inject):
                run = self.engine.load(self.folder / "runs", [*closed, *sizes, *how]).folder
        finally:
            with (inject / "now").open("r+b") as now:  # others have it mapped: it must not be shorter for a moment
                now.write(bytes(_NOW_BYTES))
        return Measured(run, inject, self.cases, numbers)


@contextlib.contextmanager
def delayed(name: str, folder: Path, cases: tuple[Case, ...]) -> Iterator[Delayed]:
    """An engine with the patch in it, for as long as the block lasts; ``cases`` are all that it can be asked for."""
    inject = folder / "inject"
    inject.mkdir(parents=True)
    (inject / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    (inject / "now").write_bytes(bytes(_NOW_BYTES))
    with contextlib.ExitStack() as stack:
        with _patched(inject):
            engine = stack.enter_context(running(name, folder, Setting()))
        yield Delayed(engine, folder, cases)


def _patched(inject: Path) -> AbstractContextManager[None]:
    """What is started in here, server or generator, has the patch in it."""
    path = [str(_PATCHES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(GAPMETER_INJECT=str(inject), PYTHONPATH=os.pathsep.join(path))


def in_turn(cases: Sequence[Case], rounds: int) -> list[Case | None]:
    """A schedule for one user: some requests that warm everything up, then every case in turn."""
    return [None] * _WARM + list(cases) * rounds


def in_blocks(cases: Sequence[Case | None], each: int) -> list[Case | None]:
    """A schedule for several users, whose requests would mix if cases took turns: blocks of one case each."""
    return [case for case in cases for _ in range(each)]


class Measured:
    """A run with delays, read again from its folder; ``schedule`` numbers the case of each request, 0 for none."""

    def __init__(self, run: Path, inject: Path, cases: Sequence[Case], schedule: Sequence[int]) -> None:
        self.folder = RunFolder(run)
        self.requests, _ = read_requests(self.folder, Manifest.read(run).plan)
        self.trace = self._trace(self.requests)
        self.ledger = make_ledger(LedgerInputs.of(self.requests, self.trace))
        self._cases = cases
        self._index = self.requests["request_id"].str.rsplit("-", n=1).str[-1].astype(int).to_numpy()
        self._schedule = np.asarray(schedule)
        logs = [np.frombuffer(file.read_bytes(), _ADDED) for file in inject.glob("added-*")]
        added = np.concatenate(logs)
        # The processes log every run of one engine into a file each, with the same numbers.
        self._added = added[np.isin(added["case"], schedule) & (added["start"] >= self.requests["due_ns"].min())]

    def _trace(self, requests: pd.DataFrame) -> Trace:
        files = self.folder.record_files(self.folder.probe)
        cores = place(1, local_server=True).server
        trace = read_trace(files, requests["request_id"].tolist(), self.folder.telemetry, cores)
        if trace is None:
            raise NotMeasured(f"{self.folder.probe}: the server recorded nothing")
        return trace

    def core_holders(self, case: Case | None) -> dict[Culprit, float]:
        """Who had the core while a case's requests waited for it, in ns a request."""
        mine = self.requests[self.of(case)].reset_index(drop=True).assign(measured=True)
        core_holders = make_ledger(LedgerInputs.of(mine, self._trace(mine))).core_holders
        return {who: ns / len(mine) for who, ns in core_holders.items()}

    def stages(self, event: str) -> pd.DataFrame:
        """Stage times of one event in ns, ``unexplained`` and ``e2e`` beside them; rows as in ``requests``."""
        rows = self.ledger.rows[self.ledger.rows["event"] == event].set_index("request_id")
        table = rows[[f"{name}_ns" for name in _NAMES]].rename(columns=lambda name: name.removesuffix("_ns"))
        table["e2e"] = rows["total_ns"]
        return table.reindex(self.requests["request_id"]).reset_index(drop=True).fillna({"interference": 0.0})

    def of(self, case: Case | None) -> Bools:
        """Of each row, whether it is one of the case's requests."""
        return np.asarray(self._schedule[self._index] == self._number(case))

    def _number(self, case: Case | None) -> int:
        return 0 if case is None else self._cases.index(case) + 1

    def put_in_ns(self, case: Case) -> float:
        """How much a case's delays worked or slept in all, a request."""
        mine = self._added[self._added["case"] == self._number(case)]
        return float(mine["own"].sum() / self.of(case).sum())

    def find(self, case: Case) -> Found:
        """Where the delays of one case went, with one request in flight."""
        rows, n, start, end, own = self._on_the_way(case)
        shares = self._owners(rows, n, start, end).groupby(rows).sum()
        true = pd.Series(own).groupby(rows).sum() / pd.Series(end - start).groupby(rows).sum()
        added = shares.sum(axis=1)
        shares = shares.div(added, axis=0)
        mine = list(case.stages)
        seen = self.stages(case.event).loc[added.index, mine].sum(axis=1) / added
        others = shares.drop(columns=mine).median()
        return Found(
            float(shares[mine].sum(axis=1).median()), others[others > 0].to_dict(), float(seen.median()),
            len(added), float(added.median()), float(true.median()),
        )  # fmt: skip

    def _on_the_way(self, case: Case) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Of each delay: the request's row, the event's token, start and end within the event's window, and its own ns.

        What was added before the request was due, or had not ended when the client had the token, delayed nobody.
        """
        mine = self._added[self._added["case"] == self._number(case)]
        row_of = {int(index) + 1: row for row, index in enumerate(self._index)}
        rows = np.array([row_of[int(request)] for request in mine["request"]], dtype=np.int64)
        received = self._stamps(f"{case.event}_ns")[rows]
        kept = (mine["start"] >= self._stamps("due_ns")[rows]) & (mine["end"] <= received)
        tokens = self._stamps("output_tokens")[rows] if case.event == "last_token" else np.ones(len(rows), np.int64)
        return rows[kept], tokens[kept], mine["start"][kept], mine["end"][kept], mine["own"][kept]

    def _stamps(self, name: str) -> Ints:
        return np.asarray(self.requests[name].fillna(-1), dtype=np.int64)

    def _owners(self, rows: Ints, n: Ints, start: Ints, end: Ints) -> pd.DataFrame:
        """How many ns each stage owns from ``start`` to ``end``, in the ledgers of token ``n`` of the rows."""
        stamps = ("due_ns", "connect_start_ns", "connect_end_ns", "write_ns", "sent_ns")
        client = ClientStamps(*map(self._stamps, stamps))
        index = Index(self.trace, len(client.due))
        causes = build(index, client, Events(rows, n, start, end), frozenset())
        counted = np.ones(len(rows), np.bool_)
        by_stage = Sharer(self.trace).shares(causes.intervals, causes.processes, counted).by_stage
        found = pd.DataFrame({stage.name: by_stage[:, at] for at, stage in enumerate(STAGES) if stage.name in _NAMES})
        found[UNEXPLAINED] = end - start - by_stage.sum(axis=1)
        return found

    def increase(self, case: Case, users: int) -> pd.Series:
        """By how many ns each stage, and E2E, is longer in a case's blocks than in those without delay.

        Means over the middle half by E2E, of requests with as many of the same case before and after them as there are
        ``users``; the first block, which warms up, is left out.
        """
        warm = np.flatnonzero(self._schedule)[0]
        same = [i >= warm and len(set(self._schedule[i - users : i + users + 1])) == 1 for i in self._index]
        table = self.stages("last_token")
        slow, plain = (_middle(table[same & self.of(each)]) for each in (case, None))
        grown: pd.Series = slow.mean() - plain.mean()
        return grown


def _middle(table: pd.DataFrame) -> pd.DataFrame:
    """Rows between the quartiles of E2E: on a machine with other work on it, some requests stand still for long."""
    low, high = table["e2e"].quantile([0.25, 0.75])
    return table[table["e2e"].between(low, high)]
