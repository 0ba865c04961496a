"""Reads a record file into numpy tables, whether its process closed it or was killed."""

from __future__ import annotations

import json
import mmap
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import numpy as np
from gapmeter_probe.records import (
    BLOB,
    DEVICE_PARTS,
    EMIT,
    FILE_HEADER,
    HEAD,
    JSON,
    MAGIC,
    REQUEST,
    SCHEMA_VERSION,
    STEP,
    Kind,
)
from numpy.typing import NDArray

from gapmeter.records.compression import open_record
from gapmeter.records.request import FINISHED, RequestRecord, decode

Table = NDArray[np.void]

_BLOCK = 1 << 24
_HEAD = [("size", "<u4"), ("kind", "<u2"), ("code", "<u2")]
SPAN_DTYPE = np.dtype(
    [*_HEAD, ("ref", "<u4"), ("n", "<u4"), ("queued_ns", "<i8"), ("start_ns", "<i8"), ("end_ns", "<i8")]
)
COUNTS_DTYPE = np.dtype(
    [*_HEAD, ("ref", "<u4"), ("prompt", "<u4"), ("output", "<u4"), ("cached", "<u4"), ("at_ns", "<i8")]
)
STEP_DTYPE = np.dtype(
    [
        *_HEAD, ("seq", "<u4"), ("running", "<u4"), ("waiting", "<u4"), ("free_blocks", "<u4"), ("padded", "<u4"),
        ("entries", "<u4"), ("cpu_ns", "<i8"), ("schedule_ns", "<i8"), ("switches", "<u4"), ("spare", "<u4"),
    ]
)  # fmt: skip
ENTRY_DTYPE = np.dtype([("ref", "<u4"), ("tokens", "<u4"), ("before", "<u4"), ("cached", "<u4"), ("flags", "<u4")])
DEVICE_DTYPE = np.dtype(
    [*_HEAD, ("seq", "<u4"), ("anchor", "<u4"),
     *((f"{part}_{clock}_ns", "<i8") for part in DEVICE_PARTS for clock in ("host", "device"))]
)  # fmt: skip
EMISSION_DTYPE = np.dtype([("ref", "<u4"), ("tokens", "<u4")])


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One process's records. Tables are numpy structured arrays in the order written.

    ``entries`` carry the sequence number of their step in ``entry_step``, ``emissions`` theirs in ``emission_step``
    and the emission's stamp in ``emission_ns``.
    """

    path: str
    process: dict[str, Any]
    engine_ids: dict[int, str]
    client_ids: dict[int, str]
    spans: Table
    counts: Table
    steps: Table
    entries: Table
    entry_step: NDArray[np.int64]
    emissions: Table
    emission_step: NDArray[np.int64]
    emission_ns: NDArray[np.int64]
    device: Table
    notes: list[dict[str, Any]]
    blobs: list[tuple[int, bytes]]
    complete: bool
    dropped: int

    def requests(self, code: int = FINISHED) -> list[RequestRecord]:
        """A generator's records, FINISHED or ISSUED, in the order written. Raises ValueError for one that is none."""
        return [decode(payload) for kind, payload in self.blobs if kind == code]


class NotRecords(ValueError):
    """The file is not a record file of a schema version this reader knows."""


def frames(data: bytes | mmap.mmap, start: int = FILE_HEADER.size) -> tuple[list[tuple[int, int]], int, bool]:
    """(offset, kind) of every whole frame from ``start``, where the next one will begin, and whether END was met."""
    whole: list[tuple[int, int]] = []
    at, length, unpack = start, len(data), HEAD.unpack_from
    while at + HEAD.size <= length:
        size, kind, _ = unpack(data, at)
        if size < HEAD.size or at + size > length or size & 7:
            break
        if kind == Kind.END:
            return whole, at, True
        whole.append((at, kind))
        at += size
    return whole, at, False


def read_records(path: str | os.PathLike[str], take: Callable[[int, bytes], None] | None = None) -> RecordFile:
    """Read one file.

    With ``take``, the file is read block by block, and what ``blobs`` would hold goes there instead, one by one; it
    raises ValueError for what is damaged. A process that was killed leaves no END mark; its records are read up to the
    last whole frame.
    Raises OSError if the file cannot be opened, NotRecords if it is something else, or damaged.
    """
    name = os.fspath(path)
    with open_record(name) as file:
        try:
            return _read(name, file.read() if take is None else _without_blobs(file, take))
        except ValueError as error:
            raise NotRecords(f"{name}: {error}") from error


def _without_blobs(file: BufferedIOBase, take: Callable[[int, bytes], None]) -> bytes:
    """The file's bytes without its BLOB frames, whose codes and payloads go to ``take``."""
    kept = bytearray(file.read(FILE_HEADER.size))
    data, size, closed = b"", _BLOCK, False
    while not closed and (more := file.read(size)):
        data += more
        whole, used, closed = frames(data, 0)
        since = 0
        for at, kind in whole:
            if kind == Kind.BLOB:
                length, _, code, payload = BLOB.unpack_from(data, at)
                take(code, data[at + BLOB.size : at + BLOB.size + payload])
                kept += data[since:at]
                since = at + length
        kept += data[since:used]
        data = data[used:]
        size = _BLOCK if whole else len(data) + _BLOCK  # a frame larger than a block
    return bytes(kept + data)


def dropped_records(path: str | os.PathLike[str]) -> int:
    """How many records found no room on the disk, as the file's own head says; 0 when there is no file."""
    try:
        with open(path, "rb") as file:
            head = file.read(FILE_HEADER.size)
    except FileNotFoundError:
        return 0
    return int(FILE_HEADER.unpack(head)[2]) if len(head) == FILE_HEADER.size else 0


def _read(name: str, data: bytes) -> RecordFile:
    if len(data) < FILE_HEADER.size:
        raise NotRecords("too short to be a record file")
    magic, version, dropped = FILE_HEADER.unpack_from(data)
    if magic != MAGIC or version != SCHEMA_VERSION:
        raise NotRecords(f"not a record file of schema version {SCHEMA_VERSION}")
    whole, _, complete = frames(data)
    by_kind: dict[int, list[int]] = defaultdict(list)
    for offset, kind in whole:
        by_kind[kind].append(offset)
    engine_ids, client_ids = _names(data, by_kind[Kind.REQUEST])
    steps = _gather(data, by_kind[Kind.STEP], STEP_DTYPE)
    entries, entry_step = _entries(data, by_kind[Kind.STEP], steps)
    emissions, emission_step, emission_ns = _emissions(data, by_kind[Kind.EMIT])
    notes = [_note(data, offset) for offset in by_kind[Kind.JSON]]
    blobs = []
    for offset in by_kind[Kind.BLOB]:
        _, _, code, length = BLOB.unpack_from(data, offset)
        blobs.append((code, data[offset + BLOB.size : offset + BLOB.size + length]))
    return RecordFile(
        path=name,
        process=notes[0] if notes else {},
        engine_ids=engine_ids,
        client_ids=client_ids,
        spans=_gather(data, by_kind[Kind.SPAN], SPAN_DTYPE),
        counts=_gather(data, by_kind[Kind.COUNTS], COUNTS_DTYPE),
        steps=steps,
        entries=entries,
        entry_step=entry_step,
        emissions=emissions,
        emission_step=emission_step,
        emission_ns=emission_ns,
        device=_gather(data, by_kind[Kind.DEVICE], DEVICE_DTYPE),
        notes=notes,
        blobs=blobs,
        complete=complete,
        dropped=dropped,
    )


def _gather(data: bytes, offsets: list[int], dtype: np.dtype[np.void]) -> Table:
    """Frames of one fixed layout as a structured array: every offset is a multiple of 8, so gather 8-byte words."""
    if offsets and offsets[-1] + dtype.itemsize > len(data):
        raise NotRecords(f"damaged at byte {offsets[-1]}")
    whole = np.frombuffer(data, dtype=np.uint8, count=len(data) // 8 * 8).reshape(-1, 8)
    rows = (np.asarray(offsets, dtype=np.int64) // 8)[:, None] + np.arange(dtype.itemsize // 8)
    return np.ascontiguousarray(whole[rows].reshape(len(offsets), dtype.itemsize)).view(dtype).reshape(-1)


def _names(data: bytes, offsets: list[int]) -> tuple[dict[int, str], dict[int, str]]:
    engine_ids: dict[int, str] = {}
    client_ids: dict[int, str] = {}
    for offset in offsets:
        size, _, padding, ref, engine_length = REQUEST.unpack_from(data, offset)
        body = data[offset + REQUEST.size : offset + size - padding]
        engine_ids[ref] = body[:engine_length].decode(errors="replace")
        client_ids[ref] = body[engine_length:].decode(errors="replace")
    return engine_ids, client_ids


def _entries(data: bytes, offsets: list[int], steps: Table) -> tuple[Table, NDArray[np.int64]]:
    table = _rows(data, ENTRY_DTYPE, steps["entries"].astype(np.int64), offsets, STEP.size)
    return table, np.repeat(steps["seq"].astype(np.int64), steps["entries"])


def _rows(data: bytes, dtype: np.dtype[np.void], counts: NDArray[np.int64], offsets: list[int], head: int) -> Table:
    """So many rows behind the ``head`` of each frame, as one table: all sizes are multiples of 4."""
    at = np.asarray(offsets, dtype=np.int64)
    words = np.frombuffer(data, dtype=np.uint32, count=len(data) // 4)
    short = np.flatnonzero(head + counts * dtype.itemsize > words[at // 4])
    if len(short):
        raise NotRecords(f"damaged at byte {offsets[short[0]]}")
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = (np.repeat(at + head, counts) + nth * dtype.itemsize) // 4
    return np.ascontiguousarray(words[begins[:, None] + np.arange(dtype.itemsize // 4)]).view(dtype).reshape(-1)


def _emissions(data: bytes, offsets: list[int]) -> tuple[Table, NDArray[np.int64], NDArray[np.int64]]:
    heads = [EMIT.unpack_from(data, offset)[3:6] for offset in offsets]
    seqs, counts, stamps = np.array(heads, np.int64).reshape(-1, 3).T
    table = _rows(data, EMISSION_DTYPE, counts, offsets, EMIT.size)
    return table, np.repeat(seqs, counts), np.repeat(stamps, counts)


def _note(data: bytes, offset: int) -> dict[str, Any]:
    size, _, padding, at_ns = JSON.unpack_from(data, offset)
    try:
        value = json.loads(data[offset + JSON.size : offset + size - padding])
    except ValueError:
        value = None
    return {**(value if isinstance(value, dict) else {"type": "torn"}), "at_ns": at_ns}
