"""A continuous-batching server whose stage times are known: the same API and records as real engines, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter.servers.launch import LOOPBACK, LaunchSpec, flag_words, with_user_flags


def simulated_command(
    python: str | Path,
    model_dir: str | Path,
    served_name: str,
    port: int,
    max_batch: int,
    precision: str,
    args: Mapping[str, Any],
    cores: Sequence[int] = (),
) -> LaunchSpec:
    """The command that serves ``model_dir``'s tokenizer as ``served_name`` with simulated stage times.

    ``args`` are further flags (``{"forward_ms": 5, "asynchronous": True}``; see docs/simulated.md). ``precision`` and
    ``cores`` change nothing here: the times are those that the flags say.
    """
    flags = {"model": model_dir, "served-name": served_name, "host": LOOPBACK, "port": port, "max-batch": max_batch}
    return LaunchSpec(
        (str(python), "-P", "-m", "gapmeter.servers.simulated", *flag_words(with_user_flags(flags, args)))
    )
