"""A user's own prompts, in the order of their file, again from its start when it ends."""

from __future__ import annotations

import numpy as np

from gapmeter.loadgen.content import CHAT, COMPLETION, NOT_EXACT, Content, Ints, Seeds, Stream
from gapmeter.loadgen.errors import PlanError
from gapmeter.loadgen.lengths import draw_lengths
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.prompts import Prompts


def ask_own(scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds) -> Content:
    """``count`` requests. Answers are as long as ``max_tokens`` says, or else as the workload does.

    Raises PlanError for a prompt that does not fit the model's context, with its line.
    """
    own = scenario.workload.file
    assert own is not None
    which = np.arange(count) % len(own.entries)
    once = _tokens(own, tokenizer)
    output = _answers(own, scenario, which, seeds)
    _check(own, once[which] + output, which, scenario.server.max_model_len)
    asks = [_ask(own, int(index)) for index in which]
    repeated = np.where(np.arange(count) < len(own.entries), 0, once[which])
    notes = [] if tokenizer is not None else [NOT_EXACT]
    if count > len(own.entries):
        notes.append(
            f"{own.path} holds {len(own.entries)} prompts for {count} requests: they come round again, and a prefix "
            "cache knows them then"
        )
    path = CHAT if own.chat else COMPLETION
    return Content(path, asks, once[which], output, tokenizer is not None, repeated, tuple(notes))


def _ask(own: Prompts, index: int) -> dict[str, object]:
    entry = own.entries[index]
    if entry.prompt is not None:
        return {"prompt": entry.prompt}
    return {"messages": [{"role": role, "content": content} for role, content in entry.messages]}


def _tokens(own: Prompts, tokenizer: PromptTokenizer | None) -> Ints:
    """Of each line once."""
    if own.chat:
        chats = [[{"role": role, "content": content} for role, content in entry.messages] for entry in own.entries]
        if tokenizer is not None:
            return tokenizer.count_messages(chats)
        return np.array([sum(len(m["content"].split()) for m in chat) for chat in chats], np.int64)
    texts = [entry.prompt or "" for entry in own.entries]
    if tokenizer is not None:
        return tokenizer.counts(texts, "completion")
    return np.array([len(text.split()) for text in texts], np.int64)


def _answers(own: Prompts, scenario: Scenario, which: Ints, seeds: Seeds) -> Ints:
    given = np.array([entry.max_tokens or 0 for entry in own.entries], np.int64)[which]
    if scenario.workload.output_tokens is None:
        return given
    drawn = draw_lengths(scenario.workload.output_tokens, len(which), seeds.rng(Stream.OUTPUT_LENGTHS))
    return np.where(given > 0, given, drawn)


def _check(own: Prompts, needed: Ints, which: Ints, max_model_len: int | None) -> None:
    if max_model_len is None or not len(needed) or int(needed.max()) <= max_model_len:
        return
    worst = int(needed.argmax())
    line = own.entries[int(which[worst])].line
    raise PlanError(
        f"{own.path}:{line}: prompt and answer have {int(needed[worst])} tokens; they do not fit server.max_model_len "
        f"{max_model_len}"
    )
