"""What every request asks: prompts and the lengths of prompts and answers, for each kind of workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.draws import Seeds, Stream, draw_lengths
from gapmeter.loadgen.plan import CHAT, COMPLETION, PATHS
from gapmeter.loadgen.prompts import Openings, Words, make_prompts, pick, shared_beginnings, start_of_own, survey
from gapmeter.loadgen.tokenizer import Message, PromptTokenizer, TemplateRefused
from gapmeter.scenarios.files import Prompts
from gapmeter.scenarios.model import MOST_REQUESTS, Scenario
from gapmeter.scenarios.plain_file import memory_bytes

Ints = NDArray[np.int64]
Say = Callable[[str], None]
_BYTES_A_TOKEN = 12  # a word with its joiner, as text and as part of a body
_TAKES_LONG = 1_000_000, 20_000_000  # tokens, some ten seconds: with a tokenizer, and without
_LITTLE = 0.05  # of the prompts' tokens: so many more do not change what the load is


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What is asked, request by request; index i of every column belongs to the same request.

    ``asks`` is what a body says that no other kind of field says: its messages or its prompt. ``repeated``: prompt
    tokens that stood at the start of an earlier one. ``openings``: what a closed loop may change when bodies are used
    again; None where they stay as they are. ``turns``: place in the conversation, from 1, conversations one after the
    other; empty where there are none. ``notes``: what did not go as asked, in sentences.
    """

    path: str
    asks: list[dict[str, object]]
    prompt_tokens: Ints
    output_tokens: Ints
    repeated: Ints
    notes: tuple[str, ...] = ()
    openings: Openings | None = None
    turns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def make_content(
    scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds, say: Say
) -> Content:  # fmt: skip
    """``count`` requests, or conversations. Without a tokenizer, tokens are words. ``say``: that it takes long.

    Raises PlanError when they cannot be made as asked, or do not fit the model's context or this machine.
    """
    make = {"file": _ask_own, "conversation": _ask_conversations}.get(scenario.workload.kind, _ask_once)
    return make(scenario, tokenizer, count, seeds, say)


def _ask_once(
    scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds, say: Say
) -> Content:  # fmt: skip
    """Requests that are independent of each other."""
    workload, trace, context = scenario.workload, scenario.load.trace, scenario.server.max_model_len
    asked, output = _draw_both(scenario, count, seeds)
    fitting = asked
    if context is not None and count:
        if int(output.max()) >= context:
            longest = f"answers of up to {output.max()} tokens"
            raise PlanError(f"{longest} leave no room for a prompt in server.max_model_len {context}")
        fitting = np.minimum(asked, context - output)
    _check_size(float(fitting.sum()), tokenizer, say)
    prompts = make_prompts(
        tokenizer, workload.kind, fitting, workload.shared_prefix, seeds,
        groups=_draw_groups(scenario, count, seeds),
        trace=trace.issued(count) if trace is not None and workload.prompt_tokens is None else None,
    )  # fmt: skip
    longest_both = int((prompts.tokens + output).max(initial=0))
    if context is not None and longest_both > context:
        # The chat template has made the shortest prompts longer than asked, and so too long again.
        raise PlanError(
            f"the shortest prompt that the chat template allows ({prompts.words.shortest} tokens) and its answer "
            f"together have up to {longest_both} tokens; they do not fit server.max_model_len {context}"
        )
    notes = []
    if trace is not None and trace.recorded.blocks and workload.prompt_tokens is not None:
        notes.append("the trace's hash_ids are not used: they fit its own prompt lengths, not workload.prompt_tokens")
    if int(prompts.tokens.sum()) > (1 + _LITTLE) * int(fitting.sum()):
        notes.append(
            f"{prompts.lengthened} of {count} prompts were asked shorter than the chat template's minimum; they have "
            f"{prompts.words.shortest} tokens"
        )
    if cut := int(np.count_nonzero(fitting < asked)):
        notes.append(f"{cut} of {count} prompts were cut to fit server.max_model_len {context}")
    texts, chat = prompts.openings.texts, workload.kind == "chat"
    return Content(
        PATHS[workload.kind],
        [{"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text} for text in texts],
        prompts.tokens, output, prompts.repeated, tuple(notes), prompts.openings,
    )  # fmt: skip


def _ask_own(scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds, say: Say) -> Content:
    """A user's own prompts, in the order of their file, again from its start when it ends.

    Answers are as long as the workload says, or else ``max_tokens``, or else a trace.
    """
    file, context = scenario.workload.file, scenario.server.max_model_len
    assert file is not None
    which = np.arange(count) % len(file.entries)
    if file.chat:
        chats = [[{"role": role, "content": content} for role, content in entry.messages] for entry in file.entries]
        once = _count_own(tokenizer, file, chats)
        asks: list[dict[str, object]] = [{"messages": chat} for chat in chats]
        texts = ["".join(f"{message['role']}\0{message['content']}\0" for message in chat) for chat in chats]
    else:
        texts = [entry.prompt or "" for entry in file.entries]
        words = [len(text.split()) for text in texts]
        once = np.array(words, np.int64) if tokenizer is None else tokenizer.counts(texts, "completion")
        asks = [{"prompt": text} for text in texts]
    _check_size(float(once[which].sum()), tokenizer, say)
    output = np.array([entry.max_tokens or 0 for entry in file.entries], np.int64)[which]
    if scenario.workload.output_tokens is not None:
        output = _draw(scenario, "output_tokens", count, seeds)
    elif not output.all():
        output = np.where(output > 0, output, _draw(scenario, "output_tokens", count, seeds))
    needed = once[which] + output
    if context is not None and int(needed.max(initial=0)) > context:
        worst = int(needed.argmax())
        raise PlanError(
            f"{file.path}:{file.entries[int(which[worst])].line}: prompt and answer have {int(needed[worst])} tokens; "
            f"they do not fit server.max_model_len {context}"
        )
    asked = texts[:count]
    repeated, different = once[which], len(set(asked))  # the file may hold one twice
    repeated[: len(asked)] = _known(asked, once)
    notes = []
    if count > different:
        held = f"{different} {'different ' * (different < len(asked))}prompts"
        notes.append(
            f"the file {file.path} holds {held} for {count} requests: they repeat, so a prefix cache will know them"
        )
    return Content(
        CHAT if file.chat else COMPLETION, [asks[index] for index in which], once[which], output, repeated,
        tuple(notes),
    )  # fmt: skip


def _ask_conversations(
    scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds, say: Say
) -> Content:  # fmt: skip
    """Turns of one user each, with all that was said before. The workload's prompt tokens are each question's alone.

    The answers in the history are planned texts of the length asked for, not what the server will really say: so every
    body can be encoded before the clock starts, and the same scenario asks the same of every server. What that costs: a
    prefix cache can hit the history up to the last answer's start, but never the tokens that the server itself made.
    Turns whose history does not fit the model's context are left out, with a note.
    """
    workload, context = scenario.workload, scenario.server.max_model_len
    turns = draw_lengths(workload.turns, count, seeds.rng(Stream.TURNS))
    if (all_turns := float(turns.sum(dtype=np.float64))) > MOST_REQUESTS:
        text = f"{count:,} conversations have {all_turns:,.0f} turns in all, more than {MOST_REQUESTS:,}"
        raise PlanError(f"{text}; write fewer of either")
    asked, output = _draw_both(scenario, int(turns.sum()), seeds)
    firsts = np.cumsum(turns) - turns  # where each conversation begins
    histories = [np.cumsum(part, dtype=np.float64) for part in np.split(asked + output, firsts[1:])]
    _check_size(sum(float(tokens[tokens <= (context or np.inf)].sum()) for tokens in histories), tokenizer, say)

    words = survey(tokenizer, "chat")
    questions = np.maximum(asked - words.overhead, 1)
    groups = _draw_groups(scenario, count, seeds)
    common = shared_beginnings(
        questions[firsts], workload.shared_prefix, groups,
        lambda which, length: pick(words, length, seeds.shared_text(which), starts=True),
    )  # fmt: skip
    chats, openings = _write_turns(words, firsts, common.heads, questions, output, seeds)
    tokens = _count_chats(tokenizer, chats)
    place = np.arange(len(chats)) - np.repeat(firsts, turns) + 1
    kept = _fitting(tokens + output, place, context)
    repeated = np.concatenate([[0], tokens[:-1]])
    repeated[firsts] = common.repeated
    notes = []
    if short := int(np.count_nonzero(asked <= words.overhead)):
        notes.append(
            f"{short} of {len(asked)} questions were asked shorter than the chat template allows; they have one word"
        )
    if dropped := int(np.count_nonzero(~kept)):
        notes.append(
            f"{dropped} of {len(place)} turns were left out: their history does not fit max_model_len {context}"
        )
    chosen = np.flatnonzero(kept).tolist()
    return Content(
        CHAT, [{"messages": chats[at]} for at in chosen], tokens[kept], output[kept], repeated[kept],
        tuple(notes),
        Openings([openings.texts[at] for at in chosen], [openings.firsts[at] for at in chosen], words.starters),
        place[kept],
    )  # fmt: skip


def _fitting(needed: Ints, place: Ints, context: int | None) -> NDArray[np.bool_]:
    """Turns up to each conversation's first that does not fit. Raises PlanError when that is its first of all."""
    if context is None:
        return np.ones(len(needed), bool)
    kept = needed <= context
    if not kept[place == 1].all():
        longest = f"first turns of up to {int(needed[place == 1].max())} tokens, their answers included,"
        raise PlanError(f"{longest} do not fit server.max_model_len {context}")
    for at in np.flatnonzero(place > 1).tolist():  # histories only grow: what does not fit ends its conversation
        kept[at] &= kept[at - 1]
    return kept


def _write_turns(
    words: Words, firsts: Ints, heads: list[list[str]], questions: Ints, output: Ints, seeds: Seeds
) -> tuple[list[list[Message]], Openings]:
    """Each turn's messages: all of its conversation up to its question. Turn i's texts are of its own randomness.

    A conversation that comes round again begins with another word in all of its turns: no cache knows any of them.
    """
    chats: list[list[Message]] = []
    openings = Openings([], [], words.starters)
    for first, end, head in zip(firsts.tolist(), [*firsts[1:].tolist(), len(questions)], heads, strict=True):
        history: list[Message] = []
        for turn in range(first, end):
            rng, begun = seeds.text(turn), head if turn == first else []
            own = pick(words, int(questions[turn]) - len(begun), rng, starts=not begun)
            if turn == first:
                first_own = own[0] if own else "", start_of_own(words.joiner, head)
            history = [*history, {"role": "user", "content": words.joiner.join(begun + own)}]
            chats.append(history)
            openings.texts.append(history[0]["content"])
            openings.firsts.append(first_own)
            answer = pick(words, int(output[turn]), rng, starts=True)
            history = [*history, {"role": "assistant", "content": words.joiner.join(answer)}]
    return chats, openings


def _draw_both(scenario: Scenario, count: int, seeds: Seeds) -> tuple[Ints, Ints]:
    """Prompt and answer tokens of each request: the trace's where the workload gives none."""
    return _draw(scenario, "prompt_tokens", count, seeds), _draw(scenario, "output_tokens", count, seeds)


def _draw(scenario: Scenario, name: Literal["prompt_tokens", "output_tokens"], count: int, seeds: Seeds) -> Ints:
    lengths, trace = getattr(scenario.workload, name), scenario.load.trace
    if lengths is None and trace is not None:
        return np.array(getattr(trace.issued(count), name), np.int64)
    stream = Stream.PROMPT_LENGTHS if name == "prompt_tokens" else Stream.OUTPUT_LENGTHS
    return draw_lengths(lengths, count, seeds.rng(stream))


def _known(texts: Sequence[str], tokens: Ints) -> Ints:
    """Of each text's tokens, how many stood at the start of an earlier one, by their share of its characters.

    Of sorted texts neighbors have most in common: the last is taken out again and again, so that all left are earlier.
    """
    order = sorted(range(len(texts)), key=texts.__getitem__)
    before = dict(zip(order, [-1, *order], strict=False))
    after = dict(zip(order, [*order[1:], -1], strict=True))
    known = np.zeros(len(texts), np.int64)
    for at in range(len(texts) - 1, -1, -1):
        low, high = before[at], after[at]
        common = max(_common(texts[at], texts[other]) if other >= 0 else 0 for other in (low, high))
        known[at] = int(tokens[at]) * common // max(len(texts[at]), 1)
        after[low], before[high] = high, low
    return known


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _draw_groups(scenario: Scenario, count: int, seeds: Seeds) -> Ints:
    """Which of the shared texts each prompt begins with."""
    return seeds.rng(Stream.GROUPS).integers(0, scenario.workload.shared_prefixes, count)


def _check_size(tokens: float, tokenizer: PromptTokenizer | None, say: Say) -> None:
    """Every prompt is made, and its body encoded, before the clock starts. Raises PlanError for more than fit."""
    memory = memory_bytes()
    if tokens * _BYTES_A_TOKEN > memory / 2:
        size = f"{tokens:,.0f} tokens in all, some {tokens * _BYTES_A_TOKEN / 1e9:,.0f} GB"
        raise PlanError(
            f"the prompts have {size}, which is more than half of this machine's {memory / 1e9:,.0f} GB; "
            "write fewer requests, or shorter prompts"
        )
    if tokens >= _TAKES_LONG[tokenizer is None]:
        say(f"planning: the prompts have {tokens:,.0f} tokens in all, which takes a while")


def _count_chats(tokenizer: PromptTokenizer | None, chats: Sequence[Sequence[Message]]) -> Ints:
    """Tokens of each chat as the template renders it; words where there is no tokenizer."""
    if tokenizer is None:
        return np.array([sum(len(message["content"].split()) for message in chat) for chat in chats], np.int64)
    return tokenizer.count_messages(chats)


def _count_own(tokenizer: PromptTokenizer | None, file: Prompts, chats: Sequence[Sequence[Message]]) -> Ints:
    """The same of a user's own; a chat that the template refuses is named with its line."""
    try:
        return _count_chats(tokenizer, chats)
    except TemplateRefused:
        for entry, chat in zip(file.entries, chats, strict=True):
            try:
                _count_chats(tokenizer, [chat])
            except TemplateRefused as error:
                raise PlanError(f"{file.path}:{entry.line}: {error.reason}; change its messages") from error
        raise
