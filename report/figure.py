"""A picture or a table as the page shows it: with a caption, its numbers, and where they are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapmeter.analysis.provenance import Provenance
from gapmeter.report.svg import NOTHING, Fragment, el, group


@dataclass(frozen=True, slots=True)
class Value:
    """A table's cell: text for people, ``raw`` for the CSV, and attributes such as ``data-metric``."""

    text: object
    raw: object = None
    attributes: dict[str, Any] = field(default_factory=dict)


Row = Sequence[Value | str]
_LONGEST_NUMBER = 44  # characters, with its interval


@dataclass(frozen=True, slots=True)
class Table:
    """Rows behind a picture. ``csv``: names of the columns with their units, where they differ from the headers.

    The first ``words`` columns hold words, the others numbers. ``name`` says what it is, for those who do not see it.
    """

    name: str
    headers: Sequence[str]
    rows: Sequence[Row]
    csv: Sequence[str] = ()
    words: int = 1
    groups: frozenset[int] = frozenset()  # rows that begin a group of rows
    css: str = ""


def figure(
    picture: Fragment, table: Table | None, provenance: Provenance, caption: object = "", css: str = "", key: str = ""
) -> Fragment:
    """A picture with its caption, where it is from, and its table folded behind it."""
    return el(
        "figure",
        el("div", el("div", picture, class_=f"plot {css}".strip()), class_="scroll"),
        el("figcaption", caption) if caption else NOTHING,
        origin(provenance),
        folded(table, provenance) if table else NOTHING,
        id=key or None,
    )


def folded(table: Table, provenance: Provenance, words: str = "as a table") -> Fragment:
    return el("details", el("summary", words), written(table, provenance, own_line=False))


def written(table: Table, provenance: Provenance, *, own_line: bool = True) -> Fragment:
    """A table with its button, and with a line that says where it is from unless its figure has said so."""
    names = [*table.csv, *table.headers[len(table.csv) :]]
    numeric = [_is_numeric(table, column) for column in range(len(table.headers))]
    head = el("tr", *(_header(table, i, names[i], numeric[i]) for i in range(len(table.headers))))
    body = [
        el("tr", *(_cell(value, numeric[i]) for i, value in enumerate(row)),
           class_="group" if number in table.groups else None)
        for number, row in enumerate(table.rows)
    ]  # fmt: skip
    grid = el("table", el("thead", head), el("tbody", *body), aria_label=table.name, class_=table.css or None)
    return el(
        "div",
        el("div", stamped(grid, len(table.rows), provenance), class_="wide", tabindex=0, role="region",
           aria_label=f"{table.name}, as a table"),
        el("button", "copy as CSV", type="button", class_="copy"),
        origin(provenance) if own_line else NOTHING,
        class_="table",
    )  # fmt: skip


def stamped(grid: Fragment, rows: int, provenance: Provenance) -> Fragment:
    """A table with what must be written across it: INVALID, once every dozen rows; a valid run's as it is."""
    if provenance.stamp is None:
        return grid
    words = [el("span", provenance.stamp) for _ in range(1 + rows // 12)]
    across = el("div", *words, class_="across", aria_hidden="true")
    return el("div", el("p", f"{provenance.stamp}. ", class_="hidden"), grid, across, class_="stamped")


def origin(provenance: Provenance) -> Fragment:
    """The small line beneath everything that may be cut out of the page."""
    return el("p", provenance.line(), class_="origin")


def switch(name: str, legend: str, options: Iterable[tuple[str, str]], chosen: str) -> Fragment:
    """Radio buttons that choose which of the panels marked ``data-NAME`` is seen (see ``panel``); arrows move."""
    buttons = [
        el(
            "label",
            el("input", type="radio", name=name, value=value, checked="checked" if value == chosen else None),
            el("span", words),
        )
        for value, words in options
    ]
    return el("fieldset", el("legend", legend), *buttons, class_="switch", data_switch=name)


def chooser(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str) -> Fragment:
    """The same as a list to choose from, for more than a handful."""
    entries = [
        el("option", words, value=value, selected="selected" if value == chosen else None) for value, words in options
    ]
    return el("label", label, el("select", *entries, name=name, data_switch=name), class_="chooser")


def panel(content: Fragment, shown: bool, **choices: str) -> Fragment:
    """What is seen while each named switch stands at the given value; ``shown`` says whether that is so at first."""
    marks = " ".join(f"{name}={value}" for name, value in choices.items())
    return el("div", content, class_="panel", data_panel=marks, hidden=None if shown else "hidden")


def _is_numeric(table: Table, column: int) -> bool:
    """Whether a column is set as numbers: to the right, unbroken. Sentences behind the numbers are not."""
    cells = [row[column] for row in table.rows if column < len(row)]
    texts = [str(cell.text if isinstance(cell, Value) else cell) for cell in cells]
    return column >= table.words and max(map(len, texts), default=0) <= _LONGEST_NUMBER


def _header(table: Table, column: int, csv: str, numeric: bool) -> Fragment:
    return el(
        "th", table.headers[column], scope="col", class_="n" if numeric else None,
        data_csv=csv if csv != table.headers[column] else None,
    )  # fmt: skip


def _cell(value: Value | str, numeric: bool) -> Fragment:
    css = "n" if numeric else None
    if not isinstance(value, Value):
        return el("td", value, class_=css)
    known = {"data_value": value.raw, **value.attributes}
    css = " ".join(filter(None, (css, known.pop("class_", None)))) or None
    return el("td", value.text, class_=css, **known)


__all__ = [
    "NOTHING",
    "Row",
    "Table",
    "Value",
    "chooser",
    "figure",
    "folded",
    "group",
    "origin",
    "panel",
    "stamped",
    "switch",
    "written",
]
