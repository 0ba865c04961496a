"""Reading what every server process recorded, joined to the client's requests, as one trace."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.arrays import AnyArray, Ints, distinct, running_sums
from gapmeter.analysis.ledger.core_use import core_use
from gapmeter.analysis.ledger.device_time import anchors_of, device_spans
from gapmeter.analysis.ledger.processes import RecordedProcess
from gapmeter.analysis.ledger.sieve import OF_TOKENS, AskedTokens, Sieve
from gapmeter.analysis.ledger.trace import (
    EMISSION,
    ENTRY,
    FIRST_PROCESS_CODE,
    FIRST_STEP_CODE,
    REQUEST_SPAN,
    STEP_SPAN,
    Trace,
    as_key,
    engines_of,
)
from gapmeter.records import RecordFile, Span, StepFlag
from gapmeter.records.process import give_back_memory
from gapmeter.records.reader import Table

# Which spans time which stages of a step. A captured graph holds the sampling, which then has no span of its own.
_TIMES: dict[tuple[Span, ...], tuple[str, ...]] = {
    (Span.FORWARD,): ("prefill", "decode"),
    (Span.INPUT_PREP,): ("input_prep",),
    (Span.INPUT_PREP, Span.SAMPLING): ("sampling",),
}
_AT_ONCE = 2  # files that are read side by side
_EMISSIONS = 1_000_000  # that are looked at together
_IN_FLIGHT = 2  # steps at the end that may be on one side only: asynchronous scheduling puts one behind another


def read_trace(
    probe_files: Sequence[Path], request_ids: Sequence[str], telemetry: Path | None = None, cores: Sequence[int] = (),
    asked: AskedTokens | None = None,
) -> Trace | None:  # fmt: skip
    """Read a run's probe files and join them to the client's requests; None when no server process recorded.

    ``telemetry``: the folder that says who had the server's ``cores``, if known. ``asked``: of all tokens, if None, or
    where a request has several choices.
    Raises gapmeter.records.NotRecords when a file is something else.
    """
    processes, by_engine, choices = _read(probe_files, request_ids, asked)
    if not processes:
        return None
    processes, last, engine_of = _in_one_numbering(processes)
    files = [process.file for process in processes]
    silent = _silent(processes)
    process_spans = {
        (p.role, p.pid): p.spans(*(code for code in p.kinds if code >= FIRST_PROCESS_CODE)) for p in processes
    }
    notes = [note for file in files for note in file.notes]
    problems, ranks_apart_ns = _problems(processes), _ranks_apart_ns(processes)
    incomplete = tuple(Path(file.path).name for file in files if not file.complete)
    drifts = tuple(drift for f in files if (found := anchors_of(f.notes)) and (drift := found.drift) is not None)
    rows = [_rows_of(process.file, by_engine) for process in processes]
    request_spans, asked = _request_spans(processes, rows, None if len(choices) else asked)
    emissions = _emissions(files, rows, asked)
    files.clear()
    parts = []
    for number, process in enumerate(processes):  # most of each goes when its tables are there
        parts.append(_tables(process, rows[number], with_steps=process.file.path not in silent))
        processes[number] = process.times_alone()
    tables = {name: _joined([part.pop(name) for part in parts]) for name in tuple(parts[0])}
    step_spans = tables.pop("step_spans")
    step_spans = step_spans.take(np.argsort(step_spans["start"], kind="stable"))
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


def _read(
    paths: Sequence[Path], request_ids: Sequence[str], asked: AskedTokens | None
) -> tuple[list[RecordedProcess], dict[str, int], Ints]:
    """The processes, and what ``_requests`` says of them."""
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    sieves = [] if asked is None else [Sieve(asked, rows) for _ in paths]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        processes = list(pool.map(RecordedProcess.read, paths, sieves or [None] * len(paths)))
    by_engine, choices = _requests([process.file for process in processes], rows, len(request_ids))
    if sieves and (len(choices) or not all(sieve.sure for sieve in sieves)):
        del processes, by_engine, choices  # there is no room for both
        give_back_memory()
        return _read(paths, request_ids, None)
    return processes, by_engine, choices


def _requests(files: Sequence[RecordFile], rows: Mapping[str, int], count: int) -> tuple[dict[str, int], Ints]:
    """The number of each of the engine's requests, by its id, and the rows of the client's table that have several.

    ``rows``: of the client's ids; ``count``: how many there are.
    """
    numbers: dict[str, int] = {}
    first: set[int] = set()
    choices: list[int] = []
    for file in files:
        for ref, engine_id in file.engine_ids.items():
            row = rows.get(file.client_ids[ref], -1)
            if not file.client_ids[ref] or not engine_id or engine_id in numbers:
                continue
            numbers[engine_id] = row
            if row in first:
                numbers[engine_id] = count + len(choices)
                choices.append(row)
            elif row >= 0:
                first.add(row)
    return numbers, np.array(choices, dtype=np.int64)


def _in_one_numbering(
    processes: Sequence[RecordedProcess],
) -> tuple[list[RecordedProcess], tuple[int, ...], dict[int, int]]:
    """The processes with their steps counted on from one engine to the next, each of which counts from 1.

    Also the last step of each, and by process id which of them is its. ``engine`` in a file's head says whose steps it
    speaks of; without it there is only one. A file that was cut short may lack steps that another process's has.
    """
    most: dict[int, int] = {}
    for process in processes:
        file = process.file
        numbers = [rows["ref"] for rows in _of_steps(process).values()]
        for seqs in (*numbers, *(rows["seq"] for rows in (file.steps, file.emits, file.device))):
            if len(seqs):
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
    steps, emits, device = (rows.copy() for rows in (file.steps, file.emits, file.device))
    for rows in (steps, emits, device):
        rows["seq"] += before
    for code, spans in _of_steps(process).items():
        kinds[code] = spans.copy()
        kinds[code]["ref"] += before
    return replace(process, file=replace(file, steps=steps, emits=emits, device=device), kinds=kinds)


def _of_steps(process: RecordedProcess) -> dict[int, Table]:
    """Its spans of steps, by what they time."""
    return {code: rows for code, rows in process.kinds.items() if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE}


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
    seqs = distinct(steps["seq"][(steps["code"] & StepFlag.EMPTY) == 0])
    working = np.bincount(engines_of(seqs, last), minlength=len(last)) > _IN_FLIGHT
    unmeasured = set[str]()
    for codes, stages in _TIMES.items():
        of = step_spans["step"][np.isin(step_spans["code"], codes)]
        timed = np.bincount(engines_of(of, last), minlength=len(last)) > 0
        unmeasured.update(stages if (working & ~timed).any() else ())
    return frozenset(unmeasured)


def _rows_of(file: RecordFile, by_engine: Mapping[str, int]) -> NDArray[np.int32]:
    """The number of the request behind each of a file's refs, which count from 1; the last: of any never named.

    A full disk may lack room for a request's name, and have it for what was recorded of it.
    """
    row_of = np.full(max(file.engine_ids, default=0) + 2, -1, dtype=np.int32)
    for ref, engine_id in file.engine_ids.items():
        row_of[ref] = by_engine.get(engine_id, -1)
    return row_of


def _request_spans(
    processes: Sequence[RecordedProcess], rows: Sequence[NDArray[np.int32]], asked: AskedTokens | None
) -> tuple[dict[int, Table], AskedTokens | None]:
    """By what they time, and what is asked for; of those in ``processes`` only the times are left."""
    codes = {code for process in processes for code in process.kinds if code < FIRST_STEP_CODE}
    found = {}
    for code in sorted(codes, key=lambda code: code != Span.EGRESS):
        both = zip(processes, rows, strict=True)
        parts = [(process.take_requests(code), of, process.pid) for process, of in both if code in process.kinds]
        spans = _joined([own for own, _, _ in parts])
        request = np.concatenate([of.take(own["ref"], mode="clip") for own, of, _ in parts])
        pids = np.repeat(np.array([pid for *_, pid in parts], np.int32), [len(own) for own, _, _ in parts])
        order = np.argsort(as_key(request, spans["n"]), kind="stable")
        if asked is not None and code in OF_TOKENS:
            counts = request[order], spans["n"][order]
            asked = asked.with_chunks(*counts) if code == Span.EGRESS else asked
            order = order[asked.carried_by(*counts)]
        found[code] = _table(REQUEST_SPAN, spans.take(order), request=request[order], process=pids[order])
        del spans, parts  # there is no room for all of a large run's spans beside what comes of them
    return found, asked


def _emissions(files: Sequence[RecordFile], rows: Sequence[NDArray[np.int32]], asked: AskedTokens | None) -> Table:
    """What the engines' steps made of each request, as far as it is asked for. A request is one engine's, in order."""
    so_far = np.zeros(max((int(of.max()) for of in rows), default=0) + 2, np.int64)  # the last: strangers'
    parts = [np.empty(0, EMISSION)]
    for file, of in zip(files, rows, strict=True):
        steps = file.emission_step
        for low in range(0, len(steps), _EMISSIONS):
            own = file.emissions[low : low + _EMISSIONS]
            request = of.take(own["ref"], mode="clip").astype(np.int64)
            order = np.argsort(request, kind="stable")
            request = request[order]
            before = so_far[request]
            n = before + running_sums(request, own["tokens"][order])
            so_far[request] = n  # of several rows the last one's stays
            kept = np.arange(len(n)) if asked is None else np.flatnonzero(asked.carried_by(request, n, before))
            part = np.empty(len(kept), EMISSION)
            part["step"], part["request"], part["n"] = steps[low + order[kept]], request[kept], n[kept]
            parts.append(part)
    emissions = np.concatenate(parts)
    return emissions.take(np.argsort(emissions["request"], kind="stable"))


def _tables(process: RecordedProcess, row_of: NDArray[np.int32], *, with_steps: bool) -> dict[str, Table]:
    """One process's tables, with numbers of requests in place of its refs, but for its requests' spans.

    Its entries become the table's.
    """
    file, step_spans = process.file, np.empty(0, STEP_SPAN)
    if with_steps:
        timed = (_table(STEP_SPAN, rows, step=rows["ref"]) for rows in _of_steps(process).values())
        step_spans = _joined([*timed, device_spans(file, process.spans(Span.SAMPLING))])
    entries = file.entries.view(ENTRY)  # a large run has no room for them twice
    entries["request"] = row_of.take(file.entries["ref"], mode="clip")
    entries["step"] = file.entry_step
    return {"step_spans": step_spans, "steps": file.steps, "entries": entries}


def _joined(parts: Sequence[AnyArray]) -> AnyArray:
    """As one; it is not copied where one alone has rows."""
    some = [part for part in parts if len(part)]
    return some[0] if len(some) == 1 else np.concatenate(parts)


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
        scheduled = distinct(np.concatenate(every[process.engine]))
        worked = distinct(process.spans(Span.FORWARD, Span.HOST_LAUNCH)["ref"])
        if not (process.file.complete and len(worked) and len(scheduled)):
            continue
        # Of a server that goes on, the part of each file that belongs to a load begins at a moment of its own.
        begun = max(int(scheduled[0]), int(worked[0]))
        scheduled, worked = scheduled[scheduled >= begun], worked[worked >= begun]
        missing, extra = (
            len(np.setdiff1d(*both, assume_unique=True)) for both in ((scheduled, worked), (worked, scheduled))
        )
        if missing > _IN_FLIGHT or extra > _IN_FLIGHT:
            name = Path(process.file.path).name
            problems.append(f"{name}: {missing} steps missing and {extra} unknown to the scheduler")
    return tuple(problems)
