"""One request on its way: what is sent, and what has come back so far."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gapmeter.records import Outcome, tracing
from gapmeter.records.wire import NO_FLAG, Flag, WireRecord

if TYPE_CHECKING:
    from gapmeter.loadgen.client import Connection

_NO_STAMPS = np.empty(0, np.int64)
_NO_SIZES = np.empty(0, np.uint32)
_NO_READS: array[int] = array("q")
_NO_MARKS: list[int] = []
_NO_PARTS: list[bytes] = []


class Opening(Protocol):
    """A connection that is being opened; an asyncio task, for instance."""

    def cancel(self) -> Any: ...


class Exchange:
    """Mutable while the request lives; ``record`` is what stays of it. Stamps are CLOCK_MONOTONIC ns.

    ``carrier`` is the connection that carries it, or what opens one, None before and after. ``retry`` counts how often
    the same request has failed before: another try is another exchange.
    """

    __slots__ = (
        "attempt", "carrier", "connect_end_ns", "connect_start_ns", "connection", "data", "done", "due_ns", "end_ns",
        "error", "first_byte_ns", "flags", "index", "marks", "outcome", "output_tokens", "parts", "prompt_tokens",
        "request_id", "retry", "sent_ns", "stamps", "status", "turn", "write_ns",
    )  # fmt: skip

    def __init__(
        self, index: int, request_id: str, data: bytes, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        self.index, self.request_id, self.data = index, request_id, data
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.retry = self.turn = 0
        self.attempt = self.due_ns = self.connect_start_ns = self.connect_end_ns = self.connection = self.status = 0
        self.write_ns = self.sent_ns = self.first_byte_ns = self.end_ns = 0
        self.outcome, self.error, self.done, self.flags = Outcome.LOST, "", False, NO_FLAG
        self.carrier: Connection | Opening | None = None
        self.stamps, self.marks, self.parts = _NO_READS, _NO_MARKS, _NO_PARTS

    def keep(self, stamps: array[int], marks: list[int], parts: list[bytes]) -> None:
        """Copy what a connection gathered: read i was at ``stamps[i]``, after it the body had ``marks[i]`` parts."""
        if stamps:
            self.first_byte_ns = stamps[0]
            self.stamps, self.marks, self.parts = stamps[:], marks[:], parts[:]

    def end(self, outcome: Outcome, error: str, at_ns: int) -> None:
        """Its fate is known."""
        self.outcome, self.error, self.end_ns, self.done = outcome, error, at_ns, True
        self.carrier = None

    def release(self) -> None:
        """Let go what was to be sent."""
        self.data = b""

    def again(self) -> Exchange:
        """Another try of a request that has failed, under an id of its own: ``ID.1``, ``ID.2`` and so on."""
        first = self.request_id.removesuffix(f".{self.retry}") if self.retry else self.request_id
        name = f"{first}.{self.retry + 1}"
        end = self.data.index(b"\r\n\r\n") + 2  # of the head's last line
        head = self.data[:end]
        for old, new in zip(_lines(self.request_id), _lines(name), strict=True):
            head = head.replace(old, new)
        data = head + self.data[end:]
        following = Exchange(self.index, name, data, self.prompt_tokens, self.output_tokens)
        following.retry, following.turn = self.retry + 1, self.turn
        return following

    def mark(self, flag: Flag) -> None:
        self.flags |= flag

    def record(self, worker: int) -> WireRecord:
        """What stays of it. Takes some 50 µs for an answer of 64 chunks: not for the moment at which it ends."""
        chunk_ns, chunk_bytes = _chunks(self.stamps, self.marks, self.parts)
        return WireRecord(
            index=self.index, request_id=self.request_id, worker=worker, due_ns=self.due_ns, attempt=self.attempt,
            connect_start_ns=self.connect_start_ns, connect_end_ns=self.connect_end_ns, write_ns=self.write_ns,
            sent_ns=self.sent_ns, first_byte_ns=self.first_byte_ns, end_ns=self.end_ns, status=self.status,
            outcome=self.outcome, error=self.error, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens,
            connection=self.connection, flags=self.flags, retry=self.retry, turn=self.turn, chunk_ns=chunk_ns,
            chunk_bytes=chunk_bytes, body=b"".join(self.parts),
        )  # fmt: skip


def _lines(request_id: str) -> tuple[bytes, bytes]:
    """The lines of a head that the id decides, with the ends of the lines around them."""
    named = f"x-request-id: {request_id}", f"traceparent: {tracing.traceparent(request_id)}"
    first, second = (f"\r\n{line}\r\n".encode() for line in named)
    return first, second


def _chunks(stamps: array[int], marks: list[int], parts: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """When each read brought how much of the body; reads that brought none (the head, an end mark) are left out."""
    if not parts:
        return _NO_STAMPS, _NO_SIZES
    total = list(accumulate(map(len, parts), initial=0))
    ends = np.array([total[mark] for mark in marks], np.int64)
    sizes = ends.copy()
    sizes[1:] -= ends[:-1]
    brought = sizes.nonzero()[0]
    return np.frombuffer(stamps, np.int64)[brought], sizes[brought].astype(np.uint32)
