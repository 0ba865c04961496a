"""The API server: from a request's first bytes to the engine, and from the engine's outputs to the socket.

A request is followed by a context variable that is set where it enters (its task, and the tasks made from it, see it)
and by the engine's id once it is handed over; ids are never taken apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from gapmeter_probe.records import Outcome, Span
from gapmeter_probe.vllm.install import Hook, Probe, now
from gapmeter_probe.vllm.settings import describe, settings
from gapmeter_probe.vllm.vitals import watch_collections, watch_loop

_HTTP = ("uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.http.h11_impl")
_OUTPUT = "vllm.v1.engine.output_processor:"
_POOLED = {"safe_apply_chat_template": Span.TEMPLATE, "_tokenize_prompt": Span.TOKENIZE}


class Generation:
    """One engine request of a call: what has come of it so far."""

    __slots__ = ("cached", "finished", "prompt", "pulled", "received", "ref")

    def __init__(self, ref: int, prompt: int) -> None:
        self.ref = ref
        self.prompt = prompt
        self.received = 0  # output tokens that the engine has delivered
        self.pulled = 0  # of these, taken by the code that formats chunks
        self.cached = 0
        self.finished = False


class Call:
    """One HTTP request."""

    __slots__ = ("begun_ns", "by_id", "client_id", "generations", "opened", "pending", "pulled_ns", "stages")

    def __init__(self, begun_ns: int, client_id: str) -> None:
        self.begun_ns = begun_ns
        self.client_id = client_id
        self.stages: list[tuple[int, list[int]]] = []  # code, [queued, start, end]
        self.generations: list[Generation] = []
        self.by_id: dict[str, Generation] = {}
        self.pending: list[tuple[Generation, int]] = []  # tokens pulled but not yet written: whose, how many so far
        self.pulled_ns = 0
        self.opened = False  # a chunk with a token has been written


current: ContextVar[Call | None] = ContextVar("gapmeter_call", default=None)


class ApiProbe(Probe):
    """Records of the process that speaks HTTP. All but the pools' threads run on its event loop."""

    role = "api"

    def __init__(self) -> None:
        super().__init__()
        self._generations: dict[str, Generation] = {}
        self._decoding_ns = 0
        self._arrived: dict[int, int] = {}  # id of an engine output -> when its message was received
        self._arrived_ns = 0
        self._marks: list[tuple[str, int]] = []
        self._watching = False

    def hooks(self) -> list[Hook]:
        ingress, egress = ("network_in", "ingress"), ("egress", "network_out")
        client = "vllm.v1.engine.core_client:"
        handoff = self._awaited(f"{client}AsyncMPClient.add_request_async", ("handoff",), self._hand_over)
        collector = f"{_OUTPUT}RequestOutputCollector."
        return [
            self.after("vllm.v1.engine.async_llm:AsyncLLM.__init__", (), self._opened),
            *(Hook((f"{m}:{p}.data_received",), (), self._wrap_bytes) for m, p in zip(_HTTP, _PROTOCOLS, strict=True)),
            *(Hook((f"{m}:RequestResponseCycle.run_asgi",), (), self._wrap_run) for m in _HTTP),
            *(Hook((f"{m}:RequestResponseCycle.send",), (), self._wrap_send) for m in _HTTP),
            Hook((f"{_HTTP[0]}:RequestResponseCycle.run_asgi", f"{_HTTP[1]}:RequestResponseCycle.run_asgi"),
                 (*ingress, *egress), _as_it_is),
            Hook(("vllm.renderers.hf:safe_apply_chat_template",), ("template",), self._wrap_inline),
            Hook(("vllm.renderers.hf:make_async",), (), self._wrap_pool),
            Hook(("vllm.renderers.base:make_async",), ("tokenize",), self._wrap_pool),
            handoff,
            self._decoder(),
            self._processor(),
            self.after(f"{collector}put", (), self._marked),
            self.after(f"{collector}get", ("egress",), self._pulled),
            self.after(f"{collector}get_nowait", ("egress",), self._pulled),
        ]  # fmt: skip

    def _opened(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        self.open(describe())
        if self.writer:
            self.writer.json(settings(args[0].vllm_config))
            watch_collections(self.writer)

    # -- in

    def _wrap_bytes(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stamp the first bytes of each request on its cycle: the earliest that the application can know of it."""

        @functools.wraps(original)
        def data_received(protocol: Any, data: bytes) -> None:
            before = protocol.cycle
            in_body = before is not None and before.more_body
            first = protocol.__dict__.get("gapmeter_first_ns") or now()
            original(protocol, data)
            cycle = protocol.cycle
            if cycle is not before:
                cycle.gapmeter_first_ns = first
                first = 0
            protocol.gapmeter_first_ns = 0 if in_body else first

        return data_received

    def _wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def run_asgi(cycle: Any, app: Any) -> None:
            call = self._begin(cycle)
            if call is None:
                await original(cycle, app)
                return
            current.set(call)
            try:
                await original(cycle, app)
            finally:
                self._finish(call)

        return run_asgi

    def _begin(self, cycle: Any) -> Call | None:
        call = None
        if self.writer is not None and cycle.scope.get("method") == "POST":
            if not self._watching:
                self._watching = True
                watch_loop(self.writer)
            names = (value for name, value in cycle.scope["headers"] if name == b"x-request-id")
            begun = getattr(cycle, "gapmeter_first_ns", 0) or now()
            call = Call(begun, next(names, b"").decode("latin-1"))
        cycle.gapmeter_call = call
        return call

    def _finish(self, call: Call) -> None:
        """The response is over: how each generation ended; or, if none was made, that the request was here."""
        writer = self.writer
        assert writer is not None
        end = now()
        if not call.generations:
            ref = writer.request("", call.client_id)
            writer.span(Span.INGRESS, ref, call.begun_ns, end)
            self._write_stages(call, ref)
        for generation in call.generations:
            outcome = Outcome.OK if generation.finished else Outcome.ABORTED
            writer.counts(outcome, generation.ref, generation.prompt, generation.received, generation.cached, end)
        for engine_id in call.by_id:
            self._generations.pop(engine_id, None)

    def _write_stages(self, call: Call, ref: int) -> None:
        assert self.writer is not None
        for code, (queued, start, end) in call.stages:
            if end:
                self.writer.span(code, ref, start, end, 0, queued)

    def _wrap_inline(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A stage that runs on the event loop itself, in the request's own context."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            call = current.get()
            if call is None:
                return original(*args, **kwargs)
            start = now()
            result = original(*args, **kwargs)
            call.stages.append((Span.TEMPLATE, [start, start, now()]))
            return result

        return called

    def _wrap_pool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's make_async: what it makes submits to a pool of threads; submit, start and end are stamped apart."""

        @functools.wraps(original)
        def make_async(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            code = _POOLED.get(getattr(func, "__name__", ""))
            if code is None:
                return original(func, *args, **kwargs)

            def in_thread(stamps: list[int], *given: Any, **named: Any) -> Any:
                stamps[1] = now()
                try:
                    return func(*given, **named)
                finally:
                    stamps[2] = now()

            submit = original(in_thread, *args, **kwargs)

            def submitted(*given: Any, **named: Any) -> Any:
                stamps = [now(), 0, 0]
                call = current.get()
                if call is not None:
                    call.stages.append((code, stamps))
                return submit(stamps, *given, **named)

            return submitted

        return make_async

    def _awaited(self, target: str, stages: tuple[str, ...], begin: Callable[..., Callable[[], None] | None]) -> Hook:
        """Around a coroutine: ``begin(*args)`` before, what it returns after."""
        fail = functools.partial(self.failed, target, stages)

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            async def called(*args: Any, **kwargs: Any) -> Any:
                end = None
                try:
                    end = begin(*args)
                except Exception as error:  # noqa: BLE001 - nothing of ours may raise into vLLM
                    fail(error)
                result = await original(*args, **kwargs)
                if end is not None:
                    end()
                return result

            return called

        return Hook((target,), stages, wrap)

    def _hand_over(self, client: Any, request: Any) -> Callable[[], None] | None:
        writer = self.writer
        if writer is None:
            return None
        call = current.get()
        start = now()
        ref = writer.request(request.request_id, call.client_id if call else "")
        generation = Generation(ref, len(request.prompt_token_ids or ()))
        self._generations[request.request_id] = generation
        if call is not None:
            call.generations.append(generation)
            call.by_id[request.request_id] = generation
            writer.span(Span.INGRESS, ref, call.begun_ns, start)
            self._write_stages(call, ref)
        return lambda: writer.span(Span.HANDOFF, ref, start, now())

    # -- out

    def _decoder(self) -> Hook:
        target = "vllm.v1.serial_utils:MsgpackDecoder.decode"
        fail = functools.partial(self.failed, target, ("output",))

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def decode(decoder: Any, bufs: Any) -> Any:
                start = now()
                result = original(decoder, bufs)
                try:
                    outputs = getattr(result, "outputs", None)
                    if outputs and self.writer is not None:
                        self._arrived[id(outputs[0])] = start
                except Exception as error:  # noqa: BLE001 - nothing of ours may raise into vLLM
                    fail(error)
                return result

            return decode

        return Hook((target,), ("output",), wrap)

    def _processor(self) -> Hook:
        target, stages = f"{_OUTPUT}OutputProcessor.process_outputs", ("detokenize", "output")
        fail = functools.partial(self.failed, target, stages)

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def process_outputs(processor: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
                self._marks.clear()
                start = now()
                result = original(processor, outputs, *args, **kwargs)
                try:
                    self._processed(outputs, start, now())
                except Exception as error:  # noqa: BLE001 - nothing of ours may raise into vLLM
                    fail(error)
                return result

            return process_outputs

        return Hook((target,), stages, wrap)

    def _marked(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        self._marks.append((args[0].request_id, end))

    def _processed(self, outputs: Any, start: int, end: int) -> None:
        """Requests of a batch are handled in turn: each one's share ends when its output is put for its task."""
        writer = self.writer
        if writer is None or not outputs:
            return
        self._arrived_ns = arrived = self._arrived.pop(id(outputs[0]), self._arrived_ns)
        marks, before = dict(self._marks), start
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue
            generation.received += len(output.new_token_ids)
            done = marks.get(output.request_id, before)
            if output.new_token_ids:
                writer.span(Span.OUTPUT_RECEIVE, generation.ref, arrived or start, start, generation.received)
                writer.span(Span.DETOKENIZE, generation.ref, before, done, generation.received, start)
            before = max(before, done)
            if output.finish_reason is not None:
                generation.finished = True
                del self._generations[output.request_id]

    def _pulled(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """The code that formats chunks has taken all tokens put so far for it: the next chunk carries them."""
        call = current.get()
        if result is None or call is None or not call.generations:
            return
        collector = args[0]
        call.pulled_ns = end
        own = call.by_id.get(collector.request_id)
        call.pending = []
        for output in result.outputs:
            generation = own or call.generations[output.index]
            count = len(output.token_ids)
            generation.pulled = generation.pulled + count if collector.aggregate else count
            generation.cached = max(result.num_cached_tokens or 0, 0)
            if count:
                call.pending.append((generation, generation.pulled))

    def _wrap_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def send(cycle: Any, message: Any) -> None:
            call = getattr(cycle, "gapmeter_call", None)
            if call is None or message["type"] != "http.response.body":
                await original(cycle, message)
                return
            start = now()
            await original(cycle, message)
            self._written(call, message.get("body", b""), start, now())

        return send

    def _written(self, call: Call, body: bytes, start: int, end: int) -> None:
        """n says how many tokens have been written with this chunk; 0 for one that carries none."""
        writer = self.writer
        if not body or writer is None or not call.generations:
            return
        if call.pending and (call.opened or not _tokenless(body)):
            call.opened = True
            generation, count = call.pending.pop(0)
            writer.span(Span.EGRESS, generation.ref, start, end, count, call.pulled_ns)
        else:
            writer.span(Span.EGRESS, call.generations[0].ref, start, end, 0)


_PROTOCOLS = ("HttpToolsProtocol", "H11Protocol")


def _as_it_is(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a hook that only says which stages are lost when none of its targets exists."""
    return original


def _tokenless(body: bytes) -> bool:
    """An event that opens a chat answer (the role alone), or a comment. A quote inside text would be escaped."""
    return body.startswith(b":") or (body.startswith(b"data: ") and b'"role":' in body)
