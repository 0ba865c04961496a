"""The simulated server's flags: one for each field of its limits, times and faults, and what each may be."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from gapmeter.servers.launch import LaunchSpec, flag_words, with_own
from gapmeter.servers.simulated.faults import Faults
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.times import LAWS, StageTimes

ROOT = Path(__file__).resolve().parents[2]
_MAX_MODEL_LEN = 8192
_ELSEWHERE = {"max_sequences": "max_batch"}  # the flag's name where it is not the field's


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that a simulated server is told. ``model`` None: a tokenizer of one token a byte.

    ``busy``: it takes its core while it waits, as an engine that computes on the CPU. ``max_queue`` requests wait at
    most beyond those that run; more are answered 503. Raises ValueError where the options contradict each other.
    """

    model: Path | None = None
    served_name: str = "simulated"
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int = _MAX_MODEL_LEN
    max_queue: int = 4096
    busy: bool = False
    limits: Limits = field(default_factory=Limits)
    times: StageTimes = field(default_factory=StageTimes)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        room = self.limits.kv_blocks * self.limits.block_tokens
        if self.max_model_len > room:
            raise ValueError(f"max_model_len {self.max_model_len} does not fit into {room} tokens of KV blocks")
        if not self.limits.chunked_prefill and self.max_model_len > self.limits.token_budget:
            raise ValueError(
                f"without chunked prefill, token_budget ({self.limits.token_budget}) must hold a request of "
                f"max_model_len ({self.max_model_len}) tokens"
            )


def parse_options(words: Sequence[str]) -> ServerOptions:
    """From the command line. A mistake ends the process with a sentence (argparse, exit code 2)."""
    parser = argparse.ArgumentParser(prog="python -m gapmeter.servers.simulated", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder with tokenizer.json (default: one token a byte)")
    parser.add_argument("--served-name", default="simulated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, help="prompt plus output, tokens")
    parser.add_argument("--max-queue", type=int, default=4096, help="requests that may wait; more are answered 503")
    parser.add_argument("--busy", action=argparse.BooleanOptionalAction, default=False, help="spin while waiting")
    for kind in (Limits, StageTimes, Faults):
        _add_fields(parser, kind)
    given = vars(parser.parse_args(words))
    try:
        parts = {name: _build(kind, given) for name, kind in _PARTS.items()}
        length = given.pop("max_model_len")
        room = parts["limits"].kv_blocks * parts["limits"].block_tokens
        return ServerOptions(**given, **parts, max_model_len=min(_MAX_MODEL_LEN, room) if length is None else length)
    except ValueError as error:
        parser.error(str(error))


_PARTS: dict[str, Any] = {"limits": Limits, "times": StageTimes, "faults": Faults}


def _flag(kind: type, name: str) -> str:
    name = _ELSEWHERE.get(name, name)
    if kind is Faults:
        name = f"fault_{name}"
    return name.removesuffix("_ns") + "_ms" if name.endswith("_ns") else name


def _add_fields(parser: argparse.ArgumentParser, kind: Any) -> None:
    """A flag a field: durations in ms, switches as --flag and --no-flag."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        flag = _flag(kind, item.name)
        option = f"--{flag.replace('_', '-')}"
        if hints[item.name] is bool:
            parser.add_argument(option, dest=flag, action=argparse.BooleanOptionalAction, default=item.default)
        elif item.name.endswith("_ns"):
            parser.add_argument(option, dest=flag, type=float, default=float(str(item.default)) / 1e6, metavar="MS")
        else:
            choices = LAWS if item.name == "jitter" else None
            parser.add_argument(option, dest=flag, type=hints[item.name], default=item.default, choices=choices)


def _build(kind: Any, given: dict[str, Any]) -> Any:
    """The dataclass from its flags, which are taken out of ``given``."""
    values = {}
    for item in fields(kind):
        flag = _flag(kind, item.name)
        value = given.pop(flag)
        if item.name.endswith("_ns") and value < 0:  # told by the flag's name, not the field's
            raise ValueError(f"{flag} is {value:g}; a duration is not negative")
        values[item.name] = round(value * 1e6) if item.name.endswith("_ns") else value
    return kind(**values)


def simulated_command(
    python: str | Path,
    model_dir: str | Path,
    served_name: str,
    port: int,
    max_batch: int,
    precision: str,
    args: Mapping[str, Any],
    cores: Sequence[int] = (),
    *,
    host: str = "127.0.0.1",
) -> LaunchSpec:
    """The command that serves ``model_dir``'s tokenizer as ``served_name`` with simulated stage times.

    ``args`` are further flags (``{"forward_ms": 5, "asynchronous": True}``; see docs/simulated.md). ``precision`` and
    ``cores`` change nothing here: the times are those that the flags say.
    """
    flags = {
        "model": model_dir,
        "served-name": served_name,
        "host": host,
        "port": port,
        "max-batch": max_batch,
    }
    words = flag_words(with_own(flags, args))
    return LaunchSpec((str(python), "-P", "-m", "gapmeter.servers.simulated", *words), {"PYTHONPATH": import_path()})


def import_path() -> str:
    """PYTHONPATH with which a child finds this package, wherever it starts."""
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
