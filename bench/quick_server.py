"""The simulated engine in virtual time for what the capacity bench asks of it, some ten times as fast.

It knows only a server that does one thing after the other: whole prompts, room for every token, and no time outside of
input preparation and the forward pass. There it must give what ``bench.virtual_server`` gives, to the nanosecond
(tests/bench/test_quick_server.py compares them).
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import fields

from bench.virtual_server import Settings
from gapmeter.servers.simulated.settings import StageTimes

_TAKES_TIME = {"forward_ns", "forward_prompt_token_ns", "forward_sequence_ns", "input_prep_ns"}


class QuickServer:
    """Answers of ``output_tokens`` tokens each; ``first_ns`` and ``last_ns`` of request k are there once it is done.

    Raises ValueError for settings that it does not know.
    """

    def __init__(self, settings: Settings, output_tokens: int) -> None:
        times, limits = settings.times, settings.limits
        other = [f.name for f in fields(StageTimes) if f.name.endswith("_ns") and f.name not in _TAKES_TIME
                 and getattr(times, f.name)]  # fmt: skip
        if other or times.jitter != "lognormal" or limits.asynchronous or limits.prefix_caching or limits.chunk_tokens:
            raise ValueError(f"not for a server with {', '.join(other) or 'such limits or jitter'}")
        self._times, self._most, self._tokens = times, limits.max_sequences, output_tokens
        self._longest_prompt = min(
            limits.token_budget // limits.max_sequences,
            limits.kv_blocks // limits.max_sequences * limits.block_tokens - output_tokens,
        )
        self._prepare, self._forward = (random.Random(f"{times.seed}/{name}") for name in ("input_prep", "forward"))
        self._sigma = math.sqrt(math.log1p(times.spread * times.spread))
        self._waiting: deque[int] = deque()
        self._running: list[list[int]] = []  # of each its number and the tokens that it has
        self._due: list[int] = []
        self._prompts: list[int] = []
        self._taken = 0
        self._free_ns = 0
        self.first_ns: list[int] = []
        self.last_ns: list[int] = []

    def arrive(self, due_ns: int, prompt_tokens: int) -> None:
        """In the order of their times. Raises ValueError for a prompt that might have to wait for room."""
        if prompt_tokens > self._longest_prompt:
            raise ValueError(f"a prompt of {prompt_tokens} tokens may not fit beside others")
        self._due.append(due_ns)
        self._prompts.append(prompt_tokens)
        self.first_ns.append(-1)
        self.last_ns.append(-1)

    def run(self, until_ns: int) -> None:
        """Every step that starts before ``until_ns``, by when all arrivals must be known."""
        while (start := self._next_start()) < until_ns:
            self._step(start)

    def _next_start(self) -> float:
        if self._waiting or self._running:
            return self._free_ns
        return max(self._free_ns, self._due[self._taken]) if self._taken < len(self._due) else math.inf

    def _step(self, start: float) -> None:
        due, taken = self._due, self._taken
        if start > self._free_ns or not (self._waiting or self._running):
            self._waiting.append(taken)  # whoever comes at the very nanosecond too comes to an engine at work
            taken += 1
        if start == self._free_ns:
            while taken < len(due) and due[taken] <= start:
                self._waiting.append(taken)
                taken += 1
        self._taken = taken
        decoding, prompt_tokens = len(self._running), 0
        while self._waiting and len(self._running) < self._most:
            key = self._waiting.popleft()
            prompt_tokens += self._prompts[key]
            self._running.append([key, 0])
        self._free_ns = int(start) + self._duration(prompt_tokens, decoding)
        self._emit()

    def _duration(self, prompt_tokens: int, decoding: int) -> int:
        times, sigma = self._times, self._sigma
        middle = -sigma * sigma / 2
        nominal = times.forward_ns + times.forward_prompt_token_ns * prompt_tokens
        nominal += times.forward_sequence_ns * decoding
        return round(times.input_prep_ns * self._prepare.lognormvariate(middle, sigma)) + round(
            nominal * self._forward.lognormvariate(middle, sigma)
        )

    def _emit(self) -> None:
        at, done = self._free_ns, False
        for each in self._running:
            key, made = each
            if not made:
                self.first_ns[key] = at
            each[1] = made + 1
            if made + 1 == self._tokens:
                self.last_ns[key] = at
                done = True
        if done:
            self._running = [each for each in self._running if each[1] < self._tokens]
