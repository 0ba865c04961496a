"""A server that generates with Transformers' continuous batching, and how to launch it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter.servers.launch import LOOPBACK, LaunchSpec, flag_words, with_user_flags

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def transformers_command(
    python: Path | str,
    model_dir: Path | str,
    served_name: str,
    port: int,
    max_batch: int,
    precision: str,
    args: Mapping[str, Any],
    cores: Sequence[int],
) -> LaunchSpec:
    """The command and environment that serve ``model_dir`` as ``served_name``.

    ``args`` are further flags (``{"max_queue": 64}``; True is a bare flag, False its negation, None leaves it out) and
    win over ours; the model's threads are as many as ``cores`` (empty: all).
    """
    flags = {
        "model": str(model_dir),
        "served-model-name": served_name,
        "host": LOOPBACK,
        "port": port,
        "max-batch": max_batch,
        "precision": precision,
    }
    words = flag_words(with_user_flags(flags, args))
    wanted = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if cores:
        wanted |= dict.fromkeys(_THREADS, str(len(cores)))
    env = {name: value for name, value in wanted.items() if name not in os.environ}
    return LaunchSpec((str(python), "-P", "-m", "gapmeter.servers.transformers", *words), env)
