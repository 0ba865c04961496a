"""A document in a terminal: plain text, whose colours only mark verdicts and owners."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gapmeter.report.document import (
    TERMINAL,
    Block,
    Chart,
    Choice,
    Column,
    Columns,
    Document,
    Facts,
    Folded,
    Header,
    Line,
    Mark,
    Paragraph,
    Pre,
    Sketch,
    Table,
    Tone,
    Verdict,
    Warnings,
    Words,
    plain,
)

WIDTH = 80
_LEAST, _MOST = 60, 100  # columns
_MARGIN = 9  # columns before what is said of a fact: a blank, its name, a blank
_TOGETHER = "\N{NO-BREAK SPACE}"  # textwrap does not break here
_STYLES: dict[Tone, str] = {"good": "bold green", "bad": "bold red", "open": "bold yellow", "": ""}


def show(document: Document, stream: TextIO, *, links: Facts | None = None, end: str = "") -> None:
    """Write it to ``stream``: coloured on a terminal (unless NO_COLOR is set), plain elsewhere."""
    terminal = stream.isatty()
    console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=terminal)
    console.print(text(document, console.width if terminal else WIDTH, links=links, end=end))


def text(document: Document, width: int = WIDTH, *, links: Facts | None = None, end: str = "") -> Text:
    """The document in at most ``width`` columns.

    ``links``: where to go from here, such as the page and the command that repeats it, which are never broken.
    ``end``: its last line.
    """
    width = max(_LEAST, min(width, _MOST))
    parts = [_header(document.header, width)]
    parts += [_verdict(document.verdict, width)] if document.verdict else []
    for section in document.on(TERMINAL):
        drawn = [one for block in section.blocks for one in _block(block, width)]
        parts += [Text("\n").append_text(_joined(drawn))] if drawn else []
    for name, *lines in links.rows if links else ():
        parts.append(Text(f" {name:<{_MARGIN - 2}} {' '.join(plain(_words_of(line)) for line in lines)}"))
    parts += [Text(" ").append(end, "bold")] if end else []
    return _joined(part for part in parts if part.plain)


def _joined(parts: Iterable[Text]) -> Text:
    return Text("\n").join(parts)


def _header(header: Header, width: int) -> Text:
    """The name, and how it was done to the right of it, or beneath where there is no room."""
    left = header.title.replace(" · ", "  ")
    if not header.how:
        return Text(_cut(left, width), "bold")
    if len(left) + 3 + len(header.how) <= width:
        return Text.assemble((left, "bold"), " " * (width - len(left) - len(header.how)), header.how)
    return Text.assemble((_cut(left, width), "bold"), "\n", _wrapped(header.how, width, "  ", "  "))


def _verdict(verdict: Verdict, width: int) -> Text:
    """Its word, and what it is about beside it; without a word the answer itself is bold."""
    margin = " " * 6 if verdict.word else ""
    first = _wrapped(" ".join([verdict.sentence, *verdict.reasons]), width, f"{verdict.word}  ".lstrip(), margin)
    style = _STYLES[verdict.tone]
    said = (
        Text.assemble((first[: len(verdict.word)], style), first[len(verdict.word) :])
        if verdict.word
        else Text(first, "bold")
    )
    for one in verdict.more:
        if TERMINAL in one.on:
            said.append(f"\n{_wrapped(one.words, width, margin, margin)}")
    return said


def _block(block: Block, width: int) -> list[Text]:
    match block:
        case Paragraph():
            return [Text(_wrapped(plain(block.words), width, " ", "   "))]
        case Facts():
            return [_fact(plain(name), lines, width) for name, *lines in block.rows]
        case Table():
            return _table(block, width)
        case Chart():
            return [block.picture.sketch(width)] if isinstance(block.picture, Sketch) else []
        case Warnings():
            return [
                Text(_wrapped(" ".join(filter(None, (one.text, one.cause))), width, " ! ", "   "))
                + Text(f"\n   try {one.flag}" if one.flag else "")
                for one in block.items
            ]
        case Pre():
            return [Text(block.text)]
        case Choice():
            return [
                one
                for panel in block.panels
                if block.is_chosen(panel)
                for b in panel.blocks
                for one in _block(b, width)
            ]
        case Folded():
            return []
        case Columns():
            return [one for part in block.parts for b in part for one in _block(b, width)]
    return []


def _fact(name: str, lines: Sequence[Words | Line], width: int) -> Text:
    drawn = []
    for at, line in enumerate(lines):
        first = f" {name:<{_MARGIN - 2}} " if not at else " " * _MARGIN
        if isinstance(line, Line):
            drawn.append(first + _cut(" ".join(plain(line.words).split()), width - _MARGIN))
        else:
            drawn.append(_wrapped(plain(line), width, first, " " * _MARGIN))
    return Text("\n".join(drawn))


def _words_of(line: Words | Line) -> Words:
    return line.words if isinstance(line, Line) else line


def _table(table: Table, width: int) -> list[Text]:
    """Columns as wide as their widest cell; the last one is cut. What is ``below`` stands under its row."""
    columns = table.columns
    shown = [at for at, column in enumerate(columns) if not column.below]
    heads = ["" if _is_sign(table, at) else columns[at].brief or columns[at].title for at in shown]
    rows = [[_cell(row[at], _is_sign(table, at)) for at in shown] for row in table.rows]
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    right = [_to_the_right(table, columns[at], at) for at in shown]
    longest = 10_000 if table.whole else width
    lines = [_row(heads, widths, right, longest, [""] * len(shown))]
    for row, cells in zip(table.rows, rows, strict=True):
        styles = [_STYLES[cell.tone] if isinstance(cell := row[at], Mark) else "" for at in shown]
        lines.append(_row(cells, widths, right, longest, styles))
        below = [plain(row[at]) for at, column in enumerate(columns) if column.below and plain(row[at])]
        lines += [Text(_wrapped(words, width, " " * 8, " " * 8)) for words in below]
    return lines


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], width: int, styles: Sequence[str]) -> Text:
    line = Text(" ")
    for cell, wide, to_the_right, style in zip(cells, widths, right, styles, strict=True):
        line.append(cell.rjust(wide) if to_the_right else cell.ljust(wide), style)
        line.append(" " if wide == 1 else "  ")
    line.rstrip()
    if len(line) > width:
        line.truncate(width - 1)
        line.append("…")
    return line


def _is_sign(table: Table, at: int) -> bool:
    """Whether a column's answers are shown as signs."""
    return all(isinstance(cell := row[at], Mark) and bool(cell.sign) for row in table.rows) and bool(table.rows)


def _cell(cell: Words, sign: bool) -> str:
    return cell.sign if sign and isinstance(cell, Mark) else plain(cell)


def _to_the_right(table: Table, column: Column, at: int) -> bool:
    return at >= table.words and not column.wraps


def _wrapped(words: str, width: int, first: str, later: str) -> str:
    """Lines of at most ``width`` columns; a number and its per cent sign stay together."""
    filled = textwrap.fill(
        words.replace(" %", f"{_TOGETHER}%"), width, initial_indent=first, subsequent_indent=later,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return filled.replace(_TOGETHER, " ")


def _cut(words: str, width: int) -> str:
    return words if len(words) <= width else f"{words[: width - 1]}…"
