"""The plan of a run: everything that is issued, drawn from the scenario's seed and encoded before the clock starts."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen.arrivals import Arrivals, draw_arrivals, warmup_span
from gapmeter.loadgen.content import Content, Seeds, Stream, ask_once
from gapmeter.loadgen.dialogue import converse
from gapmeter.loadgen.errors import PlanError
from gapmeter.loadgen.lengths import draw_lengths
from gapmeter.loadgen.own_prompts import ask_own
from gapmeter.loadgen.swaps import Swaps, swaps_of
from gapmeter.loadgen.thinking import draw_pauses, mean_pause_ns
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.distributions import FixedPause
from gapmeter.scenarios.model import Load, Scenario, Workload

_MOST_KNOTS = 20_000
_CLOSED_FEWEST, _CLOSED_MOST = 256, 4096


def _none() -> NDArray[np.int64]:
    """A column that a plan does not have."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generator process issues. Index i of every column is the same request.

    Open loop: request i is due at t0 + ``due_ns[i]``; each is issued once. Closed loop: ``due_ns`` is -1 and
    ``concurrency`` users take the next index whenever they are free: until every body is issued where ``end_ns`` is 0,
    else until t0 + ``end_ns``, with ``body`` and ``request_id`` for any index, also beyond the columns.

    Conversations: ``turns`` has each request's place in its conversation, from 1; they stand one after the other, due
    are only the first turns. An issuer sends each following one ``pause_ns`` after the end of the answer before it,
    as long as that lies before ``end_ns`` (0: all of them), and records those whose predecessor failed as ABANDONED.
    A closed loop's user thinks for ``pause_ns`` of the request that was answered, and holds one conversation after the
    other. ``places`` has each request's index in the whole plan of ``planned_in_all`` where conversations were shared.

    A request is measured when its global index is at least ``warmup_requests`` and it was due at or after
    t0 + ``warmup_ns``. ``end_ns`` is the end of the measured part, from t0 (0: when the last body is issued).
    ``rate_knots`` and ``count_dispersion`` say what the due times were drawn from (``Arrivals``), ``prefix_share`` how
    much of all prompts stood at the start of an earlier one (None: not known before the run); no issuer needs them.
    """

    loop: str
    path: str
    due_ns: NDArray[np.int64]
    bodies: list[bytes]
    request_ids: list[str]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prompt_tokens_exact: bool
    warmup_ns: int
    warmup_requests: int
    end_ns: int
    concurrency: int
    think_time_ns: int
    timeout_ns: int
    worker: int
    workers: int
    id_prefix: str
    swaps: Swaps
    notes: tuple[str, ...]
    stall_ns: int = 0
    retries: int = 0
    retry_pause_ns: int = 0
    traceparent: bool = False
    rate_knots: tuple[tuple[int, float], ...] = ()
    count_dispersion: float = 1.0
    prefix_share: float | None = None
    turns: NDArray[np.int64] = field(default_factory=_none)
    pauses_ns: NDArray[np.int64] = field(default_factory=_none)
    places: NDArray[np.int64] = field(default_factory=_none)
    planned_in_all: int = 0

    def __len__(self) -> int:
        return len(self.bodies)

    def global_index(self, index: int) -> int:
        """The request's place in the whole plan, over all generator processes."""
        if not len(self.places):
            return self.worker + index * self.workers
        cycle, at = divmod(index, len(self.places))
        return cycle * self.planned_in_all + int(self.places[at])

    def local_index(self, global_index: int) -> int:
        """The place among this process's requests of one of them that is known by its place in the whole plan."""
        if len(self.places):
            cycle, at = divmod(global_index, self.planned_in_all)
            return cycle * len(self.places) + int(np.searchsorted(self.places, at))
        return (global_index - self.worker) // self.workers

    def turn(self, index: int) -> int:
        """The request's place in its conversation, from 1; 0 where there is none. Any index."""
        return int(self.turns[index % len(self.turns)]) if len(self.turns) else 0

    def follower(self, index: int) -> int | None:
        """The next turn of the same conversation; any index."""
        return index + 1 if self.turn(index + 1) > 1 else None

    def left(self, index: int) -> int:
        """Turns from this one to its conversation's last."""
        count = 1
        while (following := self.follower(index)) is not None:
            index, count = following, count + 1
        return count

    def pause_ns(self, index: int) -> int:
        """How long a user thinks after the answer to this request; any index."""
        return int(self.pauses_ns[index % len(self.pauses_ns)]) if len(self.pauses_ns) else self.think_time_ns

    def request_id(self, index: int) -> str:
        """The x-request-id of any index; the first ``len(self)`` are in ``request_ids``."""
        return _request_id(self.id_prefix, self.global_index(index))

    def body(self, index: int) -> bytes:
        """The body of any index.

        Beyond the columns the bodies come round again, each time with another first word of its own, so that no
        prompt repeats and no prefix cache knows it.
        """
        cycle, at = divmod(index, len(self.bodies))
        return self.swaps.apply(self.bodies[at], at, cycle)

    def is_warmup(self, index: int, due_ns: int) -> bool:
        """Whether the request is left out of the results; ``due_ns`` counts from t0."""
        return due_ns < self.warmup_ns or self.global_index(index) < self.warmup_requests

    def slice(self, worker: int, workers: int) -> Plan:
        """Worker k of n's share: requests k, k + n, k + 2n … of this one plan, and its share of the users.

        Of conversations it is the k-th, k + n-th …, each with all its turns. The shares together are exactly this plan.
        Raises ValueError for a share of a share.
        """
        if self.workers != 1 or not 0 <= worker < workers:
            raise ValueError(f"cannot take share {worker} of {workers} of share {self.worker} of {self.workers}")
        talks = len(self.turns) > 0
        mine = np.flatnonzero((np.cumsum(self.turns == 1) - 1 if talks else np.arange(len(self))) % workers == worker)
        return replace(
            self,
            due_ns=self.due_ns[mine],
            bodies=[self.bodies[i] for i in mine],
            request_ids=[self.request_ids[i] for i in mine],
            prompt_tokens=self.prompt_tokens[mine],
            output_tokens=self.output_tokens[mine],
            concurrency=self._users_of(worker, workers),
            worker=worker,
            workers=workers,
            swaps=replace(self.swaps, at=self.swaps.at[mine]),
            turns=self.turns[mine] if talks else self.turns,
            pauses_ns=self.pauses_ns[mine] if len(self.pauses_ns) else self.pauses_ns,
            places=mine if talks else self.places,
            planned_in_all=len(self) if talks else 0,
        )

    def _users_of(self, worker: int, workers: int) -> int:
        return self.concurrency // workers + (worker < self.concurrency % workers)

    def without_requests(self) -> Plan:
        """The same times, users and ids, for who makes the requests himself while it runs."""
        return replace(
            self, due_ns=_none(), bodies=[], request_ids=[], prompt_tokens=_none(), output_tokens=_none(),
            prompt_tokens_exact=False, swaps=Swaps(np.zeros((0, 3), np.int64), ()), notes=(), pauses_ns=_none(),
            prefix_share=None, turns=_none(), places=_none(),
        )  # fmt: skip

    def digest(self) -> str:
        """12 hex digits of the SHA-256 over what is issued and when; ids, which differ from run to run, left out."""
        digest = hashlib.sha256(
            repr((self.loop, self.path, self.warmup_ns, self.warmup_requests, self.end_ns)).encode()
        )
        digest.update(repr((self.concurrency, self.think_time_ns, self.worker, self.workers)).encode())
        for column in (self.due_ns, self.prompt_tokens, self.output_tokens, self.turns, self.pauses_ns):
            digest.update(column.astype("<i8").tobytes())
        for body in self.bodies:
            digest.update(len(body).to_bytes(8, "little") + body)
        return digest.hexdigest()[:12]

    def describe(self) -> dict[str, object]:
        """What a manifest says about the plan; JSON-able."""
        return {
            "digest": self.digest(),
            "loop": self.loop,
            "planned": len(self.bodies) if self.loop == "open" or not self.end_ns else None,
            "measured_from_ns": self.warmup_ns,
            "warmup_requests": self.warmup_requests,
            "end_ns": self.end_ns,
            "prompt_tokens_exact": self.prompt_tokens_exact,
            "prompt_tokens": int(self.prompt_tokens.sum()),
            "output_tokens": int(self.output_tokens.sum()),
            "rate_knots": [list(knot) for knot in self.rate_knots] if len(self.rate_knots) <= _MOST_KNOTS else [],
            "count_dispersion": self.count_dispersion,
            "prefix_share": self.prefix_share,
            "think_time_ns": self.think_time_ns,
            "conversations": int(np.count_nonzero(self.turns == 1)) if len(self.turns) else None,
            "notes": list(self.notes),
        }


def make_plan(
    scenario: Scenario,
    tokenizer: PromptTokenizer | None,
    *,
    model_name: str,
    repeat: int = 0,
    id_prefix: str = "gap",
    dialect: str | None = None,
) -> Plan:
    """Draw the whole plan from the scenario's seed.

    ``tokenizer`` None: prompts are counted in words, and ``prompt_tokens_exact`` is False. ``repeat`` n is the same
    trace (arrivals, lengths) with fresh text, so that a repeat does not measure the prefix cache. ``id_prefix`` must
    differ between runs against one server. ``dialect`` None means the scenario's.
    Raises PlanError when it cannot be made as asked.
    """
    load, seeds = scenario.load, Seeds(scenario.seed, repeat)
    warmup_ns, warmup_requests = warmup_span(load)
    arrivals = _due(scenario, seeds, warmup_ns, warmup_requests)
    if load.loop == "open" and (not len(arrivals.due_ns) or arrivals.due_ns[-1] < warmup_ns):
        remedy = "a longer trace or load.warmup: 0" if load.trace else "a longer load.duration or a higher load.rate"
        raise PlanError(f"no request falls into the measured part; write {remedy}")
    content = _MAKERS[scenario.workload.kind](scenario, tokenizer, len(arrivals.due_ns), seeds)
    count = len(content.asks)
    sampling = seeds.fresh(Stream.SAMPLING).integers(0, 2**31, count)
    bodies = [
        encode_body(scenario.workload, model_name, ask, int(tokens), int(draw), dialect or scenario.server.dialect)
        for ask, tokens, draw in zip(content.asks, content.output_tokens, sampling, strict=True)
    ]
    due_ns = _first_turns(arrivals.due_ns, content.turns)
    return Plan(
        loop=load.loop,
        path=content.path,
        due_ns=due_ns,
        bodies=bodies,
        request_ids=[_request_id(id_prefix, index) for index in range(count)],
        prompt_tokens=content.prompt_tokens,
        output_tokens=content.output_tokens,
        prompt_tokens_exact=content.exact,
        warmup_ns=warmup_ns,
        warmup_requests=_warm(warmup_requests, content.turns),
        end_ns=_end(load, arrivals.due_ns, warmup_ns, talks=len(content.turns) > 0),
        concurrency=load.concurrency or 0,
        think_time_ns=mean_pause_ns(load.think_time),
        timeout_ns=load.timeout_ns,
        stall_ns=load.stall_ns or 0,
        retries=load.retries,
        retry_pause_ns=load.retry_pause_ns,
        traceparent=load.traceparent,
        worker=0,
        workers=1,
        id_prefix=id_prefix,
        swaps=swaps_of(content, bodies),
        notes=(*content.notes, *_growing(load, content, warmup_ns)),
        rate_knots=arrivals.knots,
        count_dispersion=arrivals.dispersion,
        prefix_share=_prefix_share(content) if load.loop == "open" else None,
        turns=content.turns,
        pauses_ns=_pauses(load, count, seeds),
    )


_MAKERS = {"chat": ask_once, "completion": ask_once, "conversation": converse, "file": ask_own}


def encode_body(
    workload: Workload, model_name: str, ask: dict[str, object], output_tokens: int, seed: int, dialect: str
) -> bytes:
    """One request's JSON; ``ask`` is its messages or its prompt.

    The full dialect makes the answer exactly ``output_tokens`` long (``ignore_eos``, ``min_tokens``) and asks for the
    running token count in every chunk; plain has neither.
    """
    body: dict[str, object] = {"model": model_name, **ask}
    stream_options = {"include_usage": True}
    body |= {"max_tokens": output_tokens, "temperature": workload.temperature, "seed": seed, "stream": True}
    if dialect == "full":
        body |= {"min_tokens": output_tokens, "ignore_eos": True}
        stream_options["continuous_usage_stats"] = True
    body["stream_options"] = stream_options
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _request_id(prefix: str, index: int) -> str:
    return f"{prefix}-{index:06d}"


def _first_turns(due_ns: NDArray[np.int64], turns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The due times of conversations' first turns; when the others are due the answers before them decide."""
    if not len(turns):
        return due_ns
    out = np.full(len(turns), -1, np.int64)
    out[turns == 1] = due_ns
    return out


def _warm(conversations: int, turns: NDArray[np.int64]) -> int:
    """A warm-up of so many requests, or of all turns of so many conversations."""
    if not len(turns) or not conversations:
        return conversations
    return int(np.append(np.flatnonzero(turns == 1), len(turns))[conversations])


def _pauses(load: Load, count: int, seeds: Seeds) -> NDArray[np.int64]:
    """Think times that differ; nothing where they are all the same."""
    if isinstance(load.think_time, FixedPause):
        return np.zeros(0, np.int64)
    return draw_pauses(load.think_time, count, seeds.rng(Stream.THINKING))


def _growing(load: Load, content: Content, warmup_ns: int) -> list[str]:
    """While the first conversations still go on, later turns grow more frequent: that belongs into the warm-up."""
    if not len(content.turns) or (load.loop == "closed" and load.requests is not None):
        return []
    each = len(content.turns) / int(np.count_nonzero(content.turns == 1))
    lasts_ns = (each - 1) * mean_pause_ns(load.think_time)
    if lasts_ns <= warmup_ns:
        return []
    grows = "the load still grows" if load.loop == "open" else "histories still grow"
    text = (
        f"a conversation's think times alone take {lasts_ns / 1e9:.3g} s on average, the warm-up takes "
        f"{warmup_ns / 1e9:.3g} s: {grows} while it is measured; write a longer load.warmup"
    )
    return [text]


def _prefix_share(content: Content) -> float:
    return float(content.repeated.sum()) / max(int(content.prompt_tokens.sum()), 1)


def _due(scenario: Scenario, seeds: Seeds, warmup_ns: int, warmup_requests: int) -> Arrivals:
    """Due times of requests, or of conversations where these are asked."""
    load = scenario.load
    if load.loop == "open":
        return draw_arrivals(load, seeds.rng(Stream.ARRIVALS), warmup_ns)
    if load.requests is not None:
        return _unknown(warmup_requests + load.requests)
    # How many a closed loop will ask within its time nobody knows beforehand; past these, bodies come round changed.
    span_s = (warmup_ns + (load.duration_ns or 0)) / 1e9
    guess = min(max(int((load.concurrency or 1) * span_s * 4), _CLOSED_FEWEST), _CLOSED_MOST)
    if scenario.workload.kind == "conversation":
        each = draw_lengths(scenario.workload.turns, _CLOSED_FEWEST, seeds.rng(Stream.TURNS)).mean()
        guess = math.ceil(guess / float(each))
    return _unknown(guess)


def _unknown(count: int) -> Arrivals:
    """A closed loop's: when each is due the answers before it decide."""
    return Arrivals(np.full(count, -1, np.int64), (), 0.0)


def _end(load: Load, due_ns: NDArray[np.int64], warmup_ns: int, *, talks: bool) -> int:
    """So many conversations are all heard to their end."""
    if load.duration_ns is not None:
        return warmup_ns + load.duration_ns
    return int(due_ns[-1]) + 1 if load.loop == "open" and not talks else 0
