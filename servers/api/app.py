"""The HTTP server: routes, one request's way to the engine and back, and the process's life."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns as now

import uvloop
from aiohttp import web
from gapmeter_probe import codes
from gapmeter_probe.writer import open_probe

from gapmeter.records import Outcome, RecordWriter
from gapmeter.records.process import allow_many_files, ask_for_short_slices
from gapmeter.servers.api.openai import DONE, AnswerJson, ApiError, CompletionRequest, Piece, bad, parse_request, room
from gapmeter.servers.api.stamps import Metrics, RequestStamps, StampedRequest, StampedServer
from gapmeter.servers.api.text import StopFinder, TemplateRefused, TextModel
from gapmeter.servers.engine_client import EngineClient, EngineDead, GenerationRequest, Output, QueueFull

_INLINE_CHARS = 8192  # longer texts are tokenized in a thread: a millisecond or more of a busy event loop
_CLOSE_S = 0.5
_NICER = 5
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_PROMETHEUS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """``max_model_len`` bounds prompt plus output in tokens; ``describe`` goes into the head of the probe's file."""

    host: str
    port: int
    served_name: str
    max_model_len: int
    server: str
    describe: Mapping[str, object] = field(default_factory=dict)


class Generation:
    """One answer under way: turns engine outputs into pieces of text. ``error``: why the engine gave it up."""

    __slots__ = ("_cached", "_decoder", "_over", "_pieces", "_stamps", "_stops", "_waiter", "engine_done", "error")

    def __init__(self, text: TextModel, stops: tuple[str, ...], stamps: RequestStamps) -> None:
        self._decoder = text.decoder()
        self._stops = StopFinder(stops) if stops else None
        self._stamps = stamps
        self._cached: int | None = None
        self._over = False
        self._pieces: deque[Piece] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.error = ""
        self.engine_done = False  # the engine knows that it is over, too

    def deliver(self, output: Output) -> None:
        """Take one engine output; later ones than the last are ignored (the engine may not know yet that it was)."""
        reason = output.finish_reason
        self.engine_done = self.engine_done or reason is not None
        if self._over:
            return
        start = now()
        text = self._decoder.push(output.ids, last=reason is not None)
        if self._stops:
            text, stopped = self._stops.push(text, last=reason is not None)
            reason = "stop" if stopped else reason
        self._cached = self._cached if output.cached is None else output.cached
        self._over = reason is not None
        self.error = (output.error or "the engine gave up on this request") if reason == "error" else ""
        stamps = self._stamps
        stamps.detokenized(len(output.ids), output.received_ns, output.started_ns, start, now(), output.cached or 0)
        self._pieces.append(Piece(text, output.ids, stamps.received, self._cached, reason))
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Piece:
        """The next piece, awaited if there is none yet (an asyncio.Queue would take microseconds a token more)."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pieces.popleft()


class Api:
    """Answers requests for one engine. Everything happens on one event loop."""

    def __init__(self, engine: EngineClient, text: TextModel, options: ApiOptions, writer: RecordWriter | None) -> None:
        self._engine = engine
        self._text = text
        self._options = options
        self._writer = writer
        self._metrics = Metrics()
        self._count = 0
        self._started_s = int(time.time())
        self.ready = False
        self._routes = {
            ("POST", "/v1/chat/completions"): self._generate,
            ("POST", "/v1/completions"): self._generate,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's entry: route, and turn refusals into JSON."""
        assert isinstance(request, StampedRequest)
        try:
            route = self._routes.get((request.method, request.path))
            if route is not None:
                return await route(request)
            methods = [method for method, path in self._routes if path == request.path]
            if methods:
                raise ApiError(405, f"{request.path} is for {', '.join(methods)}, not {request.method}")
            paths = ", ".join(path for _, path in self._routes)
            raise ApiError(404, f"there is no {request.path} here; there are {paths}")
        except ApiError as error:
            return _refusal(error, request)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(ApiError(413, "the body is larger than this server reads"), request)
        except ConnectionError:
            return web.Response()  # the client is gone: aiohttp finds nobody to send it to, and closes

    # -- the small endpoints

    async def _health(self, request: StampedRequest) -> web.StreamResponse:
        return web.Response(status=200 if self.ready else 503)

    async def _models(self, request: StampedRequest) -> web.StreamResponse:
        model = {
            "id": self._options.served_name, "object": "model", "created": self._started_s, "owned_by": "gapmeter",
            "max_model_len": self._options.max_model_len,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [model]})

    async def _show_metrics(self, request: StampedRequest) -> web.StreamResponse:
        page = self._metrics.page(self._options.served_name, self._engine.stats())
        return web.Response(body=page.encode(), headers=_PROMETHEUS)

    # -- generation

    async def _generate(self, request: StampedRequest) -> web.StreamResponse:
        self._count += 1
        client_id = _client_id(request)
        chat = request.path == "/v1/chat/completions"
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{client_id or uuid.uuid4().hex}"
        engine_id = f"{answer_id}-{self._count}"
        stamps = RequestStamps(self._writer, self._metrics, engine_id, client_id, request.seen_ns)
        outcome = Outcome.ABORTED
        try:
            if request.headers.get("expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await request.read()
            seen_ns, read_ns = request.seen_ns, now()
            completion = parse_request(body, chat=chat, served_name=self._options.served_name)
            stamps.parsed(seen_ns, read_ns)
            prompt_ids = await self._prompt_ids(completion, stamps)
            generation = self._submit(completion, engine_id, client_id, prompt_ids, stamps)
            answer = AnswerJson(completion, answer_id, self._options.served_name, prompt_ids)
            try:
                send = self._stream if completion.stream else self._whole
                response = await send(request, answer, generation, stamps)
            finally:
                if not generation.engine_done:
                    self._engine.cancel(engine_id)
            outcome = Outcome.CUT if generation.error else Outcome.OK
            return response
        except ApiError as error:
            outcome = Outcome.HTTP_4XX if error.status < 500 else Outcome.HTTP_5XX
            raise
        finally:
            stamps.finished(outcome)

    async def _prompt_ids(self, completion: CompletionRequest, stamps: RequestStamps) -> Sequence[int]:
        if completion.prompt_ids is not None:
            if max(completion.prompt_ids) >= self._text.size:
                raise bad(f"prompt has a token id beyond the vocabulary of {self._text.size}", "prompt")
            return completion.prompt_ids
        text = completion.text or ""
        if completion.messages is not None:
            start = now()
            try:
                text = self._text.template(completion.messages)
            except TemplateRefused as error:
                raise bad(str(error), "messages") from error
            stamps.pooled(codes.TEMPLATE, start, start, now())
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can say it, and the tokenizers library cannot take it
            raise bad("the text holds half of a surrogate pair", "messages" if completion.chat else "prompt") from error

        def tokenize() -> tuple[int, list[int], int]:
            start = now()
            return start, self._text.encode(text, templated=completion.chat), now()

        # On the spot where it is quick: a hop to a thread and back costs more, and its waits are nobody's work.
        queued = now()
        inline = len(text) <= _INLINE_CHARS
        start, ids, end = tokenize() if inline else await asyncio.to_thread(tokenize)
        stamps.pooled(codes.TOKENIZE, start if inline else queued, start, end, 0 if inline else now() - end)
        if not ids:
            raise bad("the prompt has no tokens", "prompt")
        return ids

    def _submit(
        self, completion: CompletionRequest, engine_id: str, client_id: str, prompt_ids: Sequence[int],
        stamps: RequestStamps,
    ) -> Generation:  # fmt: skip
        most = room(len(prompt_ids), completion.min_tokens, completion.max_tokens, self._options.max_model_len)
        if not self.ready:
            raise ApiError(503, "the model is still being loaded", retry_after_s=1)
        request = GenerationRequest(
            engine_id, client_id, prompt_ids, most, completion.min_tokens, completion.ignore_eos,
            completion.temperature, completion.seed,
        )  # fmt: skip
        generation = Generation(self._text, completion.stops, stamps)
        start = now()
        try:
            self._engine.submit(request, generation.deliver)
        except QueueFull as error:
            raise ApiError(503, str(error), retry_after_s=1) from error
        except EngineDead as error:
            raise ApiError(500, str(error)) from error
        stamps.handoff(len(prompt_ids), start, now())
        return generation

    async def _stream(
        self, request: StampedRequest, answer: AnswerJson, generation: Generation, stamps: RequestStamps
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**_SSE, **_echo(request)})
        await response.prepare(request)
        piece = None
        while piece is None or piece.finish_reason is None:
            piece = await generation.next()
            if piece.finish_reason == "error":
                await response.write(f"data: {ApiError(500, generation.error).encoded()}\n\n{DONE}".encode())
                break
            begun = now()
            text = answer.event(piece)
            start = now()
            await response.write(text.encode())
            stamps.egress(piece.tokens if piece.ids else 0, begun, start)
        await response.write_eof()
        return response

    async def _whole(
        self, request: StampedRequest, answer: AnswerJson, generation: Generation, stamps: RequestStamps
    ) -> web.StreamResponse:
        pieces = [await generation.next()]
        while pieces[-1].finish_reason is None:
            pieces.append(await generation.next())
        if generation.error:
            raise ApiError(500, generation.error)
        begun = now()
        body = answer.whole(pieces).encode()
        response = web.Response(body=body, headers={"Content-Type": "application/json", **_echo(request)})
        start = now()
        await response.prepare(request)
        await response.write_eof()
        stamps.egress(pieces[-1].tokens, begun, start)
        return response


def _client_id(request: web.BaseRequest) -> str:
    """The client's name for the request, as text that can be written again whatever bytes it had."""
    return request.headers.get("x-request-id", "").encode("utf-8", "replace").decode()


def _echo(request: web.BaseRequest) -> dict[str, str]:
    client_id = _client_id(request)
    return {"x-request-id": client_id} if client_id else {}


def _refusal(error: ApiError, request: web.BaseRequest) -> web.Response:
    headers = {"Content-Type": "application/json", **_echo(request)}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.status, body=error.encoded().encode(), headers=headers)


def serve(
    engine: EngineClient, text: TextModel, options: ApiOptions, around: Callable[[Handler], Handler] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine ends by itself; returns the process's exit code.

    ``around`` may put something of the server's own around the handling of every request.
    """
    priority = ask_for_short_slices(_NICER)
    allow_many_files()  # a connection beyond their limit would be closed as soon as it is taken
    writer = open_probe("api", {"server": options.server, "priority": priority, **options.describe})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(engine, text, options, writer, around))
    finally:
        if writer:
            writer.close()


async def _serve(
    engine: EngineClient,
    text: TextModel,
    options: ApiOptions,
    writer: RecordWriter | None,
    around: Callable[[Handler], Handler] | None,
) -> int:
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_asked.set)
    api = Api(engine, text, options, writer)
    handle = around(api.handle) if around else api.handle
    server = StampedServer(handle, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
        except OSError as error:
            return _cannot(f"listen on {options.host}:{options.port}: {os.strerror(error.errno or 0)}")
        return await _until_over(api, engine, stop_asked)
    finally:
        await engine.stop()
        await runner.cleanup()


async def _until_over(api: Api, engine: EngineClient, stop_asked: asyncio.Event) -> int:
    over = asyncio.create_task(stop_asked.wait())
    starting = asyncio.create_task(engine.start())
    await asyncio.wait({over, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return 0
    try:
        starting.result()
    except EngineDead as error:
        return _cannot(f"start the engine: {error}")
    gc.collect()
    gc.freeze()
    api.ready = True
    dead = asyncio.create_task(engine.wait_dead())
    done, _ = await asyncio.wait({over, dead}, return_when=asyncio.FIRST_COMPLETED)
    api.ready = False
    if dead in done:
        return _cannot(f"go on: {dead.result()}")
    dead.cancel()
    return 0


def _cannot(what: str) -> int:
    print(f"cannot {what}", file=sys.stderr, flush=True)
    return 1
