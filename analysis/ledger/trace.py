"""What every server process recorded as one trace, keyed by the client's requests and the engine's steps, and indexed.

``Index`` looks it up by request, by token and by step, for the events whose way is sought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.ledger.cores import CoreUse, read_core_use
from gapmeter.analysis.ledger.critical_path import covered, union
from gapmeter.records import CoreThread, EntryFlag, RecordFile, Span, StepFlag, read_records

Table = NDArray[np.void]


def _dtype(names: str) -> np.dtype[Any]:
    return np.dtype([(name, "<i8") for name in names.split()])


REQUEST_SPAN = _dtype("request code n queued start end")
STEP_SPAN = _dtype("step code n start end")
ENTRY = _dtype("step request tokens before cached flags")
EMISSION = _dtype("step request tokens at")

MISSING = -1
FAR = np.int64(1) << 40  # more tokens than any request has
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
    roles: frozenset[str]
    unmeasured: frozenset[str]
    notes: list[dict[str, Any]]
    problems: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    cores: CoreUse | None = None

    @property
    def has_api(self) -> bool:
        seen = np.isin(self.request_spans["code"], (Span.INGRESS, Span.EGRESS)).any()
        return bool(self.roles & {"api", "engine"}) and bool(seen)

    @property
    def has_engine(self) -> bool:
        return len(self.steps) > 0

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
        start, end = (
            np.concatenate([part[name] for part in rows] or [np.empty(0)]).astype(np.int64)
            for name in ("start_ns", "end_ns")
        )
        return union(start, end)

    def loop_work(self) -> tuple[Ints, Ints]:
        """Starts and ends of what the API server's event loop did for anybody, in order, overlapping ones joined."""
        spans = self.request_spans
        begun = np.where(spans["code"] == Span.DETOKENIZE, spans["queued"], spans["start"])
        inline = np.isin(spans["code"], (Span.TEMPLATE, Span.TOKENIZE)) & (spans["queued"] == spans["start"])
        rows = inline | np.isin(spans["code"], (Span.HANDOFF, Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS))
        return union(begun[rows], spans["end"][rows])

    def step_loads(self) -> pd.DataFrame:
        """A row a step that ran tokens, by ``step``: what was in it.

        ``start_ns`` and ``forward_ns`` are its forward's, 0 where that was not stamped; what its thread waited for a
        core meanwhile is no part of it. ``decoding`` and ``prompts``: how many sequences of each kind;
        ``prompt_tokens``; ``kv_tokens``: what the decoding ones attend to.
        """
        entries = self.entries[self.entries["tokens"] > 0]
        seqs, at = np.unique(entries["step"], return_inverse=True)
        prompt = (entries["flags"] & EntryFlag.PROMPT) != 0
        forwards = self.step_spans[self.step_spans["code"] == Span.FORWARD]
        forwards = forwards[np.isin(forwards["step"], seqs)]
        of_step = np.searchsorted(seqs, forwards["step"])
        start_ns = np.zeros(len(seqs), np.int64)
        start_ns[of_step] = forwards["start"]
        lasted_ns = forwards["end"] - forwards["start"]
        if self.cores is not None and not self.on_device:
            lasted_ns = lasted_ns - covered(forwards["start"], forwards["end"], *self.cores.waits["engine"].whole())

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
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    by_engine = {
        engine_id: rows.get(file.client_ids[ref], -1)
        for file in files
        for ref, engine_id in file.engine_ids.items()
        if file.client_ids[ref]
    }
    parts = [_tables(file, by_engine) for file in files]
    tables = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    notes = [note for file in files for note in file.notes]
    return Trace(
        request_spans=tables["request_spans"],
        step_spans=np.sort(tables["step_spans"], order="start"),
        process_spans={
            f"{f.process.get('role')}-{f.process.get('pid')}": f.spans[f.spans["code"] >= _FIRST_PROCESS_CODE]
            for f in files
        },
        steps=tables["steps"],
        entries=tables["entries"],
        emissions=tables["emissions"],
        roles=frozenset(str(f.process.get("role")) for f in files),
        unmeasured=frozenset(s for note in notes if note.get("type") == "missing" for s in note.get("stages", ())),
        notes=notes,
        problems=_problems(files),
        incomplete=tuple(Path(f.path).name for f in files if not f.complete),
        cores=read_core_use(telemetry, files, cores) if telemetry else None,
    )


def _tables(file: RecordFile, by_engine: dict[str, int]) -> dict[str, Table]:
    """One file's tables, with rows of the client's table in place of its refs, which count from 1."""
    row_of = np.full(max(file.engine_ids, default=0) + 1, -1, dtype=np.int64)
    for ref, engine_id in file.engine_ids.items():
        row_of[ref] = by_engine.get(engine_id, -1)
    codes = file.spans["code"]
    of_requests = file.spans[codes < _FIRST_STEP_CODE]
    of_steps = file.spans[(codes >= _FIRST_STEP_CODE) & (codes < _FIRST_PROCESS_CODE)]
    return {
        "request_spans": _table(REQUEST_SPAN, of_requests, request=row_of[of_requests["ref"]]),
        "step_spans": _table(STEP_SPAN, of_steps, step=of_steps["ref"]),
        "steps": file.steps,
        "entries": _table(ENTRY, file.entries, step=file.entry_step, request=row_of[file.entries["ref"]]),
        "emissions": _table(
            EMISSION, file.emissions,
            step=file.emission_step, request=row_of[file.emissions["ref"]], at=file.emission_ns,
        ),
    }  # fmt: skip


def _table(dtype: np.dtype[Any], source: Table, **columns: NDArray[Any]) -> Table:
    """Rows of ``dtype``: what is not among ``columns`` is the source's, whose stamps are called so much ``_ns``."""
    out = np.empty(len(source), dtype)
    own = source.dtype.names or ()
    for name in dtype.names or ():
        out[name] = columns[name] if name in columns else source[name if name in own else f"{name}_ns"]
    return out


def _problems(files: list[RecordFile]) -> tuple[str, ...]:
    """Reasons for which no ledger may be shown: records lost, or processes that disagree on the steps."""
    problems = [f"{Path(f.path).name}: {f.dropped} records were dropped (disk full)" for f in files if f.dropped]
    scheduled = {int(seq) for f in files for seq in f.steps["seq"][(f.steps["code"] & StepFlag.EMPTY) == 0]}
    for file in files:
        worked = {int(s) for s in file.spans["ref"][file.spans["code"] == Span.FORWARD]}
        if worked and file.complete and worked != scheduled and scheduled:
            missing, extra = len(scheduled - worked), len(worked - scheduled)
            if missing > 1 or extra > 1:  # the step in flight at the end may be on one side only
                problems.append(f"{Path(file.path).name}: {missing} steps missing and {extra} unknown to the scheduler")
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Events:
    """The ends of ledgers: token ``n`` (from 1) of row ``request`` received at ``end``, counted from ``start``."""

    request: Ints
    n: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.request)


class Index:
    """Looks a trace's rows up by request and code, by request and token, by step and code."""

    def __init__(self, trace: Trace, requests: int) -> None:
        self.requests = requests
        spans = trace.request_spans
        self.spans = spans[spans["request"] >= 0]
        emissions = trace.emissions[trace.emissions["request"] >= 0]
        emissions = emissions[np.lexsort((emissions["at"], emissions["request"]))]
        self.emission_key = emissions["request"] * FAR + _cumulative(emissions["request"], emissions["tokens"])
        self.emission_step = emissions["step"]
        self.seqs = np.unique(trace.steps["seq"].astype(np.int64))
        step_codes = [code for code in Span if _FIRST_STEP_CODE <= code < _FIRST_PROCESS_CODE]
        self.step_spans = {code: self._dense(trace.step_spans, code) for code in step_codes}
        entries = trace.entries[(trace.entries["request"] >= 0) & (trace.entries["tokens"] > 0)]
        key = entries["request"] * FAR + entries["step"]
        order = np.argsort(key, kind="stable")
        self.entry_key, self.entry_flags = key[order], entries["flags"][order]
        self.entries = entries[order]

    def _dense(self, table: Table, code: int) -> tuple[Ints, Ints]:
        """Start and end of a step's span, by the step's position in ``seqs``; several of one step are joined."""
        start = np.full(len(self.seqs), np.iinfo(np.int64).max)
        end = np.full(len(self.seqs), MISSING)
        rows = table[(table["code"] == code) & np.isin(table["step"], self.seqs)]
        at = np.searchsorted(self.seqs, rows["step"])
        np.minimum.at(start, at, rows["start"])
        np.maximum.at(end, at, rows["end"])
        start[end == MISSING] = MISSING
        return start, end

    def of_request(self, code: int) -> Table:
        """The first span of ``code`` of each client row (fields -1 where none)."""
        out = np.full(self.requests, MISSING, dtype=self.spans.dtype)
        rows = self.spans[self.spans["code"] == code]
        rows = rows[np.argsort(rows["start"], kind="stable")][::-1]
        out[rows["request"]] = rows
        return out

    def of_token(self, code: int, events: Events) -> Table:
        """The span of ``code`` that carried each event's token: the first whose count so far reaches it."""
        rows = self.spans[self.spans["code"] == code]
        key = rows["request"] * FAR + rows["n"]
        order = np.argsort(key, kind="stable")
        rows, key = rows[order], key[order]
        out = np.full(len(events), MISSING, dtype=rows.dtype)
        at = np.searchsorted(key, events.request * FAR + events.n)
        inside = np.flatnonzero(at < len(key))
        same = inside[rows["request"][at[inside]] == events.request[inside]]
        out[same] = rows[at[same]]
        return out

    def step_of_token(self, events: Events) -> Ints:
        """Position in ``seqs`` of the step that made each event's token, or MISSING."""
        at = np.searchsorted(self.emission_key, events.request * FAR + events.n)
        inside = np.flatnonzero(at < len(self.emission_key))
        same = inside[self.emission_key[at[inside]] // FAR == events.request[inside]]
        positions = np.full(len(events), MISSING)
        positions[same] = self.position(self.emission_step[at[same]])
        return positions

    def position(self, seq: Ints) -> Ints:
        at = np.minimum(np.searchsorted(self.seqs, seq), len(self.seqs) - 1)
        return np.where(self.seqs[at] == seq, at, MISSING)

    def first_step(self) -> Ints:
        """Position of the first step that carries tokens of each client row, or MISSING."""
        out = np.full(self.requests, MISSING)
        out[self.entries["request"][::-1]] = self.position(self.entries["step"][::-1])
        return out


def _cumulative(groups: Ints, values: Ints) -> Ints:
    """Running sum of ``values`` within runs of equal ``groups``."""
    total = np.cumsum(values)
    starts = np.flatnonzero(np.diff(groups, prepend=np.int64(MISSING - 1)))
    before = np.zeros(len(groups), dtype=np.int64)
    before[starts] = np.diff(total[starts] - values[starts], prepend=np.int64(0)) if len(starts) else 0
    return np.asarray(total - np.cumsum(before), dtype=np.int64)
