"""A scenario's plan, drawn from its seed: arrivals, prompts and answer lengths, with every body encoded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.arrivals import Arrivals, draw_arrivals, warmup_span
from gapmeter.loadgen.content import Content, Ints, make_content
from gapmeter.loadgen.draws import Seeds, Stream, draw_lengths, draw_pauses, mean_pause_ns
from gapmeter.loadgen.plan import CHAT, Plan, Swaps
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.model import Load, Scenario, Workload
from gapmeter.scenarios.shapes import FixedPause
from gapmeter.scenarios.values import LONGEST_NS, SECOND_NS

_CLOSED_FEWEST, _CLOSED_MOST = 256, 4096
_NOT_EXACT = "prompt lengths are counted in words, not tokens: no tokenizer is known; name one with --tokenizer"
_WARMED_UP_S = 2.0  # with a warm-up that is found, a whole trace asks for up to so much more than it has: no lack


def make_plan(
    scenario: Scenario,
    tokenizer: PromptTokenizer | None,
    *,
    model_name: str,
    repeat: int = 0,
    id_prefix: str = "gap",
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Draw the whole plan from the scenario's seed.

    ``tokenizer`` None: prompts are counted in words, and ``prompt_tokens_exact`` is False. ``repeat`` n is the same
    trace (arrivals, lengths) with fresh text, so that a repeat does not measure the prefix cache. ``id_prefix`` must
    differ between runs against one server. ``say`` is told where it takes long. Raises PlanError when it cannot be
    made as asked.
    """
    load, seeds = scenario.load, Seeds(scenario.seed, repeat)
    warmup_ns, warmup_requests = warmup_span(load)
    arrivals = _due(scenario, seeds, warmup_ns, warmup_requests)
    if load.loop == "open" and (not len(arrivals.due_ns) or arrivals.due_ns[-1] < warmup_ns):
        remedy = "a longer trace or load.warmup: 0" if load.trace else "a longer load.duration or a higher load.rate"
        raise PlanError(f"no request falls into the measured part; write {remedy}")
    if load.requests and len(arrivals.due_ns) and (takes_ns := arrivals.due_ns[-1] - warmup_ns) > LONGEST_NS:
        days = f"{takes_ns / SECOND_NS / 86400:,.0f} days"
        raise PlanError(f"{load.requests:,} requests take {days} with this load.{load.arrivals}; write fewer")
    content = make_content(scenario, tokenizer, len(arrivals.due_ns), seeds, say)
    count = len(content.asks)
    due_ns, warmup_requests = _of_turns(content.turns, arrivals.due_ns, warmup_requests)
    sampling = seeds.fresh(Stream.SAMPLING).integers(0, 2**31, count)
    bodies = [
        encode_body(scenario.workload, model_name, ask, int(tokens), int(draw), scenario.server.dialect)
        for ask, tokens, draw in zip(content.asks, content.output_tokens, sampling, strict=True)
    ]
    counted = () if tokenizer is not None else (_NOT_EXACT,)
    notes = *counted, *content.notes, *_growing(load, content, warmup_ns), *_ending(load, arrivals.due_ns, warmup_ns)
    differ = not isinstance(load.think_time, FixedPause)
    return Plan(
        loop=load.loop,
        path=content.path,
        due_ns=due_ns,
        bodies=bodies,
        prompt_tokens=content.prompt_tokens,
        output_tokens=content.output_tokens,
        prompt_tokens_exact=tokenizer is not None,
        warmup_ns=warmup_ns,
        warmup_requests=warmup_requests,
        end_ns=_end_ns(load, content, due_ns, warmup_ns),
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
        swaps=_swaps(content, bodies),
        notes=notes,
        rate_knots=arrivals.knots,
        count_dispersion=arrivals.dispersion,
        prefix_share=(
            float(content.repeated.sum()) / max(int(content.prompt_tokens.sum()), 1) if load.loop == "open" else None
        ),
        turns=content.turns,
        pauses_ns=draw_pauses(load.think_time, count, seeds.rng(Stream.THINKING)) if differ else np.zeros(0, np.int64),
    )


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


def _growing(load: Load, content: Content, warmup_ns: int) -> list[str]:
    """A note where the load still grows while it is measured: turns grow more frequent until conversations end."""
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


def _ending(load: Load, due_ns: Ints, warmup_ns: int) -> list[str]:
    """A note where a trace ends before what was asked of it: nothing is made up behind its end."""
    if load.trace is None or load.trace.loop:
        return []
    measured, asked = int(np.count_nonzero(due_ns >= warmup_ns)), load.requests or 0
    if measured < asked:
        return [f"the trace has {measured:,} requests after the warm-up, and load.requests asks for {asked:,}"]
    has_s, asked_s = load.trace.span_ns / 1e9, (warmup_ns + (load.duration_ns or 0)) / 1e9
    if asked_s - has_s <= _WARMED_UP_S:
        return []
    return [f"the trace ends after {has_s:.3g} s, and load.duration with its warm-up asks for {asked_s:.3g} s"]


def _due(scenario: Scenario, seeds: Seeds, warmup_ns: int, warmup_requests: int) -> Arrivals:
    """Due times of requests, or of conversations."""
    load = scenario.load
    if load.loop == "open":
        return draw_arrivals(load, seeds.rng(Stream.ARRIVALS), warmup_ns)
    if load.requests is not None:
        count = warmup_requests + load.requests
    else:
        # How many requests a closed loop will send is not known beforehand; past these, bodies come round changed.
        span_s = (warmup_ns + (load.longest_ns or 0)) / 1e9
        count = min(max(int((load.concurrency or 1) * span_s * 4), _CLOSED_FEWEST), _CLOSED_MOST)
        if (own := scenario.workload.file) is not None:  # these come round unchanged: all of them before any again
            count = -(-count // len(own.entries)) * len(own.entries)
        if scenario.workload.kind == "conversation":
            each = draw_lengths(scenario.workload.turns, _CLOSED_FEWEST, seeds.rng(Stream.TURNS)).mean()
            count = max(math.ceil(count / float(each)), load.concurrency or 1)
    return Arrivals(np.full(count, -1, np.int64), (), 0.0)  # when each is due depends on the answers before it


def _of_turns(turns: Ints, due_ns: Ints, warmup_requests: int) -> tuple[Ints, int]:
    """Due times and the warm-up's requests, turn by turn, where those given count conversations.

    First turns alone have due times; a warm-up of so many conversations is one of all their turns.
    """
    if not len(turns):
        return due_ns, warmup_requests
    firsts = np.flatnonzero(turns == 1)
    each_ns = np.full(len(turns), -1, np.int64)
    each_ns[firsts] = due_ns
    return each_ns, int(np.append(firsts, len(turns))[warmup_requests]) if warmup_requests else 0


def _end_ns(load: Load, content: Content, due_ns: Ints, warmup_ns: int) -> int:
    """When sending ends, from t0; 0: with the last answer, as where so many conversations run to their ends."""
    if load.longest_ns is not None:
        return warmup_ns + load.longest_ns
    return int(due_ns[-1]) + 1 if load.loop == "open" and not len(content.turns) else 0


def _swaps(content: Content, bodies: list[bytes]) -> Swaps:
    """Where each body's first own word stands.

    Texts are lower-case ASCII, so that a text stands in its body character for character. A starter costs one token
    at a text's start and within it, so it may stand in for any first own word.
    """
    openings = content.openings
    if openings is None:
        return Swaps(np.full((len(bodies), 3), -1, np.int64), ())
    key = "content" if content.path == CHAT else "prompt"
    starters = openings.starters
    index_of = {word: index for index, word in enumerate(starters)}
    rows = np.full((len(bodies), 3), -1, np.int64)
    for row, text, (word, at), body in zip(rows, openings.texts, openings.firsts, bodies, strict=True):
        if word:
            opening = f'"{key}":"'
            start = body.index(f'{opening}{text}"'.encode()) + len(opening) + at
            row[:] = start, start + len(word), index_of.get(word, 0)
    return Swaps(rows, tuple(word.encode() for word in starters))
