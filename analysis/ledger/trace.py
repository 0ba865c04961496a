"""Joins what every server process recorded into one trace, keyed by the client's requests and the engine's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.ledger.cores import CoreUse, read_core_use
from gapmeter.analysis.ledger.critical_path import union
from gapmeter.records import CoreThread, RecordFile, Span, StepFlag, read_records

Ints = NDArray[np.int64]
Table = NDArray[np.void]

REQUEST_SPAN = np.dtype(
    [("request", "<i8"), ("code", "<i8"), ("n", "<i8"), ("queued", "<i8"), ("start", "<i8"), ("end", "<i8")]
)
STEP_SPAN = np.dtype([("step", "<i8"), ("code", "<i8"), ("n", "<i8"), ("start", "<i8"), ("end", "<i8")])
ENTRY = np.dtype(
    [("step", "<i8"), ("request", "<i8"), ("tokens", "<i8"), ("before", "<i8"), ("cached", "<i8"), ("flags", "<i8")]
)
EMISSION = np.dtype([("step", "<i8"), ("request", "<i8"), ("tokens", "<i8"), ("at", "<i8")])
COUNT = np.dtype([("request", "<i8"), ("outcome", "<i8"), ("prompt", "<i8"), ("output", "<i8"), ("cached", "<i8")])

_FIRST_STEP_CODE, _FIRST_PROCESS_CODE = 100, 200


@dataclass(frozen=True, slots=True)
class Trace:
    """What the server's processes stamped. ``request`` is a row number of the client's table, -1 for a stranger.

    All times are CLOCK_MONOTONIC ns. ``roles`` are the kinds of process that recorded; ``unmeasured`` the stages
    that a probe said it could not stamp.
    """

    request_spans: Table
    step_spans: Table
    process_spans: dict[str, Table]
    steps: Table
    entries: Table
    emissions: Table
    counts: Table
    roles: frozenset[str]
    unmeasured: frozenset[str]
    notes: list[dict[str, Any]]
    problems: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = field(default=())
    cores: CoreUse | None = None

    @property
    def has_api(self) -> bool:
        return bool(self.roles & {"api", "engine"}) and bool(
            np.isin(self.request_spans["code"], (Span.INGRESS, Span.EGRESS)).any()
        )

    @property
    def on_device(self) -> bool:
        """Whether forwards are stamped by a device's own events: it goes on while the host's thread has no core."""
        return bool(self.step_spans["n"][self.step_spans["code"] == Span.FORWARD].any())

    @property
    def counts_core_waits(self) -> bool:
        """Whether a server process recorded how long its woken threads waited for a core."""
        return self.cores is not None or any(note.get("type") == "core_waits" for note in self.notes)

    def core_waits(self, threads: tuple[CoreThread, ...]) -> tuple[Ints, Ints]:
        """Starts and ends of the waits of these kinds of thread, in order, overlapping ones joined."""
        rows = [spans[spans["code"] == Span.CORE_WAIT] for spans in self.process_spans.values()]
        rows = [part[np.isin(part["n"], threads)] for part in rows]
        start = np.concatenate([part["start_ns"] for part in rows] or [np.empty(0)]).astype(np.int64)
        end = np.concatenate([part["end_ns"] for part in rows] or [np.empty(0)]).astype(np.int64)
        return union(start, end)

    def loop_work(self) -> tuple[Ints, Ints]:
        """Starts and ends of what the API server's event loop did for anybody, in order, overlapping ones joined."""
        spans = self.request_spans
        begun = np.where(spans["code"] == Span.DETOKENIZE, spans["queued"], spans["start"])
        inline = np.isin(spans["code"], (Span.TEMPLATE, Span.TOKENIZE)) & (spans["queued"] == spans["start"])
        rows = inline | np.isin(spans["code"], (Span.HANDOFF, Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS))
        return union(begun[rows], spans["end"][rows])

    @property
    def has_engine(self) -> bool:
        return len(self.steps) > 0


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
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    by_engine = {
        engine_id: rows.get(file.client_ids[ref], -1)
        for file in files
        for ref, engine_id in file.engine_ids.items()
        if file.client_ids[ref]
    }
    maps = [_row_of_ref(file, by_engine) for file in files]
    notes = [note for file in files for note in file.notes]
    return Trace(
        request_spans=_concat([_request_spans(f, m) for f, m in zip(files, maps, strict=True)], REQUEST_SPAN),
        step_spans=np.sort(_concat([_step_spans(f) for f in files], STEP_SPAN), order="start"),
        process_spans={_label(f): f.spans[f.spans["code"] >= _FIRST_PROCESS_CODE] for f in files},
        steps=_concat([f.steps for f in files], files[0].steps.dtype),
        entries=_concat([_entries(f, m) for f, m in zip(files, maps, strict=True)], ENTRY),
        emissions=_concat([_emissions(f, m) for f, m in zip(files, maps, strict=True)], EMISSION),
        counts=_concat([_counts(f, m) for f, m in zip(files, maps, strict=True)], COUNT),
        roles=frozenset(str(f.process.get("role")) for f in files),
        unmeasured=frozenset(s for note in notes if note.get("type") == "missing" for s in note.get("stages", ())),
        notes=notes,
        problems=_problems(files),
        incomplete=tuple(Path(f.path).name for f in files if not f.complete),
        cores=read_core_use(telemetry, files, cores) if telemetry else None,
    )


def _label(file: RecordFile) -> str:
    return f"{file.process.get('role')}-{file.process.get('pid')}"


def _row_of_ref(file: RecordFile, by_engine: dict[str, int]) -> Ints:
    """Row of the client's table for each ref of a file (refs count from 1)."""
    rows = np.full(max(file.engine_ids, default=0) + 1, -1, dtype=np.int64)
    for ref, engine_id in file.engine_ids.items():
        rows[ref] = by_engine.get(engine_id, -1)
    return rows


def _concat(parts: list[Table], dtype: np.dtype[Any]) -> Table:
    kept = [part for part in parts if len(part)]
    return np.concatenate(kept) if kept else np.empty(0, dtype)


def _request_spans(file: RecordFile, rows: Ints) -> Table:
    source = file.spans[file.spans["code"] < _FIRST_STEP_CODE]
    out = np.empty(len(source), REQUEST_SPAN)
    out["request"] = rows[source["ref"]] if len(source) else 0
    for name, column in (
        ("code", "code"),
        ("n", "n"),
        ("queued", "queued_ns"),
        ("start", "start_ns"),
        ("end", "end_ns"),
    ):
        out[name] = source[column]
    return out


def _step_spans(file: RecordFile) -> Table:
    codes = file.spans["code"]
    source = file.spans[(codes >= _FIRST_STEP_CODE) & (codes < _FIRST_PROCESS_CODE)]
    out = np.empty(len(source), STEP_SPAN)
    for name, column in (("step", "ref"), ("code", "code"), ("n", "n"), ("start", "start_ns"), ("end", "end_ns")):
        out[name] = source[column]
    return out


def _entries(file: RecordFile, rows: Ints) -> Table:
    out = np.empty(len(file.entries), ENTRY)
    out["step"] = file.entry_step
    out["request"] = rows[file.entries["ref"]] if len(out) else 0
    for name in ("tokens", "before", "cached", "flags"):
        out[name] = file.entries[name]
    return out


def _emissions(file: RecordFile, rows: Ints) -> Table:
    out = np.empty(len(file.emissions), EMISSION)
    out["step"] = file.emission_step
    out["request"] = rows[file.emissions["ref"]] if len(out) else 0
    out["tokens"] = file.emissions["tokens"]
    out["at"] = file.emission_ns
    return out


def _counts(file: RecordFile, rows: Ints) -> Table:
    out = np.empty(len(file.counts), COUNT)
    out["request"] = rows[file.counts["ref"]] if len(out) else 0
    out["outcome"] = file.counts["code"]
    for name in ("prompt", "output", "cached"):
        out[name] = file.counts[name]
    return out


def _problems(files: list[RecordFile]) -> tuple[str, ...]:
    """Reasons for which no ledger may be shown: records lost, or processes that disagree on the steps."""
    found = [f"{Path(f.path).name}: {f.dropped} records were dropped (disk full)" for f in files if f.dropped]
    scheduled = {int(seq) for f in files for seq in f.steps["seq"][(f.steps["code"] & StepFlag.EMPTY) == 0]}
    for file in files:
        worked = {int(s) for s in file.spans["ref"][file.spans["code"] == Span.FORWARD]}
        if worked and file.complete and worked != scheduled and scheduled:
            missing, extra = len(scheduled - worked), len(worked - scheduled)
            if missing > 1 or extra > 1:  # the step in flight at the end may be on one side only
                found.append(f"{Path(file.path).name}: {missing} steps missing and {extra} unknown to the scheduler")
    return tuple(found)
