"""A document as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gapmeter.report.document import (
    MARKDOWN,
    Block,
    Chart,
    Choice,
    Code,
    Column,
    Columns,
    Document,
    Facts,
    Line,
    Mark,
    Name,
    Paragraph,
    Pre,
    Table,
    Warnings,
    Words,
)


def text(document: Document) -> str:
    """A heading with the verdict, then the sections, then where the figures are from. Ends with a line feed."""
    verdict, header = document.verdict, document.header
    word = verdict.word if verdict else ""
    parts = [f"### {': '.join(filter(None, (word, escaped(header.title))))}"]
    parts.append(escaped(header.how))
    if verdict:
        parts.append(escaped(" ".join([verdict.sentence, *verdict.reasons])))
        parts += [escaped(one.words) for one in verdict.more if MARKDOWN in one.on]
    parts.append(escaped(header.caveat))
    parts += [part for section in document.on(MARKDOWN) for block in section.blocks for part in _block(block)]
    parts.append(f"<sub>{escaped(document.provenance.line())}</sub>")
    return "\n\n".join(filter(None, parts)) + "\n"


def _block(block: Block) -> Iterable[str]:
    match block:
        case Paragraph():
            yield _words(block.words)
        case Facts():
            for name, *lines in block.rows:
                yield "\n".join([f"**{_words(name)}** {_line(lines[0])}", *(f"  {_line(line)}" for line in lines[1:])])
        case Table():
            yield _table(block)
        case Chart():
            yield _table(block.table) if block.table else ""
        case Warnings():
            yield "\n".join(
                " ".join(filter(None, ("-", escaped(one.text), escaped(one.cause), one.flag and f"Try `{one.flag}`.")))
                for one in block.items
            )
        case Pre():
            yield f"```\n{block.text}\n```"
        case Choice():
            for panel in block.panels:
                if block.is_chosen(panel):
                    yield from (part for inner in panel.blocks for part in _block(inner))
        case Columns():
            yield from (part for column in block.parts for inner in column for part in _block(inner))


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    columns = table.columns
    rule = ["---" if at < table.words or column.wraps else "--:" for at, column in enumerate(columns)]
    rows = [[_words(cell) for cell in row] for row in table.rows]
    lines = [[_title(column) for column in columns], rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _title(column: Column) -> str:
    return escaped(column.brief or column.title)


def _line(line: Words | Line) -> str:
    return _words(line.words if isinstance(line, Line) else line)


def _words(words: Words) -> str:
    return "".join(_inline(part) for part in (words if isinstance(words, tuple) else (words,)))


def _inline(part: object) -> str:
    match part:
        case Code(text):
            return f"`{text}`"
        case Mark() if part.status:
            return part.status
        case Name(text, href) if href:
            return f"[{escaped(text)}]({href})"
    return escaped(str(part))


def escaped(words: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    return re.sub(r"\s+", " ", words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
