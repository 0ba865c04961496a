"""A document as one self-contained page, which asks the network for nothing and works without its script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.stages import OWNER_COLORS, owner_words
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.document import PAGE, Document, Figure, Mark, Table, Tone, Verdict, Words, plain
from gapmeter.report.pictures import gauge_line
from gapmeter.report.svg import NOTHING, Fragment, el, group
from gapmeter.scenarios.plain_file import replace_text

_LONGEST_NUMBER = 44  # characters, with its interval; anything longer is a sentence
_MARKS: Mapping[Tone, str] = {"good": "mark met", "bad": "mark missed", "open": "mark open", "": "mark"}


def page(document: Document, scripts: Sequence[str] = (), policy: str = "") -> str:
    """The whole page.

    ``scripts``: further sources of the page's own; ``policy``: further directives of its content-security policy, for a
    page that a server hands out.
    """
    printer, header = _Printer(document.provenance, document.device), document.header
    top = [el("h1", header.title), el("p", header.how) if header.how else NOTHING]
    top.append(el("p", header.caveat, class_="caveat") if header.caveat else NOTHING)
    sections = document.on(PAGE)
    sources = [asset("report.js"), *scripts]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return fill(
        asset("page.html"),
        title=document.title,
        line=document.provenance.line(),
        policy=f"script-src {allowed}; {policy}".strip("; "),
        style=Markup(asset("report.css")),
        scripts=[Markup(source) for source in sources],
        definitions=marks.definitions(),
        header=el("header", *top, class_="top") if header.title else NOTHING,
        verdict=printer.verdict(document.verdict) if document.verdict else NOTHING,
        sections=[(section, printer.blocks(section.blocks)) for section in sections],
        origin=origin(document.provenance),
        data={section.key: _json(section.data) for section in sections if section.data},
    )


def origin(provenance: Provenance) -> Fragment:
    """The small line beneath every picture, which may be cut out of the page; none of what is of no one run."""
    return el("p", line, class_="origin") if (line := provenance.line()) else NOTHING


def fill(template: str, **context: Any) -> Fragment:
    """A template filled in. Text is escaped; only fragments are taken as markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return Markup(environment.from_string(template).render(**context))  # the template escapes


def write(path: Path, document: Document, scripts: Sequence[str] = ()) -> None:
    """The page as a file. Raises OSError."""
    replace_text(path, page(document, scripts))


@functools.lru_cache(maxsize=32)
def asset(name: str, package: str = "gapmeter.report") -> str:
    """A file that is shipped with a package's pages."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def _json(value: Mapping[str, Any]) -> Markup:
    """JSON that cannot end its element: no ``<``, no ``>``, no ``&``."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # three signs less, it is no markup


class _Printer:
    """Prints the blocks of one page: each table and chart says where it is from, and an invalid run's are stamped."""

    def __init__(self, provenance: Provenance, device: str) -> None:
        self._provenance, self._device = provenance, device

    def blocks(self, blocks: Iterable[doc.Block]) -> Fragment:
        return group(map(self._block, blocks))

    def _block(self, block: doc.Block) -> Fragment:
        match block:
            case doc.Paragraph(words, tone):
                css = {"quiet": "lead", "strong": "told", "empty": "empty"}.get(tone)
                return el("p", _words(words), class_=css)
            case doc.Heading(text) | doc.Pre(text):
                return el("h3" if isinstance(block, doc.Heading) else "pre", text)
            case doc.Facts(rows):
                lines = (el("dd" if at else "dt", _words(part)) for row in rows for at, part in enumerate(row))
                return el("dl", *lines)
            case doc.Table():
                return self.table(block)
            case doc.Chart():
                return self._chart(block)
            case doc.Warnings(items):
                return el("ul", *map(_warning, items), class_="warnings")
            case doc.Folded(summary, inner):
                return el("details", el("summary", summary), self.blocks(inner))
            case doc.Columns(parts):
                return el("div", *(el("div", self.blocks(part)) for part in parts), class_="grid2")
            case doc.Choice():
                return self._choice(block)
        return block.markup

    # --- the first screen

    def verdict(self, verdict: Verdict) -> Fragment:
        parts = [el("p", verdict.word, class_="word") if verdict.word else NOTHING]
        parts.append(el("p", verdict.sentence, class_="sentence"))
        parts.append(el("ul", *(el("li", reason) for reason in verdict.reasons)) if verdict.reasons else NOTHING)
        parts += [
            el("p", marks.swatch(one.stage) if one.stage else "", one.words,
               class_="owner" if one.strong or one.stage else "bracket")
            for one in verdict.more if PAGE in one.on
        ]  # fmt: skip
        said = [el("div", *parts, class_="said")]
        if verdict.gauges:
            said.append(el("ul", *map(_gauge, verdict.gauges), class_="gauges", aria_label="Objectives"))
        if trust := verdict.trust:
            word = el("b", trust.word, class_="sound" if trust.sound else "unsound")
            said.append(el("p", word, f" {trust.words}", class_="trust"))
        css = f"verdict {verdict.tone}".strip()
        return el("div", *said, class_=css, data_verdict=verdict.word or None)

    # --- charts and tables

    def _chart(self, block: doc.Chart) -> Fragment:
        """A picture with its caption, its legend, where it is from, and its table folded behind it."""
        picture, table = block.picture.draw(block.key), block.table
        picture = self._stamped(picture, max(1, picture.count('class="chart"')))
        behind = el("details", el("summary", "as a table"), self.table(table)) if table else NOTHING
        drawn = el(
            "figure",
            el("div", el("div", picture, class_=f"plot {block.margin}".strip()), class_="scroll"),
            el("figcaption", block.caption) if block.caption else NOTHING,
            origin(self._provenance),
            behind,
        )
        return group([drawn, self._legend(block.stages)]) if block.stages else drawn

    def table(self, table: Table) -> Fragment:
        """A table with its button."""
        numeric = [_is_numeric(table, at) for at in range(len(table.columns))]
        head = [
            el("th", column.title, scope="col", class_="n" if number else None, data_csv=column.csv or None)
            for column, number in zip(table.columns, numeric, strict=True)
        ]
        body = [
            el("tr", *map(_cell, row, numeric), class_="group" if at in table.groups else None)
            for at, row in enumerate(table.rows)
        ]
        rows = el("tbody", *body, id=table.key or None)
        grid = el("table", el("thead", el("tr", *head)), rows, aria_label=table.name, class_=table.css or None)
        grid = self._stamped(grid, 1 + len(table.rows) // 12)
        return el(
            "div",
            el("div", grid, class_="wide", tabindex=0, role="region", aria_label=f"{table.name}, as a table"),
            el("button", "copy as CSV", type="button", class_="copy"),
            class_="table",
        )

    def _stamped(self, shown: Fragment, times: int) -> Fragment:
        """With the stamp of what must not be believed across it, so many times, if there is one."""
        if (stamp := self._provenance.stamp) is None:
            return shown
        across = el("div", *(el("span", stamp) for _ in range(times)), class_="across", aria_hidden="true")
        return el("div", el("p", f"{stamp}. ", class_="hidden"), shown, across, class_="stamped")

    def _legend(self, stages: Sequence[str]) -> Fragment:
        """The stages by owner, each with a swatch and its name; buttons, so that they can be picked by keyboard too."""
        groups: dict[str, list[Fragment]] = {owner_words(name, self._device): [] for name in OWNER_COLORS}
        for stage in stages:
            words, owner = marks.words(stage), marks.owner(stage, self._device)
            title = f"{words}: owner {owner}, {marks.kind(stage)}"
            entry = {"type": "button", "data_stage": stage, "aria_pressed": "false", "title": title}
            groups.setdefault(owner, []).append(el("button", marks.swatch(stage), words, **entry))
        drawn = [el("div", el("span", owner, class_="whose"), *own) for owner, own in groups.items() if own]
        return el("div", *drawn, class_="legend", role="group", aria_label="Stages, by owner")

    # --- what is seen on demand

    def _choice(self, block: doc.Choice) -> Fragment:
        switches = el("div", *map(_switch, block.switches), class_="switches")
        panels = [
            el("div", self.blocks(panel.blocks), class_="panel",
               data_panel=" ".join(f"{name}={value}" for name, value in panel.at.items()),
               hidden=None if block.is_chosen(panel) else "hidden")
            for panel in block.panels
        ]  # fmt: skip
        return group([switches, *panels])


def _is_numeric(table: Table, at: int) -> bool:
    """Whether a column is set as numbers: to the right, unbroken. Sentences behind the numbers are not."""
    cells = (row[at] for row in table.rows)
    words = (cell for cell in cells if not isinstance(cell, Figure) or cell.text)
    return table.is_right(at) and all(len(plain(each)) <= _LONGEST_NUMBER for each in words)


def _cell(cell: Words, numeric: bool) -> Fragment:
    """A figure's has its value with all digits, and where it stands in the result."""
    css, attributes = ["n"] if numeric else [], dict[str, Any]()
    match cell:
        case Figure(value, unit, key, hint, text):
            raw = json.dumps(value) if value is not None or key else ""
            attributes = {"data_value": raw, "data_key": key or None, "title": hint or None}
            css += ["zero"] if value == 0 and unit == "ms" and not text else []
        case doc.Unmeasured():
            css, attributes = [*css, "unmeasured"], {"data_value": "unmeasured"}
        case Mark():
            css.append(_MARKS[cell.tone])
        case doc.Name():
            css.append("name")
        case doc.Stage():
            attributes = {"title": cell.meaning or None}
        case doc.Html(_, kind) if kind:
            css.append(kind)
    inside = cell.text if isinstance(cell, Mark) else _words(cell)
    return el("td", inside, class_=" ".join(css) or None, **attributes)


def _words(words: Words) -> Fragment | str:
    return group(map(_inline, words)) if isinstance(words, tuple) else _inline(words)


def _inline(part: doc.Inline) -> Fragment | str:
    """A fragment, or a text that is still to be escaped."""
    match part:
        case str() | Figure():
            return str(part)
        case doc.Code(text):
            return el("code", text)
        case Mark(word, tone):
            return el("b", word, class_=_MARKS[tone])
        case doc.Name(text, href) if href:
            return el("a", text, href=href)
        case doc.Html(markup):
            return markup
        case doc.Stage(name):
            return group([marks.swatch(name), el("span", marks.words(name))])
    return str(part)


def _gauge(gauge: doc.Gauge) -> Fragment:
    bounded = gauge.low is not None or gauge.high is not None
    known = gauge.interval if gauge.value is None and not gauge.never and bounded else gauge.measured
    spoken = el("i", f", 95 % interval {gauge.interval}", class_="hidden")
    return el("li", el("p", _inline(gauge.mark), f" {gauge.objective}", el("span", known), spoken), gauge_line(gauge))


def _warning(one: doc.Warned) -> Fragment:
    tried = el("span", "Try ", el("code", one.flag), class_="try") if one.flag else ""
    return el("li", " ".join(filter(None, (one.text, one.cause))), tried)


def _switch(switch: doc.Switch) -> Fragment:
    """Radio buttons, which arrows move; or a list to choose from."""
    name, chosen = switch.name, switch.chosen
    if switch.list:
        entries = [
            el("option", words, value=value, selected="selected" if value == chosen else None)
            for value, words in switch.options
        ]
        return el("label", switch.legend, el("select", *entries, name=name, data_switch=name), class_="chooser")
    buttons = [
        el("label",
           el("input", type="radio", name=name, value=value, checked="checked" if value == chosen else None),
           el("span", words))
        for value, words in switch.options
    ]  # fmt: skip
    return el("fieldset", el("legend", switch.legend), *buttons, class_="switch", data_switch=name)
