"""One request as the client saw it on the wire: stamps, outcome, and the raw bytes of the answer with their arrival.

Carried in BLOB frames: code ``ISSUED`` when a request leaves, code ``FINISHED`` when its fate is known. A request with
the first and without the second was in flight when its process died: its outcome is LOST.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from enum import IntFlag

import numpy as np
from gapmeter_probe.records import Outcome
from numpy.typing import NDArray

ISSUED, FINISHED = 1, 2
MOST_ERROR_BYTES = 4096
_HEAD = struct.Struct("<13I2H7q")  # a multiple of 8, so that the stamps after it lie aligned


class Flag(IntFlag):
    """How the request travelled."""

    REUSED = 1  # on a connection that was open before it
    TLS = 2
    RESENT = 4  # an idle connection closed as we wrote to it: sent once more on a new one (``attempt`` 1)
    CLOSE_DELIMITED = 8  # the body ended with the connection


NO_FLAG = Flag(0)


@dataclass(frozen=True, slots=True)
class WireRecord:
    """Stamps are CLOCK_MONOTONIC ns, 0 where the thing did not happen.

    ``index`` is the request's place in the whole plan. ``connect_*`` are 0 when the connection was open already, and
    include the TLS handshake; of a request that was sent again (RESENT) they begin with the write that was lost.
    ``write_ns`` is just before the last write call, ``sent_ns`` just after it returned,
    ``first_byte_ns`` the first read of the answer, head included. ``chunk_ns`` (int64) and ``chunk_bytes`` (uint32) say
    when each piece of ``body`` (the entity, transfer coding removed) was read and how long it is.
    ``prompt_tokens`` and ``output_tokens`` are what was asked. ``status`` 0: no HTTP answer. ``retry``: how often the
    same request (the same ``index``) had been issued before and failed; ``due_ns`` is this try's own. ``turn`` is the
    place in its conversation, from 1; 0 where there is none.
    """

    index: int
    request_id: str
    worker: int
    due_ns: int
    attempt: int = 0
    connect_start_ns: int = 0
    connect_end_ns: int = 0
    write_ns: int = 0
    sent_ns: int = 0
    first_byte_ns: int = 0
    end_ns: int = 0
    status: int = 0
    outcome: Outcome = Outcome.LOST
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    connection: int = 0
    flags: Flag = NO_FLAG
    retry: int = 0
    turn: int = 0
    chunk_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    chunk_bytes: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    body: bytes = b""


def on_clock(record: WireRecord, offset_ns: int) -> WireRecord:
    """The record as our clock would have stamped it; ``offset_ns`` is its worker's clock minus ours."""
    if not offset_ns:
        return record
    due, opened, connected, write, sent, first, end = (
        at - offset_ns if at else 0
        for at in (
            record.due_ns, record.connect_start_ns, record.connect_end_ns, record.write_ns, record.sent_ns,
            record.first_byte_ns, record.end_ns,
        )
    )  # fmt: skip
    return replace(
        record, due_ns=due, connect_start_ns=opened, connect_end_ns=connected, write_ns=write, sent_ns=sent,
        first_byte_ns=first, end_ns=end, chunk_ns=record.chunk_ns - offset_ns,
    )  # fmt: skip


def encode(record: WireRecord) -> list[bytes]:
    """The payload of a BLOB frame, in pieces. An error text beyond 4 KiB is cut."""
    name, error = record.request_id.encode(), record.error.encode()[:MOST_ERROR_BYTES]
    head = _HEAD.pack(
        record.index, record.worker, record.attempt, record.status, record.outcome, record.prompt_tokens,
        record.output_tokens, record.connection, record.flags, len(name), len(error), len(record.chunk_ns),
        len(record.body), record.retry, record.turn, record.due_ns, record.connect_start_ns, record.connect_end_ns,
        record.write_ns, record.sent_ns, record.first_byte_ns, record.end_ns,
    )  # fmt: skip
    return [head, record.chunk_ns.tobytes(), record.chunk_bytes.tobytes(), name, error, record.body]


def decode(payload: bytes | memoryview) -> WireRecord:
    """The record in a BLOB frame's payload. Raises ValueError when it is not a whole one.

    Its arrays and its body are copies: they outlive the file that ``payload`` may point into.
    """
    data = bytes(payload)
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few for a wire record")
    (
        index, worker, attempt, status, outcome, prompt, output, connection, flags, name, error, chunks, body,
        retry, turn, due, connect_start, connect_end, write, sent, first_byte, end,
    ) = _HEAD.unpack_from(data)  # fmt: skip
    at = _HEAD.size + 12 * chunks
    if len(data) < at + name + error + body:
        raise ValueError("a wire record is cut off")
    text = at + name + error
    return WireRecord(
        index=index, request_id=data[at : at + name].decode(), worker=worker, due_ns=due, attempt=attempt,
        connect_start_ns=connect_start, connect_end_ns=connect_end, write_ns=write, sent_ns=sent,
        first_byte_ns=first_byte, end_ns=end, status=status, outcome=Outcome(outcome),
        error=data[at + name : text].decode(errors="replace"), prompt_tokens=prompt, output_tokens=output,
        connection=connection, flags=Flag(flags), retry=retry, turn=turn,
        chunk_ns=np.frombuffer(data, np.int64, chunks, _HEAD.size),
        chunk_bytes=np.frombuffer(data, np.uint32, chunks, _HEAD.size + 8 * chunks), body=data[text : text + body],
    )  # fmt: skip
