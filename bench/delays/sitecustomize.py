"""Puts known delays into functions of a real engine, of the server around it and of the load tester.

Python imports this module by its name when its folder is on PYTHONPATH. It does nothing unless GAPMETER_INJECT names a
folder with ``cases.json`` (what is injected where), ``schedule.json`` (the case of each request) and ``now`` (which
case and request it is just now: written by the generator before each request, read by everybody). Functions are wrapped
as soon as their module has run, before anybody else wraps them, so the delay lies inside what others stamp. What was
added is logged by the process that added it, to a file of its own.
"""

from __future__ import annotations

import asyncio
import functools
import json
import mmap
import os
import struct
import sys
import time
from importlib.machinery import PathFinder

NOW = struct.Struct("<qq")  # case (0: none), request (from 1)
ADDED = struct.Struct("<qqqqq")  # case, request, start, end; ns of it slept on purpose, or worked on a core


class Injector:
    """What is to be injected now, by whom; opened on first use, since few processes need it."""

    def __init__(self, folder):
        self._folder = folder
        self._map = self._cases = self._log = None
        self._schedule = ()
        self._latest = {}  # point -> the request in which it was last delayed

    def _open(self):
        with open(os.path.join(self._folder, "cases.json")) as file:
            self._cases = json.load(file)
        with open(os.path.join(self._folder, "now"), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), NOW.size)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._log = os.open(os.path.join(self._folder, f"added-{os.getpid()}"), flags, 0o644)

    def begin(self, index):
        """A request is about to be sent: everybody's case is now the one that the schedule gives it."""
        if not self._schedule:
            self._open()
            with open(os.path.join(self._folder, "schedule.json")) as file:
                self._schedule = json.load(file)
        NOW.pack_into(self._map, 0, self._schedule[index], index + 1)

    def delay(self, point):
        """Wait as the present case says, if it is about this point: at every call, or once a request."""
        if self._map is None:
            self._open()
        number, request = NOW.unpack_from(self._map, 0)
        if not number:
            return
        case = self._cases[number - 1]
        if point not in case["point"].split("+") or (case["once"] and self._latest.get(point) == request):
            return
        self._latest[point] = request
        if case["how"] == "sleep":
            own, start, end = _sleep(case["delay_ns"])
        else:
            ran, start = time.thread_time_ns(), time.monotonic_ns()
            until = start + case["delay_ns"]
            while time.monotonic_ns() < until:
                pass
            own, end = time.thread_time_ns() - ran, time.monotonic_ns()
        os.write(self._log, ADDED.pack(number, request, start, end, min(own, end - start)))


def _sleep(delay_ns):
    """Sleep; for how long it slept indeed, and from when to when: it may have been put off its core before."""
    waited, start = _waited_ns(), time.monotonic_ns()
    time.sleep(delay_ns / 1e9)
    end = time.monotonic_ns()
    return delay_ns - (_waited_ns() - waited), start, end


def _waited_ns():
    """How long this thread has waited for a core so far, by the kernel's own count."""
    with open("/proc/thread-self/schedstat") as file:  # which lets the interpreter's lock go, as a sleep does
        return int(file.read().split()[1])


def _before(point, wanted=None):
    """A delay at the start of a function or coroutine, at calls whose arguments are ``wanted``."""

    def wrap(original, injector):
        if asyncio.iscoroutinefunction(original):

            @functools.wraps(original)
            async def awaited(*args, **kwargs):
                if wanted is None or wanted(*args):
                    injector.delay(point)
                return await original(*args, **kwargs)

            return awaited

        @functools.wraps(original)
        def called(*args, **kwargs):
            if wanted is None or wanted(*args):
                injector.delay(point)
            return original(*args, **kwargs)

        return called

    return wrap


def _around_bound(point, attribute):
    """For ``__init__``: a delay before a method as it then is, with all that was wrapped around it in the class."""

    def wrap(original, injector):
        @functools.wraps(original)
        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            setattr(self, attribute, _before(point)(getattr(self, attribute), injector))

        return init

    return wrap


def _sending(original, injector):
    @functools.wraps(original)
    def send(sender, exchange, due_ns):
        injector.begin(exchange.index)
        injector.delay("loop held when a request is due")
        original(sender, exchange, due_ns)

    return send


def _is_event(cycle, message):
    return message["type"] == "http.response.body" and b"choices" in message.get("body", b"")


_CB = "transformers.generation.continuous_batching."
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
PATCHES = {
    # the load tester
    "gapmeter.loadgen.sender:Sender.send": _sending,
    # the Transformers server
    "gapmeter.servers.api.stamps:StampedHandler.data_received": _before("loop held when a request comes"),
    "gapmeter.servers.api.openai:parse_request": _before("parse"),
    "gapmeter.servers.api.text:TextModel.template": _before("template"),
    "gapmeter.servers.api.text:TextModel.encode": _before("tokenize"),
    "gapmeter.servers.engine_client:EngineClient.submit": _before("hand over"),
    f"{_CB}scheduler:FIFOScheduler.schedule_batch": _before("schedule"),
    f"{_CB}input_outputs:ContinuousBatchingIOs.prepare_batch_tensors": _before("prepare inputs"),
    "transformers.models.llama.modeling_llama:LlamaForCausalLM.forward": _before("forward"),
    f"{_CB}model_runner:ModelRunner._sample": _before("sample"),
    "gapmeter.servers.engine_client:EngineClient._readable": _before("loop held when outputs come"),
    "gapmeter.servers.api.text:Decoder.push": _before("detokenize"),
    "gapmeter.servers.api.openai:AnswerJson.event": _before("format"),
    # vLLM
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.__init__": _around_bound(
        "loop held when a request comes", "data_received"
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion": _before("parse"),
    "vllm.renderers.hf:safe_apply_chat_template": _before("template"),
    "vllm.renderers.base:BaseRenderer._tokenize_prompt": _before("tokenize"),
    "vllm.v1.engine.core_client:AsyncMPClient.add_request_async": _before("hand over"),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": _before("schedule"),
    f"{_RUNNER}_prepare_inputs": _before("prepare inputs"),
    f"{_RUNNER}_model_forward": _before("forward"),
    f"{_RUNNER}_sample": _before("sample"),
    "vllm.v1.engine.core_client:BackgroundResources.validate_alive": _before("loop held when outputs come"),
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update": _before("detokenize"),
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle.send": _before("format", _is_event),
}


class Finder:
    """Finds the modules above as Python does, and patches them when they have run."""

    def __init__(self, injector):
        self._injector = injector
        self._targets = {}
        for target, wrap in PATCHES.items():
            module, _, path = target.partition(":")
            self._targets.setdefault(module, []).append((path, wrap))

    def find_spec(self, name, path, target=None):
        patches = self._targets.get(name)
        spec = PathFinder.find_spec(name, path, target) if patches else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            for attributes, wrap in patches:
                owner, attribute = self._owner(module, attributes)
                setattr(owner, attribute, wrap(getattr(owner, attribute), self._injector))

        spec.loader.exec_module = execute_and_patch
        return spec

    @staticmethod
    def _owner(module, attributes):
        *owners, attribute = attributes.split(".")
        return functools.reduce(getattr, owners, module), attribute


if os.environ.get("GAPMETER_INJECT"):
    sys.meta_path.insert(0, Finder(Injector(os.environ["GAPMETER_INJECT"])))
