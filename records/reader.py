"""Reads a record file into numpy tables, whether its process closed it or was killed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, NamedTuple

import numpy as np
from gapmeter_probe.records import BLOB, DEVICE_PARTS, FILE_HEADER, HEAD, JSON, MAGIC, REQUEST, SCHEMA_VERSION, Kind
from numpy.typing import NDArray

from gapmeter.records.compression import open_record
from gapmeter.records.request import FINISHED, Ints, RequestRecord, decode
from gapmeter.records.request import Table as Table

Take = Callable[[bytes, Ints, Ints, Ints], None]
TakeSpans = Callable[[Table, dict[int, str]], None]

_BLOCK = 1 << 22
_FEW, _MANY = 8, 4096
_MOST_REQUESTS = 1 << 28  # of a process; tables by ref have room for as many as the largest says
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
EMIT_DTYPE = np.dtype([*_HEAD, ("seq", "<u4"), ("entries", "<u4"), ("at_ns", "<i8")])
EMISSION_DTYPE = np.dtype([("ref", "<u4"), ("tokens", "<u4")])
_SPAN_HEAD = struct.pack("<IH", SPAN_DTYPE.itemsize, Kind.SPAN)
_LAYOUTS = {
    Kind.SPAN: SPAN_DTYPE, Kind.COUNTS: COUNTS_DTYPE, Kind.STEP: STEP_DTYPE, Kind.EMIT: EMIT_DTYPE,
    Kind.DEVICE: DEVICE_DTYPE,
}  # fmt: skip
_LEAST = {
    **{kind: layout.itemsize for kind, layout in _LAYOUTS.items()},
    Kind.REQUEST: REQUEST.size,
    Kind.JSON: JSON.size,
    Kind.BLOB: BLOB.size,
}  # bytes of a frame


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One process's records. Tables are numpy structured arrays in the order written.

    Each of ``steps`` has so many of ``entries`` as it says, one step's behind the other's; each of ``emits`` of
    ``emissions``.
    """

    path: str
    process: dict[str, Any]
    engine_ids: dict[int, str]
    client_ids: dict[int, str]
    spans: Table
    counts: Table
    steps: Table
    entries: Table
    emits: Table
    emissions: Table
    device: Table
    notes: list[dict[str, Any]]
    blobs: list[tuple[int, bytes]]
    complete: bool
    dropped: int

    @property
    def entry_step(self) -> NDArray[np.int32]:
        """Of each entry, the sequence number of its step."""
        return np.repeat(np.asarray(self.steps["seq"], np.int32), self.steps["entries"])

    @property
    def emission_step(self) -> NDArray[np.int32]:
        """Of each emission, the sequence number of its step."""
        return np.repeat(np.asarray(self.emits["seq"], np.int32), self.emits["entries"])

    def requests(self, code: int = FINISHED) -> list[RequestRecord]:
        """A generator's records, FINISHED or ISSUED, in the order written. Raises ValueError for one that is none."""
        return [decode(payload) for kind, payload in self.blobs if kind == code]


class NotRecords(ValueError):
    """The file is not a record file of a schema version this reader knows."""


class Frames(NamedTuple):
    """The whole frames that bytes begin with: (offset, kind) of each, but (begin, end) of spans in a row.

    ``used``: where the next frame will begin. ``closed``: END was met.
    """

    others: Ints
    spans: Ints
    used: int
    closed: bool


def frames(data: bytes) -> Frames:
    """Most are spans, many in a row: where some came, as many as follow are found at once."""
    others, spans = list[tuple[int, int]](), list[tuple[int, int]]()
    at, length, unpack, startswith = 0, len(data), HEAD.unpack_from, data.startswith
    enough = _FEW  # spans met one after the other that make it worth while to look for more
    closed = False
    while at + HEAD.size <= length:
        if startswith(_SPAN_HEAD, at):
            begin, last = at, min(at + enough * SPAN_DTYPE.itemsize, length) - SPAN_DTYPE.itemsize
            while at <= last and startswith(_SPAN_HEAD, at):
                at += SPAN_DTYPE.itemsize
            if at == begin:
                break
            if at > last:
                more = _spans_from(data, at)
                enough = _FEW if more > 4 * enough else min(2 * enough, _MANY)
                at += more * SPAN_DTYPE.itemsize
            spans.append((begin, at))
            continue
        size, kind, _ = unpack(data, at)
        if size < HEAD.size or at + size > length or size & 7:
            break
        if kind == Kind.END:
            closed = True
            break
        if kind == Kind.SPAN:  # of a length that no probe writes
            spans.append((at, at + SPAN_DTYPE.itemsize))
        others.append((at, kind))
        at += size
    return Frames(np.array(others, np.int64).reshape(-1, 2), np.array(spans, np.int64).reshape(-1, 2), at, closed)


def _spans_from(data: bytes, at: int) -> int:
    """How many spans follow one another from ``at``, at most ``_MANY``."""
    count = min((len(data) - at) // SPAN_DTYPE.itemsize, _MANY)
    heads = np.frombuffer(data, "<u4", count * SPAN_DTYPE.itemsize // 4, at).reshape(count, SPAN_DTYPE.itemsize // 4)
    others = np.flatnonzero((heads[:, 0] != SPAN_DTYPE.itemsize) | (heads[:, 1] & 0xFFFF != Kind.SPAN))
    return int(others[0]) if len(others) else count


def read_records(
    path: str | os.PathLike[str], take: Take | None = None, take_spans: TakeSpans | None = None
) -> RecordFile:
    """Read one file, block by block.

    With ``take``, what ``blobs`` would hold goes there instead, block by block: bytes, the code of each payload in
    them, and from where to where it is; it raises ValueError for what is damaged. With ``take_spans``, each block's
    spans go there, with the client's ids of the requests that it names. A process that was killed leaves no END mark;
    its records are read up to the last whole frame.
    Raises OSError if the file cannot be opened, NotRecords if it is something else, or damaged.
    """
    name = os.fspath(path)
    blobs = list[tuple[int, bytes]]()

    def keep(data: bytes, codes: Ints, begins: Ints, ends: Ints) -> None:
        every = zip(codes.tolist(), begins.tolist(), ends.tolist(), strict=True)
        blobs.extend((code, data[begin:end]) for code, begin, end in every)

    with open_record(name) as file:
        try:
            reader = _Reader(file.read(FILE_HEADER.size))
            reader.read(file, take or keep, take_spans)
            return reader.file(name, blobs)
        except ValueError as error:
            raise NotRecords(f"{name}: {error}") from error


def dropped_records(path: str | os.PathLike[str]) -> int:
    """How many records found no room on the disk, as the file's own head says; 0 when there is no file."""
    try:
        with open(path, "rb") as file:
            head = file.read(FILE_HEADER.size)
    except FileNotFoundError:
        return 0
    return int(FILE_HEADER.unpack(head)[2]) if len(head) == FILE_HEADER.size else 0


class _Reader:
    """Collects a file's records, the frames of a kind behind one another: a file need not be in memory as a whole."""

    def __init__(self, head: bytes) -> None:
        if len(head) < FILE_HEADER.size:
            raise NotRecords("too short to be a record file")
        magic, version, self.dropped = FILE_HEADER.unpack(head)
        if magic != MAGIC or version != SCHEMA_VERSION:
            raise NotRecords(f"not a record file of schema version {SCHEMA_VERSION}")
        self.tables = {kind: bytearray() for kind in _LAYOUTS}
        self.entries, self.emissions = bytearray(), bytearray()
        self.engine_ids: dict[int, str] = {}
        self.client_ids: dict[int, str] = {}
        self.notes: list[dict[str, Any]] = []
        self.complete = False

    def read(self, file: BufferedIOBase, take: Take, take_spans: TakeSpans | None) -> None:
        """The rest of the file. Raises NotRecords, and what ``take`` raises."""
        data, size, before = b"", _BLOCK, FILE_HEADER.size
        while not self.complete and (more := file.read(size)):
            data += more
            whole = frames(data)
            named = self._sort(data, whole, before, take)
            if take_spans is not None:
                take_spans(np.frombuffer(self.tables[Kind.SPAN], SPAN_DTYPE), named)
                self.tables[Kind.SPAN] = bytearray()
            data, self.complete = data[whole.used :], whole.closed
            before += whole.used
            size = _BLOCK if whole.used else len(data) + _BLOCK  # a frame larger than a block

    def _sort(self, data: bytes, whole: Frames, before: int, take: Take) -> dict[int, str]:
        """Returns the client's ids of the requests that are named here."""
        offsets, kinds = whole.others.T
        of = {kind: offsets[kinds == kind] for kind in Kind}
        words = np.frombuffer(data, np.uint32, len(data) // 4)
        for kind, least in _LEAST.items():
            short = np.flatnonzero(words[of[kind] // 4] < least)
            if len(short):
                raise NotRecords(f"damaged at byte {before + of[kind][short[0]]}")
        view = memoryview(data)
        _append(self.tables[Kind.SPAN], view, whole.spans[:, 0], whole.spans[:, 1])
        for kind in (Kind.COUNTS, Kind.STEP, Kind.EMIT, Kind.DEVICE):
            _append(self.tables[kind], view, of[kind], of[kind] + _LAYOUTS[kind].itemsize)
        for kind, counted_at, layout, rows in (
            (Kind.STEP, 7, ENTRY_DTYPE, self.entries), (Kind.EMIT, 3, EMISSION_DTYPE, self.emissions)
        ):  # fmt: skip
            at, head = of[kind], _LEAST[kind]
            counts = words[at // 4 + counted_at].astype(np.int64)
            short = np.flatnonzero(head + counts * layout.itemsize > words[at // 4])
            if len(short):
                raise NotRecords(f"damaged at byte {before + at[short[0]]}")
            _append(rows, view, at + head, at + head + counts * layout.itemsize)
        named = dict[int, str]()
        for offset in of[Kind.REQUEST].tolist():
            size, _, padding, ref, engine_length = REQUEST.unpack_from(data, offset)
            if ref > _MOST_REQUESTS:
                raise NotRecords(f"damaged at byte {before + offset}")
            body = data[offset + REQUEST.size : offset + size - padding]
            self.engine_ids[ref] = body[:engine_length].decode(errors="replace")
            named[ref] = body[engine_length:].decode(errors="replace")
        self.client_ids |= named
        self.notes += [_note(data, offset) for offset in of[Kind.JSON].tolist()]
        if len(at := of[Kind.BLOB]):
            lengths = words[(at // 4)[:, None] + (2, 3)].view(np.uint64).reshape(-1)
            long = np.flatnonzero(lengths > words[at // 4] - np.uint32(BLOB.size))
            if len(long):
                raise NotRecords(f"damaged at byte {before + at[long[0]]}")
            take(data, words[at // 4 + 1] >> 16, at + BLOB.size, at + BLOB.size + lengths.astype(np.int64))
        return named

    def file(self, name: str, blobs: list[tuple[int, bytes]]) -> RecordFile:
        """What was read."""
        tables = {kind: np.frombuffer(self.tables[kind], layout) for kind, layout in _LAYOUTS.items()}
        return RecordFile(
            path=name,
            process=self.notes[0] if self.notes else {},
            engine_ids=self.engine_ids,
            client_ids=self.client_ids,
            spans=tables[Kind.SPAN],
            counts=tables[Kind.COUNTS],
            steps=tables[Kind.STEP],
            entries=np.frombuffer(self.entries, ENTRY_DTYPE),
            emits=tables[Kind.EMIT],
            emissions=np.frombuffer(self.emissions, EMISSION_DTYPE),
            device=tables[Kind.DEVICE],
            notes=self.notes,
            blobs=blobs,
            complete=self.complete,
            dropped=self.dropped,
        )


def _append(rows: bytearray, data: memoryview, begins: Ints, ends: Ints) -> None:
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        rows += data[begin:end]


def _note(data: bytes, offset: int) -> dict[str, Any]:
    size, _, padding, at_ns = JSON.unpack_from(data, offset)
    try:
        value = json.loads(data[offset + JSON.size : offset + size - padding])
    except (ValueError, RecursionError):
        value = None
    return {**(value if isinstance(value, dict) else {"type": "torn"}), "at_ns": at_ns}
