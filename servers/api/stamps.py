"""What the API process stamps of one request. Without a writer every method does nothing but return."""

from __future__ import annotations

import time

from gapmeter_probe.cores import CoreWaits

from gapmeter.records import CoreThread, Outcome, RecordWriter, Span

now = time.monotonic_ns
_LOOP = int(CoreThread.LOOP)


class RequestStamps:
    """The records of one request: ``begun_ns`` is when its first bytes were seen."""

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
