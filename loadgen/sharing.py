"""What prompts have in common, so that a prefix cache can be hit: shared beginnings, and the blocks of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.trace import BLOCK_TOKENS, Recording

Ints = NDArray[np.int64]
Write = Callable[[int, int], list[str]]  # (which text, how many words) → its first words, the same ones every time


@dataclass(frozen=True, slots=True)
class Common:
    """What each prompt shares: its first words, and where those are given too, its own.

    ``repeated``: how many of its words stood at the start of an earlier prompt already, (n,); a cache without limits
    would hit that much.
    """

    heads: list[list[str]]
    tails: list[list[str]] | None
    repeated: Ints


def shared_beginnings(words: Ints, share: float, groups: Ints, write: Write) -> Common:
    """The first ``share`` of each prompt's ``words`` is its group's text, cut to length."""
    counts = np.rint(words * share).astype(np.int64)
    longest = {int(group): int(counts[groups == group].max()) for group in np.unique(groups)}
    texts = {group: write(group, length) for group, length in longest.items()}
    heads = [texts[int(group)][:count] for group, count in zip(groups, counts, strict=True)]
    return Common(heads, None, _seen_before(groups, counts))


def trace_blocks(words: Ints, trace: Recording, write: Write) -> Common:
    """Each prompt is its trace's blocks one after the other, equal ids with equal text; the last one ends it.

    A prompt whose blocks do not fill it (they were recorded with another template) repeats its last block's text.
    """
    size = BLOCK_TOKENS
    texts: dict[int, list[str]] = {}
    heads, tails, repeated = [], [], np.zeros(len(words), np.int64)
    seen: set[tuple[int, ...]] = set()
    for at, (count, ids) in enumerate(zip(words.tolist(), trace.blocks, strict=False)):
        needed = ids[: -(-count // size)] or (0,)
        for block in needed:
            texts.setdefault(block, write(block, size))
        whole = [word for block in needed for word in texts[block]]
        whole += (texts[needed[-1]] * (count // size + 1))[: max(count - len(whole), 0)]
        cut = min((len(needed) - 1) * size, count - 1)
        heads.append(whole[:cut])
        tails.append(whole[cut:count])
        known = 0
        while known < len(needed) and needed[: known + 1] in seen:
            known += 1
        repeated[at] = min(known * size, count)
        seen.update(needed[: length + 1] for length in range(known, len(needed)))
    return Common(heads, tails, repeated)


def _seen_before(groups: Ints, counts: Ints) -> Ints:
    longest: dict[int, int] = {}
    out = np.zeros(len(counts), np.int64)
    for at, (group, count) in enumerate(zip(groups.tolist(), counts.tolist(), strict=True)):
        out[at] = min(count, longest.get(group, 0))
        longest[group] = max(count, longest.get(group, 0))
    return out
