"""One request on its way: what is sent, and what has come back so far."""

from __future__ import annotations

import asyncio
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recording import Outcome
from recording.wire import NO_FLAG, Flag, WireRecord

if TYPE_CHECKING:
    from loadgen.client import Connection

_NO_STAMPS = np.empty(0, np.int64)
_NO_SIZES = np.empty(0, np.uint32)


class Exchange:
    """Mutable while the request lives; ``record`` is what stays of it. Stamps are CLOCK_MONOTONIC ns.

    ``carrier`` is the connection that carries it, or the task that opens one, None before and after.
    """

    __slots__ = (
        "attempt", "body", "carrier", "chunk_bytes", "chunk_ns", "connect_end_ns", "connect_start_ns", "connection",
        "data", "done", "due_ns", "end_ns", "error", "first_byte_ns", "flags", "index", "outcome", "output_tokens",
        "prompt_tokens", "request_id", "sent_ns", "status", "write_ns",
    )  # fmt: skip

    def __init__(
        self, index: int, request_id: str, data: bytes, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        self.index, self.request_id, self.data = index, request_id, data
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.attempt = self.due_ns = self.connect_start_ns = self.connect_end_ns = self.connection = self.status = 0
        self.write_ns = self.sent_ns = self.first_byte_ns = self.end_ns = 0
        self.outcome, self.error, self.done, self.flags = Outcome.LOST, "", False, NO_FLAG
        self.carrier: Connection | asyncio.Task[None] | None = None
        self.chunk_ns: NDArray[np.int64] = _NO_STAMPS
        self.chunk_bytes: NDArray[np.uint32] = _NO_SIZES
        self.body = b""

    def keep(self, stamps: array[int], marks: list[int], parts: list[bytes]) -> None:
        """Take what a connection gathered: read i was at ``stamps[i]``, after it there were ``marks[i]`` body parts.

        Reads that brought no part of the body (the head, an end mark) leave no chunk.
        """
        if stamps:
            self.first_byte_ns = stamps[0]
        if not parts:
            return
        total = list(accumulate(map(len, parts), initial=0))
        ends = np.array([total[mark] for mark in marks], np.int64)
        sizes = ends.copy()
        sizes[1:] -= ends[:-1]
        brought = sizes.nonzero()[0]
        self.chunk_ns = np.frombuffer(stamps, np.int64)[brought]
        self.chunk_bytes = sizes[brought].astype(np.uint32)
        self.body = b"".join(parts)

    def end(self, outcome: Outcome, error: str, at_ns: int) -> None:
        """Its fate is known; what was to be sent is let go."""
        self.outcome, self.error, self.end_ns, self.done = outcome, error, at_ns, True
        self.carrier, self.data = None, b""

    def mark(self, flag: Flag) -> None:
        self.flags |= flag

    def record(self, worker: int) -> WireRecord:
        return WireRecord(
            index=self.index, request_id=self.request_id, worker=worker, due_ns=self.due_ns, attempt=self.attempt,
            connect_start_ns=self.connect_start_ns, connect_end_ns=self.connect_end_ns, write_ns=self.write_ns,
            sent_ns=self.sent_ns, first_byte_ns=self.first_byte_ns, end_ns=self.end_ns, status=self.status,
            outcome=self.outcome, error=self.error, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens,
            connection=self.connection, flags=self.flags, chunk_ns=self.chunk_ns, chunk_bytes=self.chunk_bytes,
            body=self.body,
        )  # fmt: skip
