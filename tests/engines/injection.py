"""Known delays in real engines, and where the ledger finds them.

``patches/sitecustomize.py`` adds the delays and logs them; here they are planned and compared with the ledger. The
case changes from request to request, so that what disturbs the machine disturbs all cases, and the requests without
any delay between them, alike.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from bench.engine import Engine, Setting, running
from gapmeter.analysis.ledger.critical_path import sweep
from gapmeter.analysis.ledger.intervals import CLASSES, Client, build
from gapmeter.analysis.ledger.ledger import make_ledger
from gapmeter.analysis.ledger.trace import Events, read_trace
from gapmeter.analysis.results import Manifest
from gapmeter.analysis.stages import STAGES, UNEXPLAINED
from gapmeter.analysis.tables import read_requests
from gapmeter.records import RunFolder

_PATCHES = Path(__file__).with_name("patches")
_DELAY_NS = 5_000_000
_WARM = 4
_NOW_BYTES = 16
_ADDED = np.dtype([("case", "<i8"), ("request", "<i8"), ("start", "<i8"), ("end", "<i8")])
_NAMES = (*(stage.name for stage in STAGES if stage.name != "launch_gap"), UNEXPLAINED)
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """A delay at ``point``, ``how`` busy or asleep: ``once`` a request (at the first call), or at every call.

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
    added; ``added_ns``: what was added.
    """

    owned: float
    elsewhere: dict[str, float]
    seen: float
    requests: int
    added_ns: float


def _once(point: str, *stages: str, event: str = "first_token") -> list[Case]:
    return [Case(point, how, stages, event, True, _DELAY_NS) for how in ("sleep", "busy")]


def _each_step(point: str, *stages: str) -> list[Case]:
    return [Case(point, how, stages, "last_token", False, _DELAY_NS) for how in ("sleep", "busy")]


# On the way to the first token once a request; in the engine in every step up to the last token. What comes after the
# engine would be hidden behind its next step, so there the first token tells; the generator knows only the last one.
# A loop that is held between two stamps may lose its core to the engine meanwhile: that part of the delay is core_wait.
ALONE: tuple[Case, ...] = (
    *_once("loop held when a request is due", "generator_lag"),
    *_once("loop held when a request comes", "network_in", "core_wait"),
    *_once("parse", "ingress"),
    *_once("template", "template"),
    *_once("tokenize", "tokenize"),
    *_once("hand over", "handoff"),
    *_each_step("schedule", "scheduling"),
    *_each_step("prepare inputs", "input_prep"),
    *_each_step("forward", "prefill", "decode", "interference"),
    *_each_step("sample", "sampling"),
    *_once("loop held when outputs come", "output", "core_wait"),
    *_once("detokenize", "detokenize"),
    *_once("format", "egress"),
    *_once("loop held when an answer comes", "network_out", event="last_token"),
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Two cases under load: ``block`` requests of each in turn from ``users``. The first slows down the tokenizer."""

    users: int
    block: int
    output_tokens: int
    cases: tuple[Case, Case]


# The tokenizer's delay is long, so that the users wait for it and not for the engine.
CROWDS = {
    "transformers": Crowd(
        4, 24, 8,
        (
            Case("tokenize", "sleep", ("tokenize",), "last_token", False, 40_000_000),
            Case("forward", "sleep", ("prefill", "decode", "interference"), "last_token", False, _DELAY_NS),
        ),
    ),
    "vllm": Crowd(
        8, 32, 4,
        (
            Case("tokenize", "sleep", ("tokenize",), "last_token", False, 60_000_000),
            Case("schedule", "busy", ("scheduling",), "last_token", False, _DELAY_NS),
        ),
    ),
}  # fmt: skip
_CASES = (*ALONE, *(case for crowd in CROWDS.values() for case in crowd.cases))
_NUMBER: dict[Case | None, int] = {None: 0} | {case: number for number, case in enumerate(_CASES, 1)}


ENGINES = {name: pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.alone]) for name in CROWDS}


def on(name: str) -> pytest.MarkDecorator:
    """Only with the fixture ``engine`` of this name."""
    return pytest.mark.parametrize("engine", [ENGINES[name]], indirect=True)


@dataclass(frozen=True, slots=True)
class Delayed:
    """An engine with the patch in it, which adds nothing but while ``measure`` loads it."""

    engine: Engine
    folder: Path

    @property
    def name(self) -> str:
        return self.engine.name

    def measure(self, schedule: Sequence[Case | None], users: int, output_tokens: int, think: str) -> Measured:
        """A closed loop with the delay of each request that ``schedule`` says."""
        inject = self.folder / "inject"
        numbers = [_NUMBER[case] for case in schedule]
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
        return Measured(run, inject, numbers)


@contextlib.contextmanager
def delayed(name: str, folder: Path) -> Iterator[Delayed]:
    """An engine with the patch in it, for as long as the block lasts."""
    inject = folder / "inject"
    inject.mkdir(parents=True)
    (inject / "cases.json").write_text(json.dumps([asdict(case) for case in _CASES]))
    (inject / "now").write_bytes(bytes(_NOW_BYTES))
    with contextlib.ExitStack() as stack:
        with _patched(inject):
            engine = stack.enter_context(running(name, folder, Setting()))
        yield Delayed(engine, folder)


@contextlib.contextmanager
def _patched(inject: Path) -> Iterator[None]:
    """What is started in here, server or generator, has the patch in it."""
    path = [str(_PATCHES), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPMETER_INJECT", str(inject))
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        yield


def in_turn(cases: Sequence[Case], rounds: int) -> list[Case | None]:
    """A schedule for one user: some requests that warm everything up, then every case in turn."""
    return [None] * _WARM + list(cases) * rounds


def in_blocks(cases: Sequence[Case | None], each: int) -> list[Case | None]:
    """A schedule for several users, whose requests would mix if cases took turns: blocks of one case each."""
    return [case for case in cases for _ in range(each)]


class Measured:
    """A run with delays, read again from its folder; ``schedule`` numbers the case of each request."""

    def __init__(self, run: Path, inject: Path, schedule: Sequence[int]) -> None:
        folder = RunFolder(run)
        self.requests, _ = read_requests(folder, Manifest.read(folder.path).plan)
        self.trace = read_trace(folder.record_files(folder.probe), self.requests["request_id"].tolist())
        self.ledger = make_ledger(self.requests, self.trace)
        self._index = self.requests["request_id"].str.rsplit("-", n=1).str[-1].astype(int).to_numpy()
        self._schedule = np.asarray(schedule)
        logs = [np.frombuffer(file.read_bytes(), _ADDED) for file in inject.glob("added-*")]
        added = np.concatenate(logs)
        self._added = added[np.isin(added["case"], schedule)]

    def stages(self, event: str) -> pd.DataFrame:
        """Stage times of one event in ns, ``unexplained`` and ``e2e`` beside them; rows as in ``requests``."""
        rows = self.ledger.rows[self.ledger.rows["event"] == event].set_index("request_id")
        table = rows[[f"{name}_ns" for name in _NAMES]].rename(columns=lambda name: name.removesuffix("_ns"))
        table["e2e"] = rows["total_ns"]
        return table.reindex(self.requests["request_id"]).reset_index(drop=True).fillna({"interference": 0.0})

    def of(self, case: Case | None) -> NDArray[np.bool_]:
        """Of each row, whether it is one of the case's requests."""
        return np.asarray(self._schedule[self._index] == _NUMBER[case])

    def find(self, case: Case) -> Found:
        """Where the delays of one case went, with one request in flight."""
        rows, n, start, end = self._on_the_way(case)
        shares = self._owners(rows, n, start, end).groupby(rows).sum()
        added = shares.sum(axis=1)
        shares = shares.div(added, axis=0)
        mine = list(case.stages)
        seen = self.stages(case.event).loc[added.index, mine].sum(axis=1) / added
        others = shares.drop(columns=mine).median()
        return Found(
            float(shares[mine].sum(axis=1).median()), others[others > 0].to_dict(), float(seen.median()),
            len(added), float(added.median()),
        )  # fmt: skip

    def _on_the_way(self, case: Case) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each delay: the request's row, the event's token, and start and end within the event's window.

        What was added before the request was due, or had not ended when the client had the token, delayed nobody.
        """
        mine = self._added[self._added["case"] == _NUMBER[case]]
        row_of = {int(index) + 1: row for row, index in enumerate(self._index)}
        rows = np.array([row_of[int(request)] for request in mine["request"]], dtype=np.int64)
        received = self._stamps(f"{case.event}_ns")[rows]
        kept = (mine["start"] >= self._stamps("due_ns")[rows]) & (mine["end"] <= received)
        tokens = self._stamps("output_tokens")[rows] if case.event == "last_token" else np.ones(len(rows), np.int64)
        return rows[kept], tokens[kept], mine["start"][kept], mine["end"][kept]

    def _stamps(self, name: str) -> Ints:
        return np.asarray(self.requests[name].fillna(-1), dtype=np.int64)

    def _owners(self, rows: Ints, n: Ints, start: Ints, end: Ints) -> pd.DataFrame:
        """How many ns each stage owns from ``start`` to ``end``, in the ledgers of token ``n`` of the rows."""
        stamps = ("due_ns", "connect_start_ns", "connect_end_ns", "write_ns", "sent_ns")
        client = Client(*map(self._stamps, stamps))
        causes = build(self.trace, client, Events(rows, n, start, end), frozenset())
        owned, _ = sweep(causes.intervals, len(rows), len(CLASSES))
        found = pd.DataFrame(0, index=range(len(rows)), columns=list(_NAMES))
        for number, cls in enumerate(CLASSES):
            found[cls.stage] += owned[:, number]
        found[UNEXPLAINED] = end - start - owned.sum(axis=1)
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
