"""One request at a time: the slowest, each with its own ledger."""

from __future__ import annotations

from analysis.report.run import Run
from analysis.report.shell import Section, fill
from analysis.report.slowest import slowest
from analysis.report.svg import el, group
from analysis.report.where import EVENTS, first_metric

_LEAD = (
    "Each with its own ledger, ",
    ". Pick a stage in any picture to sort by it; open a request to see its stages.",
)


def requests_section(run: Run) -> Section | None:
    """The slowest requests, one by one."""
    event = EVENTS[first_metric(run.summary)][0]
    found = slowest(run, event)
    if not found:
        return None
    lead = el("p", _LEAD[0], el("span", "slowest first", id="slow-order"), _LEAD[1], class_="lead")
    listed = fill("slowest.html", requests=found, event=event.replace("_", " "))
    return Section("requests", "The slowest requests", group([lead, listed]), short="requests")
