"""The sections after the verdict: service level objectives, what failed, what to be warned of."""

from __future__ import annotations

from typing import Any

from gapmeter.report import failed, head, marks
from gapmeter.report.cost import cost_sentence
from gapmeter.report.figure import Row, Table, Value, written
from gapmeter.report.gauges import gauges
from gapmeter.report.run import Run
from gapmeter.report.shell import Section, fill
from gapmeter.report.svg import Fragment, el, group

_NONE = "The scenario names none, so there is nothing to pass or fail."


def header_of(run: Run) -> Fragment:
    """What ran, above everything."""
    return fill("header.html", head=_head(run))


def verdict_section(run: Run) -> Section:
    """The first thing that is read: the verdict, in the same place and size whatever it is."""
    return Section("verdict", "", fill("verdict.html", head=_head(run)))


def _head(run: Run) -> dict[str, Any]:
    summary = run.summary
    return {
        "verdict": summary["verdict"],
        "scenario": summary["name"] or run.folder.path.name,
        "target": head.target(run.manifest),
        "load": head.load(summary),
        "caveat": head.caveat(summary) or head.turns_of(summary),
        "sentence": head.sentence(summary),
        "gauges": gauges(summary),
        "reasons": head.reasons(summary),
        "owner": head.owner_sentence(summary),
        "swatch": marks.swatch(summary["tail"]["stage"]) if summary["tail"]["stage"] else "",
        "bracket": head.upgrade_sentence(summary),
        "cost": cost_sentence(summary),
        "trusted": summary["trust"]["valid"],
        "trust_word": "Valid." if summary["trust"]["valid"] else "Not valid.",
        "trust": head.trust_figures(summary),
    }


def slo_section(run: Run) -> Section:
    """Every objective with what was measured, its interval, and what would decide it."""
    lines = head.slo_lines(run.summary)
    rows: list[Row] = [
        [
            Value(line.word, None, {"class_": f"mark {line.css}"}),
            line.expression,
            line.note,
            Value(line.measured, line.raw, {"data_slo": line.expression}),
            line.interval,
            line.n,
        ]
        for line in lines
    ]
    headers = ["answer", "objective", "largest part, or what is missing", "measured", "95 % interval", "n"]
    table = Table("Service level objectives", headers, rows, words=3)
    body = written(table, run.provenance) if rows else el("p", _NONE)
    lead = head.confidence_sentence(run.summary) if rows else ""
    return Section("slo", "Service level objectives", body, lead, short="objectives")


def failed_section(run: Run) -> Section | None:
    """What failed, a few of each class by name; nothing when all went well."""
    classes = failed.failed_classes(run.summary)
    if not classes:
        return None
    said = filter(None, (failed.failed_sentence(run.summary), failed.censored_sentence(run.summary)))
    lead = " ".join(map(head.as_sentence, said))
    headers = ["class", "request", "status", "what was said", "requests", "share", "due at", "tokens by then",
               "ended after"]  # fmt: skip
    rows: list[Row] = []
    groups: set[int] = set()
    for found in classes:
        for number, example in enumerate(found.examples):
            first = not number
            groups |= {len(rows)} if first else set()
            told = [found.words, found.count, found.share] if first else ["", "", ""]
            rows.append([told[0], Value(example.request, None, {"class_": "name"}), example.status, example.error,
                         *told[1:], example.at, example.tokens, example.waited])  # fmt: skip
    table = Table("Requests that failed", headers, rows, words=4, groups=frozenset(groups))
    note = el("p", "Of each class the first by due time. How the percentiles change when they count is in the table "
              "of percentiles.", class_="lead")  # fmt: skip
    return Section("failed", "Requests that failed", group([written(table, run.provenance), note]), lead, "failures")


def warnings_section(run: Run) -> Section | None:
    """What was seen, its likely cause, the flag to try."""
    told = head.warnings(run.summary)
    if not told:
        return None
    items = [
        el("li", " ".join(filter(None, (w.text, w.cause))),
           el("span", "Try ", el("code", w.flag), class_="try") if w.flag else "")
        for w in told
    ]  # fmt: skip
    return Section("warnings", "Warnings", el("ul", *items, class_="warnings"), short="warnings")
