"""A server that generates with Transformers' continuous batching: how to launch it, and its engine's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gapmeter.servers.launch import LOOPBACK, LaunchSpec, Service, flag_words, with_user_flags

PRECISIONS = ("float32", "bfloat16", "float16")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class TransformersSettings:
    """What the engine process gets, as JSON; lengths and sizes are in tokens.

    ``device`` "auto" is the first CUDA device, else the CPU. ``kv_tokens`` 0: room for every request at full length,
    within bounds. ``async_batching`` and ``cuda_graphs`` None: as Transformers chooses.
    """

    model: str
    precision: str
    max_batch: int
    max_model_len: int
    max_batch_tokens: int
    kv_tokens: int
    page_size: int
    scheduler: str
    prefix_cache: bool
    async_batching: bool | None
    cuda_graphs: bool | None
    device: str
    threads: int
    seed: int


def transformers_command(python: Path | str, service: Service) -> LaunchSpec:
    """The command and environment that serve; the model's threads are as many as the cores."""
    flags = {
        "model": service.model, "served-model-name": service.name, "host": LOOPBACK, "port": service.port,
        "max-batch": service.max_batch, "precision": service.precision,
    }  # fmt: skip
    words = flag_words(with_user_flags(flags, service.args))
    defaults = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if service.cores:
        defaults |= dict.fromkeys(_THREADS, str(len(service.cores)))
    env = {name: value for name, value in defaults.items() if name not in os.environ}
    return LaunchSpec((str(python), "-P", "-m", "gapmeter.servers.transformers", *words), env)
