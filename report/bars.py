"""Stacked bars made of letters: one letter a stage, one column so many milliseconds, for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping

from rich.text import Text

from gapmeter.analysis.numbers import in_unit, ticks, unit_of
from gapmeter.analysis.stages import BY_NAME, UNEXPLAINED, colour
from gapmeter.report import marks

RESIDUAL_LETTER = "?"


def letter(stage: str) -> str:
    """The letter of a stage; ``?`` for the residual."""
    return RESIDUAL_LETTER if stage == UNEXPLAINED else BY_NAME[stage].letter


def columns(parts: Mapping[str, float], ms_per_column: float) -> dict[str, int]:
    """How many columns each stage gets.

    The whole bar is as long as its total, rounded; the columns go to stages by largest remainder, so that the
    lengths of the parts are right to a column and their sum is exact.
    """
    exact = {stage: max(ms, 0.0) / ms_per_column for stage, ms in parts.items()}
    given = {stage: math.floor(size) for stage, size in exact.items()}
    left = round(sum(exact.values())) - sum(given.values())
    for stage in sorted(exact, key=lambda s: given[s] - exact[s])[:left]:
        given[stage] += 1
    return {stage: size for stage, size in given.items() if size}


def bar(parts: Mapping[str, float], ms_per_column: float) -> Text:
    """A bar in the stages' order, each in its owner's colour."""
    text = Text("|")
    for stage, size in columns(parts, ms_per_column).items():
        text.append(letter(stage) * size, style=colour(stage))
    return text


def axis(top_ms: float, width: int) -> tuple[str, float]:
    """A line of ``width`` columns with round numbers where they lie, and how many milliseconds a column is."""
    ms_per_column = top_ms / max(width - 4, 1)  # room for the last number and its unit
    unit = unit_of(top_ms)
    scale = in_unit(1.0, unit)[0]
    line = [" "] * width
    end = -1
    values = ticks(top_ms * scale, 5)
    for value in values:
        text = f"{value:g} {unit}" if value == values[-1] else f"{value:g}"
        at = round(value / scale / ms_per_column)
        if at > end and at + len(text) <= width:
            line[at : at + len(text)] = text
            end = at + len(text)
    return "".join(line).rstrip(), ms_per_column


def key(stages: Iterable[str], width: int, margin: int) -> str:
    """What the letters mean, on lines of at most ``width`` columns that begin at ``margin``."""
    together = "\N{NO-BREAK SPACE}"  # a letter and its stage stay on one line
    words = "  ".join(f"{letter(s)} {marks.words(s)}".replace(" ", together) for s in stages)
    indent = " " * margin
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent).replace(together, " ")
