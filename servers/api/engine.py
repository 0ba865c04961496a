"""The seam between the HTTP layer and what generates tokens. Behind it stand Transformers and the simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``temperature`` 0 is greedy; ``seed`` None lets the engine draw one."""

    engine_id: str
    client_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What one engine message brought for one request.

    ``ids`` are the new tokens only (none is allowed, when ``finish_reason`` is set). ``received_ns`` is when this
    process had the message, before it looked at it; ``started_ns`` when it began with the outputs that came together in
    it (0: with this one). ``finish_reason`` is "length", "stop" or "error" in the last one. ``cached`` counts the
    prompt's tokens that the prefix cache spared (None: unknown).
    """

    ids: Sequence[int]
    received_ns: int
    finish_reason: str | None = None
    cached: int | None = None
    error: str = ""
    started_ns: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state as of its last message; counters count since its start; None is unknown."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    steps: int = 0
    preemptions: int | None = None


class QueueFull(RuntimeError):
    """The engine holds as many requests as it may."""


class EngineDead(RuntimeError):
    """The engine has ended; the message says why."""


Deliver = Callable[[Output], None]


class Engine(Protocol):
    """Generates tokens. All methods are called on the event loop, and ``deliver`` is called back there, in order."""

    async def start(self) -> None:
        """Return when requests can be served. Raises EngineDead when that will not happen."""

    async def wait_dead(self) -> str:
        """Return, with the reason, if the engine ends by itself; never after a ``stop``."""

    async def stop(self) -> None:
        """End within seconds; requests that are running get no more outputs."""

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Hand a request over without waiting. Raises QueueFull or EngineDead."""

    def cancel(self, engine_id: str) -> None:
        """Nobody wants the rest. Nothing is delivered for it any more; an unknown or finished id is fine."""

    def stats(self) -> EngineStats:
        """The engine's state."""
