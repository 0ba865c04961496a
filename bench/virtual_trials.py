"""Trials in virtual time: the simulated engine (``quick_server``) under Poisson arrivals, as long as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.quick_server import QuickServer
from bench.virtual_server import Settings
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.read import count_values
from gapmeter.analysis.capacity.trial import Count, Enough, Outcome, Promise
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import StageTimes

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the virtual server: ``prompt_tokens`` uniform on both ends included, a fixed answer's length.

    ``limits_ns`` are the promises' limits, on TTFT or E2E; the first ``warmup`` requests of a trial do not count.
    ``around_s``: what a trial takes beside its load.
    """

    settings: Settings
    prompt_tokens: tuple[int, int]
    output_tokens: int
    promises: tuple[Promise, ...]
    limits_ns: tuple[int, ...]
    warmup: int
    around_s: float = 0.0

    @property
    def longest_ns(self) -> int:
        return max(self.limits_ns)


# A server whose time is all in its steps.
STEPS = StageTimes(
    template_ns=0, tokenize_ns=0, handoff_ns=0, schedule_ns=0, input_prep_ns=0, forward_ns=0,
    forward_prompt_token_ns=0, forward_sequence_ns=0, forward_kv_token_ns=0, sampling_ns=0, update_ns=0, output_ns=0,
    detokenize_ns=0, egress_ns=0, jitter="lognormal", spread=0.0,
)  # fmt: skip
# Two tokens an answer, four places in the batch: queues, batching and prompts beside decodes, at few steps a request.
SMALL = Asked(
    Settings(
        Limits(max_sequences=4),
        replace(
            STEPS, input_prep_ns=500_000, forward_ns=6_000_000, forward_prompt_token_ns=100_000,
            forward_sequence_ns=500_000, spread=0.2,
        ),
    ),
    prompt_tokens=(8, 24),
    output_tokens=2,
    promises=(Promise("ttft p95 <= 40 ms", "ttft", 0.05), Promise("e2e p95 <= 60 ms", "e2e", 0.05)),
    limits_ns=(40_000_000, 60_000_000),
    warmup=200,
)  # fmt: skip


# Like the scenario chat-p99 on a small engine: four places, answers of five tokens, a limit far above what is usual.
CHAT = Asked(
    Settings(
        Limits(max_sequences=4),
        replace(
            STEPS, input_prep_ns=1_000_000, forward_ns=4_000_000, forward_prompt_token_ns=60_000,
            forward_sequence_ns=800_000, spread=0.3,
        ),
    ),
    prompt_tokens=(8, 120),
    output_tokens=5,
    promises=(Promise("ttft p99 <= 500 ms", "ttft", 0.01), Promise("e2e p99 <= 900 ms", "e2e", 0.01)),
    limits_ns=(500_000_000, 900_000_000),
    warmup=300,
    around_s=4.0,
)  # fmt: skip


class VirtualTrial:
    """One trial's server and arrivals; ``count(n)`` runs it until the fate of n measured requests is known."""

    def __init__(self, asked: Asked, rate: float, seed: tuple[int, ...]) -> None:
        self._asked, self._rate = asked, rate
        self._draw = np.random.default_rng(seed)
        times = replace(asked.settings.times, seed=int(self._draw.integers(2**31)))
        self._server = QuickServer(replace(asked.settings, times=times), asked.output_tokens)
        self._due: list[int] = []
        self._fed = 0
        self._prompts: list[int] = []

    @property
    def issued(self) -> int:
        return self._fed

    def count(self, measured: int) -> list[Count]:
        """The counts over the first ``measured`` requests after the warm-up, one a promise."""
        due = np.array(self._due_of(measured), float)
        return [
            count_values(values, due, limit, 100 * (1 - promise.share), self._rate)
            for promise, limit, values in zip(
                self._asked.promises, self._asked.limits_ns, self.values_ns(measured), strict=True
            )
        ]

    def values_ns(self, measured: int) -> list[Floats]:
        """What each promise judges; infinite for a request that has not come so far when its limit is long past."""
        due = self._due_of(measured)
        first, last = self._asked.warmup, self._asked.warmup + measured
        self._feed_until(due[-1] + self._asked.longest_ns)
        out = []
        for promise in self._asked.promises:
            stamps = self._server.first_ns if promise.metric == "ttft" else self._server.last_ns
            at = np.array(stamps[first:last], float)
            out.append(np.where(at < 0, np.inf, at - np.array(due, float)))
        return out

    def _due_of(self, measured: int) -> list[int]:
        last = self._asked.warmup + measured
        self._feed(last)
        return self._due[self._asked.warmup : last]

    def _feed(self, count: int) -> None:
        """Draw arrivals until there are so many; each block's draws are the same however it is come by."""
        while len(self._due) < count:
            gaps = self._draw.exponential(1e9 / self._rate, _BLOCK)
            last = self._due[-1] if self._due else 0
            self._due += (last + np.cumsum(gaps)).astype(int).tolist()
            low, high = self._asked.prompt_tokens
            self._prompts += self._draw.integers(low, high + 1, _BLOCK).tolist()

    def _feed_until(self, end_ns: int) -> None:
        while True:
            self._feed(self._fed + 1)
            if self._due[self._fed] >= end_ns:
                break
            self._server.arrive(self._due[self._fed], self._prompts[self._fed])
            self._fed += 1
        self._server.run(end_ns)


class VirtualOracle:
    """Runs trials of ``asked``; ``seed`` and the trial's number fix its arrivals and durations."""

    def __init__(self, asked: Asked, seed: int) -> None:
        self._asked, self._seed = asked, seed

    def run(self, rate: float, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        trial = VirtualTrial(self._asked, rate, (self._seed, number))
        for at, look in enumerate(looks):
            counts = trial.count(look)
            if enough(at, counts):
                break
        within = [values <= limit for values, limit in zip(trial.values_ns(look), self._asked.limits_ns, strict=True)]
        good = int(np.logical_and.reduce(within).sum())
        worth = min(count.n_eff for count in counts)
        seconds = trial.issued / rate + self._asked.around_s
        return Outcome(tuple(counts), trial.issued, look, seconds, good, worth, at + 1)
