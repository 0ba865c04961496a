"""A document as one self-contained page, which asks the network for nothing and works without its script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.stages import OWNER_COLOURS, owner_words
from gapmeter.report import marks
from gapmeter.report.document import (
    PAGE,
    Bar,
    Block,
    Chart,
    Choice,
    Code,
    Column,
    Columns,
    Document,
    Facts,
    Figure,
    Folded,
    Gauge,
    Heading,
    Html,
    Inline,
    Key,
    Line,
    Mark,
    Name,
    Open,
    Paragraph,
    Pre,
    RequestView,
    Slot,
    Stage,
    Switch,
    Table,
    Tone,
    Unmeasured,
    Verdict,
    Warnings,
    Words,
    plain,
)
from gapmeter.report.pictures import gauge_line, ledger_bar
from gapmeter.report.svg import NOTHING, Fragment, el, group

_LONGEST_NUMBER = 44  # characters, with its interval; anything longer is a sentence
_MARKS: Mapping[Tone, str] = {"good": "mark met", "bad": "mark missed", "open": "mark open", "": "mark"}
_TONES: Mapping[Tone, str] = {"good": "PASS", "bad": "FAIL", "open": "INCONCLUSIVE", "": ""}


def page(document: Document, scripts: Sequence[str] = (), policy: str = "") -> str:
    """The whole page.

    ``scripts``: further sources of the page's own; ``policy``: further directives of its content-security policy, for a
    page that a server hands out.
    """
    printer = _Printer(document.provenance, document.device)
    sections = document.on(PAGE)
    sources = [asset("report.js"), *scripts]
    allowed = " ".join(f"'{_digest(source)}'" for source in sources)
    return fill(
        asset("page.html"),
        title=document.title,
        line=document.provenance.line(),
        policy=f"script-src {allowed}; {policy}".strip("; "),
        style=Markup(asset("report.css")),
        scripts=[Markup(source) for source in sources],
        definitions=marks.definitions(),
        header=_header(document),
        verdict=printer.verdict(document.verdict) if document.verdict else NOTHING,
        sections=[(section, printer.blocks(section.blocks)) for section in sections],
        origin=printer.origin(),
        data={section.key: _json(section.data) for section in sections if section.data},
        version=document.version,
    )


def fill(template: str, **context: Any) -> Fragment:
    """A template filled in. Text is escaped; only fragments are taken as markup."""
    return Markup(_environment().from_string(template).render(**context))  # the template escapes


@functools.lru_cache(maxsize=32)
def asset(name: str) -> str:
    """A file that is shipped with the page."""
    return (files("gapmeter.report") / "assets" / name).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _json(value: Mapping[str, Any]) -> Markup:
    """JSON that cannot end its element: no ``<``, no ``>``, no ``&``."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # three signs less, it is no markup


def _header(document: Document) -> Fragment:
    header = document.header
    caveat = el("p", header.caveat, class_="caveat") if header.caveat else NOTHING
    how = el("p", header.how) if header.how else NOTHING
    return el("header", el("h1", header.title), how, caveat, class_="top") if header.title else NOTHING


class _Printer:
    """Prints the blocks of one page: each table and chart says where it is from, and an invalid run's are stamped."""

    def __init__(self, provenance: Provenance, device: str) -> None:
        self._provenance, self._device = provenance, device
        self._writers: dict[type, Callable[[Any], Fragment]] = {
            Paragraph: _paragraph,
            Heading: lambda block: el("h3", block.text),
            Facts: _facts,
            Table: self.table,
            Chart: self._chart,
            Key: _key,
            Warnings: _warnings,
            Pre: lambda block: el("pre", block.text),
            Folded: lambda block: el("details", el("summary", block.summary), self.blocks(block.blocks)),
            Columns: lambda block: el("div", *(el("div", self.blocks(part)) for part in block.parts), class_="grid2"),
            Choice: self._choice,
            RequestView: lambda block: fill(
                asset("request.html"),
                embedded=f"{block.embedded:,}",
                all=f"{block.requests:,}",
                origin=self.origin(),
            ),
            Html: lambda block: block.markup,
        }

    def blocks(self, blocks: Iterable[Block]) -> Fragment:
        return group(self._writers[type(block)](block) for block in blocks)

    def origin(self) -> Fragment:
        """The small line beneath everything that may be cut out of the page."""
        return el("p", self._provenance.line(), class_="origin")

    # --- the first screen

    def verdict(self, verdict: Verdict) -> Fragment:
        reasons = [el("li", reason) for reason in verdict.reasons]
        said = [
            el("p", marks.swatch(one.stage) if one.stage else "", one.words,
               class_="owner" if one.strong or one.stage else "bracket")
            for one in verdict.more if PAGE in one.on
        ]  # fmt: skip
        trust = verdict.trust
        gauges = [_gauge(gauge) for gauge in verdict.gauges]
        return el(
            "div",
            el(
                "div",
                el("p", verdict.word, class_="word") if verdict.word else NOTHING,
                el("p", verdict.sentence, class_="sentence"),
                el("ul", *reasons) if reasons else NOTHING,
                *said,
                class_="said",
            ),
            el("ul", *gauges, class_="gauges", aria_label="Objectives") if gauges else NOTHING,
            el(
                "p",
                el("b", trust.word, class_="sound" if trust.sound else "unsound"),
                f" {trust.words}",
                class_="trust",
            )
            if trust
            else NOTHING,
            class_=f"verdict {_TONES[verdict.tone]}".strip(),
            data_verdict=verdict.word or None,
        )

    # --- charts and tables

    def _chart(self, block: Chart) -> Fragment:
        """A picture with its caption, its legend, where it is from, and its table folded behind it."""
        picture = block.picture.draw(block.key, self._provenance.stamp)
        table = block.table
        behind = el("details", el("summary", "as a table"), self.table(table, own_line=False)) if table else NOTHING
        drawn = el(
            "figure",
            el("div", el("div", picture, class_=f"plot {block.margin}".strip()), class_="scroll"),
            el("figcaption", block.caption) if block.caption else NOTHING,
            self.origin(),
            behind,
        )
        return group([drawn, self._legend(block.stages)]) if block.stages else drawn

    def table(self, table: Table, *, own_line: bool = True) -> Fragment:
        """With its button, and with a line that says where it is from unless its chart has said so."""
        columns = table.columns
        numeric = [_is_numeric(table, columns[i], i) for i in range(len(columns))]
        head = el("tr", *(_column(column, number) for column, number in zip(columns, numeric, strict=True)))
        body = [
            el("tr", *(_cell(cell, number) for cell, number in zip(row, numeric, strict=True)),
               class_="group" if at in table.groups else None)
            for at, row in enumerate(table.rows)
        ]  # fmt: skip
        grid = el(
            "table",
            el("thead", head),
            el("tbody", *body, id=table.key or None),
            aria_label=table.name,
            class_=table.css or None,
        )
        return el(
            "div",
            el("div", stamped(grid, len(table.rows), self._provenance.stamp), class_="wide", tabindex=0, role="region",
               aria_label=f"{table.name}, as a table"),
            el("button", "copy as CSV", type="button", class_="copy"),
            self.origin() if own_line else NOTHING,
            class_="table",
        )  # fmt: skip

    def _legend(self, stages: Sequence[str]) -> Fragment:
        """The stages by owner, each with a swatch and its name; buttons, so that they can be picked by keyboard too."""
        order = [owner_words(name, self._device) for name in OWNER_COLOURS]
        owners = dict.fromkeys(marks.owner(stage, self._device) for stage in stages)
        groups = [
            el("div", el("span", owner, class_="whose"),
               *(self._entry(stage) for stage in stages if marks.owner(stage, self._device) == owner))
            for owner in sorted(owners, key=lambda name: order.index(name) if name in order else len(order))
        ]  # fmt: skip
        return el("div", *groups, class_="legend", role="group", aria_label="Stages, by owner")

    def _entry(self, stage: str) -> Fragment:
        words = marks.words(stage)
        return el(
            "button", marks.swatch(stage), words, type="button", data_stage=stage, aria_pressed="false",
            title=f"{words}: owner {marks.owner(stage, self._device)}, {marks.kind(stage)}",
        )  # fmt: skip

    # --- what is seen on demand

    def _choice(self, block: Choice) -> Fragment:
        switches = el("div", *map(_switch, block.switches), class_="switches")
        panels = [
            el("div", self.blocks(panel.blocks), class_="panel",
               data_panel=" ".join(f"{name}={value}" for name, value in panel.at.items()),
               hidden=None if block.is_chosen(panel) else "hidden")
            for panel in block.panels
        ]  # fmt: skip
        return group([switches, *panels])


def stamped(grid: Fragment, rows: int, stamp: str | None) -> Fragment:
    """A table with what must be written across it: INVALID, once every dozen rows; a valid run's as it is."""
    if stamp is None:
        return grid
    across = el("div", *(el("span", stamp) for _ in range(1 + rows // 12)), class_="across", aria_hidden="true")
    return el("div", el("p", f"{stamp}. ", class_="hidden"), grid, across, class_="stamped")


def _is_numeric(table: Table, column: Column, at: int) -> bool:
    """Whether a column is set as numbers: to the right, unbroken. Sentences behind the numbers are not."""
    longest = max((len(plain(row[at])) for row in table.rows), default=0)
    return at >= table.words and not column.wraps and longest <= _LONGEST_NUMBER


def _column(column: Column, numeric: bool) -> Fragment:
    return el("th", column.title, scope="col", class_="n" if numeric else None, data_csv=column.csv or None)


def _cell(cell: Words, numeric: bool) -> Fragment:
    css, attributes = ["n"] if numeric else [], dict[str, Any]()
    match cell:
        case Figure():
            attributes = _raw(cell)
            css += ["zero"] if cell.value == 0 and cell.unit == "ms" and not cell.text else []
        case Unmeasured():
            css, attributes = [*css, "unmeasured"], {"data_value": "unmeasured"}
        case Mark():
            css.append(_MARKS[cell.tone])
        case Name():
            css.append("name")
        case Stage():
            attributes = {"title": cell.meaning or None}
        case Bar():
            css.append("bar")
    inside = plain(cell) if isinstance(cell, Mark) else _words(cell)
    return el("td", inside, class_=" ".join(css) or None, **attributes)


def _raw(figure: Figure) -> dict[str, Any]:
    """A figure's value with all its digits, and where it stands in the result."""
    value = "null" if figure.value is None and figure.key else "" if figure.value is None else json.dumps(figure.value)
    return {"data_value": value, "data_key": figure.key or None, "title": figure.hint or None}


def _words(words: Words) -> Fragment:
    return group(map(_inline, words if isinstance(words, tuple) else (words,)))


def _inline(part: Inline) -> Fragment:
    match part:
        case Code(text):
            return el("code", text)
        case Mark(word, tone):
            return el("b", word, class_=_MARKS[tone])
        case Name(text, href) if href:
            return el("a", text, href=href)
        case Open(request, there) if there:
            return el("button", request, type="button", class_="open", data_request=request)
        case Open(request):
            return el("span", request, title="not embedded in this page; its ledger is in ledger.parquet")
        case Bar(parts, longest):
            return el("svg", ledger_bar(parts, longest), width="100%", height=16, aria_hidden="true")
        case Slot(key, text):
            return el("span", text, id=key)
        case Stage(name):
            return group([marks.swatch(name), el("span", marks.words(name))])
    return Markup.escape(plain(part))


def _paragraph(block: Paragraph) -> Fragment:
    css = {"quiet": "lead", "strong": "told", "empty": "empty"}.get(block.tone)
    return el("p", _words(block.words), class_=css)


def _facts(block: Facts) -> Fragment:
    rows: list[Fragment] = []
    for name, *lines in block.rows:
        told = [_words(line.words if isinstance(line, Line) else line) for line in lines]
        rows += [el("dt", _words(name)), *(el("dd", line) for line in told)]
    return el("dl", *rows)


def _gauge(gauge: Gauge) -> Fragment:
    known = gauge.interval if gauge.value is None and not gauge.never else gauge.measured
    spoken = el("i", f", 95 % interval {gauge.interval}", class_="hidden")
    mark = el("b", gauge.mark.word, class_=_MARKS[gauge.mark.tone])
    return el("li", el("p", mark, f" {gauge.objective}", el("span", known), spoken), gauge_line(gauge))


def _key(block: Key) -> Fragment:
    entries = [el("span", marks.square(paint), words, class_="owner-key") for paint, words in block.entries]
    return el("p", *entries, class_="lead key")


def _warnings(block: Warnings) -> Fragment:
    items = [
        el("li", " ".join(filter(None, (one.text, one.cause))),
           el("span", "Try ", el("code", one.flag), class_="try") if one.flag else "")
        for one in block.items
    ]  # fmt: skip
    return el("ul", *items, class_="warnings")


def _switch(switch: Switch) -> Fragment:
    """Radio buttons, which arrows move; or a list to choose from."""
    if switch.list:
        entries = [
            el("option", words, value=value, selected="selected" if value == switch.chosen else None)
            for value, words in switch.options
        ]
        chosen = el("select", *entries, name=switch.name, data_switch=switch.name)
        return el("label", switch.legend, chosen, class_="chooser")
    buttons = [
        el("label",
           el("input", type="radio", name=switch.name, value=value,
              checked="checked" if value == switch.chosen else None),
           el("span", words))
        for value, words in switch.options
    ]  # fmt: skip
    return el("fieldset", el("legend", switch.legend), *buttons, class_="switch", data_switch=switch.name)
