"""Capacity trials in virtual time, on servers whose capacity is known: queues, and the simulated engine."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from bench.queues import lindley
from bench.virtual_server import Arrival, Settings, simulate
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.curve import pace_of
from gapmeter.analysis.capacity.read import bunched, count_values
from gapmeter.analysis.capacity.sample import served_by
from gapmeter.analysis.capacity.search import Goal, next_trial, run_trial
from gapmeter.analysis.capacity.trial import Ask, Enough, Oracle, Outcome, Trial
from gapmeter.analysis.results.capacity import Ended
from gapmeter.scenarios.slo import Slo
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import StageTimes

Answers = tuple[Floats, Floats, Floats, Floats]  # when due, had their first and last token, ns; tokens after the first
_MORE = 50  # requests after the last that counts, so that it does not meet an emptying server


@dataclass(frozen=True, slots=True)
class Queue:
    """``places`` that each serve one request at a time, first come, first served.

    The wait is the time to first token, the service that from the first to the second, which is the last.
    ``law``: exponential, deterministic, lognormal (standard deviation of the logarithm 1) or pareto (2.5), all with the
    mean ``service_ms``. ``burstiness``: squared coefficient of variation of the gaps between arrivals, which are gamma
    distributed; 1 is Poisson.
    """

    places: int
    law: str
    service_ms: float
    burstiness: float = 1.0

    @property
    def ceiling(self) -> float:
        return 1000 * self.places / self.service_ms

    def __call__(self, rate: float, rng: np.random.Generator, count: int) -> Answers:
        shape = 1 / self.burstiness
        gaps, services = rng.gamma(shape, 1e9 / rate / shape, count), self._services(rng, count)
        due = np.cumsum(gaps)
        if self.places == 1:
            start = due + lindley(gaps[None], services[None])[0]
        else:
            start, free = np.empty(count), [0.0] * self.places
            for i, (at, work) in enumerate(zip(due.tolist(), services.tolist(), strict=True)):
                start[i] = begin = max(at, free[0])
                heapq.heapreplace(free, begin + work)
        return due, start, start + services, np.ones(count)

    def _services(self, rng: np.random.Generator, count: int) -> Floats:
        mean = 1e6 * self.service_ms
        if self.law == "deterministic":
            return np.full(count, mean)
        if self.law == "exponential":
            return rng.exponential(mean, count)
        if self.law == "lognormal":
            return mean * rng.lognormal(-0.5, 1.0, count)
        return mean * 0.6 * (1 + rng.pareto(2.5, count))


@dataclass(frozen=True, slots=True)
class Engine:
    """The simulated engine. Prompt and output tokens uniform, both ends included; arrivals Poisson."""

    burstiness: ClassVar[float] = 1.0
    settings: Settings
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def __call__(self, rate: float, rng: np.random.Generator, count: int) -> Answers:
        times = replace(self.settings.times, seed=int(rng.integers(2**31)))
        settings = replace(self.settings, times=times)
        due = np.cumsum(rng.exponential(1e9 / rate, count)).astype(np.int64)
        prompts = rng.integers(self.prompt_tokens[0], self.prompt_tokens[1] + 1, count).tolist()
        outputs = rng.integers(self.output_tokens[0], self.output_tokens[1] + 1, count).tolist()
        found = simulate([Arrival(*each) for each in zip(due.tolist(), prompts, outputs, strict=True)], settings)
        first, last = (np.array([getattr(each, name) for each in found], float) for name in _STAMPS)
        return due.astype(float), first, last, np.array(outputs) - 1.0


_STAMPS = ("first_token_ns", "last_token_ns")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a virtual server. ``slos``: on TTFT or E2E.

    ``warmup_s`` of load do not count; ``around_s``: what a trial takes beside its load. ``drift``: standard deviation
    of the logarithm of the server's speed, drawn anew for each trial.
    """

    server: Queue | Engine
    slos: tuple[Slo, ...]
    warmup_s: float = 5.0
    around_s: float = 3.0
    drift: float = 0.0


# A server whose time is all in its steps.
STEPS = StageTimes(
    template_ns=0, tokenize_ns=0, handoff_ns=0, schedule_ns=0, input_prep_ns=0, forward_ns=0,
    forward_prompt_token_ns=0, forward_sequence_ns=0, forward_kv_token_ns=0, sampling_ns=0, update_ns=0, output_ns=0,
    detokenize_ns=0, egress_ns=0,
)  # fmt: skip
# Sixteen places in the batch and few KV blocks: under load it evicts requests and computes them again, so that it
# completes some 5 % fewer when it is overloaded than it could.
EVICTING = Engine(
    Settings(
        Limits(max_sequences=16, kv_blocks=80, block_tokens=16),
        replace(
            STEPS, input_prep_ns=1_000_000, forward_ns=8_000_000, forward_prompt_token_ns=40_000,
            forward_sequence_ns=400_000, jitter=0.2,
        ),
    ),
    prompt_tokens=(20, 119),
    output_tokens=(10, 39),
)  # fmt: skip


class VirtualOracle:
    """Runs trials of ``asked``; ``seed`` and the trial's number fix its arrivals and durations."""

    def __init__(self, asked: Asked, seed: int) -> None:
        self._asked, self._seed = asked, seed

    def run(self, ask: Ask, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        rng, asked = np.random.default_rng((self._seed, number)), self._asked
        slow = float(np.exp(-asked.drift * rng.standard_normal()))
        warmup_s = min(asked.warmup_s, 1.0) if ask.aim == "ceiling" else asked.warmup_s
        issued = round(1.05 * (ask.rate * warmup_s + looks[-1])) + _MORE
        *stamps, tokens = asked.server(ask.rate * slow, rng, issued)
        due, first, last = (slow * each for each in stamps)
        ahead = int(np.searchsorted(due, 1e9 * warmup_s))
        for at, look in enumerate(looks):
            of = slice(ahead, ahead + look)
            values = [(first if slo.metric == "ttft" else last)[of] - due[of] for slo in asked.slos]
            counts = tuple(
                count_values(each, due[of], slo.limit_ns or 0, slo.percentile or 0.0, ask.rate)
                for slo, each in zip(asked.slos, values, strict=True)
            )
            if enough(at, counts):
                break
        good = np.logical_and.reduce(
            [each <= (slo.limit_ns or 0) for slo, each in zip(asked.slos, values, strict=True)]
        )
        seconds = float(last[: of.stop].max()) / 1e9 + asked.around_s
        in_flight = ask.rate * float((last[of] - due[of]).mean()) / 1e9
        return Outcome(
            counts, int(np.searchsorted(due, 1e9 * seconds)), look, seconds, int(good.sum()),
            min(count.n_eff for count in counts), at + 1, served_by(due[of], last[of]),
            pace_of((last[of] - first[of]) / tokens[of]), in_flight, bunched=bunched(asked.server.burstiness),
        )  # fmt: skip


def search(goal: Goal, oracle: Oracle) -> tuple[list[Trial], Ended]:
    """Every trial until the search ends, and how it ended."""
    done: list[Trial] = []
    while not isinstance(ask := next_trial(goal, done), str):
        done.append(run_trial(goal, oracle, ask, len(done) + 1))
    return done, ask
