"""One request at a time: the slowest in a list, and any that can be opened as a timeline over the engine's steps."""

from __future__ import annotations

from typing import Any

from gapmeter.analysis.numbers import duration
from gapmeter.report import marks
from gapmeter.report.figure import Row, Table, Value, folded, origin, stamped
from gapmeter.report.picked import STAGE_NAMES, picked, request_data
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.slowest import SlowRequest, slowest
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.where import EVENTS, first_metric

_LEAD = (
    "The slowest, each with its own ledger, ",
    "slowest first",
    ". Pick a stage in any picture to sort by it; press a request to see what happened when, and beside whom.",
)
_CLOSED = "Press a request above, or a larger dot in the charts over time."


def requests_section(run: Run) -> Section | None:
    """The slowest requests, one by one, and the view that opens any of the embedded ones."""
    event = EVENTS[first_metric(run.summary)][0]
    found = slowest(run, event)
    if not found:
        return None
    names = picked(run)
    lead = el("p", _LEAD[0], el("span", _LEAD[1], id="slow-order"), _LEAD[2], class_="lead")
    body = [lead, _list(run, found, frozenset(names), event), folded(_table(found, event), run.provenance)]
    data: dict[str, Any] = {}
    if names:
        body.append(_view(run, names))
        data = request_data(run, names) | _looks(run.device)
    return Section("requests", "One request", group(body), short="one request", data=data)


def _list(run: Run, found: list[SlowRequest], openable: frozenset[str], event: str) -> Fragment:
    heads = ("request", "due at", "TTFT", "E2E", "tokens", f"to the {event.replace('_', ' ')}")
    css = ("", "n", "n", "n", "", "bar")
    head = el("tr", *(el("th", h, scope="col", class_=c or None) for h, c in zip(heads, css, strict=True)))
    rows = [
        el(
            "tr",
            el("td", _name(r.name, r.name in openable)),
            el("td", r.due, class_="n"),
            el("td", r.ttft, class_="n"),
            el("td", r.e2e, class_="n"),
            el("td", r.tokens, class_="name"),
            el("td", r.bar, class_="bar"),
        )
        for r in found
    ]
    grid = el("table", el("thead", head), el("tbody", *rows, id="slow-requests"), class_="slow")
    return el("div", stamped(grid, len(found), run.provenance), class_="wide")


def _name(name: str, openable: bool) -> Fragment:
    if openable:
        return el("button", name, type="button", class_="open", data_request=name)
    return el("span", name, title="not embedded in this page; its ledger is in ledger.parquet")


def _table(found: list[SlowRequest], event: str) -> Table:
    stages = list(dict.fromkeys(stage for r in found for stage in r.stages_ms))
    rows: list[Row] = [
        [r.name, *(Value(duration(r.stages_ms.get(s)), repr(r.stages_ms.get(s, ""))) for s in stages)] for r in found
    ]
    headers = ["request", *(marks.words(s) for s in stages)]
    csv = ["request", *(f"{s} (ms)" for s in stages)]
    return Table(f"The slowest requests to the {event.replace('_', ' ')}, by stage", headers, rows, csv=csv)


def _view(run: Run, names: list[str]) -> Fragment:
    embedded = f"{len(names):,} of {len(run.requests):,} requests are embedded in this page"
    where = "the others are in timeline.parquet and ledger.parquet"
    return el(
        "div",
        el("h3", "No request is open", id="request-name"),
        el("p", _CLOSED, id="request-facts", class_="lead"),
        el("div", id="request-drawing"),
        el("p", f"{embedded}: the slowest to either token, and an even sample by rank; {where}.", class_="note"),
        origin(run.provenance),
        el("noscript", "Opening a request needs the page's script."),
        id="request-view", tabindex=-1, role="region", aria_live="polite", aria_labelledby="request-name",
    )  # fmt: skip


def _looks(device: str) -> dict[str, Any]:
    """Words, owners and paints of the stages, for the script."""
    return {
        "words": [marks.words(s) for s in STAGE_NAMES],
        "owners": [marks.owner(s, device) for s in STAGE_NAMES],
        "kinds": [marks.kind(s) for s in STAGE_NAMES],
        "paints": [marks.fill(s) for s in STAGE_NAMES],
        "inks": [marks.ink(s) for s in STAGE_NAMES],
    }
