"""Prompts of exact token counts whose texts differ from their first own word on, or begin alike where asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.draws import Seeds
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.trace import BLOCK_TOKENS, Recording

Ints = NDArray[np.int64]
Write = Callable[[int, int], list[str]]  # (which text, how many words) → the words, the same ones every time

_WITHOUT_IDS = 1 << 63  # beyond every block's id
# Short words that nearly every tokenizer holds as one token: for servers whose tokenizer we do not have.
_COMMON = """
about after again air all also always and animal another answer any are around ask away back because been
before below between big book both boy but call came can car change children city close come could country
cut day did different do does down each earth eat end enough even every eye face family far father feet few
find first follow food for form found four from get girl give go good great group grow had hand hard has have
head hear help her here high him his home house how idea if important in into is it just keep kind know land
large last late learn leave left let letter life light like line list little live long look made make man many
may me mean men might mile more most mother mountain move much must my name near need never new next night no
not now number of off often old on once one only open or other our out over own page paper part people place
plant play point put question quick quite read really right river run said same saw say school sea second see
seem sentence set she should show side small so some something soon sound spell start state still stop story
study such take talk tell than that the their them then there these they thing think this those thought three
through time to together too took tree try turn two under until up us use very walk want was watch water way we
well went were what when where which while white who why will with without word work world would write year you
"""
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Words:
    """What prompts are made of. A text of n words costs ``overhead`` + n tokens when its first is a starter.

    ``starters`` are words that cost one token at a text's start, ``joined`` those that do after a joiner.
    """

    joined: list[str]
    starters: list[str]
    joiner: str
    overhead: int

    @property
    def shortest(self) -> int:
        """The fewest tokens that a prompt can have."""
        return self.overhead + 1


@dataclass(frozen=True, slots=True)
class Openings:
    """Each request's first text, its first own word and the character where that stands ("": none).

    ``starters`` may stand in for any of these words: each costs one token there too.
    """

    texts: list[str]
    firsts: list[tuple[str, int]]
    starters: list[str]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts with their lengths. ``lengthened`` counts those that were asked shorter than ``words.shortest``.

    ``repeated`` is how many of each text's tokens stood at the start of an earlier one.
    """

    openings: Openings
    words: Words
    tokens: Ints
    lengthened: int
    repeated: Ints


def survey(tokenizer: PromptTokenizer | None, kind: str) -> Words:
    """The words of a tokenizer's vocabulary that cost one token for certain; without a tokenizer, common words."""
    if tokenizer is None:
        common = _COMMON.split()
        return Words(common, common, " ", 0)
    joined, joiner = tokenizer.words()
    alone = tokenizer.counts(joined, kind)
    least = int(alone.min())
    return Words(joined, [w for w, tokens in zip(joined, alone, strict=True) if tokens == least], joiner, least - 1)


def make_prompts(
    tokenizer: PromptTokenizer | None,
    kind: str,
    asked: Ints,
    shared_prefix: float,
    seeds: Seeds,
    *,
    groups: Ints | None = None,
    trace: Recording | None = None,
) -> Prompts:
    """One prompt for each asked token count, verified by the tokenizer.

    What one prompt says depends on no other. ``groups`` says with which shared text each begins (all with 0 when None).
    ``trace``: its blocks are the prompts' text. Raises PlanError when a count cannot be met exactly.
    """
    words = survey(tokenizer, kind)
    target = np.maximum(asked, words.shortest)
    content = target - words.overhead

    def shared_text(which: int, count: int) -> list[str]:
        return pick(words, count, seeds.shared_text(which), starts=True)

    if trace is not None and trace.blocks:
        common = trace_blocks(content, trace, shared_text)
    else:
        which = np.zeros(len(content), np.int64) if groups is None else groups
        common = shared_beginnings(content, shared_prefix, which, shared_text)
    heads = common.heads
    own = common.tails or [
        pick(words, int(total - len(head)), seeds.text(i), starts=not head)
        for i, (total, head) in enumerate(zip(content, heads, strict=True))
    ]
    if tokenizer is not None:
        _fit(tokenizer, kind, words, heads, own, target, seeds)
    texts = [words.joiner.join(head + rest) for head, rest in zip(heads, own, strict=True)]
    firsts = [
        (rest[0] if rest else "", start_of_own(words.joiner, head)) for head, rest in zip(heads, own, strict=True)
    ]
    lengthened = int(np.count_nonzero(asked < words.shortest))
    return Prompts(Openings(texts, firsts, words.starters), words, target, lengthened, common.repeated)


def pick(words: Words, count: int, rng: np.random.Generator, *, starts: bool) -> list[str]:
    """``count`` words, each equally likely; the first one a starter where the text ``starts`` with it."""
    picked = [words.joined[i] for i in rng.integers(0, len(words.joined), count)]
    if starts and picked:
        picked[0] = words.starters[int(rng.integers(0, len(words.starters)))]
    return picked


def start_of_own(joiner: str, head: list[str]) -> int:
    """The character at which a text's own words begin, behind its head."""
    return len(joiner.join(head)) + len(joiner) if head else 0


def _fit(
    tokenizer: PromptTokenizer,
    kind: str,
    words: Words,
    heads: list[list[str]],
    own: list[list[str]],
    target: Ints,
    seeds: Seeds,
) -> None:
    """Count every prompt, and lengthen or shorten (in place) those that came out otherwise than asked."""
    todo = list(range(len(own)))
    for _ in range(_ROUNDS):
        counted = tokenizer.counts([words.joiner.join(heads[i] + own[i]) for i in todo], kind)
        missing = target[todo] - counted
        wrong = [(i, int(miss)) for i, miss in zip(todo, missing, strict=True) if miss]
        if not wrong:
            return
        for i, miss in wrong:
            extra = pick(words, max(miss, 0), seeds.text(i), starts=False)
            own[i][max(len(own[i]) + min(miss, 0), 0) :] = extra
        todo = [i for i, _ in wrong]
    i = todo[0]
    raise PlanError(
        f"cannot make a {kind} prompt of {target[i]} tokens with the tokenizer of {tokenizer.name}; "
        f"{len(todo)} of {len(own)} prompts came out otherwise"
    )


@dataclass(frozen=True, slots=True)
class CommonText:
    """What prompts have in common, so that a prefix cache can be hit: their first words, and a trace's also its own.

    ``repeated``: how many of its words stood at the start of an earlier prompt already, (n,); a cache without limits
    would hit that much.
    """

    heads: list[list[str]]
    tails: list[list[str]] | None
    repeated: Ints


def shared_beginnings(words: Ints, share: float, groups: Ints, write: Write) -> CommonText:
    """The first ``share`` of each prompt's ``words`` is its group's text, cut to length."""
    counts = np.rint(words * share).astype(np.int64)
    texts = {group: write(group, int(counts[groups == group].max())) for group in np.unique(groups).tolist()}
    heads, repeated, longest = [], np.zeros(len(words), np.int64), dict.fromkeys(texts, 0)
    for at, (group, count) in enumerate(zip(groups.tolist(), counts.tolist(), strict=True)):
        heads.append(texts[group][:count])
        repeated[at] = min(count, longest[group])
        longest[group] = max(count, longest[group])
    return CommonText(heads, None, repeated)


def trace_blocks(words: Ints, trace: Recording, write: Write) -> CommonText:
    """Each prompt is its trace's blocks one after the other, equal ids with equal text; the last one ends it.

    A prompt whose blocks do not fill it (they were recorded with another template) repeats its last block's text; one
    of which the trace has none has a text of its own.
    """
    size = BLOCK_TOKENS
    texts: dict[int, list[str]] = {}
    heads, tails, repeated = [], [], np.zeros(len(words), np.int64)
    seen: set[tuple[int, ...]] = set()
    for at, (count, ids) in enumerate(zip(words.tolist(), trace.blocks, strict=False)):
        needed = ids[: -(-count // size)] or (_WITHOUT_IDS + at,)
        texts |= {block: write(block, size) for block in needed if block not in texts}
        whole = [word for block in needed for word in texts[block]]
        whole += (texts[needed[-1]] * (count // size + 1))[: max(count - len(whole), 0)]
        cut = min((len(needed) - 1) * size, count - 1)
        heads.append(whole[:cut])
        tails.append(whole[cut:count])
        old = 0  # blocks at its start that an earlier prompt began with
        while old < len(needed) and needed[: old + 1] in seen:
            old += 1
        repeated[at] = min(old * size, count)
        seen.update(needed[: length + 1] for length in range(old, len(needed)))
    return CommonText(heads, tails, repeated)
