"""How long each stage of the simulated server takes: constants, one law for the forward pass, and optional jitter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

from gapmeter.servers.simulated.scheduler import StepPlan

LAWS = ("none", "exponential", "lognormal", "uniform")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nominal durations in ns, and the law of their jitter.

    The forward pass takes ``forward_ns + forward_prompt_token_ns · prompt tokens + forward_sequence_ns · decoding
    sequences + forward_kv_token_ns · their KV tokens``. ``handoff_ns`` and ``output_ns`` are the hops from the API
    server to the engine and back. Template and tokenize are per request, detokenize and egress per chunk.

    Each duration is multiplied by a draw with mean 1: ``exponential``; ``lognormal`` with standard deviation
    ``spread``; ``uniform`` on 1 ± ``spread``. The draws of one stage depend on ``seed`` and its name alone. Raises
    ValueError for a negative duration or an unknown law.
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
    jitter: str = "none"
    spread: float = 0.1
    seed: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_ns") and getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a duration is not negative")
        if self.jitter not in LAWS:
            raise ValueError(f"jitter {self.jitter!r} is none of {', '.join(LAWS)}")
        if self.spread < 0 or (self.jitter == "uniform" and self.spread > 1):
            raise ValueError(f"spread is {self.spread}; it must not be negative, nor above 1 for uniform jitter")

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
        self._streams: dict[str, Callable[[], float]] = {}

    def draw(self, stage: str, nominal_ns: float) -> int:
        """A duration of ``stage`` in ns, ``nominal_ns`` on average."""
        if self.times.jitter == "none" or not nominal_ns:
            return round(nominal_ns)
        stream = self._streams.get(stage)
        if stream is None:
            stream = self._streams[stage] = self._stream(stage)
        return round(nominal_ns * stream())

    def _stream(self, stage: str) -> Callable[[], float]:
        source, law, spread = random.Random(f"{self.times.seed}/{stage}"), self.times.jitter, self.times.spread
        if law == "exponential":
            return lambda: source.expovariate(1.0)
        if law == "uniform":
            return lambda: source.uniform(1 - spread, 1 + spread)
        sigma = math.sqrt(math.log1p(spread * spread))
        return lambda: source.lognormvariate(-sigma * sigma / 2, sigma)
