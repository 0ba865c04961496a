"""What the API process stamps of each request: its first bytes, its stages, and writes that have left."""

from __future__ import annotations

import asyncio
from time import monotonic_ns as now
from typing import Any

from aiohttp import web
from gapmeter_probe.cores import CoreWaits

from gapmeter.records import CoreThread, Outcome, RecordWriter, Span

_MOST_BODY_BYTES = 64 << 20
_LOOP = int(CoreThread.LOOP)


class RequestStamps:
    """The records of one request: ``begun_ns`` is when its first bytes were seen. Without a writer nothing is done."""

    __slots__ = ("_begun_ns", "_cached", "_handed", "_prompt", "_ref", "_waits", "_writer", "received")

    def __init__(
        self, writer: RecordWriter | None, waits: CoreWaits, engine_id: str, client_id: str, begun_ns: int
    ) -> None:
        self._writer, self._waits = writer, waits
        self._begun_ns = begun_ns
        self._ref = writer.request(engine_id, client_id) if writer else 0
        self._prompt = self._cached = 0
        self._handed = False
        self.received = 0

    def pooled(self, code: Span, queued_ns: int, start_ns: int, end_ns: int) -> None:
        """Template or tokenizer: asked for, begun, done."""
        if self._writer:
            self._writer.span(code, self._ref, start_ns, end_ns, 0, queued_ns)

    def handoff(self, prompt_tokens: int, start_ns: int, end_ns: int) -> None:
        """The call that gave the request to the engine; ingress ends where it starts."""
        self._prompt = prompt_tokens
        self._handed = True
        if self._writer:
            self._writer.span(Span.INGRESS, self._ref, self._begun_ns, start_ns)
            self._writer.span(Span.HANDOFF, self._ref, start_ns, end_ns)
            self._waits.done(end_ns)

    def detokenized(self, new: int, received_ns: int, batch_ns: int, start_ns: int, end_ns: int, cached: int) -> None:
        """``new`` tokens of one engine message were turned into text."""
        self.received += new
        self._cached = cached or self._cached
        if self._writer and new:
            self._waits.woken(_LOOP, received_ns)
            self._writer.span(Span.OUTPUT_RECEIVE, self._ref, received_ns, batch_ns, self.received)
            self._writer.span(Span.DETOKENIZE, self._ref, start_ns, end_ns, self.received, batch_ns)

    def egress(self, tokens: int, format_ns: int, start_ns: int) -> None:
        """A chunk that brings the answer to ``tokens`` was written: formatted from, handed over at; written now."""
        if self._writer:
            end = now()
            self._writer.span(Span.EGRESS, self._ref, start_ns, end, tokens, format_ns)
            self._waits.done(end)

    def finished(self, outcome: Outcome) -> None:
        """The answer is over, or was refused before it began."""
        if self._writer:
            end = now()
            if not self._handed:
                self._writer.span(Span.INGRESS, self._ref, self._begun_ns, end)
            self._writer.counts(outcome, self._ref, self._prompt, self.received, self._cached, end)


class StampedHandler(web.RequestHandler):
    """A connection. ``first_ns``: when bytes of the request that is being read, or comes next, were first seen."""

    __slots__ = ("_waits", "first_ns")

    def __init__(self, waits: CoreWaits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits = waits
        self.first_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            # uvloop gathers writes until its loop comes round, except beyond this mark: what a write call returned
            # from has left, and the stamp after it tells the truth.
            transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        if not self.first_ns:
            self.first_ns = now()
            self._waits.woken(_LOOP, self.first_ns)
        super().data_received(data)


class StampedRequest(web.BaseRequest):
    """A request that knows when its first bytes were seen."""

    ATTRS = web.BaseRequest.ATTRS | frozenset(("begun_ns",))
    begun_ns: int

    def finished(self) -> None:
        """The request has been read and answered: the next bytes belong to another one."""
        if isinstance(self.protocol, StampedHandler):
            self.protocol.first_ns = 0


class StampedServer(web.Server):
    """aiohttp's low-level server, made of these connections and requests."""

    def __init__(self, handler: Any, waits: CoreWaits, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._waits = waits

    def __call__(self) -> StampedHandler:
        return StampedHandler(self._waits, self, loop=self._loop, **self._kwargs)

    def _make_request(
        self, message: Any, payload: Any, protocol: web.RequestHandler, writer: Any, task: asyncio.Task[None]
    ) -> StampedRequest:
        request = StampedRequest(message, payload, protocol, writer, task, self._loop, client_max_size=_MOST_BODY_BYTES)
        request.begun_ns = (protocol.first_ns if isinstance(protocol, StampedHandler) else 0) or now()
        return request
