"""How a simulated server is set up: its flags, one for each field of its limits, times and faults."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from gapmeter.servers.launch import LOOPBACK
from gapmeter.servers.simulated.scheduler import Limits, StepPlan

_MAX_MODEL_LEN = 8192
_RENAMED = {"max_sequences": "max_batch"}  # the flag's name where it is not the field's


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long each stage takes: nominal durations in ns, and how much they vary.

    The forward pass takes ``forward_ns + forward_prompt_token_ns · prompt tokens + forward_sequence_ns · decoding
    sequences + forward_kv_token_ns · their KV tokens``. ``handoff_ns`` and ``output_ns`` are the hops from the API
    server to the engine and back. Template and tokenize are per request, detokenize and egress per chunk.

    Each duration is multiplied by a lognormal draw with mean 1 and standard deviation ``jitter``. The draws of one
    stage depend on ``seed`` and its name alone. Raises ValueError for a negative duration or jitter.
    """

    template_ns: int = 100_000
    tokenize_ns: int = 200_000
    handoff_ns: int = 0
    schedule_ns: int = 100_000
    input_prep_ns: int = 500_000
    forward_ns: int = 3_000_000
    forward_prompt_token_ns: int = 20_000
    forward_sequence_ns: int = 100_000
    forward_kv_token_ns: int = 100
    sampling_ns: int = 200_000
    update_ns: int = 100_000
    output_ns: int = 100_000
    detokenize_ns: int = 20_000
    egress_ns: int = 20_000
    jitter: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name.endswith("_ns") and getattr(self, item.name) < 0:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; a duration is not negative")
        if self.jitter < 0:
            raise ValueError(f"jitter is {self.jitter}; it must not be negative")

    def forward(self, plan: StepPlan) -> float:
        """Nominal duration of a step's forward pass, in ns."""
        return (
            self.forward_ns
            + self.forward_prompt_token_ns * plan.prompt_tokens
            + self.forward_sequence_ns * plan.decoding
            + self.forward_kv_token_ns * plan.kv_tokens
        )


class Durations:
    """Draws actual durations, one stream of randomness a stage."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self._sigma = math.sqrt(math.log1p(times.jitter**2))
        self._sources: dict[str, random.Random] = {}

    def draw(self, stage: str, nominal_ns: float) -> int:
        """A duration of ``stage`` in ns, ``nominal_ns`` on average."""
        if not self._sigma or not nominal_ns:
            return round(nominal_ns)
        if stage not in self._sources:
            self._sources[stage] = random.Random(f"{self.times.seed}/{stage}")
        return round(nominal_ns * self._sources[stage].lognormvariate(-self._sigma * self._sigma / 2, self._sigma))


@dataclass(frozen=True, slots=True)
class Faults:
    """What the server does wrong. Requests count from 1, in the order in which they come; 0 is never.

    ``start_s``: seconds before the server is ready; ``never_ready``: it listens but its health never answers 200;
    ``die_at``: it is gone, without a word, when that request comes; ``stall_at``: the engine then does nothing for
    ``stall_s`` seconds; ``error_share``: this share of requests, spread evenly, is answered 500.
    """

    start_s: float = 0.0
    never_ready: bool = False
    die_at: int = 0
    stall_at: int = 0
    stall_s: float = 1.0
    error_share: float = 0.0

    def refuses(self, number: int) -> bool:
        """Whether request ``number`` is answered 500: as often as makes ``error_share`` of all so far."""
        return int(number * self.error_share) > int((number - 1) * self.error_share)


_PARTS: dict[str, Any] = {"limits": Limits, "times": StageTimes, "faults": Faults}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that a simulated server is set to. ``model`` None: a tokenizer of one token a byte.

    ``busy``: it takes its core while it waits, as an engine that computes on the CPU. ``max_queue`` requests wait at
    most beyond those that run; more are answered 503. Raises ValueError where the options contradict each other.
    """

    model: Path | None = None
    served_name: str = "simulated"
    host: str = LOOPBACK
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
    parser = argparse.ArgumentParser(
        prog="python -m gapmeter.servers.simulated", description=__doc__,
        argument_default=argparse.SUPPRESS,  # what is not given is as the fields say
    )  # fmt: skip
    parser.add_argument("--model", type=Path, help="folder with tokenizer.json (default: one token a byte)")
    parser.add_argument("--served-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-model-len", type=int, help="prompt plus output, tokens")
    parser.add_argument("--max-queue", type=int, help="requests that may wait; more are answered 503")
    parser.add_argument("--busy", action=argparse.BooleanOptionalAction, help="spin while waiting")
    for kind in _PARTS.values():
        _add_flags(parser, kind)
    given = vars(parser.parse_args(words))
    try:
        parts = {name: _build(kind, given) for name, kind in _PARTS.items()}
        room = parts["limits"].kv_blocks * parts["limits"].block_tokens
        given.setdefault("max_model_len", min(_MAX_MODEL_LEN, room))
        return ServerOptions(**given, **parts)
    except ValueError as error:
        parser.error(str(error))


def _flag(kind: type, name: str) -> str:
    name = _RENAMED.get(name, f"fault_{name}" if kind is Faults else name)
    return name.removesuffix("_ns") + "_ms" if name.endswith("_ns") else name


def _add_flags(parser: argparse.ArgumentParser, kind: Any) -> None:
    """A flag a field: durations in ms, switches as --flag and --no-flag."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        option = f"--{_flag(kind, item.name).replace('_', '-')}"
        if hints[item.name] is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        elif item.name.endswith("_ns"):
            parser.add_argument(option, type=float, metavar="MS")
        else:
            parser.add_argument(option, type=hints[item.name])


def _build(kind: Any, given: dict[str, Any]) -> Any:
    """The dataclass from those of its flags that are there; they are taken out of ``given``."""
    values = {}
    for item in fields(kind):
        flag = _flag(kind, item.name)
        if flag not in given:
            continue
        value = given.pop(flag)
        if item.name.endswith("_ns") and value < 0:  # told by the flag's name, not the field's
            raise ValueError(f"{flag} is {value:g}; a duration is not negative")
        values[item.name] = round(value * 1e6) if item.name.endswith("_ns") else value
    return kind(**values)
