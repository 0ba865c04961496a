"""A document as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gapmeter.report import document as doc
from gapmeter.report.document import Document, Table, Words


def text(document: Document) -> str:
    """A heading with the verdict, then the sections, then where the figures are from. Ends with a line feed."""
    verdict, header = document.verdict, document.header
    parts = [f"### {': '.join(filter(None, (verdict.word if verdict else '', escaped(header.title))))}"]
    parts.append(escaped(header.how))
    if verdict:
        parts.append(escaped(" ".join([verdict.sentence, *verdict.reasons])))
        parts += [escaped(one.words) for one in verdict.more if doc.MARKDOWN in one.on]
    parts.append(escaped(header.caveat))
    for section in document.on(doc.MARKDOWN):
        parts += [part for block in doc.flat(section.blocks) for part in _block(block)]
    parts.append(f"<sub>{escaped(document.provenance.line())}</sub>")
    return "\n\n".join(filter(None, parts)) + "\n"


def _block(block: doc.Block) -> Iterable[str]:
    match block:
        case doc.Paragraph():
            yield _words(block.words)
        case doc.Facts():
            for name, *lines in block.rows:
                yield f"**{_words(name)}** " + "\n  ".join(map(_words, lines))
        case (Table() as table) | doc.Chart(table=Table() as table):
            yield _table(table)
        case doc.Warnings():
            yield "\n".join(
                " ".join(filter(None, ("-", escaped(one.text), escaped(one.cause), one.flag and f"Try `{one.flag}`.")))
                for one in block.items
            )
        case doc.Pre():
            fence = _fence(block.text, 3)
            yield f"{fence}\n{block.text}\n{fence}"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    columns = table.columns
    titles = [escaped(column.brief or column.title) for column in columns]
    rule = ["--:" if table.is_right(at) else "---" for at in range(len(columns))]
    lines = [titles, rule, *([_words(cell) for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _words(words: Words) -> str:
    return "".join(map(_inline, words if isinstance(words, tuple) else (words,)))


def _inline(part: doc.Inline) -> str:
    match part:
        case doc.Code(text):
            fence = _fence(text, 1)
            return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"
        case doc.Mark() if part.status:
            return part.status
        case doc.Name(text, href) if href:
            return f"[{escaped(text)}]({href})"
    return escaped(str(part))


def _fence(code: str, least: int) -> str:
    """Backticks that no backticks within end."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", code))])


def escaped(words: str) -> str:
    """Text that Markdown and HTML show as it is, on one line: no link, image, code, heading or emphasis of somebody's.

    A space of no width keeps GitHub from calling ``@team``, and from telling issue ``#12`` that it was mentioned.
    """
    words = re.sub(r"\s+", " ", words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    words = re.sub(r"[\\`*~\[\]]|(?<![^\W_])_|_(?![^\W_])|^[#+-](?=[#+-]*(?:\s|$))", r"\\\g<0>", words)
    return re.sub(r"(?<!\w)@(?=\w)|#(?=\d)", r"\g<0>&#8203;", words)
