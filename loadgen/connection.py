"""One connection on the wire: in the timed window it stamps and stores, nothing else.

It carries one request at a time. It stamps bytes as they are read and keeps the pieces of the body; what they mean is
derived after the run, from the recorded bytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

import httptools

from gapmeter.loadgen.exchange import Exchange
from gapmeter.records import Outcome
from gapmeter.records.request import Flag
from gapmeter.records.stream import parse_answer

if TYPE_CHECKING:
    from gapmeter.loadgen.client import Pool
    from gapmeter.loadgen.transport import Transport

# A reused connection that closes so soon after our write, unanswered, had been closed by the server while it idled.
# Later than that the server had the request and dropped it: that is a failure, not a stale connection.
STALE_NS = 500_000_000
CUT = "the connection was closed before the answer was complete"
_UNENDED = "the connection was closed before the body had ended, behind the answer's end mark"
_HELD_OPEN = "the server held the body open behind the answer's end mark"
_MOST_ERROR_BODY = 300
_MOST_HEAD, _MOST_ANSWER = 1 << 20, 1 << 26  # bytes: a server that sends for ever must not fill the memory
_UPGRADED = 101  # nobody had asked for that
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|arguments)":\s*"[^"]')
_END_MARK = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\] *(?:[\r\n]|$)")
_NO_STAMPS: array[int] = array("q")


class Connection:
    """One socket. A piece has two stamps: when the kernel had its bytes, and when we did, before we look at them.

    The transport sets itself as ``transport``, and where it reads with the kernel's stamps ``disorder``, which counts
    packets that came out of order.
    """

    __slots__ = (
        "_arrive", "_arrived", "_complete", "_disordered", "_exchange", "_feed", "_final", "_framed", "_headed",
        "_keep", "_location", "_mark", "_marks", "_parser", "_parts", "_pool", "_room", "_stamp", "_stamps",
        "closed", "disorder", "number", "on_body", "transport",
    )  # fmt: skip

    def __init__(self, pool: Pool, number: int) -> None:
        self._pool, self.number, self.closed = pool, number, False
        self._exchange: Exchange | None = None
        self.transport: Transport | None = None
        self._stamps, self._arrived, self._marks, self._parts = array("q"), array("q"), list[int](), list[bytes]()
        # Bound methods of C objects: the parser and ``received`` store through them without a Python frame.
        self._stamp, self._arrive, self._mark = self._stamps.append, self._arrived.append, self._marks.append
        self.disorder: Callable[[], int] | None = None
        self._disordered = 0
        self.on_body = self._parts.append
        self._room = _MOST_HEAD  # bytes that may still come
        self._complete = -1  # body parts of the complete answer, -1 until it is
        self._headed = self._framed = False  # its head has been read; its head says where the body ends
        self._location = b""  # where its head points to
        self._keep = False  # whether the connection may carry another request
        self._final = 0  # status of the complete answer, 0 until it is
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def send(self, exchange: Exchange) -> None:
        """Hand the whole request to the socket in one write."""
        assert self.transport is not None
        self._exchange, exchange.carrier, exchange.connection = exchange, self, self.number
        data = exchange.data
        exchange.write_ns = monotonic_ns()
        self.transport.write(data)
        exchange.sent_ns = monotonic_ns()

    def resume_writing(self) -> None:
        """The socket has taken the rest of a request that was too long for its buffer: only now it is sent."""
        if self._exchange is not None and not self._stamps:
            self._exchange.sent_ns = monotonic_ns()
            self._exchange.flags |= Flag.WAITED

    def received(self, data: bytes, now: int, arrived: int) -> None:
        """``now``: when we had it; ``arrived``: when the kernel did, by CLOCK_REALTIME, 0 where it does not say."""
        if self._exchange is None:  # bytes that answer nothing: this connection cannot be trusted any more
            self.close()
            return
        self._stamp(now)
        self._arrive(arrived)
        self._room -= len(data)
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._mark(len(self._parts))
            if self._complete < 0:
                self._finish(Outcome.MALFORMED, f"not HTTP: {error}: {data[:60]!r}", now)
            else:
                self._answered(now, stray=True)  # it stands behind a complete answer
            return
        self._mark(len(self._parts))
        if self._complete >= 0:
            self._answered(now)
        elif self._room < 0:
            what, most = ("answer", _MOST_ANSWER) if self._headed else ("answer's head", _MOST_HEAD)
            self._pool.give_up(self._exchange, Outcome.MALFORMED, f"the {what} is longer than {most >> 20} MB")
        elif b"[DONE]" in data or self._is_cut_mark():
            self._pool.await_end(self._exchange, now)

    def connection_lost(self, error: Exception | None) -> None:
        now = monotonic_ns()
        self.closed = True
        exchange = self._exchange
        if exchange is None:
            self._pool.forget(self)
        elif self._is_stale(exchange, now):
            self._exchange = None
            self._pool.resend(exchange)
        elif error is None and self._headed and not self._framed:
            exchange.flags |= Flag.CLOSE_DELIMITED
            self._complete = len(self._parts)
            self._answered(now)
        elif self._is_marked():
            self._finish(Outcome.OK, _UNENDED, now)
        else:
            self._finish(Outcome.CUT, f"{CUT}: {error}" if error else CUT, now)
        self._parser = self.transport = self.disorder = None  # they hold on to us: nobody collects cycles here
        del self._feed

    def last_text_ns(self) -> int:
        """When the last read with text came; 0 if none is seen, also where each text is cut across two reads."""
        for k in range(len(self._stamps) - 1, -1, -1):
            if _TEXT.search(b"".join(self._parts[self._marks[k - 1] if k else 0 : self._marks[k]])):
                return self._stamps[k]
        return 0

    def last_token_ns(self) -> int:
        """When the last token came, 0 before the first. Parses all that is there: not to be called for each chunk."""
        if self._exchange is None:
            return 0
        self._exchange.keep(self._stamps, self._arrived, self._marks, self._parts)
        return max(parse_answer(self._exchange.collect()).chunk_ns.tolist(), default=0)

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """End the request that is under way from our side; what has arrived of its answer is kept."""
        self._finish(outcome, reason, monotonic_ns())

    def leave_unended(self) -> bool:
        """End the request if its answer's end mark has come; whether it had."""
        if found := self._is_marked():
            self._finish(Outcome.OK, _HELD_OPEN, monotonic_ns())
        return found

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._headed = self._framed = self._keep = False
        self._location = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-length" or (lowered == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        elif lowered == b"location":
            self._location = value

    def on_headers_complete(self) -> None:
        if self._status() >= 200:  # an interim answer (100 Continue) has a head of its own
            self._headed = True
            self._room = _MOST_ANSWER

    def on_message_complete(self) -> None:
        if self._complete < 0 and self._parser is not None and self._status() >= 200:
            self._complete = len(self._parts)
            # The parser forgets both with the next byte.
            self._keep, self._final = self._parser.should_keep_alive(), self._parser.get_status_code()

    def _status(self) -> int:
        return self._final or (self._parser.get_status_code() if self._parser is not None else 0)

    def _is_cut_mark(self) -> bool:
        """Whether the body's last parts, the very last too short for an end mark, hold one together."""
        return len(self._parts) > 1 and len(self._parts[-1]) < 11 and b"[DONE]" in b"".join(self._parts[-8:])

    def _is_marked(self) -> bool:
        """Whether an answer has come up to its end mark; what keeps the connection alive may stand behind that."""
        good = self._headed and _by_status(self._status()) is Outcome.OK
        return good and _END_MARK.search(b"".join(self._parts)) is not None

    def _is_stale(self, exchange: Exchange, now: int) -> bool:
        reused = Flag.REUSED in exchange.flags and exchange.attempt == 0
        return reused and not self._stamps and now - exchange.sent_ns < STALE_NS

    def _answered(self, now: int, *, stray: bool = False) -> None:
        """A whole answer is here; what came behind it in the same read is not part of it."""
        stray = stray or len(self._parts) > self._complete
        del self._parts[self._complete :]
        self._marks[-1:] = [min(mark, self._complete) for mark in self._marks[-1:]]
        keep = self._keep and not stray and not self.closed
        outcome = _by_status(self._status())
        error = "" if outcome is Outcome.OK else b"".join(self._parts)[:_MOST_ERROR_BODY].decode(errors="replace")
        if 300 <= self._status() < 400:
            error = f"it points to {self._location.decode(errors='replace') or 'nowhere'}"
        self._finish(outcome, error, now, keep=keep)

    def _finish(self, outcome: Outcome, error: str, now: int, *, keep: bool = False) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        status = self._status()
        if self._stamps and (status >= 200 or status == _UPGRADED):  # an interim one is none of the answer
            exchange.status = status
        before, self._disordered = self._disordered, self.disorder() if self.disorder is not None else 0
        trusted = self._disordered <= before and self.disorder is not None
        # Where a packet overtook another, a stamp of the kernel may be too early.
        exchange.keep(self._stamps, self._arrived if trusted else _NO_STAMPS, self._marks, self._parts)
        exchange.end(outcome, error, now)
        if keep:
            self._parts.clear()
            self._marks.clear()
            del self._stamps[:], self._arrived[:]
            self._complete, self._final, self._room = -1, 0, _MOST_HEAD
            self._headed = self._framed = False
            self._parser = httptools.HttpResponseParser(self)  # the old one would give this status to what is no answer
            self._feed = self._parser.feed_data
        else:
            self.close()
        self._pool.finished(self, exchange)


def _by_status(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.OK
    return Outcome.HTTP_5XX if status >= 500 else Outcome.HTTP_4XX
