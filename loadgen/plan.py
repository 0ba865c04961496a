"""The plan of a run: everything that is issued, drawn from the scenario's seed and encoded before the clock starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadgen.arrivals import Arrivals, draw_arrivals, warmup_span
from loadgen.errors import PlanError
from loadgen.lengths import draw_lengths
from loadgen.prompts import Prompts, make_prompts
from loadgen.tokenizer import PromptTokenizer
from scenarios.model import Load, Scenario, Workload

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

# One stream of randomness for each thing that is drawn: drawing more of one moves no other.
_ARRIVALS, _PROMPT_LENGTHS, _OUTPUT_LENGTHS, _CONTENTS, _SAMPLING, _GROUPS, _SHARED = range(7)
_MOST_KNOTS = 20_000
_CLOSED_FEWEST, _CLOSED_MOST = 256, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generator process issues. Index i of every column is the same request.

    Open loop: request i is due at t0 + ``due_ns[i]``; each is issued once. Closed loop: ``due_ns`` is -1 and
    ``concurrency`` users take the next index whenever they are free: until every body is issued where ``end_ns`` is 0,
    else until t0 + ``end_ns``, with ``body`` and ``request_id`` for any index, also beyond the columns.

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
    rate_knots: tuple[tuple[int, float], ...] = ()
    count_dispersion: float = 1.0
    prefix_share: float | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    def global_index(self, index: int) -> int:
        """The request's place in the whole plan, over all generator processes."""
        return self.worker + index * self.workers

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

        The shares together are exactly this plan. Raises ValueError for a share of a share.
        """
        if self.workers != 1 or not 0 <= worker < workers:
            raise ValueError(f"cannot take share {worker} of {workers} of share {self.worker} of {self.workers}")
        mine = slice(worker, None, workers)
        return replace(
            self,
            due_ns=self.due_ns[mine],
            bodies=self.bodies[mine],
            request_ids=self.request_ids[mine],
            prompt_tokens=self.prompt_tokens[mine],
            output_tokens=self.output_tokens[mine],
            concurrency=self.concurrency // workers + (worker < self.concurrency % workers),
            worker=worker,
            workers=workers,
            swaps=replace(self.swaps, at=self.swaps.at[mine]),
        )

    def digest(self) -> str:
        """12 hex digits of the SHA-256 over what is issued and when; ids, which differ from run to run, left out."""
        digest = hashlib.sha256(
            repr((self.loop, self.path, self.warmup_ns, self.warmup_requests, self.end_ns)).encode()
        )
        digest.update(repr((self.concurrency, self.think_time_ns, self.worker, self.workers)).encode())
        for column in (self.due_ns, self.prompt_tokens, self.output_tokens):
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
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """Where each body's first own word stands, and the words that may stand there instead.

    ``at``: int64 (n, 3): first byte, byte after the last, the word's index in ``words`` (-1: nothing to swap).
    """

    at: NDArray[np.int64]
    words: tuple[bytes, ...]

    def apply(self, body: bytes, index: int, cycle: int) -> bytes:
        """The body as it is in the given round; the first round's is the body itself."""
        start, end, word = (int(value) for value in self.at[index])
        if cycle == 0 or word < 0:
            return body
        return body[:start] + self.words[(word + cycle) % len(self.words)] + body[end:]


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
    load, workload, seed = scenario.load, scenario.workload, scenario.seed
    warmup_ns, warmup_requests = warmup_span(load)
    arrivals = _due(load, np.random.default_rng([seed, _ARRIVALS]), warmup_ns, warmup_requests)
    due_ns, count = arrivals.due_ns, len(arrivals.due_ns)
    if load.loop == "open" and (not count or due_ns[-1] < warmup_ns):
        raise PlanError("no request falls into the measured part; write a longer load.duration or a higher load.rate")
    asked, output = _lengths(scenario, count)
    fitting = _within_context(asked, output, scenario.server.max_model_len)

    def contents(index: int) -> np.random.Generator:
        if index < -1:
            return np.random.default_rng([seed, _SHARED, repeat, -1 - index])
        return np.random.default_rng([seed, _CONTENTS, repeat, index + 1])

    blocks = load.trace if workload.prompt_tokens is None else None
    groups = np.random.default_rng([seed, _GROUPS]).integers(0, workload.shared_prefixes, count)
    prompts = make_prompts(
        tokenizer, workload.kind, fitting, workload.shared_prefix, contents, groups=groups, trace=blocks
    )
    _check_context(prompts, output, scenario.server.max_model_len)
    sampling = np.random.default_rng([seed, _SAMPLING, repeat]).integers(0, 2**31, count)
    bodies = [
        encode_body(workload, model_name, text, int(tokens), int(draw), dialect or scenario.server.dialect)
        for text, tokens, draw in zip(prompts.texts, output, sampling, strict=True)
    ]
    return Plan(
        loop=load.loop,
        path=PATHS[workload.kind],
        due_ns=due_ns,
        bodies=bodies,
        request_ids=[_request_id(id_prefix, index) for index in range(count)],
        prompt_tokens=prompts.tokens,
        output_tokens=output,
        prompt_tokens_exact=prompts.exact,
        warmup_ns=warmup_ns,
        warmup_requests=warmup_requests,
        end_ns=_end(load, due_ns, warmup_ns),
        concurrency=load.concurrency or 0,
        think_time_ns=load.think_time_ns,
        timeout_ns=load.timeout_ns,
        stall_ns=load.stall_ns or 0,
        retries=load.retries,
        retry_pause_ns=load.retry_pause_ns,
        worker=0,
        workers=1,
        id_prefix=id_prefix,
        swaps=_swaps(prompts, bodies),
        notes=_notes(prompts, asked, fitting, scenario),
        rate_knots=arrivals.knots,
        count_dispersion=arrivals.dispersion,
        prefix_share=float(prompts.repeated.sum() / max(int(prompts.tokens.sum()), 1)) if load.loop == "open" else None,
    )


def encode_body(workload: Workload, model_name: str, text: str, output_tokens: int, seed: int, dialect: str) -> bytes:
    """One request's JSON.

    The full dialect makes the answer exactly ``output_tokens`` long (``ignore_eos``, ``min_tokens``) and asks for the
    running token count in every chunk; plain has neither.
    """
    body: dict[str, object] = {"model": model_name}
    if workload.kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    stream_options = {"include_usage": True}
    body |= {"max_tokens": output_tokens, "temperature": workload.temperature, "seed": seed, "stream": True}
    if dialect == "full":
        body |= {"min_tokens": output_tokens, "ignore_eos": True}
        stream_options["continuous_usage_stats"] = True
    body["stream_options"] = stream_options
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _request_id(prefix: str, index: int) -> str:
    return f"{prefix}-{index:06d}"


def _lengths(scenario: Scenario, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and answer tokens of each request: the trace's where the workload gives none."""
    trace, drawn = scenario.load.trace, []
    for name, stream in (("prompt_tokens", _PROMPT_LENGTHS), ("output_tokens", _OUTPUT_LENGTHS)):
        lengths = getattr(scenario.workload, name)
        if lengths is None and trace is not None:
            drawn.append(np.array(getattr(trace, name)[:count], np.int64))
        else:
            drawn.append(draw_lengths(lengths, count, np.random.default_rng([scenario.seed, stream])))
    return drawn[0], drawn[1]


def _due(load: Load, rng: np.random.Generator, warmup_ns: int, warmup_requests: int) -> Arrivals:
    if load.loop == "open":
        return draw_arrivals(load, rng, warmup_ns)
    if load.requests is not None:
        return _unknown(warmup_requests + load.requests)
    # How many a closed loop will ask within its time nobody knows beforehand; past these, bodies come round changed.
    span_s = (warmup_ns + (load.duration_ns or 0)) / 1e9
    guess = int((load.concurrency or 1) * span_s * 4)
    return _unknown(min(max(guess, _CLOSED_FEWEST), _CLOSED_MOST))


def _unknown(count: int) -> Arrivals:
    """A closed loop's: when each is due the answers before it decide."""
    return Arrivals(np.full(count, -1, np.int64), (), 0.0)


def _end(load: Load, due_ns: NDArray[np.int64], warmup_ns: int) -> int:
    if load.duration_ns is not None:
        return warmup_ns + load.duration_ns
    return int(due_ns[-1]) + 1 if load.loop == "open" else 0


def _within_context(
    asked: NDArray[np.int64], output: NDArray[np.int64], max_model_len: int | None
) -> NDArray[np.int64]:
    """Prompt lengths cut so that prompt and answer fit the model's context."""
    if max_model_len is None or not len(asked):
        return asked
    if int(output.max()) >= max_model_len:
        raise PlanError(
            f"answers of up to {output.max()} tokens leave no room for a prompt in server.max_model_len {max_model_len}"
        )
    return np.minimum(asked, max_model_len - output)


def _check_context(prompts: Prompts, output: NDArray[np.int64], max_model_len: int | None) -> None:
    """The chat template may have made the shortest prompts longer than asked, and so too long again."""
    longest = int((prompts.tokens + output).max(initial=0))
    if max_model_len is not None and longest > max_model_len:
        raise PlanError(
            f"the shortest prompt that the chat template allows ({prompts.words.shortest} tokens) and its answer "
            f"together have up to {longest} tokens; they do not fit server.max_model_len {max_model_len}"
        )


def _swaps(prompts: Prompts, bodies: list[bytes]) -> Swaps:
    """Texts are lower-case ASCII, so that a text stands in its body character for character.

    A starter costs one token at a text's start and within it, so it may stand in for any first own word.
    """
    starters = prompts.words.starters
    index_of = {word: index for index, word in enumerate(starters)}
    rows = np.full((len(bodies), 3), -1, np.int64)
    for row, text, (word, at), body in zip(rows, prompts.texts, prompts.firsts, bodies, strict=True):
        if word:
            start = body.index(f'"{text}"'.encode()) + 1 + at
            row[:] = start, start + len(word), index_of.get(word, 0)
    return Swaps(rows, tuple(word.encode() for word in starters))


def _notes(
    prompts: Prompts, asked: NDArray[np.int64], fitting: NDArray[np.int64], scenario: Scenario
) -> tuple[str, ...]:
    """What did not go as asked, in sentences."""
    notes = []
    if not prompts.exact:
        notes.append(
            "prompt lengths are counted in words, not tokens: no tokenizer is known; name one with --tokenizer"
        )
    if prompts.lengthened:
        notes.append(
            f"{prompts.lengthened} of {len(asked)} prompts were asked shorter than the shortest that the chat template "
            f"allows; they have {prompts.words.shortest} tokens"
        )
    cut = int(np.count_nonzero(fitting < asked))
    if cut:
        limit = scenario.server.max_model_len
        notes.append(f"{cut} of {len(asked)} prompts were cut to fit server.max_model_len {limit}")
    return tuple(notes)
