"""What every server process recorded, as one trace keyed by the client's requests and the engine's steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.ledger.core_use import core_use
from gapmeter.analysis.ledger.cores import CoreUse
from gapmeter.analysis.ledger.critical_path import covered
from gapmeter.analysis.ledger.device_time import anchors_of, device_spans
from gapmeter.records import EntryFlag, RecordFile, Span, StepFlag, read_records
from gapmeter.records.process import give_back_memory
from gapmeter.records.reader import Table


def _dtype(numbers: str, times: str = "") -> np.dtype[Any]:
    """A run has millions of these rows, so numbers are narrow."""
    fields = [(name, "<i4") for name in numbers.split()] + [(name, "<i8") for name in times.split()]
    return np.dtype(fields, align=True)


REQUEST_SPAN = _dtype("request code n process", "queued start end")
STEP_SPAN = _dtype("step code", "n start end")  # n may be a time as well
ENTRY = _dtype("step request tokens before cached flags")
EMISSION = _dtype("step request tokens", "at")

MISSING = -1
FIRST_STEP_CODE, FIRST_PROCESS_CODE = 100, 200
# Which spans time which stages of a step. A captured graph holds the sampling, which then has no span of its own.
_TIMES: dict[tuple[Span, ...], tuple[str, ...]] = {
    (Span.FORWARD,): ("prefill", "decode"),
    (Span.INPUT_PREP,): ("input_prep",),
    (Span.INPUT_PREP, Span.SAMPLING): ("sampling",),
}
_IN_FLIGHT = 2  # steps at the end that may be on one side only: asynchronous scheduling puts one behind another


@dataclass(frozen=True, slots=True)
class Trace:
    """What the server's processes stamped. ``request`` is a row number of the client's table, -1 for a stranger.

    The further choices of one request (n > 1, a list of prompts) are requests of their own: the numbers behind the
    table's last row, whose row is in ``choices``. ``step`` counts through all engines of the server: ``engine_steps``
    has each one's last. Of an engine's ranks the one that answers it tells the steps; ``ranks_apart_ns`` is how far
    apart they began a step's forward.

    All times are CLOCK_MONOTONIC ns. ``roles`` are the kinds of process that recorded; ``unmeasured`` the stages
    that a probe said it could not stamp.
    """

    request_spans: Table
    step_spans: Table
    process_spans: dict[str, Table]
    steps: Table
    entries: Table
    emissions: Table
    roles: frozenset[str]
    unmeasured: frozenset[str]
    notes: list[dict[str, Any]]
    problems: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    cores: CoreUse | None = None
    choices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    engine_steps: tuple[int, ...] = ()
    engine_of: Mapping[int, int] = field(default_factory=dict)  # by process id, its engine's place among those
    ranks_apart_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    drifts: tuple[float, ...] = ()  # of each device's clock against the host's, a fraction of 1
    least: tuple[Ints, Floats] | None = None  # steps, and the least that their device needs for a forward, ns

    @property
    def has_api(self) -> bool:
        seen = np.isin(self.request_spans["code"], (Span.INGRESS, Span.EGRESS)).any()
        return bool(self.roles & {"api", "engine"}) and bool(seen)

    @property
    def has_engine(self) -> bool:
        return len(self.steps) > 0

    @property
    def on_device(self) -> bool:
        """Whether a device computes the forwards: it goes on while the host's thread has no core."""
        forwards = self.step_spans["n"][self.step_spans["code"] == Span.FORWARD]
        return bool(forwards.any() or (self.step_spans["code"] == Span.HOST_LAUNCH).any())

    @property
    def logits_in_sampling(self) -> bool:
        """Whether the device makes the logits in its sampling, as vLLM's Model Runner V2 does."""
        return self.on_device and any(note.get("model_runner") == 2 for note in self.notes)

    @property
    def untimed_steps(self) -> Ints:
        """Steps that were put on a device, and of which it is not known when it computed them."""
        steps, codes = self.step_spans["step"], self.step_spans["code"]
        return np.setdiff1d(steps[codes == Span.HOST_LAUNCH], steps[codes == Span.FORWARD])

    def belong_to(self, steps: Ints, process: int) -> Bools:
        """Which steps are those of a process's engine; all of them where that is not known."""
        if process not in self.engine_of:
            return np.ones(len(steps), np.bool_)
        return np.asarray(np.searchsorted(self.engine_steps, steps) == self.engine_of[process])

    def by_engine(self) -> list[Table]:
        """``step_spans``, apart for each engine: they compute side by side."""
        if len(self.engine_steps) < 2:
            return [self.step_spans]
        engine = np.searchsorted(self.engine_steps[:-1], self.step_spans["step"])
        return [self.step_spans[engine == one] for one in range(len(self.engine_steps))]

    def step_loads(self) -> pd.DataFrame:
        """A row a step that ran tokens, by ``step``: what was in it.

        ``start_ns`` and ``forward_ns`` are its forward's, 0 where that was not stamped; what its thread waited for a
        core meanwhile is no part of it. ``decoding`` and ``prompts``: how many sequences of each kind;
        ``prompt_tokens``; ``kv_tokens``: what the decoding ones attend to. ``graph``: how it was launched, 0 where not
        as a captured graph.
        """
        entries = self.entries[self.entries["tokens"] > 0]
        seqs, at = np.unique(entries["step"], return_inverse=True)
        prompt = (entries["flags"] & EntryFlag.PROMPT) != 0
        forwards = self.step_spans[self.step_spans["code"] == Span.FORWARD]
        forwards = forwards[np.isin(forwards["step"], seqs)]
        of_step = np.searchsorted(seqs, forwards["step"])
        start_ns = np.zeros(len(seqs), np.int64)
        start_ns[of_step] = forwards["start"]
        launched = self.step_spans[self.step_spans["code"] == Span.INPUT_PREP]
        launched = launched[np.isin(launched["step"], seqs)]
        graph = np.zeros(len(seqs), np.int64)
        graph[np.searchsorted(seqs, launched["step"])] = launched["n"] >> 30
        lasted_ns = forwards["end"] - forwards["start"]
        if self.cores is not None and not self.on_device:
            for (kind, pid), waits in self.cores.of.items():
                if kind == "forward":
                    kept_ns = covered(forwards["start"], forwards["end"], waits.start, waits.end)
                    lasted_ns = lasted_ns - kept_ns * self.belong_to(forwards["step"], pid)

        def total(rows: Ints, values: NDArray[Any]) -> Floats:
            return np.bincount(rows, values, len(seqs)).astype(np.float64)

        return pd.DataFrame(
            {
                "step": seqs,
                "start_ns": start_ns,
                "forward_ns": total(of_step, lasted_ns),
                "decoding": total(at, ~prompt),
                "prompts": total(at, prompt),
                "prompt_tokens": total(at, entries["tokens"] * prompt),
                "kv_tokens": total(at, (entries["before"] + entries["tokens"]) * ~prompt),
                "graph": graph,
            }
        )


def read_trace(
    probe_files: Sequence[Path], request_ids: Sequence[str], telemetry: Path | None = None, cores: Sequence[int] = ()
) -> Trace | None:
    """Read a run's probe files and join them to the client's requests; None when no server process recorded.

    ``telemetry``: the folder that says who had the server's ``cores``, if known.

    Raises gapmeter.records.NotRecords when a file is something else.
    """
    files = [read_records(path) for path in probe_files]
    if not files:
        return None
    by_engine, choices = _requests(files, request_ids)
    files, last, engine_of = _in_one_numbering(files)
    silent = _silent(files)
    use = core_use(telemetry, files, cores)
    process_spans = {
        f"{f.process.get('role')}-{f.process.get('pid')}": f.spans[f.spans["code"] >= FIRST_PROCESS_CODE] for f in files
    }
    notes = [note for file in files for note in file.notes]
    roles, problems = {str(f.process.get("role")) for f in files}, _problems(files)
    ranks_apart_ns = _ranks_apart_ns(files)
    incomplete = tuple(Path(f.path).name for f in files if not f.complete)
    drifts = tuple(drift for f in files if (found := anchors_of(f.notes)) and (drift := found.drift) is not None)
    give_back_memory()
    parts = []
    while files:  # each goes when its tables are there
        parts.append(_tables(files[0], by_engine, with_steps=files.pop(0).path not in silent))
    tables = {name: np.concatenate([part.pop(name) for part in parts]) for name in tuple(parts[0])}
    missing = {stage for note in notes if note.get("type") == "missing" for stage in note.get("stages", ())}
    return Trace(
        request_spans=tables["request_spans"],
        step_spans=tables["step_spans"][np.argsort(tables["step_spans"]["start"], kind="stable")],
        process_spans=process_spans,
        steps=tables["steps"],
        entries=tables["entries"],
        emissions=tables["emissions"],
        roles=frozenset(roles),
        unmeasured=frozenset(missing) | _untimed(tables["steps"], tables["step_spans"], last),
        notes=notes,
        problems=problems,
        incomplete=incomplete,
        cores=use,
        choices=choices,
        engine_steps=last,
        engine_of=engine_of,
        ranks_apart_ns=ranks_apart_ns,
        drifts=drifts,
    )


def _requests(files: Sequence[RecordFile], request_ids: Sequence[str]) -> tuple[dict[str, int], Ints]:
    """The number of each of the engine's requests, by its id, and the rows of the client's table that have several."""
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    numbers: dict[str, int] = {}
    first: set[int] = set()
    choices: list[int] = []
    for file in files:
        for ref, engine_id in file.engine_ids.items():
            row = rows.get(file.client_ids[ref], -1)
            if not file.client_ids[ref] or engine_id in numbers:
                continue
            numbers[engine_id] = row
            if row in first and engine_id:
                numbers[engine_id] = len(request_ids) + len(choices)
                choices.append(row)
            elif row >= 0:
                first.add(row)
    return numbers, np.array(choices, dtype=np.int64)


def _engine(file: RecordFile) -> int:
    return int(file.process.get("engine", 0))


def _in_one_numbering(files: Sequence[RecordFile]) -> tuple[list[RecordFile], tuple[int, ...], dict[int, int]]:
    """The files with their steps counted on from one engine to the next, each of which counts from 1.

    Also the last step of each, and by process id which of them is its. ``engine`` in a file's head says whose steps it
    speaks of; without it there is only one.
    """
    most: dict[int, int] = {}
    for file in files:
        if len(file.steps):
            most[_engine(file)] = max(most.get(_engine(file), 0), int(file.steps["seq"].max()))
    last = np.cumsum([most[engine] for engine in sorted(most)], dtype=np.int64)
    before = dict(zip(sorted(most), (last - [most[engine] for engine in sorted(most)]).tolist(), strict=True))
    places = {engine: place for place, engine in enumerate(sorted(most))}
    known = [file for file in files if "pid" in file.process and _engine(file) in places]
    engine_of = {int(file.process["pid"]): places[_engine(file)] for file in known}
    return [_counted_on(file, before.get(_engine(file), 0)) for file in files], tuple(last.tolist()), engine_of


def _counted_on(file: RecordFile, before: int) -> RecordFile:
    if not before:
        return file
    steps, spans, device = file.steps.copy(), file.spans.copy(), file.device.copy()
    steps["seq"] += before
    device["seq"] += before
    spans["ref"][(spans["code"] >= FIRST_STEP_CODE) & (spans["code"] < FIRST_PROCESS_CODE)] += before
    return replace(
        file, steps=steps, spans=spans, device=device, entry_step=file.entry_step + before,
        emission_step=file.emission_step + before,
    )  # fmt: skip


def _ranks(files: Sequence[RecordFile]) -> list[list[RecordFile]]:
    """The workers of each engine that has several."""
    workers: dict[int, list[RecordFile]] = {}
    for file in files:
        if file.process.get("role") == "worker":
            workers.setdefault(_engine(file), []).append(file)
    return [ranks for ranks in workers.values() if len(ranks) > 1]


def _silent(files: Sequence[RecordFile]) -> set[str]:
    """Of several ranks those that do not answer the engine, by their files: each computes the same steps once more."""
    silent: set[str] = set()
    for ranks in _ranks(files):
        answers = [bool((file.spans["code"] == Span.WORKER).any()) for file in ranks]
        answering = answers.index(True) if True in answers else 0
        silent.update(file.path for number, file in enumerate(ranks) if number != answering)
    return silent


def _ranks_apart_ns(files: Sequence[RecordFile]) -> Ints:
    """Between the first and the last rank of an engine to begin a step's forward, for each step that all have."""
    parts = [np.empty(0, np.int64)]
    for ranks in _ranks(files):
        begun = [file.spans[file.spans["code"] == Span.FORWARD] for file in ranks]
        steps = functools.reduce(np.intersect1d, [rows["ref"] for rows in begun])
        starts = []
        for rows in begun:
            seqs, first = np.unique(rows["ref"], return_index=True)
            starts.append(rows["start_ns"][first][np.isin(seqs, steps)])
        parts.append(np.max(starts, axis=0) - np.min(starts, axis=0))
    return np.concatenate(parts)


def _untimed(steps: Table, step_spans: Table, last: Sequence[int]) -> frozenset[str]:
    """The stages within steps that an engine had, and nobody timed: no worker recorded, or no device told its times."""
    seqs = np.unique(steps["seq"][(steps["code"] & StepFlag.EMPTY) == 0])
    working = np.bincount(np.searchsorted(last, seqs), minlength=len(last)) > _IN_FLIGHT
    unmeasured = set[str]()
    for codes, stages in _TIMES.items():
        of = step_spans["step"][np.isin(step_spans["code"], codes)]
        timed = np.bincount(np.searchsorted(last[:-1], of), minlength=len(last)) > 0
        unmeasured.update(stages if (working & ~timed).any() else ())
    return frozenset(unmeasured)


def _tables(file: RecordFile, by_engine: dict[str, int], *, with_steps: bool) -> dict[str, Table]:
    """One file's tables, with numbers of requests in place of its refs, which count from 1."""
    row_of = np.full(max(file.engine_ids, default=0) + 1, -1, dtype=np.int32)
    for ref, engine_id in file.engine_ids.items():
        row_of[ref] = by_engine.get(engine_id, -1)
    codes, process = file.spans["code"], int(file.process.get("pid", MISSING))
    of_requests = np.flatnonzero(codes < FIRST_STEP_CODE)
    of_steps = np.flatnonzero(with_steps & (codes >= FIRST_STEP_CODE) & (codes < FIRST_PROCESS_CODE))
    refs = file.spans["ref"]
    return {
        "request_spans": _table(
            REQUEST_SPAN, file.spans, rows=of_requests,
            request=row_of[refs[of_requests]], process=process,
        ),
        "step_spans": np.concatenate(
            [
                _table(STEP_SPAN, file.spans, rows=of_steps, step=refs[of_steps]),
                *([_device_table(file)] if with_steps else []),
            ]
        ),
        "steps": file.steps,
        "entries": _table(ENTRY, file.entries, step=file.entry_step, request=row_of[file.entries["ref"]]),
        "emissions": _table(
            EMISSION, file.emissions,
            step=file.emission_step, request=row_of[file.emissions["ref"]], at=file.emission_ns,
        ),
    }  # fmt: skip


def _device_table(file: RecordFile) -> Table:
    """What the device did for each step, by its own marks."""
    rows = device_spans(file)
    out = np.empty(len(rows), STEP_SPAN)
    for name, column in zip(("step", "code", "n", "start", "end"), rows.T, strict=True):
        out[name] = column
    return out


def _table(dtype: np.dtype[Any], source: Table, *, rows: Ints | None = None, **columns: NDArray[Any] | int) -> Table:
    """All rows or some: what is not among ``columns`` is the source's, whose stamps are called so much ``_ns``."""
    out = np.empty(len(source) if rows is None else len(rows), dtype)
    own = source.dtype.names or ()
    for name in dtype.names or ():
        if name in columns:
            out[name] = columns[name]
            continue
        values = source[name if name in own else f"{name}_ns"]
        out[name] = values if rows is None else values[rows]
    return out


def _problems(files: list[RecordFile]) -> tuple[str, ...]:
    """Reasons for which no ledger may be shown: records lost, or processes that disagree on the steps."""
    problems = [f"{Path(f.path).name}: {f.dropped} records were dropped (disk full)" for f in files if f.dropped]
    engines = [_engine(file) for file in files if len(file.steps)]
    if len(engines) > len(set(engines)):
        problems.append("several servers recorded, whose engines cannot be told apart: give each a folder of its own")
    every: dict[int, list[Ints]] = {}
    for file in files:
        working = file.steps["seq"][(file.steps["code"] & StepFlag.EMPTY) == 0]
        every.setdefault(_engine(file), []).append(working.astype(np.int64))
    for file in files:
        scheduled = np.unique(np.concatenate(every[_engine(file)]))
        worked = np.unique(file.spans["ref"][np.isin(file.spans["code"], (Span.FORWARD, Span.HOST_LAUNCH))])
        if not (file.complete and len(worked) and len(scheduled)):
            continue
        # Of a server that goes on, the part of each file that belongs to a load begins at a moment of its own.
        begun = max(int(scheduled[0]), int(worked[0]))
        scheduled, worked = scheduled[scheduled >= begun], worked[worked >= begun]
        missing, extra = len(np.setdiff1d(scheduled, worked)), len(np.setdiff1d(worked, scheduled))
        if missing > _IN_FLIGHT or extra > _IN_FLIGHT:
            problems.append(f"{Path(file.path).name}: {missing} steps missing and {extra} unknown to the scheduler")
    return tuple(problems)
