"""Conversations: turns of one user, each with all that was said before it.

The answers in the history are planned texts of the length asked for, not what the server will really say: so every body
can be encoded before the clock starts, and the same scenario asks the same of every server. What that costs: a prefix
cache can hit the history up to the last answer's start, but never the tokens that the server itself generated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.content import (
    CHAT,
    NOT_EXACT,
    Content,
    Ints,
    Openings,
    Seeds,
    Stream,
    check_size,
    count_chats,
    draw_both,
    draw_groups,
)
from gapmeter.loadgen.draws import draw_lengths
from gapmeter.loadgen.prompts import Words, pick, start_of_own, survey
from gapmeter.loadgen.tokenizer import Message, PromptTokenizer
from gapmeter.scenarios.model import MOST_REQUESTS, Scenario


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request of a conversation: everything said up to its question, and how many words of a first one are not new.

    ``first``: the first own word of the conversation's first question, and where it stands in it.
    """

    messages: list[Message]
    repeated: int
    first: tuple[str, int]


def ask_conversations(scenario: Scenario, tokenizer: PromptTokenizer | None, count: int, seeds: Seeds) -> Content:
    """``count`` conversations. ``prompt_tokens`` of the workload are each question's, as if it were asked alone.

    Turns whose history does not fit the model's context are left out, with a note. Raises PlanError where not even the
    first ones fit.
    """
    turns = draw_lengths(scenario.workload.turns, count, seeds.rng(Stream.TURNS))
    if (all_turns := float(turns.sum(dtype=np.float64))) > MOST_REQUESTS:
        text = f"{count:,} conversations have {all_turns:,.0f} turns in all, more than {MOST_REQUESTS:,}"
        raise PlanError(f"{text}; write fewer of either")
    asked, output = draw_both(scenario, int(turns.sum()), seeds)
    check_size(_histories(asked + output, turns, scenario.server.max_model_len))
    words = survey(tokenizer, "chat")
    written = _write_turns(scenario, words, turns, asked, output, seeds)
    tokens = count_chats(tokenizer, [turn.messages for turn in written])
    place = np.concatenate([np.arange(1, n + 1) for n in turns]) if count else np.zeros(0, np.int64)
    kept = _fitting(tokens + output, place, scenario.server.max_model_len)
    shared = np.array([turn.repeated for turn in written], np.int64)
    repeated = np.where(place == 1, shared, np.concatenate([[0], tokens[:-1]]))
    notes = _notes(scenario, tokenizer, words, asked, place, kept)
    written = [written[i] for i in np.flatnonzero(kept)]
    asks: list[dict[str, object]] = [{"messages": turn.messages} for turn in written]
    # A conversation that comes round again begins with another word in all of its turns: no cache knows any of them.
    firsts = [turn.first for turn in written]
    openings = Openings([turn.messages[0]["content"] for turn in written], firsts, words.starters)
    return Content(
        CHAT, asks, tokens[kept], output[kept], tokenizer is not None, repeated[kept], notes,
        openings, turns=place[kept],
    )  # fmt: skip


def _histories(each: Ints, turns: Ints, max_model_len: int | None) -> float:
    """Tokens of all histories together, each with all that was said before; those that do not fit are left out."""
    total, at = 0.0, 0
    for count in turns.tolist():
        reached = np.cumsum(each[at : at + count], dtype=np.float64)
        total += float(reached[reached <= (max_model_len or np.inf)].sum())
        at += count
    return total


def _write_turns(scenario: Scenario, words: Words, turns: Ints, asked: Ints, output: Ints, seeds: Seeds) -> list[_Turn]:
    """Every conversation's turns. Request i's question and answer are of its own randomness."""
    groups = draw_groups(scenario, len(turns), seeds)
    questions = np.maximum(asked - words.overhead, 1)
    out: list[_Turn] = []
    longest: dict[int, int] = {}
    at = 0
    for group, count in zip(groups.tolist(), turns.tolist(), strict=True):
        history: list[Message] = []
        shared = int(np.rint(questions[at] * scenario.workload.shared_prefix))
        repeated = min(shared, longest.get(group, 0))
        longest[group] = max(shared, longest.get(group, 0))
        first = "", 0
        for turn in range(count):
            rng, length = seeds.text(at), int(questions[at])
            head = pick(words, shared, seeds.text(-1 - group), starts=True) if turn == 0 else []
            own = pick(words, length - len(head), rng, starts=not head)
            if turn == 0:
                first = (own[0] if own else "", start_of_own(words.joiner, head))
            history = [*history, _message("user", words, head + own)]
            out.append(_Turn(history, repeated, first))
            history = [*history, _message("assistant", words, pick(words, int(output[at]), rng, starts=True))]
            at += 1
    return out


def _message(role: str, words: Words, text: list[str]) -> Message:
    return {"role": role, "content": words.joiner.join(text)}


def _fitting(needed: Ints, place: Ints, max_model_len: int | None) -> NDArray[np.bool_]:
    """Which turns fit the context: histories only grow, so what does not fit ends its conversation."""
    if max_model_len is None:
        return np.ones(len(needed), bool)
    kept = needed <= max_model_len
    if not kept[place == 1].all():
        raise PlanError(
            f"first turns of up to {int(needed[place == 1].max())} tokens, their answers included, do not fit "
            f"server.max_model_len {max_model_len}"
        )
    for i in range(1, len(kept)):
        kept[i] &= bool(place[i] == 1 or kept[i - 1])
    return kept


def _notes(
    scenario: Scenario, tokenizer: PromptTokenizer | None, words: Words, asked: Ints, place: Ints,
    kept: NDArray[np.bool_],
) -> tuple[str, ...]:  # fmt: skip
    notes = [] if tokenizer is not None else [NOT_EXACT]
    short = int(np.count_nonzero(asked <= words.overhead))
    if short:
        notes.append(
            f"{short} of {len(asked)} questions were asked shorter than the chat template allows; they have one word"
        )
    dropped = int(np.count_nonzero(~kept))
    if dropped:
        limit = scenario.server.max_model_len
        notes.append(f"{dropped} of {len(place)} turns were left out: their history does not fit max_model_len {limit}")
    return tuple(notes)
