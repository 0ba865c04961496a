"""A document in a terminal: plain text, whose colors only mark answers."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gapmeter.analysis.numbers import DASH
from gapmeter.report import document as doc
from gapmeter.report.document import Document, Facts, Mark, Table, Tone, plain
from gapmeter.report.printable import is_shown, printable

WIDTH = 80
_LEAST, _MOST = 60, 100  # columns; the most of a sentence
_MARGIN = 9  # columns before what is said of a fact: a blank, its name, a blank
_BETWEEN = "   "  # columns of a table
_TOGETHER = "\N{NO-BREAK SPACE}"  # textwrap does not break here
_STYLES: dict[Tone, str] = {"good": "bold green", "bad": "bold red", "open": "bold yellow", "": ""}


def show(
    document: Document, stream: TextIO, *, links: Facts | None = None, end: str = "", details: bool = False
) -> None:
    """Write it to ``stream``: colored on a terminal (unless NO_COLOR is set), plain elsewhere."""
    terminal = stream.isatty()
    console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=terminal)
    width = console.width if terminal else WIDTH
    console.print(text(document, width, links=links, end=end, details=details))


def text(
    document: Document, width: int = WIDTH, *, links: Facts | None = None, end: str = "", details: bool = False
) -> Text:
    """The document in at most ``width`` columns, sentences in fewer where those are many.

    ``links``: where to go from here, such as the page and the command that repeats it, which are never broken.
    ``end``: its last line. ``details``: also what is left out of the first screen.
    """
    wide, width = max(_LEAST, width), max(_LEAST, min(width, _MOST))
    parts = [*_head(document, width, details=details)]
    joined = document.verdict is not None  # the first section is what it rests on
    for section in document.on(doc.TERMINAL | doc.DETAILS if details else doc.TERMINAL):
        if drawn := [one for block in doc.flat(section.blocks) for one in _block(block, width, wide, details=details)]:
            parts.append(Text("" if joined or section.joined else "\n").append_text(Text("\n").join(drawn)))
            joined = False
    for name, *lines in links.rows if links else ():
        parts.append(Text(f" {name:<{_MARGIN - 2}} {' '.join(map(plain, lines))}".replace("\n", " ")))
    parts += [Text(" ").append(end, "bold")] if end else []
    return _shown(Text("\n").join(part for part in parts if part.plain))


def _shown(drawn: Text) -> Text:
    """The text as a terminal may have it: much in it is a server's or a stranger's folder's."""
    edges = [edge for at, char in enumerate(drawn.plain) if not is_shown(char) for edge in (at, at + 1)]
    return Text().join(
        one if all(map(is_shown, one.plain)) else Text(printable(one.plain)) for one in drawn.divide(edges)
    )


def _head(document: Document, width: int, *, details: bool) -> Iterator[Text]:
    """The name, with how it was done to the right of it or beneath where there is no room; then the verdict."""
    header, verdict = document.header, document.verdict
    left, how = header.title.replace(" · ", "  ").replace("\n", " "), header.how
    if how and len(left) + 3 + len(how) <= width:
        yield Text.assemble((left, "bold"), " " * (width - len(left) - len(how)), how)
    else:
        yield Text(left if len(left) <= width else f"{left[: width - 1]}…", "bold")
        yield Text(_wrapped(how, width, "  ", "  ") if how else "")
    if verdict is None:
        return
    margin = " " * 6 if verdict.word else ""
    first = _wrapped(" ".join([verdict.sentence, *verdict.reasons]), width, f"{verdict.word}  ".lstrip(), margin)
    at = len(verdict.word) or len(first)  # without a word the answer itself is bold
    yield Text.assemble((first[:at], _STYLES[verdict.tone] if verdict.word else "bold"), first[at:])
    for one in verdict.more:
        if one.on & (doc.TERMINAL | doc.DETAILS if details else doc.TERMINAL):
            yield Text(_wrapped(one.words, width, margin, margin))


def _block(block: doc.Block, width: int, wide: int, *, details: bool) -> Iterator[Text]:
    match block:
        case doc.Paragraph():
            yield Text(_wrapped(plain(block.words), width, " ", "   "))
        case Facts():
            for name, *lines in block.rows:
                for at, line in enumerate(lines):
                    first = " " * _MARGIN if at else f" {plain(name):<{_MARGIN - 2}} "
                    foreign = isinstance(line, doc.Quoted)
                    yield Text(_wrapped(plain(line), width, first, " " * _MARGIN, broken=foreign))
        case (Table() as table) | doc.Chart(table=Table() as table):
            yield from _table(table, wide)
        case doc.Warnings():
            for one in block.items:
                yield Text(_wrapped(" ".join(filter(None, (one.text, one.cause))), width, " ! ", "   "))
                yield from [Text(f"   try {one.flag}")] if one.flag else []
        case doc.Pre():
            yield Text(block.text if details or cell_len(block.text) <= 2 * width else _shortened(block.text, width))


def _table(table: Table, width: int) -> Iterator[Text]:
    """Columns as wide as their widest cell. Under a row stands what is ``below``, and what of it has no room."""
    columns = table.columns
    shown, under = ([at for at, column in enumerate(columns) if column.below == below] for below in (False, True))
    signs = {at for at in shown if table.rows and all(isinstance(c := row[at], Mark) and c.sign for row in table.rows)}
    heads = ["" if at in signs or column.below else column.brief or column.title for at, column in enumerate(columns)]
    rows = [
        [cell.sign if at in signs and isinstance(cell, Mark) else plain(cell) for at, cell in enumerate(row)]
        for row in table.rows
    ]
    widths = [max(map(cell_len, cells)) for cells in zip(heads, *rows, strict=True)]

    def room() -> int:
        """For the last column."""
        return width - 1 - sum(widths[at] + (1 if widths[at] == 1 else 2) for at in shown[:-1])

    def fits(at: int) -> bool:
        return cell_len(heads[at]) <= room() if columns[at].wraps else widths[at] <= room()

    while len(shown) > 1 and not fits(shown[-1]):
        under.insert(0, shown.pop())

    def line(cells: Sequence[str], styles: Sequence[str]) -> Text:
        drawn = Text(" ")
        for at in shown:
            drawn.append(_padded(cells[at], widths[at], right=table.is_right(at)), styles[at])
            drawn.append(" " if widths[at] == 1 else "  ")
        drawn.rstrip()
        if drawn.cell_len > width:
            drawn.truncate(width - 1)
            drawn.append("…")
        return drawn

    last = shown[-1]
    yield line(heads, [""] * len(columns))
    for row, cells in zip(table.rows, rows, strict=True):
        more = [f"{heads[at]}: {cells[at]}".removeprefix(": ") for at in under if cells[at] not in ("", DASH)]
        below = ["; ".join(more)]
        if columns[last].wraps and cell_len(cells[last]) > room():
            below.insert(0, cells[last])
            cells[last] = ""
        yield line(cells, [_STYLES[cell.tone] if isinstance(cell, Mark) else "" for cell in row])
        yield from (Text(_wrapped(words, width, " " * 8, " " * 8)) for words in below if words)


def _shortened(command: str, width: int) -> str:
    """The beginning of a long command in a line, with whole flags."""
    rest, flag = " … (whole in the report)", " --"
    return command[: width - cell_len(rest) + len(flag)].rpartition(flag)[0] + rest


def _padded(cell: str, wide: int, *, right: bool) -> str:
    """So wide on a terminal, where some letters take two columns."""
    space = " " * (wide - cell_len(cell))
    return space + cell if right else cell + space


def _wrapped(words: str, width: int, first: str, later: str, *, broken: bool = False) -> str:
    """Lines of at most ``width`` columns, long words ``broken``; a number and its per cent sign stay together."""
    filled = textwrap.fill(
        words.replace(" %", f"{_TOGETHER}%"), width, initial_indent=first, subsequent_indent=later,
        break_long_words=broken, break_on_hyphens=False,
    )  # fmt: skip
    return filled.replace(_TOGETHER, " ")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Rows on standard output, each on one line, as wide as their content: a path stays whole on a narrow terminal too.

    Columns in ``right`` are set to the right.
    """
    cells = [[printable(cell).expandtabs().replace("\n", " ") for cell in row] for row in (headers, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        shown = (_padded(cell, wide, right=i in right) for i, (cell, wide) in enumerate(zip(row, widths, strict=True)))
        return f" {_BETWEEN.join(shown)}".rstrip()

    rule = "─" * (sum(widths) + len(_BETWEEN) * (len(widths) - 1))
    print("", line(cells[0]), f" {rule}", *map(line, cells[1:]), "", sep="\n")
