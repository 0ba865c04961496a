"""One request as the client saw it on the wire: stamps, outcome, and the raw bytes of the answer with their arrival.

The fields of ``RequestRecord`` are the one table of what is known of a request: the layout on disk, the columns of
requests.parquet that come straight from the wire, and the table in docs/records.md are read from it.

A record is carried in BLOB frames: code ``ISSUED`` when a request leaves, code ``FINISHED`` when its fate is known. A
request with the first and without the second was in flight when its process died: its outcome is LOST.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from gapmeter_probe.records import Outcome
from numpy.typing import NDArray

ISSUED, FINISHED = 1, 2
MOST_ERROR_BYTES = 4096


class Flag(IntFlag):
    """How the request travelled."""

    REUSED = 1  # on a connection that was open before it
    TLS = 2
    RESENT = 4  # an idle connection closed as we wrote to it: sent once more on a new one (``attempt`` 1)
    CLOSE_DELIMITED = 8  # the body ended with the connection
    KERNEL = 16  # the kernel stamped what arrived: ``chunk_wait_ns`` is there
    WAITED = 32  # for room in the socket, from ``write_ns`` to ``sent_ns``: the network or the server took it in pieces


Ints = NDArray[np.int64]
Table = NDArray[np.void]

NO_FLAG = Flag(0)
_NO_STAMPS = np.empty(0, np.int64)
_NO_SIZES = np.empty(0, np.uint32)


class Stored(NamedTuple):
    """How a field is kept. ``code``: its struct code in the record's head; of a text, bytes or an array, its length's.

    ``column``: its name in requests.parquet, "" where it is not there as it stands.
    """

    code: str
    text: str
    column: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """Stamps are CLOCK_MONOTONIC ns, 0 where the thing did not happen. Filled by the client, and then left alone."""

    index: Annotated[int, Stored("I", "place in the whole plan", "index")]
    worker: Annotated[int, Stored("I", "generator process that issued it", "worker")] = 0
    attempt: Annotated[int, Stored("I", "1 where it was sent again (RESENT), else 0", "attempt")] = 0
    status: Annotated[int, Stored("I", "HTTP status; 0: no HTTP answer", "status")] = 0
    outcome: Annotated[Outcome, Stored("I", "how it ended on the wire")] = Outcome.LOST
    prompt_tokens: Annotated[int, Stored("I", "prompt tokens asked for", "prompt_tokens_asked")] = 0
    output_tokens: Annotated[int, Stored("I", "output tokens asked for", "output_tokens_asked")] = 0
    connection: Annotated[int, Stored("I", "number of its connection in its process, from 1")] = 0
    flags: Annotated[
        Flag,
        Stored("I", "how it travelled: REUSED 1, TLS 2, RESENT 4, CLOSE_DELIMITED 8, KERNEL 16, WAITED 32", "flags"),
    ] = NO_FLAG
    request_id: Annotated[str, Stored("I", "the `x-request-id` that went out", "request_id")]
    error: Annotated[str, Stored("I", "what went wrong, at most 4 KiB", "error")] = ""
    chunk_ns: Annotated[NDArray[np.int64], Stored("I", "when each piece of the body was read")] = field(
        default_factory=lambda: _NO_STAMPS
    )
    chunk_bytes: Annotated[NDArray[np.uint32], Stored("", "bytes of each piece, as many as `chunk_ns`")] = field(
        default_factory=lambda: _NO_SIZES
    )
    chunk_wait_ns: Annotated[
        NDArray[np.uint32],
        Stored("", "how long each had lain in the kernel by then, 0 where that is not known; only with KERNEL"),
    ] = field(default_factory=lambda: _NO_SIZES)
    body: Annotated[bytes, Stored("I", "the entity, transfer coding removed")] = b""
    retry: Annotated[int, Stored("H", "how often the same `index` had been issued before and failed", "retry")] = 0
    turn: Annotated[int, Stored("H", "place in its conversation, from 1; 0: in none", "turn")] = 0
    due_ns: Annotated[int, Stored("q", "when this attempt was due", "due_ns")] = 0
    connect_start_ns: Annotated[
        int, Stored("q", "it lacked a connection (0: one was open); if RESENT, the lost write", "connect_start_ns")
    ] = 0
    connect_end_ns: Annotated[int, Stored("q", "it was open, its TLS handshake done", "connect_end_ns")] = 0
    write_ns: Annotated[int, Stored("q", "just before the last write call", "write_ns")] = 0
    sent_ns: Annotated[int, Stored("q", "just after it returned", "sent_ns")] = 0
    first_byte_ns: Annotated[int, Stored("q", "first read of the answer, head included", "first_byte_ns")] = 0
    end_ns: Annotated[int, Stored("q", "its fate was known", "end_ns")] = 0

    def forget_answer(self) -> None:
        """Let go of what takes its memory."""
        self.body, self.chunk_ns, self.chunk_bytes, self.chunk_wait_ns = b"", _NO_STAMPS, _NO_SIZES, _NO_SIZES

    @property
    def handed_ns(self) -> int:
        """When the load tester had done its part, and the rest was the network's."""
        return self.write_ns if self.flags & Flag.WAITED else self.sent_ns

    @property
    def arrival_ns(self) -> NDArray[np.int64]:
        """When each piece of the body was here: in the kernel where it said so, else when we read it."""
        return self.chunk_ns - self.chunk_wait_ns if len(self.chunk_wait_ns) else self.chunk_ns


FIELDS: dict[str, Stored] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(RequestRecord, include_extras=True).items()
}
COLUMNS = tuple(stored.column for stored in FIELDS.values() if stored.column)
STAMPS = tuple(name for name, stored in FIELDS.items() if stored.code == "q")
# The head, a multiple of 8 so that the stamps behind it lie aligned: numbers, four lengths, numbers.
_HEAD = struct.Struct("<" + "".join(stored.code for stored in FIELDS.values()))
# The same as a table; of a text, an array or the body it has the length.
HEAD_DTYPE = np.dtype(
    [(name, {"I": "<u4", "H": "<u2", "q": "<i8"}[stored.code]) for name, stored in FIELDS.items() if stored.code]
)
_NAMES = tuple(FIELDS)
_FIRST, _LAST = _NAMES[: _NAMES.index("request_id")], _NAMES[_NAMES.index("body") + 1 :]
_NUMBERS = _FIRST + _LAST
_FLAGS = _FIRST.index("flags")
_first, _last = attrgetter(*_FIRST), attrgetter(*_LAST)
_in_columns = attrgetter(*(name for name, stored in FIELDS.items() if stored.column))


def encode(record: RequestRecord) -> list[bytes]:
    """The payload of a BLOB frame, in pieces. An error text beyond 4 KiB is cut."""
    name, error = record.request_id.encode(), record.error.encode()[:MOST_ERROR_BYTES]
    lengths = len(name), len(error), len(record.chunk_ns), len(record.body)
    head = _HEAD.pack(*_first(record), *lengths, *_last(record))
    waits = record.chunk_wait_ns.tobytes()
    return [head, record.chunk_ns.tobytes(), record.chunk_bytes.tobytes(), waits, name, error, record.body]


def decode(payload: bytes | memoryview) -> RequestRecord:
    """The record in a BLOB frame's payload. Raises ValueError when it is not a whole one.

    Its arrays and its body are copies: they outlive the file that ``payload`` may point into.
    """
    data = bytes(payload)
    values = _head(data)
    name, error, chunks, body = values[len(_FIRST) : -len(_LAST)]
    waits = chunks if values[_FLAGS] & Flag.KERNEL else 0
    at = _HEAD.size + 12 * chunks + 4 * waits
    if len(data) < at + name + error + body:
        raise ValueError("a request record is cut off")
    text = at + name + error
    record = RequestRecord(
        request_id=data[at : at + name].decode(),
        error=data[at + name : text].decode(errors="replace"),
        chunk_ns=np.frombuffer(data, np.int64, chunks, _HEAD.size),
        chunk_bytes=np.frombuffer(data, np.uint32, chunks, _HEAD.size + 8 * chunks),
        chunk_wait_ns=np.frombuffer(data, np.uint32, waits, _HEAD.size + 12 * chunks),
        body=data[text : text + body],
        **dict(zip(_NUMBERS, values[: len(_FIRST)] + values[-len(_LAST) :], strict=True)),
    )
    record.outcome, record.flags = Outcome(record.outcome), Flag(record.flags)
    return record


def _head(payload: bytes) -> tuple[Any, ...]:
    if len(payload) < _HEAD.size:
        raise ValueError(f"{len(payload)} bytes are too few for a request record")
    return _HEAD.unpack_from(payload)


def request_id_of(payload: bytes) -> str:
    """The id of the record in a BLOB frame's payload. Raises ValueError when it is not a whole one."""
    values = _head(payload)
    name, _, chunks, _ = values[len(_FIRST) : -len(_LAST)]
    at = _HEAD.size + (16 if values[_FLAGS] & Flag.KERNEL else 12) * chunks
    return bytes(payload[at : at + name]).decode()


@dataclass(frozen=True, slots=True)
class Block:
    """Records that ``data`` holds, an entry each: from where to where, their heads, and where what follows begins.

    ``waited``: whether the kernel's stamps are there.
    """

    data: bytes
    begins: Ints
    ends: Ints
    heads: Table
    request_ids: list[str]
    waited: NDArray[np.bool_]
    stamps_at: Ints
    texts_at: Ints
    bodies_at: Ints

    @classmethod
    def of(cls, data: bytes, begins: Ints, ends: Ints) -> Block:
        """The payloads of BLOB frames as a block. Raises ValueError when ``decode`` would for one of them."""
        stamps_at = begins + HEAD_DTYPE.itemsize
        if (stamps_at > ends).any():
            raise ValueError("too few bytes for a request record")
        heads = np.frombuffer(b"".join(_between(data, begins, stamps_at)), HEAD_DTYPE)
        if not np.isin(heads["outcome"], list(Outcome)).all():
            raise ValueError("a request record with an unknown outcome")
        waited = (heads["flags"] & Flag.KERNEL) > 0
        texts_at = stamps_at + np.where(waited, 16, 12) * heads["chunk_ns"]
        errors_at = texts_at + heads["request_id"]
        bodies_at = errors_at + heads["error"]
        if (bodies_at + heads["body"] > ends).any():
            raise ValueError("a request record is cut off")
        request_ids = [text.decode() for text in _between(data, texts_at, errors_at)]
        return cls(data, begins, ends, heads, request_ids, waited, stamps_at, texts_at, bodies_at)

    @classmethod
    def joined(cls, payloads: Sequence[bytes]) -> Block:
        """The same of payloads that lie anywhere."""
        sizes = np.array([len(payload) for payload in payloads], np.int64)
        ends = np.cumsum(sizes)
        return cls.of(b"".join(payloads), ends - sizes, ends)

    def record(self, number: int) -> RequestRecord:
        return decode(self.data[self.begins[number] : self.ends[number]])

    def errors(self) -> list[str]:
        errors = _between(self.data, self.bodies_at - self.heads["error"], self.bodies_at)
        return [text.decode(errors="replace") for text in errors]

    def waits_ns(self) -> list[NDArray[np.uint32]]:
        """``chunk_wait_ns`` of each."""
        counts = np.where(self.waited, self.heads["chunk_ns"], 0)
        waits = _between(self.data, self.texts_at - 4 * counts, self.texts_at)
        return split(np.frombuffer(b"".join(waits), np.uint32), counts)


def _between(data: bytes, begins: Ints, ends: Ints) -> list[bytes]:
    return [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def split(values: NDArray[Any], counts: Ints) -> list[NDArray[Any]]:
    """The values in parts, so many each."""
    ends = np.cumsum(counts)
    return [values[at:end] for at, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)]


def columns(record: RequestRecord) -> dict[str, Any]:
    """What requests.parquet takes from the record as it stands, by column; None for a stamp of what did not happen."""
    values: dict[str, Any] = dict(zip(COLUMNS, _in_columns(record), strict=True))
    for name in STAMPS:
        if not values[name]:
            values[name] = None
    return values


def on_clock(record: RequestRecord, offset_ns: int) -> RequestRecord:
    """The record as our clock would have stamped it; ``offset_ns`` is its worker's clock minus ours."""
    if not offset_ns:
        return record
    stamps: dict[str, Any] = {name: at - offset_ns for name in STAMPS if (at := getattr(record, name))}
    return replace(record, **stamps, chunk_ns=record.chunk_ns - offset_ns)


def as_read(record: RequestRecord) -> RequestRecord:
    """The record without the kernel's stamps: what arrived did so when we read it."""
    return replace(record, chunk_wait_ns=_NO_SIZES, flags=record.flags & ~Flag.KERNEL)


def trace_ids(request_id: str) -> tuple[int, int]:
    """Trace id (128 bits) and id of the caller's span (64 bits): the request's id decides them. Never 0.

    So the trace context (W3C Trace Context, level 1) of a request needs no record of its own.
    """
    digest = hashlib.sha256(b"gapmeter trace " + request_id.encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def traceparent(request_id: str) -> str:
    """The header's value: version 00, sampled."""
    trace, span = trace_ids(request_id)
    return f"00-{trace:032x}-{span:016x}-01"
