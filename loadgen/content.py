"""What every request asks: prompts, their lengths and those of the answers, for each kind of workload."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.draws import draw_lengths
from gapmeter.loadgen.prompts import Prompts, make_prompts
from gapmeter.loadgen.tokenizer import Message, PromptTokenizer
from gapmeter.scenarios.files import Prompts as PromptFile
from gapmeter.scenarios.model import Scenario

Ints = NDArray[np.int64]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_AT_ONCE = 64  # chats tokenized together: a long plan needs no more memory than its bodies
_BYTES_A_TOKEN = 12  # a word with its joiner, as text and as part of a body
PATHS = {"chat": CHAT, "completion": COMPLETION}
NOT_EXACT = "prompt lengths are counted in words, not tokens: no tokenizer is known; name one with --tokenizer"


class Stream(IntEnum):
    """One stream of randomness for each thing that is drawn, so that drawing more of one changes no other."""

    ARRIVALS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    CONTENTS = 3
    SAMPLING = 4
    GROUPS = 5
    SHARED = 6
    TURNS = 7
    THINKING = 8


@dataclass(frozen=True, slots=True)
class Seeds:
    """Where randomness comes from. A repeat has arrivals and lengths in common with the first run, texts of its own."""

    seed: int
    repeat: int = 0

    def rng(self, stream: Stream) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    def fresh(self, stream: Stream) -> np.random.Generator:
        """A different one in every repeat."""
        return np.random.default_rng([self.seed, stream, self.repeat])

    def text(self, index: int) -> np.random.Generator:
        """Request ``index``'s own; -1 - g is that of shared text g."""
        if index < -1:
            return np.random.default_rng([self.seed, Stream.SHARED, self.repeat, -1 - index])
        return np.random.default_rng([self.seed, Stream.CONTENTS, self.repeat, index + 1])


@dataclass(frozen=True, slots=True)
class Openings:
    """Each request's first text, its first own word and the character where that stands ("": none).

    ``starters`` may stand in for any of these words: each costs one token there too.
    """

    texts: list[str]
    firsts: list[tuple[str, int]]
    starters: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What is asked, request by request; index i of every column is the same request.

    ``asks`` is what a body says that no other kind of field says: its messages or its prompt. ``repeated``: prompt
    tokens that stood at the start of an earlier one. ``openings``: what a closed loop may change when bodies come round
    again; None where they stay as they are. ``turns``: place in the conversation, from 1, conversations one after the
    other; empty where there are none. ``notes``: what did not go as asked, in sentences.
    """

    path: str
    asks: list[dict[str, object]]
    prompt_tokens: Ints
    output_tokens: Ints
    exact: bool
    repeated: Ints
    notes: tuple[str, ...] = ()
    openings: Openings | None = None
    turns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def ask_once(scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds) -> Content:
    """Requests that are independent of each other. Raises PlanError when they cannot be made as asked."""
    workload, most = scenario.workload, scenario.server.max_model_len
    asked, output = draw_both(scenario, count, seeds)
    fitting = _within_context(asked, output, most)
    check_size(float(fitting.sum()))
    trace = scenario.load.trace
    prompts = make_prompts(
        tokenizer, workload.kind, fitting, workload.shared_prefix, seeds.text,
        groups=draw_groups(scenario, count, seeds),
        trace=trace.recorded if trace is not None and workload.prompt_tokens is None else None,
    )  # fmt: skip
    _check_context(prompts, output, most)
    chat = workload.kind == "chat"
    asks: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text} for text in prompts.texts
    ]
    notes = _notes(prompts, asked, fitting, scenario)
    openings = Openings(prompts.texts, prompts.firsts, prompts.words.starters)
    return Content(PATHS[workload.kind], asks, prompts.tokens, output, prompts.exact, prompts.repeated, notes, openings)


def check_size(tokens: float) -> None:
    """Every prompt is made, and its body encoded, before the clock starts. Raises PlanError for more than fit."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if tokens * _BYTES_A_TOKEN > memory / 2:
        size = f"{tokens:,.0f} tokens in all, some {tokens * _BYTES_A_TOKEN / 1e9:,.0f} GB"
        raise PlanError(
            f"the prompts have {size}, which is more than half of this machine's {memory / 1e9:,.0f} GB; "
            "write fewer requests, or shorter prompts"
        )


def count_chats(tokenizer: PromptTokenizer | None, chats: Sequence[Sequence[Message]]) -> Ints:
    """Tokens of each chat as the template renders it; words where there is no tokenizer."""
    if tokenizer is None:
        return np.array([sum(len(message["content"].split()) for message in chat) for chat in chats], np.int64)
    starts = range(0, len(chats), _AT_ONCE)
    counts = [tokenizer.count_messages(chats[start : start + _AT_ONCE]) for start in starts]
    return np.concatenate(counts) if counts else np.zeros(0, np.int64)


def draw_both(scenario: Scenario, count: int, seeds: Seeds) -> tuple[Ints, Ints]:
    """Prompt and answer tokens of each request: the trace's where the workload gives none."""
    trace, drawn = scenario.load.trace, []
    for name, stream in (("prompt_tokens", Stream.PROMPT_LENGTHS), ("output_tokens", Stream.OUTPUT_LENGTHS)):
        lengths = getattr(scenario.workload, name)
        if lengths is None and trace is not None:
            drawn.append(np.array(getattr(trace.recorded, name)[:count], np.int64))
        else:
            drawn.append(draw_lengths(lengths, count, seeds.rng(stream)))
    return drawn[0], drawn[1]


def draw_groups(scenario: Scenario, count: int, seeds: Seeds) -> Ints:
    """Which of the shared texts each prompt begins with."""
    return seeds.rng(Stream.GROUPS).integers(0, scenario.workload.shared_prefixes, count)


def _within_context(asked: Ints, output: Ints, max_model_len: int | None) -> Ints:
    """Prompt lengths cut so that prompt and answer fit the model's context."""
    if max_model_len is None or not len(asked):
        return asked
    if int(output.max()) >= max_model_len:
        raise PlanError(
            f"answers of up to {output.max()} tokens leave no room for a prompt in server.max_model_len {max_model_len}"
        )
    return np.minimum(asked, max_model_len - output)


def _check_context(prompts: Prompts, output: Ints, max_model_len: int | None) -> None:
    """The chat template may have made the shortest prompts longer than asked, and so too long again."""
    longest = int((prompts.tokens + output).max(initial=0))
    if max_model_len is not None and longest > max_model_len:
        raise PlanError(
            f"the shortest prompt that the chat template allows ({prompts.words.shortest} tokens) and its answer "
            f"together have up to {longest} tokens; they do not fit server.max_model_len {max_model_len}"
        )


def _notes(prompts: Prompts, asked: Ints, fitting: Ints, scenario: Scenario) -> tuple[str, ...]:
    notes = [] if prompts.exact else [NOT_EXACT]
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


def ask_own(scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds) -> Content:
    """``count`` of a user's own prompts, in the order of their file, again from its start when it ends.

    Answers are as long as ``max_tokens`` says, or else as the workload does.

    Raises PlanError for a prompt that does not fit the model's context, with its line.
    """
    file = scenario.workload.file
    assert file is not None
    which = np.arange(count) % len(file.entries)
    once = _tokens(file, tokenizer)
    output = _answers(file, scenario, which, seeds)
    _check(file, once[which] + output, which, scenario.server.max_model_len)
    asks = [_ask(file, int(index)) for index in which]
    repeated = np.where(np.arange(count) < len(file.entries), 0, once[which])
    notes = [] if tokenizer is not None else [NOT_EXACT]
    if count > len(file.entries):
        notes.append(
            f"{file.path} holds {len(file.entries)} prompts for {count} requests: they come round again, and a prefix "
            "cache knows them then"
        )
    path = CHAT if file.chat else COMPLETION
    return Content(path, asks, once[which], output, tokenizer is not None, repeated, tuple(notes))


def _ask(file: PromptFile, index: int) -> dict[str, object]:
    entry = file.entries[index]
    if entry.prompt is not None:
        return {"prompt": entry.prompt}
    return {"messages": [{"role": role, "content": content} for role, content in entry.messages]}


def _tokens(file: PromptFile, tokenizer: PromptTokenizer | None) -> Ints:
    """Tokens of each line of the file."""
    if file.chat:
        chats = [[{"role": role, "content": content} for role, content in entry.messages] for entry in file.entries]
        return count_chats(tokenizer, chats)
    texts = [entry.prompt or "" for entry in file.entries]
    if tokenizer is not None:
        return tokenizer.counts(texts, "completion")
    return np.array([len(text.split()) for text in texts], np.int64)


def _answers(file: PromptFile, scenario: Scenario, which: Ints, seeds: Seeds) -> Ints:
    given = np.array([entry.max_tokens or 0 for entry in file.entries], np.int64)[which]
    if scenario.workload.output_tokens is None:
        return given
    drawn = draw_lengths(scenario.workload.output_tokens, len(which), seeds.rng(Stream.OUTPUT_LENGTHS))
    return np.where(given > 0, given, drawn)


def _check(file: PromptFile, needed: Ints, which: Ints, max_model_len: int | None) -> None:
    if max_model_len is None or not len(needed) or int(needed.max()) <= max_model_len:
        return
    worst = int(needed.argmax())
    line = file.entries[int(which[worst])].line
    raise PlanError(
        f"{file.path}:{line}: prompt and answer have {int(needed[worst])} tokens; they do not fit server.max_model_len "
        f"{max_model_len}"
    )
