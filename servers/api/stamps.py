"""What the API process notes of each request: its last bytes, its stages, writes that have left, and how it ended.

It goes into the probe's record file, where there is one, and into the counters of /metrics.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from time import monotonic_ns as now
from typing import Any

from aiohttp import web
from gapmeter_probe import codes

from gapmeter.records import Outcome, RecordWriter
from gapmeter.servers.engine_client import EngineStats

_MOST_BODY_BYTES = 64 << 20


class Metrics:
    """The API process's counters since its start."""

    def __init__(self) -> None:
        self.accepted = self.prompt_tokens = self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self.request_ns = 0

    def page(self, served_name: str, stats: EngineStats) -> str:
        """The page that Prometheus scrapes: these counters, and beside them the engine's figures."""
        return "".join(self._lines(served_name, stats))

    def _lines(self, served_name: str, stats: EngineStats) -> Iterator[str]:
        escaped = served_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        label, seconds = f'model="{escaped}"', round(self.request_ns / 1e9, 6)
        for name, kind, what, value in (
            ("requests_accepted_total", "counter", "Requests that the engine took.", self.accepted),
            ("prompt_tokens_total", "counter", "Prompt tokens of these.", self.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens written to clients.", self.generated_tokens),
            ("request_seconds_total", "counter", "Seconds in requests, last byte in to end.", seconds),
            ("engine_steps_total", "counter", "Steps of the engine.", stats.steps),
            ("engine_preemptions_total", "counter", "Requests evicted from the KV cache.", stats.preemptions),
            ("requests_running", "gauge", "Requests that the engine is working on.", stats.running),
            ("requests_waiting", "gauge", "Requests that wait for the engine.", stats.waiting),
            ("kv_blocks", "gauge", "KV cache blocks.", stats.kv_blocks),
            ("kv_blocks_free", "gauge", "KV cache blocks that are free.", stats.kv_blocks_free),
        ):
            if value is not None:
                yield f"# HELP gapmeter_{name} {what}\n# TYPE gapmeter_{name} {kind}\n"
                yield f"gapmeter_{name}{{{label}}} {value}\n"
        yield "# HELP gapmeter_requests_finished_total Requests by how they ended.\n"
        yield "# TYPE gapmeter_requests_finished_total counter\n"
        for outcome, count in sorted(self.finished.items()):
            yield f'gapmeter_requests_finished_total{{{label},outcome="{outcome}"}} {count}\n'


class RequestStamps:
    """One request: ``begun_ns`` is when its head was seen. Without a writer it is only counted."""

    __slots__ = ("_begun_ns", "_cached", "_metrics", "_prompt", "_ref", "_writer", "_written", "received")

    def __init__(
        self, writer: RecordWriter | None, metrics: Metrics, engine_id: str, client_id: str, begun_ns: int
    ) -> None:
        self._writer, self._metrics = writer, metrics
        self._begun_ns = begun_ns
        self._ref = writer.request(engine_id, client_id) if writer else 0
        self._prompt = self._cached = self._written = 0
        self.received = 0

    def pooled(self, code: int, queued_ns: int, start_ns: int, end_ns: int, back_ns: int = 0) -> None:
        """Template or tokenizer: asked for, begun, done; and how long after that the event loop went on."""
        if self._writer:
            self._writer.span(code, self._ref, start_ns, end_ns, min(back_ns, 2**32 - 1), queued_ns)

    def parsed(self, seen_ns: int, read_ns: int) -> None:
        """The body's last bytes were seen at ``seen_ns``; it had been read at ``read_ns``, and is a request now."""
        self._begun_ns = seen_ns
        if self._writer:
            self._writer.span(codes.HTTP, self._ref, self._begun_ns, read_ns)
            self._writer.span(codes.APPLICATION, self._ref, read_ns, now())

    def handoff(self, prompt_tokens: int, start_ns: int, end_ns: int) -> None:
        """The call that gave the request to the engine; ingress ends where it starts."""
        self._prompt = prompt_tokens
        self._metrics.accepted += 1
        self._metrics.prompt_tokens += prompt_tokens
        if self._writer:
            self._writer.span(codes.INGRESS, self._ref, self._begun_ns, start_ns)
            self._writer.span(codes.HANDOFF, self._ref, start_ns, end_ns)

    def detokenized(self, new: int, received_ns: int, batch_ns: int, start_ns: int, end_ns: int, cached: int) -> None:
        """``new`` tokens of one engine message were turned into text."""
        self.received += new
        self._cached = cached or self._cached
        if self._writer and new:
            self._writer.span(codes.OUTPUT_RECEIVE, self._ref, received_ns, batch_ns, self.received)
            self._writer.span(codes.DETOKENIZE, self._ref, start_ns, end_ns, self.received, batch_ns)

    def egress(self, tokens: int, format_ns: int, start_ns: int) -> None:
        """A chunk was written by now: formatted from, handed over at. ``tokens``: of the answer so far, 0: none new."""
        end = now()
        if tokens:
            self._metrics.generated_tokens += tokens - self._written
            self._written = tokens
        if self._writer:
            self._writer.span(codes.EGRESS, self._ref, start_ns, end, tokens, format_ns)

    def finished(self, outcome: Outcome) -> None:
        """The answer is over, or was refused before it began."""
        end = now()
        self._metrics.finished[outcome.name.lower()] += 1
        self._metrics.request_ns += end - self._begun_ns
        if self._writer:
            if not self._prompt:
                self._writer.span(codes.INGRESS, self._ref, self._begun_ns, end)
            self._writer.counts(outcome, self._ref, self._prompt, self.received, self._cached, end)


class StampedHandler(web.RequestHandler):
    """A connection. ``seen_ns``: when bytes last came."""

    __slots__ = ("seen_ns",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            # uvloop gathers writes until its loop comes round, except beyond this mark: what a write call returned
            # from has left, and the stamp after it tells the truth.
            transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self.seen_ns = now()
        super().data_received(data)


class StampedRequest(web.BaseRequest):
    """A request that knows when its latest bytes were seen: at first its head's, then its body's."""

    @property
    def seen_ns(self) -> int:
        return self.protocol.seen_ns if isinstance(self.protocol, StampedHandler) else now()


class StampedServer(web.Server):
    """aiohttp's low-level server, made of these connections and requests."""

    def __call__(self) -> StampedHandler:
        return StampedHandler(self, loop=self._loop, **self._kwargs)

    def _make_request(
        self, message: Any, payload: Any, protocol: web.RequestHandler, writer: Any, task: asyncio.Task[None]
    ) -> StampedRequest:
        return StampedRequest(message, payload, protocol, writer, task, self._loop, client_max_size=_MOST_BODY_BYTES)
