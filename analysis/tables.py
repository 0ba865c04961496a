"""The tables of a run, rebuilt from the raw files in its folder: requests and steps."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pandas.api.types import is_object_dtype

from gapmeter.analysis.arrays import Ints, each_of
from gapmeter.analysis.ledger.trace import FIRST_PROCESS_CODE, FIRST_STEP_CODE, Trace
from gapmeter.analysis.requests.attempts import read_attempts
from gapmeter.analysis.requests.metrics import stamps_ns
from gapmeter.analysis.results.manifest import PlanFacts
from gapmeter.records import RecordFile, RunFolder, Span
from gapmeter.records.reader import NotRecords
from gapmeter.scenarios.plain_file import memory_bytes, open_plain

_PADDED = (1 << 30) - 1  # in INPUT_PREP's n; the bits above say how the step ran
_ROWS = 200_000  # of a table that are written at once
_CELL_BYTES = 8  # of memory, at least: a file may hold any number of equal ones in a few bytes


@dataclass(frozen=True, slots=True)
class GeneratorFile:
    """What one generator process recorded beside its requests, on our clock.

    ``beat_due_ns`` and ``beat_at_ns``: when its event loop was to run at every beat, and when it did.
    """

    worker: int
    notes: list[dict[str, Any]]
    beat_due_ns: Ints
    beat_at_ns: Ints
    canary_at_ns: Ints
    canary_ns: Ints
    complete: bool
    dropped: int

    def lag_ns(self, since_ns: int) -> Ints:
        """How late the event loop was at every beat that was due from then on, also those unseen while it was held.

        A loop that did nothing for a second notes one beat that was a second late, and not the 49 that were due
        meanwhile: their share of the time would be missing from its percentiles (Tene's correction for coordinated
        omission).
        """
        apart = np.diff(np.sort(self.beat_due_ns))
        every = apart[apart > 0].min(initial=1 << 62)
        beat, nth = each_of(np.maximum(1, (self.beat_at_ns - self.beat_due_ns) // every))
        due_ns = self.beat_due_ns[beat] + every * nth
        return np.asarray((self.beat_at_ns[beat] - due_ns)[due_ns >= since_ns], np.int64)

    def cpu_share(self) -> float | None:
        """CPU time over wall time of the timed window, None when the process did not live to say."""
        usage = [note for note in self.notes if note.get("type") == "usage"]
        return usage[-1]["cpu_ns"] / usage[-1]["wall_ns"] if usage else None


def read_requests(folder: RunFolder, plan: PlanFacts) -> tuple[pd.DataFrame, list[GeneratorFile]]:
    """One row an attempt of every request, in the order of due times, and what each generator process said.

    ``plan`` is the manifest's. A request is ``measured`` when it was due after the warm-up. One that was sent but whose
    end was never recorded is ``lost``. Only the last of several attempts is measured (``superseded`` marks the others),
    and its due time is the first one's. ``censored_ns`` is how long a failed request was given: its latency is longer.
    Raises gapmeter.records.NotRecords when no generator process recorded anything.
    """
    paths = folder.record_files(folder.requests)
    if not paths:
        raise NotRecords(f"{folder.path}: no request was recorded")
    offsets_ns = plan.clock_offsets_ns or {}
    table, files = read_attempts(paths, plan.timeout_ns, offsets_ns)
    table = _settle(table.sort_values(["due_ns", "index"], ignore_index=True), plan.timeout_ns)
    since_start = table["due_ns"] - plan.start_ns
    table["measured"] = (since_start >= plan.warmup_ns) & (table["index"] >= plan.warmup_requests)
    table["measured"] &= ~table["superseded"]
    if (end_ns := cut_short_ns(table, plan)) is not None:
        table["measured"] &= table["due_ns"] < end_ns
    return table, [_generator(file, offsets_ns) for file in files]


def _settle(table: pd.DataFrame, timeout_ns: int) -> pd.DataFrame:
    """A row an attempt, with what makes requests of them; ``table`` has ``index``, ``retry`` and the client's stamps.

    ``attempt_due_ns`` is the attempt's own due time and ``due_ns`` becomes that of the request's first attempt, from
    which its latency counts. ``superseded``: a later attempt followed, so that this one's outcome is not the request's.
    A failed request was given ``censored_ns`` from its first due time on, at least.
    """
    table["attempt_due_ns"] = table["due_ns"]
    by_request = table.groupby("index")
    table["superseded"] = (table["retry"] < by_request["retry"].transform("max")).to_numpy(bool)
    if (table["retry"] > 0).any():
        table["due_ns"] = by_request["due_ns"].transform("min")
        waited = (table["end_ns"].fillna(0) - table["due_ns"]).clip(lower=timeout_ns)
        table["censored_ns"] = waited.where(table["censored_ns"].notna())
        table = table.sort_values(["due_ns", "index", "retry"], ignore_index=True)
    return table


def cut_short_ns(requests: pd.DataFrame, plan: PlanFacts) -> int | None:
    """Until when requests were due that count, in a run that was ended early because enough was known; else None.

    Where what was in flight was given up, the oldest of that is the end: leaving out only what was given up would leave
    out the slow ones.
    """
    shortened = plan.shortened
    if shortened is None:
        return None
    given_up = requests.loc[requests["outcome"] == "aborted", "due_ns"] if shortened.in_flight == "aborted" else []
    return min([shortened.at_ns, *(int(due) for due in given_up)])


def _generator(file: RecordFile, offsets_ns: Mapping[str, int]) -> GeneratorFile:
    worker = int(file.process.get("worker", 0))
    offset_ns = offsets_ns.get(str(worker), 0)
    lag = file.spans[file.spans["code"] == Span.LOOP_LAG]
    canary = file.spans[file.spans["code"] == Span.CANARY]
    return GeneratorFile(
        worker=worker,
        notes=file.notes,
        beat_due_ns=np.asarray(lag["queued_ns"], np.int64) - offset_ns,
        beat_at_ns=np.asarray(lag["start_ns"], np.int64) - offset_ns,
        canary_at_ns=np.asarray(canary["start_ns"], np.int64) - offset_ns,
        canary_ns=np.asarray(canary["end_ns"] - canary["start_ns"], dtype=np.int64),
        complete=file.complete,
        dropped=file.dropped,
    )


def last_looks_ns(requests: pd.DataFrame, generators: Sequence[GeneratorFile]) -> Ints:
    """When, before each first token came, its generator process had last looked for what was there; -1 where unknown.

    A loop that runs a beat has asked the kernel since that was due, and has read all that it was told of when it runs
    the next one.
    """
    looks, first_ns = np.full(len(requests), -1), stamps_ns(requests, "first_token_ns")
    worker = requests["worker"].to_numpy()
    for generator in generators:
        mine = np.flatnonzero(worker == generator.worker)
        before = np.searchsorted(generator.beat_at_ns, first_ns[mine])
        looks[mine] = np.concatenate([[-1, -1], generator.beat_due_ns])[before]
    return looks


def steps_table(trace: Trace) -> pd.DataFrame:
    """One row a step of the engine: what it ran, the state around it, and the time of each part, in ns."""
    steps = trace.steps
    table = pd.DataFrame(
        {
            "step": steps["seq"].astype(np.int64),
            "flags": steps["code"].astype(np.int64),
            **{n: steps[n].astype(np.int64) for n in ("running", "waiting", "free_blocks", "padded")},
            "schedule_ns": steps["schedule_ns"],
        }
    ).set_index("step")
    # vLLM's scheduler does not know it yet: its workers record it.
    prepared = trace.spans_of(Span.INPUT_PREP)
    batch = pd.Series(prepared["n"].astype(np.int64) & _PADDED, prepared["step"]).groupby(level=0).max()
    table["padded"] = np.maximum(table["padded"], batch.reindex(table.index, fill_value=0))
    loads = trace.step_loads.set_index("step").astype(np.int64)
    table["requests"] = loads["prompts"] + loads["decoding"]
    table["prompt_tokens"] = loads.loc[loads["prompts"] > 0, "prompt_tokens"]
    table["decode_tokens"] = loads.loc[loads["decoding"] > 0, "decode_tokens"]
    for code in Span:
        if FIRST_STEP_CODE <= code < FIRST_PROCESS_CODE and len(rows := trace.spans_of(code)):
            spans = pd.DataFrame({n: rows[n] for n in ("step", "start", "end")}).groupby("step")
            table[f"{code.name.lower()}_start_ns"] = spans["start"].min()
            table[f"{code.name.lower()}_end_ns"] = spans["end"].max()
    return table.sort_index().reset_index()


def read_table(path: Path, **how: Any) -> pd.DataFrame:
    """A Parquet file as ``pandas.read_parquet`` gives it with these words.

    Raises OSError, also for one that says of itself that it fills half of this machine's memory; ValueError.
    """
    check_table(path)
    return pd.read_parquet(path, **how)


def table_in(folder: Path, name: str, **how: Any) -> pd.DataFrame:
    """A table of an analysed run, such as ``gaps``; empty where it has none. Raises as ``read_table``.

    Read by one thread: several take five times the CPU time, and more memory.
    """
    path = folder / f"{name}.parquet"
    return read_table(path, use_threads=False, **how) if path.exists() else pd.DataFrame()


def check_table(path: Path) -> None:
    """Raises as ``read_table``, before anything is unpacked."""
    with open_plain(path) as file:
        footer = pq.read_metadata(file)
    groups = (footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    size = max(sum(groups), _CELL_BYTES * footer.num_rows * footer.num_columns)
    if size > memory_bytes() // 2:
        text = f"unpacked it takes {size >> 30:,} GiB, more than half of this machine's memory"
        raise OSError(errno.EFBIG, text, str(path))


def write_table(path: Path, table: pd.DataFrame, about: Mapping[str, str] | None = None) -> None:
    """A table as a Parquet file; ``about`` is kept in its ``attrs``.

    By blocks, since a table of gaps is most of a large run's memory; but one with a column of objects at once, whose
    type all of its rows tell. Categories are written as texts, integers (stamps, most of them) as differences.
    """
    rows = max(len(table), 1) if any(map(is_object_dtype, table.dtypes)) else _ROWS
    plain = _plain(table[:rows])
    plain.attrs = {"provenance": dict(about)} if about else {}
    first = pa.Table.from_pandas(plain, preserve_index=False)
    if about:  # as pandas would write it
        first = first.replace_schema_metadata({**first.schema.metadata, "PANDAS_ATTRS": json.dumps(plain.attrs)})
    schema = first.schema
    whole = {field.name: "DELTA_BINARY_PACKED" for field in schema if pa.types.is_integer(field.type)}
    others = [field.name for field in schema if field.name not in whole]
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=others, column_encoding=whole) as writer:
        writer.write_table(first)
        for at in range(rows, len(table), rows):
            writer.write_table(pa.Table.from_pandas(_plain(table[at : at + rows]), schema, preserve_index=False))


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """The table with texts in place of categories, and whole numbers of eight bytes."""
    kinds = {name: kind for name, kind in table.dtypes.items() if isinstance(kind, pd.CategoricalDtype)}
    texts = {name: pd.array(kind.categories, "str").take(table[name].cat.codes.to_numpy(), allow_fill=True)
             for name, kind in kinds.items()}  # fmt: skip
    return table.assign(**texts, **{name: table[name].astype(np.int64) for name in table.select_dtypes(np.int32)})
