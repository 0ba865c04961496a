"""What a closed loop changes in bodies that come round again, so that no prefix cache knows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen.content import PATHS, Content


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


def swaps_of(content: Content, bodies: list[bytes]) -> Swaps:
    """Where each body's first own word stands.

    Texts are lower-case ASCII, so that a text stands in its body character for character.

    A starter costs one token at a text's start and within it, so it may stand in for any first own word.
    """
    openings = content.openings
    if openings is None:
        return Swaps(np.full((len(bodies), 3), -1, np.int64), ())
    key = "content" if content.path == PATHS["chat"] else "prompt"
    starters = openings.starters
    index_of = {word: index for index, word in enumerate(starters)}
    rows = np.full((len(bodies), 3), -1, np.int64)
    for row, text, (word, at), body in zip(rows, openings.texts, openings.firsts, bodies, strict=True):
        if word:
            opening = f'"{key}":"'
            start = body.index(f'{opening}{text}"'.encode()) + len(opening) + at
            row[:] = start, start + len(word), index_of.get(word, 0)
    return Swaps(rows, tuple(word.encode() for word in starters))
