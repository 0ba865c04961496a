"""A continuous-batching scheduler: which requests run in the next step, with how many tokens each.

Plain values only: no clock, no input or output. The rules are those of vLLM's V1 scheduler (0.32): running requests
first, in the order in which they were admitted, then waiting ones first come, first served, within a budget of tokens
a step; prompts in chunks; KV blocks by need, and when they run out the request admitted last is evicted and computed
anew; what a request has computed counts from the moment it is scheduled, so that the next step may be scheduled while
this one still runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gapmeter_probe.records import EntryFlag

from gapmeter.servers.simulated.blocks import BlockPool, Lease

Key = Any  # names a request: its engine id here, a plain number in virtual time
_PROMPT, _LAST = int(EntryFlag.PROMPT), int(EntryFlag.LAST_CHUNK)
_RESUMED, _PREEMPTED = int(EntryFlag.RESUMED), int(EntryFlag.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler must keep to.

    ``asynchronous``: a step may be scheduled while the one before it runs. ``reserve_prompt``: a request is admitted
    only when blocks for its whole prompt are free, not just for its first chunk. ``chunk_tokens``: the most prompt
    tokens of one request in a step while others want to run (0: the whole budget). Raises ValueError for limits that
    no scheduler could work with.
    """

    max_sequences: int = 8
    token_budget: int = 2048
    kv_blocks: int = 4096
    block_tokens: int = 16
    chunked_prefill: bool = True
    chunk_tokens: int = 0
    reserve_prompt: bool = True
    prefix_caching: bool = False
    asynchronous: bool = False

    def __post_init__(self) -> None:
        for name in ("max_sequences", "token_budget", "kv_blocks", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}; it must not be negative")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget ({self.token_budget}) is below max_sequences ({self.max_sequences}): "
                "a step must hold one token of each"
            )


class Request(NamedTuple):
    """What a client wants: ``prompt_tokens`` in, exactly ``output_tokens`` out.

    ``hashes`` name the content of the prompt's full blocks, each covering all before it (empty: nothing to share).
    """

    key: Key
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[Hashable, ...] = ()


class Entry(NamedTuple):
    """One request's part in a step; ``flags`` as in gapmeter_probe.records.EntryFlag."""

    key: Key
    tokens: int
    before: int
    cached: int
    flags: int


class Emission(NamedTuple):
    """One request's new tokens from a step, and whether they were its last."""

    key: Key
    tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    ``prompt_tokens`` counts tokens computed for prompts (and again for the evicted), ``decoding`` the sequences that
    decode and ``kv_tokens`` those that their attention reads. ``running``, ``waiting`` and ``free_blocks`` are those
    after scheduling; ``preempted`` the requests evicted meanwhile.
    """

    seq: int
    entries: tuple[Entry, ...]
    preempted: tuple[Key, ...]
    running: int
    waiting: int
    free_blocks: int
    prompt_tokens: int
    decoding: int
    kv_tokens: int

    @property
    def empty(self) -> bool:
        """No token is scheduled."""
        return not (self.prompt_tokens or self.decoding)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way. ``target`` tokens are known to it: its prompt and what was made and delivered."""

    request: Request
    target: int
    made: int = 0
    computed: int = 0
    pending: int = 0  # tokens that steps in flight will make
    flying: int = 0  # steps in flight that carry it
    stale: int = 0  # of these, such as were scheduled before it was evicted
    resumed: bool = False
    lease: Lease = field(default_factory=Lease)


class Scheduler:
    """Call ``add`` and ``abort`` at any time, ``schedule`` for each step, ``update`` with its plan once it has run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.kv_blocks, limits.block_tokens, caching=limits.prefix_caching)
        self._unfinished: dict[Key, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._seq = 0

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._unfinished)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests that run, requests in the queue, free KV blocks."""
        return len(self._running), len(self._waiting), self.pool.free

    @property
    def next_seq(self) -> int:
        """The sequence number that the next plan will carry, from 1."""
        return self._seq + 1

    def check(self, request: Request) -> None:
        """Raises ValueError when ``request`` could never run within the limits."""
        tokens = request.prompt_tokens + request.output_tokens
        limits = self.limits
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request needs at least one token in and one out")
        if self.pool.count(tokens) > limits.kv_blocks:
            raise ValueError(f"{tokens} tokens need more than the {limits.kv_blocks} KV blocks that there are")
        if not limits.chunked_prefill and tokens > limits.token_budget:
            raise ValueError(f"{tokens} tokens exceed the budget of {limits.token_budget} and prompts are not chunked")

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, or its key is in use."""
        self.check(request)
        if request.key in self._unfinished:
            raise ValueError(f"request {request.key} is there already")
        sequence = _Sequence(request, request.prompt_tokens)
        self._unfinished[request.key] = sequence
        self._waiting.append(sequence)

    def abort(self, key: Key) -> bool:
        """Forget a request, wherever it is. False when it is not there (any more)."""
        sequence = self._unfinished.pop(key, None)
        if sequence is None:
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self.pool.release(sequence.lease)
        return True

    def schedule(self) -> StepPlan:
        """Decide the next step. Without ``asynchronous`` the one before must have been updated."""
        self._seq += 1
        entries: list[Entry] = []
        preempted: list[Key] = []
        budget = self._schedule_running(entries, preempted)
        if not preempted:
            self._schedule_waiting(entries, budget)
        decodes = [entry for entry in entries if not entry.flags & _PROMPT]
        evicted = tuple(Entry(key, 0, 0, 0, _PREEMPTED) for key in preempted)
        return StepPlan(
            seq=self._seq,
            entries=evicted + tuple(entries),
            preempted=tuple(preempted),
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self.pool.free,
            prompt_tokens=sum(entry.tokens for entry in entries) - len(decodes),
            decoding=len(decodes),
            kv_tokens=sum(entry.before for entry in decodes) + len(decodes),
        )

    def update(self, plan: StepPlan) -> tuple[Emission, ...]:
        """Take in what a step has made. Plans come back in the order in which they were made.

        Each request whose last known token was computed gets one token. One that was evicted while the step ran gets
        it as well; one that was aborted gets nothing.
        """
        emissions = []
        for entry in plan.entries:
            sequence = self._unfinished.get(entry.key)
            if sequence is None or not entry.tokens:
                continue
            sequence.flying -= 1
            makes = entry.flags & _LAST or not entry.flags & _PROMPT
            if sequence.stale:
                sequence.stale -= 1
            elif makes:
                sequence.pending -= 1
            if makes:
                sequence.made += 1
                sequence.target += 1
                finished = sequence.made == sequence.request.output_tokens
                emissions.append(Emission(entry.key, 1, finished))
                if finished:
                    self.abort(entry.key)
        return tuple(emissions)

    def _schedule_running(self, entries: list[Entry], preempted: list[Key]) -> int:
        """Tokens for those that run already, evicting from the end where blocks are short; the budget left."""
        budget, position = self.limits.token_budget, 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            tokens = 0  # when all that it will make is in flight
            if sequence.made + sequence.pending < sequence.request.output_tokens:
                tokens = self._chunk(sequence.target + sequence.pending - sequence.computed, budget)
            if not tokens:
                position += 1
                continue
            if not self._make_room(sequence, tokens, preempted):
                break
            budget -= tokens
            position += 1
            entries.append(self._advance(sequence, tokens, 0))
        return budget

    def _chunk(self, tokens: int, budget: int) -> int:
        most = self.limits.chunk_tokens if self.limits.chunked_prefill else 0
        if 0 < most < tokens and len(self._unfinished) > 1:
            tokens = most
        return min(tokens, budget)

    def _make_room(self, sequence: _Sequence, tokens: int, preempted: list[Key]) -> bool:
        """Blocks for ``tokens`` more, evicting those admitted last; False when it was evicted itself."""
        while not self.pool.extend(sequence.lease, sequence.computed + tokens):
            victim = self._running.pop()
            self.pool.release(victim.lease)
            victim.computed = victim.pending = 0
            victim.stale = victim.flying
            victim.resumed = True
            self._waiting.appendleft(victim)
            preempted.append(victim.request.key)
            if victim is sequence:
                return False
        return True

    def _schedule_waiting(self, entries: list[Entry], budget: int) -> None:
        """Admit from the queue's head as long as sequences, budget and blocks last."""
        limits, passed = self.limits, []
        while self._waiting and budget > 0 and len(self._running) < limits.max_sequences:
            sequence = self._waiting.popleft()
            if sequence.stale:  # tokens made before its eviction are on their way; it may not overtake them
                passed.append(sequence)
                continue
            hashes = self._hashes(sequence, sequence.target)
            hits = self.pool.find(hashes, sequence.target - 1)
            cached = hits * limits.block_tokens
            tokens = self._chunk(sequence.target - cached, budget)
            cut = cached + tokens < sequence.target
            room = sequence.target if limits.reserve_prompt else cached + tokens
            if (cut and not limits.chunked_prefill) or not self.pool.fits(hashes, hits, room):
                self._waiting.appendleft(sequence)
                break
            self._running.append(sequence)
            sequence.lease = self.pool.take(hashes, hits)
            sequence.computed = cached
            if not self.pool.extend(sequence.lease, cached + tokens):
                raise AssertionError("blocks that were free have gone")
            budget -= tokens
            entries.append(self._advance(sequence, tokens, cached))
        self._waiting.extendleft(reversed(passed))

    def _advance(self, sequence: _Sequence, tokens: int, cached: int) -> Entry:
        """Count ``tokens`` as computed, and say what they are."""
        before, target = sequence.computed, sequence.target
        after = sequence.computed = before + tokens
        sequence.flying += 1
        flags = 0
        if before < sequence.request.prompt_tokens or (sequence.resumed and before < target):
            flags = _PROMPT | (_RESUMED if sequence.resumed else 0) | (_LAST if after >= target else 0)
        if after >= target:
            sequence.pending += 1
            sequence.resumed = False
        if self.limits.prefix_caching and min(after, target) // self.limits.block_tokens > len(sequence.lease.content):
            self.pool.fill(sequence.lease, self._hashes(sequence, min(after, target)))
        return Entry(sequence.request.key, tokens, before, cached, flags)

    def _hashes(self, sequence: _Sequence, tokens: int) -> tuple[Hashable, ...]:
        """Names of the full blocks among the first ``tokens``; blocks with generated tokens are the request's own."""
        if not self.limits.prefix_caching:
            return ()
        full = tokens // self.limits.block_tokens
        key, shared = sequence.request.key, sequence.request.hashes
        return shared[:full] + tuple((key, number) for number in range(len(shared), full))
