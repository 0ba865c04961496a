"""The API server: from a request's last bytes to the engine, and from the engine's outputs to the socket.

A request is followed by a context variable that is set where it enters (its task, and the tasks made from it, see it)
and by the engine's id once it is handed over; ids are never taken apart.
"""

from __future__ import annotations

import functools
import re
from asyncio import Future
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from gapmeter_probe import calls, codes
from gapmeter_probe.hooks import Hook, Probe, now
from gapmeter_probe.records import Outcome
from gapmeter_probe.vllm.answers import Answers
from gapmeter_probe.vllm.core import describe, settings

_PROTOCOLS = ("HttpToolsProtocol", "H11Protocol")
_HTTP = ("uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.http.h11_impl")
_CLIENT = "vllm.v1.engine.core_client:"
_OUTPUT = "vllm.v1.engine.output_processor:"
_INDEX = re.compile(rb'"index": ?([0-9]+)')  # a quote inside text would be escaped
_ENDPOINTS = (
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion",
)
_MOST = 2**32 - 1  # of a span's n
_RENDERERS = ("hf", "mistral", "deepseek_v32", "deepseek_v4", "kimi_k3", "cohere", "inkling")
_POOLED = {
    **dict.fromkeys(("safe_apply_chat_template", "_apply_chat_template", "_render"), codes.TEMPLATE),
    "_tokenize_prompt": codes.TOKENIZE,
}


class Generation:
    """One engine request of a call: what has come of it so far, in tokens."""

    __slots__ = ("collector", "finished", "put", "received", "ref", "state", "written")

    def __init__(self, ref: int, state: Any) -> None:
        self.ref = ref
        self.state = state  # the output processor's own, None where it could not be had
        self.collector = getattr(state, "queue", None)  # outputs lie here until the code that formats chunks takes them
        self.received = 0  # tokens that the engine has delivered
        self.put = 0  # of these, put into the collector
        self.written = 0  # of these, gone out in chunks
        self.finished = False

    def taken(self) -> int:
        """Tokens that the formatting code has: all that were put, but for those that still lie in the collector."""
        lying = getattr(self.collector, "output", None)
        if lying is None:
            return self.put
        mine = (output for output in getattr(lying, "outputs", ()) if output.index == self.state.request_index)
        return self.put - sum(len(output.token_ids) for output in mine)


class Call:
    """One HTTP request."""

    __slots__ = (
        "begun_ns", "client_id", "engine_ids", "generations", "opened", "running_ns", "sent_ns", "served_ns", "stages",
    )  # fmt: skip

    def __init__(self, begun_ns: int, client_id: str) -> None:
        self.begun_ns = begun_ns
        self.running_ns = now()  # the application is called
        self.served_ns = 0  # the endpoint's own code is called
        self.sent_ns = 0  # the message to the engine is with its socket
        self.client_id = client_id
        self.stages: list[tuple[int, list[int]]] = []  # code, [queued, start, end, the event loop goes on]
        self.generations: list[Generation] = []
        self.engine_ids: list[str] = []
        self.opened = False  # a chunk with a token has been written

    def carries(self, body: bytes) -> Sequence[Generation]:
        """Whose tokens this piece of the answer carries: of several choices a chunk names one.

        ``written`` of each is how many have gone out with it. An answer that comes whole has all that the engine made:
        choices that ended early wait within vLLM for the last one.
        """
        if not self.opened and _tokenless(body):
            return ()
        if body.startswith((b"data:", b":")):
            fresh = [one for one in self.generations if one.taken() > one.written]
            fresh = self._of_choice(body, fresh) if len(self.generations) > 1 else fresh
            for one in fresh:
                one.written = one.taken()
        else:
            fresh = [one for one in self.generations if one.received > one.written]
            for one in fresh:
                one.written = one.received
        self.opened = self.opened or bool(fresh)
        return fresh

    def _of_choice(self, body: bytes, fresh: list[Generation]) -> list[Generation]:
        """The one that this chunk is of; choices are numbered prompt by prompt."""
        named = _INDEX.search(body)
        if named is None:
            return fresh[:1]
        prompts = list(dict.fromkeys(id(one.collector) for one in self.generations))
        order = sorted(
            self.generations, key=lambda one: (prompts.index(id(one.collector)), getattr(one.state, "request_index", 0))
        )
        return [one for at, one in enumerate(order) if at == int(named[1]) and one in fresh]


_current: ContextVar[Call | None] = ContextVar("gapmeter_call", default=None)


def _tokenless(body: bytes) -> bool:
    """An event that opens a chat answer (the role alone), or a comment. A quote inside text would be escaped."""
    return body.startswith(b":") or (body.startswith(b"data: ") and b'"role":' in body)


class ApiProbe(Probe):
    """Records of the process that speaks HTTP. All but the pools' threads run on its event loop."""

    role = "api"

    def __init__(self) -> None:
        super().__init__()
        self._generations: dict[str, Generation] = {}
        self._marks: dict[str, int] = {}  # collector's id -> when an output was put into it
        self._states: dict[str, Any] = {}  # engine id -> the output processor's state, until handed over
        made = calls.native.Answers if calls.native else Answers
        self._answers: Answers = made(self._generations, self._marks, self._carrying)

    def make_hooks(self) -> list[Hook]:
        ingress, egress = ("network_in", "ingress"), ("egress", "network_out")
        collector = f"{_OUTPUT}RequestOutputCollector."
        return [
            self.after("vllm.v1.engine.async_llm:AsyncLLM.__init__", (), self._opened),
            self.around(
                tuple(f"{m}:{p}.data_received" for m, p in zip(_HTTP, _PROTOCOLS, strict=True)), ingress,
                self._receiving, every=True,
            ),
            self.around(
                tuple(f"{m}:RequestResponseCycle.run_asgi" for m in _HTTP), (*ingress, *egress), self._begin, every=True
            ),
            *(Hook((f"{m}:RequestResponseCycle.send",), (), self._wrap_send) for m in _HTTP),
            self.after("vllm.renderers.hf:safe_apply_chat_template", ("template",), _inline(codes.TEMPLATE)),
            self.after("vllm.v1.engine.input_processor:InputProcessor.process_inputs", (), _inline(codes.REQUEST)),
            *(Hook((f"vllm.renderers.{name}:make_async",), (), self._wrap_pool) for name in _RENDERERS),
            Hook(("vllm.renderers.base:make_async",), ("tokenize",), self._wrap_pool),
            *(self.before(endpoint, (), _serving) for endpoint in _ENDPOINTS),
            self.after(f"{_CLIENT}AsyncMPClient._send_input_message", (), _handed),
            self.around(
                (f"{_CLIENT}AsyncMPClient.add_request_async", f"{_CLIENT}DPAsyncMPClient.add_request_async"),
                ("handoff",), self._hand_over, every=True,
            ),
            self.after("vllm.v1.serial_utils:MsgpackDecoder.decode", ("output",), self._answers.decoded),
            self.after(f"{_OUTPUT}OutputProcessor.process_outputs", ("detokenize", "output"), self._answers.processed),
            self.after(f"{_OUTPUT}OutputProcessor.add_request", ("egress",), self._registered),
            self._hook(
                f"{collector}put", ("detokenize", "egress"),
                lambda call, fail: calls.mark(call, self._marks, fail, "request_id"),
            ),
            *(  # the code that formats chunks takes an output
                self._hook(f"{collector}{name}", (), lambda call, fail: calls.taken(call, "gapmeter_ns", fail))
                for name in ("get", "get_nowait")
            ),
        ]  # fmt: skip

    def _opened(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        self.open(describe())
        if self.writer:
            self.writer.json(settings(args[0].vllm_config))
            self._answers.writer = self.writer

    # -- in

    def _receiving(self, protocol: Any, *_: Any) -> Callable[[], None]:
        """Stamp on a request's cycle when its latest bytes came: what a slow network brings late is not our wait."""
        before = protocol.cycle
        in_body = before is not None and before.more_body
        seen = now()

        def received() -> None:
            if protocol.cycle is not before:  # the head is complete
                protocol.cycle.gapmeter_seen_ns = seen
            elif in_body:
                before.gapmeter_seen_ns = seen
                if (call := getattr(before, "gapmeter_call", None)) is not None:
                    call.begun_ns = seen

        return received

    def _begin(self, cycle: Any, *_: Any) -> Callable[[], None] | None:
        if self.writer is None or cycle.scope.get("method") != "POST":
            return None
        names = (value for name, value in cycle.scope["headers"] if name == b"x-request-id")
        begun = getattr(cycle, "gapmeter_seen_ns", 0) or now()
        call = cycle.gapmeter_call = Call(begun, next(names, b"").decode("latin-1"))
        _current.set(call)
        return functools.partial(self._finish, call)

    def _finish(self, call: Call) -> None:
        """The response is over: how each generation ended; or, if none was made, that the request was here."""
        writer = self.writer
        assert writer is not None
        end = now()
        if not call.generations:
            ref = writer.request("", call.client_id)
            writer.span(codes.INGRESS, ref, call.begun_ns, end)
            self._write_stages(call, ref)
        for generation in call.generations:
            outcome = Outcome.OK if generation.finished else Outcome.ABORTED
            prompt = getattr(generation.state, "prompt_len", 0)
            cached = max(getattr(generation.state, "num_cached_tokens", 0), 0)
            writer.counts(outcome, generation.ref, prompt, generation.received, cached, end)
        for engine_id in call.engine_ids:
            self._generations.pop(engine_id, None)
            self._states.pop(engine_id, None)

    def _write_stages(self, call: Call, ref: int) -> None:
        assert self.writer is not None
        running = max(call.begun_ns, call.running_ns)  # it is called with the head, and may await the body
        self.writer.span(codes.HTTP, ref, call.begun_ns, running)
        if call.served_ns:
            self.writer.span(codes.APPLICATION, ref, running, call.served_ns)
        for code, (queued, start, end, back) in call.stages:
            if end:
                self.writer.span(code, ref, start, end, min(max(back - end, 0), _MOST), queued)

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
                stamps = [now(), 0, 0, 0]
                call = _current.get()
                if call is not None:
                    call.stages.append((code, stamps))
                made = submit(stamps, *given, **named)
                if isinstance(made, Future):  # its own callback comes right before whoever awaits it

                    def back(_: Any) -> None:
                        stamps[3] = now()

                    made.add_done_callback(back)
                return made

            return submitted

        return make_async

    def _hand_over(self, client: Any, request: Any) -> Callable[[], None] | None:
        writer = self.writer
        if writer is None:
            return None
        call = _current.get()
        start = now()
        ref = writer.request(request.request_id, call.client_id if call else "")
        generation = Generation(ref, self._states.pop(request.request_id, None))
        self._generations[request.request_id] = generation
        if call is not None:
            call.generations.append(generation)
            call.engine_ids.append(request.request_id)
            writer.span(codes.INGRESS, ref, call.begun_ns, start)
            self._write_stages(call, ref)

        def sent() -> None:
            """What the call awaits when the message has been sent is no work of it."""
            end = call.sent_ns if call is not None and call.sent_ns > start else now()
            writer.span(codes.HANDOFF, ref, start, end)

        return sent

    # -- out

    def _registered(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        processor, request = args[:2]
        state = processor.request_states[request.request_id]
        if self.writer is not None:
            self._states[request.request_id] = state

    def _wrap_send(self, original: Callable[..., Any]) -> Callable[..., Any]:
        fail = functools.partial(self.failed, f"{_HTTP[0]}:RequestResponseCycle.send", ("egress",))
        return calls.sent(original, self._answers.sending, fail)

    def _carrying(self, call: Call, body: bytes) -> calls.Sent | None:
        """n says how many tokens have been written with this chunk; 0 for one that carries none."""
        if not call.generations:
            return None
        assert self.writer is not None
        carried = call.carries(body)
        rows = ((codes.EGRESS, one.ref, one.written, getattr(one.collector, "gapmeter_ns", 0)) for one in carried)
        return self.writer, tuple(rows) or ((codes.EGRESS, call.generations[0].ref, 0, 0),)


def _serving(*_: Any) -> None:
    call = _current.get()
    if call is not None:
        call.served_ns = now()


def _handed(start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
    call = _current.get()
    if call is not None:
        call.sent_ns = end


def _inline(code: int) -> Callable[..., None]:
    """Stamps a stage that runs on the event loop itself, in the request's own context."""

    def stamp(start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        call = _current.get()
        if call is not None:
            call.stages.append((code, [start, start, end, end]))

    return stamp
