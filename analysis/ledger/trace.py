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
from gapmeter.analysis.ledger.processes import RecordedProcess
from gapmeter.records import EntryFlag, RecordFile, Span, StepFlag, read_records
from gapmeter.records.process import give_back_memory
from gapmeter.records.reader import Table


def _dtype(numbers: str, times: str = "") -> np.dtype[Any]:
    """A run has millions of these rows, so numbers are narrow."""
    fields = [(name, "<i4") for name in numbers.split()] + [(name, "<i8") for name in times.split()]
    return np.dtype(fields, align=True)


REQUEST_SPAN = _dtype("request n process", "queued start end")
STEP_SPAN = _dtype("step code", "n start end")  # n may be a time as well
ENTRY = _dtype("step request tokens before cached flags")
EMISSION = _dtype("step request tokens", "at")

MISSING = -1
MOST_TOKENS = np.int64(1) << 40  # more tokens than any request has
FIRST_STEP_CODE, FIRST_PROCESS_CODE = 100, 200
# Which spans time which stages of a step. A captured graph holds the sampling, which then has no span of its own.
_TIMES: dict[tuple[Span, ...], tuple[str, ...]] = {
    (Span.FORWARD,): ("prefill", "decode"),
    (Span.INPUT_PREP,): ("input_prep",),
    (Span.INPUT_PREP, Span.SAMPLING): ("sampling",),
}
_OF_TOKENS = (Span.EGRESS, Span.OUTPUT_RECEIVE, Span.DETOKENIZE)
_IN_FLIGHT = 2  # steps at the end that may be on one side only: asynchronous scheduling puts one behind another


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """Of which tokens of each request ledgers are made: of all (``every``), or up to ``first`` and from ``last`` on."""

    every: Bools
    first: Ints
    last: Ints

    def with_chunks(self, request: Ints, n: Ints) -> AskedTokens:
        """The same, and all tokens that left with the first one. Of writes by request and count: these."""
        known = np.flatnonzero((request >= 0) & (n > 0))
        begins = known[np.diff(request[known], prepend=-1) != 0]
        first = self.first.copy()
        first[request[begins]] = np.maximum(first[request[begins]], n[begins])
        return replace(self, first=first)

    def carried_by(self, request: Ints, n: Ints) -> Bools:
        """Which spans a search by tokens finds. Of spans of one kind by request and count: these."""
        before = np.where(np.diff(request, prepend=-1) == 0, np.roll(n, 1), 0)
        return self.every[request] | (before < self.first[request]) | (n >= self.last[request])


@dataclass(frozen=True, slots=True)
class Trace:
    """What the server's processes stamped. ``request`` is a row number of the client's table, -1 for a stranger.

    ``request_spans`` by what they time, each kind's in the order of requests and tokens, those of tokens as far as they
    were asked for; ``emissions`` in the order of requests and time. The further choices of one request (n > 1, a list
    of prompts) are requests of their own: the numbers behind the table's last row, whose row is in ``choices``.
    ``step`` counts through all engines of the server: ``engine_steps`` has each one's last. Of an engine's ranks the
    one that answers it tells the steps; ``ranks_apart_ns`` is how far apart they began a step's forward.

    All times are CLOCK_MONOTONIC ns. ``roles`` are the kinds of process that recorded; ``unmeasured`` the stages
    that a probe said it could not stamp.
    """

    request_spans: Mapping[int, Table]
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
        seen = self.request_spans.keys() & {Span.INGRESS, Span.EGRESS}
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

    def without_tokens(self) -> Trace:
        """What is asked once the ledgers are made: without what is there for every token, or that only they need."""
        spans = {code: spans[:0].copy() for code, spans in self.request_spans.items()}
        cores = self.cores
        if cores is not None:
            cores = replace(cores, of={key: kept for key, kept in cores.of.items() if key[0] == "forward"})
        return replace(self, request_spans=spans, emissions=self.emissions[:0].copy(), cores=cores)

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
    probe_files: Sequence[Path], request_ids: Sequence[str], telemetry: Path | None = None, cores: Sequence[int] = (),
    asked: AskedTokens | None = None,
) -> Trace | None:  # fmt: skip
    """Read a run's probe files and join them to the client's requests; None when no server process recorded.

    ``telemetry``: the folder that says who had the server's ``cores``, if known. ``asked``: of all tokens, if None, or
    where a request has several choices.
    Raises gapmeter.records.NotRecords when a file is something else.
    """
    processes = [RecordedProcess.of(read_records(path)) for path in probe_files]
    if not processes:
        return None
    by_engine, choices = _requests([process.file for process in processes], request_ids)
    processes, last, engine_of = _in_one_numbering(processes)
    files = [process.file for process in processes]
    silent = _silent(processes)
    process_spans = {
        f"{p.role}-{p.file.process.get('pid')}": p.spans(*(code for code in p.kinds if code >= FIRST_PROCESS_CODE))
        for p in processes
    }
    notes = [note for file in files for note in file.notes]
    roles, problems, ranks_apart_ns = {p.role for p in processes}, _problems(processes), _ranks_apart_ns(processes)
    incomplete = tuple(Path(file.path).name for file in files if not file.complete)
    drifts = tuple(drift for f in files if (found := anchors_of(f.notes)) and (drift := found.drift) is not None)
    files.clear()
    rows = [_rows_of(process.file, by_engine) for process in processes]
    request_spans = _request_spans(processes, rows, None if len(choices) else asked)
    parts = []
    for number, process in enumerate(processes):  # most of each goes when its tables are there
        parts.append(_tables(process, rows[number], with_steps=process.file.path not in silent))
        processes[number] = process.times_alone()
    tables = {name: np.concatenate([part.pop(name) for part in parts]) for name in tuple(parts[0])}
    emissions, step_spans = tables.pop("emissions"), tables.pop("step_spans")
    emissions = emissions[np.lexsort((emissions["at"], emissions["request"]))]
    step_spans = step_spans[np.argsort(step_spans["start"], kind="stable")]
    missing = {stage for note in notes if note.get("type") == "missing" for stage in note.get("stages", ())}
    unmeasured = frozenset(missing) | _untimed(tables["steps"], step_spans, last)
    del process
    give_back_memory()
    use = core_use(telemetry, processes, cores)
    return Trace(
        request_spans=request_spans,
        step_spans=step_spans,
        process_spans=process_spans,
        steps=tables["steps"],
        entries=tables["entries"],
        emissions=emissions,
        roles=frozenset(roles),
        unmeasured=unmeasured,
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


def _in_one_numbering(
    processes: Sequence[RecordedProcess],
) -> tuple[list[RecordedProcess], tuple[int, ...], dict[int, int]]:
    """The processes with their steps counted on from one engine to the next, each of which counts from 1.

    Also the last step of each, and by process id which of them is its. ``engine`` in a file's head says whose steps it
    speaks of; without it there is only one.
    """
    most: dict[int, int] = {}
    for process in processes:
        if len(seqs := process.file.steps["seq"]):
            most[process.engine] = max(most.get(process.engine, 0), int(seqs.max()))
    last = np.cumsum([most[engine] for engine in sorted(most)], dtype=np.int64)
    before = dict(zip(sorted(most), (last - [most[engine] for engine in sorted(most)]).tolist(), strict=True))
    places = {engine: place for place, engine in enumerate(sorted(most))}
    known = [process for process in processes if "pid" in process.file.process and process.engine in places]
    engine_of = {process.pid: places[process.engine] for process in known}
    return [_counted_on(each, before.get(each.engine, 0)) for each in processes], tuple(last.tolist()), engine_of


def _counted_on(process: RecordedProcess, before: int) -> RecordedProcess:
    if not before:
        return process
    file, kinds = process.file, dict(process.kinds)
    steps, device = file.steps.copy(), file.device.copy()
    steps["seq"] += before
    device["seq"] += before
    for code in (code for code in kinds if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE):
        kinds[code] = kinds[code].copy()
        kinds[code]["ref"] += before
    file = replace(
        file, steps=steps, device=device, entry_step=file.entry_step + before, emission_step=file.emission_step + before
    )
    return RecordedProcess(file, kinds)


def _ranks(processes: Sequence[RecordedProcess]) -> list[list[RecordedProcess]]:
    """The workers of each engine that has several."""
    workers: dict[int, list[RecordedProcess]] = {}
    for process in processes:
        if process.role == "worker":
            workers.setdefault(process.engine, []).append(process)
    return [ranks for ranks in workers.values() if len(ranks) > 1]


def _silent(processes: Sequence[RecordedProcess]) -> set[str]:
    """Of several ranks those that do not answer the engine, by their files: each computes the same steps once more."""
    silent: set[str] = set()
    for ranks in _ranks(processes):
        answers = [len(rank.spans(Span.WORKER)) > 0 for rank in ranks]
        answering = answers.index(True) if True in answers else 0
        silent.update(rank.file.path for number, rank in enumerate(ranks) if number != answering)
    return silent


def _ranks_apart_ns(processes: Sequence[RecordedProcess]) -> Ints:
    """Between the first and the last rank of an engine to begin a step's forward, for each step that all have."""
    parts = [np.empty(0, np.int64)]
    for ranks in _ranks(processes):
        begun = [rank.spans(Span.FORWARD) for rank in ranks]
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


def _rows_of(file: RecordFile, by_engine: Mapping[str, int]) -> NDArray[np.int32]:
    """The number of the request behind each of a file's refs, which count from 1."""
    row_of = np.full(max(file.engine_ids, default=0) + 1, -1, dtype=np.int32)
    for ref, engine_id in file.engine_ids.items():
        row_of[ref] = by_engine.get(engine_id, -1)
    return row_of


def _request_spans(
    processes: Sequence[RecordedProcess], rows: Sequence[NDArray[np.int32]], asked: AskedTokens | None
) -> dict[int, Table]:
    """By what they time."""
    codes = {code for process in processes for code in process.kinds if code < FIRST_STEP_CODE}
    found = {}
    for code in sorted(codes, key=lambda code: code != Span.EGRESS):
        both = zip(processes, rows, strict=True)
        parts = [(process.kinds[code], of, process.pid) for process, of in both if code in process.kinds]
        spans = np.concatenate([own for own, _, _ in parts]) if len(parts) > 1 else parts[0][0]
        request = np.concatenate([of[own["ref"]] for own, of, _ in parts])
        pids = np.repeat(np.array([pid for *_, pid in parts], np.int32), [len(own) for own, _, _ in parts])
        order = np.argsort(request * MOST_TOKENS + spans["n"], kind="stable")
        if asked is not None and code in _OF_TOKENS:
            counts = request[order], spans["n"][order]
            asked = asked.with_chunks(*counts) if code == Span.EGRESS else asked
            order = order[asked.carried_by(*counts)]
        found[code] = _table(REQUEST_SPAN, spans[order], request=request[order], process=pids[order])
    return found


def _tables(process: RecordedProcess, row_of: NDArray[np.int32], *, with_steps: bool) -> dict[str, Table]:
    """One process's tables, with numbers of requests in place of its refs, but for its requests' spans."""
    file, none = process.file, np.empty(0, STEP_SPAN)
    of_steps = [code for code in process.kinds if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE]
    spans = process.spans(*of_steps)
    step_spans = [_table(STEP_SPAN, spans, step=spans["ref"]), _device_table(process)] if with_steps else [none]
    return {
        "step_spans": np.concatenate(step_spans),
        "steps": file.steps,
        "entries": _table(ENTRY, file.entries, step=file.entry_step, request=row_of[file.entries["ref"]]),
        "emissions": _table(
            EMISSION, file.emissions,
            step=file.emission_step, request=row_of[file.emissions["ref"]], at=file.emission_ns,
        ),
    }  # fmt: skip


def _device_table(process: RecordedProcess) -> Table:
    """What the device did for each step, by its own marks."""
    rows = device_spans(process.file, process.spans(Span.SAMPLING))
    out = np.empty(len(rows), STEP_SPAN)
    for name, column in zip(("step", "code", "n", "start", "end"), rows.T, strict=True):
        out[name] = column
    return out


def _table(dtype: np.dtype[Any], source: Table, **columns: NDArray[Any] | int) -> Table:
    """All rows: what is not among ``columns`` is the source's, whose stamps are called so much ``_ns``."""
    out, own = np.empty(len(source), dtype), source.dtype.names or ()
    for name in dtype.names or ():
        out[name] = columns[name] if name in columns else source[name if name in own else f"{name}_ns"]
    return out


def _problems(processes: Sequence[RecordedProcess]) -> tuple[str, ...]:
    """Reasons for which no ledger may be shown: records lost, or processes that disagree on the steps."""
    files = [process.file for process in processes]
    problems = [f"{Path(f.path).name}: {f.dropped} records were dropped (disk full)" for f in files if f.dropped]
    engines = [process.engine for process in processes if len(process.file.steps)]
    if len(engines) > len(set(engines)):
        problems.append("several servers recorded, whose engines cannot be told apart: give each a folder of its own")
    every: dict[int, list[Ints]] = {}
    for process in processes:
        steps = process.file.steps
        working = steps["seq"][(steps["code"] & StepFlag.EMPTY) == 0]
        every.setdefault(process.engine, []).append(working.astype(np.int64))
    for process in processes:
        scheduled = np.unique(np.concatenate(every[process.engine]))
        worked = np.unique(process.spans(Span.FORWARD, Span.HOST_LAUNCH)["ref"])
        if not (process.file.complete and len(worked) and len(scheduled)):
            continue
        # Of a server that goes on, the part of each file that belongs to a load begins at a moment of its own.
        begun = max(int(scheduled[0]), int(worked[0]))
        scheduled, worked = scheduled[scheduled >= begun], worked[worked >= begun]
        missing, extra = len(np.setdiff1d(scheduled, worked)), len(np.setdiff1d(worked, scheduled))
        if missing > _IN_FLIGHT or extra > _IN_FLIGHT:
            name = Path(process.file.path).name
            problems.append(f"{name}: {missing} steps missing and {extra} unknown to the scheduler")
    return tuple(problems)
