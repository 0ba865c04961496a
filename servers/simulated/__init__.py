"""A continuous-batching server whose stage times are known: the same API and records as real engines, no model."""

from __future__ import annotations

from pathlib import Path

from gapmeter.servers.launch import LOOPBACK, LaunchSpec, Service, flag_words, with_user_flags


def simulated_command(python: str | Path, service: Service) -> LaunchSpec:
    """The command that serves the model's tokenizer with simulated stage times.

    Further flags are, for instance, ``{"forward_ms": 5, "asynchronous": True}``; see docs/simulated.md. Precision and
    cores change nothing here: the times are those that the flags say.
    """
    flags = {
        "model": service.model, "served-name": service.name, "host": LOOPBACK, "port": service.port,
        "max-batch": service.max_batch,
    }  # fmt: skip
    words = flag_words(with_user_flags(flags, service.args))
    return LaunchSpec((str(python), "-P", "-m", "gapmeter.servers.simulated", *words))
