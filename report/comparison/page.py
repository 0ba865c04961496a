"""report.html of a comparison: the verdict, whether it may be made at all, what differs and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter.analysis.compare.claims import NAMES
from gapmeter.analysis.compare.protocol import BLOCKS
from gapmeter.analysis.compare.sides import Run
from gapmeter.analysis.numbers import DASH, bounds, count, duration, share
from gapmeter.analysis.provenance import Provenance
from gapmeter.analysis.stages import owner_words
from gapmeter.report import bridge, marks
from gapmeter.report.comparison import pictures, words
from gapmeter.report.figure import Row, Table, Value, figure, written
from gapmeter.report.shell import Section, page_shell
from gapmeter.report.svg import NOTHING, Fragment, el, group

# What tone the verdict's box has; the word itself says it too.
_TONES = {"FASTER": "PASS", "SLOWER": "FAIL", "MIXED": "INCONCLUSIVE", "NO DIFFERENCE FOUND": "INCONCLUSIVE"}
_EVENTS = {"first_token": "the first token (TTFT)", "last_token": "the last token (E2E)"}
_STAMP = "NOT COMPARABLE"


def write_page(folder: Path, document: Mapping[str, Any], firsts: Sequence[Run]) -> Path:
    """Write ``report.html`` beside ``compare.json``; ``firsts``: each side's first run. Raises OSError."""
    path = folder / "report.html"
    path.write_text(page(document, firsts), encoding="utf-8")
    return path


def page(document: Mapping[str, Any], firsts: Sequence[Run]) -> str:
    """The whole page."""
    origin = provenance(document, firsts)
    stamp = _STAMP if document["forced"] else None
    sections: list[Section | None] = [_verdict(document), _protocol(document, origin)]
    several = len(document["comparisons"]) > 1
    for number, found in enumerate(document["comparisons"]):
        name = f" ({found['b']} against {found['a']})" if several else ""
        sections += [
            _changed(found, origin, number, name, stamp),
            _metrics(found, origin, number, name, stamp),
            _shift(found, origin, number, name, stamp),
        ]
    sections += [_table(document, origin), _method(document)]
    return page_shell(
        f"{document['verdict']} · comparison · gapmeter", sections, origin, header=_header(document),
        version=str(firsts[0].manifest.get("versions", {}).get("gapmeter", "")),
    )  # fmt: skip


def provenance(document: Mapping[str, Any], firsts: Sequence[Run]) -> Provenance:
    """Of all runs together."""
    known = [bridge.provenance(run.summary) for run in firsts]
    hardware = dict.fromkeys(bridge.hardware_words(run.manifest.get("hardware") or {}) for run in firsts)
    validity = _STAMP + ", forced" if document["forced"] else "valid" if document["comparable"] else "not compared"
    return known[0].model_copy(
        update={
            "digest": ", ".join(dict.fromkeys(each.digest for each in known)),
            "engine": ", ".join(dict.fromkeys(each.engine for each in known)),
            "hardware": ", ".join(hardware),
            "load": ", ".join(dict.fromkeys(each.load for each in known)),
            "n": " and ".join(str(side["requests"]) for side in document["sides"]),
            "validity": validity,
            "command": str(document["command"]) or "gapmeter compare",
        }
    )


def _header(document: Mapping[str, Any]) -> Fragment:
    sides = "; ".join(f"{side['name']}: {', '.join(side['runs'])}" for side in document["sides"])
    scenario = document["sides"][0]["scenario"] or "runs"
    return el("header", el("h1", f"{scenario}: a comparison"), el("p", sides), class_="top")


def _verdict(document: Mapping[str, Any]) -> Section:
    tone = _TONES.get(document["verdict"], "INVALID")
    comparisons = document["comparisons"]
    sentences = [found["sentence"] for found in comparisons] or [document["headline"]]
    changed = [found["changed"]["sentence"] for found in comparisons if found["changed"]]
    unsound = not document["comparable"]
    trust = words.remedy(document) if unsound else "Only what was meant to differ does."
    body = el(
        "div",
        el("p", document["verdict"], class_="word"),
        *(el("p", f"{sentence[0].upper()}{sentence[1:]}.", class_="sentence") for sentence in sentences),
        *(el("p", f"{sentence[0].upper()}{sentence[1:]}.", class_="owner") for sentence in changed),
        el("p", el("b", "Not comparable. " if unsound else "Comparable. ", class_="unsound" if unsound else "sound"),
           trust, class_="trust"),
        class_=f"verdict {tone}", data_verdict=document["verdict"],
    )  # fmt: skip
    return Section("verdict", "", body)


def _protocol(document: Mapping[str, Any], origin: Provenance) -> Section:
    rows: list[Row] = []
    for each in document["protocol"]:
        for fact in each["facts"]:
            css = "mark missed" if fact["meaning"] == BLOCKS else "mark"
            rows.append([Value(fact["meaning"], None, {"class_": css}), fact["key"], fact["a"], f"{fact['b']}"])
    if not rows:
        body = el("p", "Scenario, plan, model, engine, hardware and load tester are the same on all sides.")
        return Section("protocol", "May they be compared?", body, short="comparable")
    table = Table("What differs", ["", "what differs", "A", "the other"], rows, words=4)
    lead = (
        "factor: what is compared; follows: differs because of it; noted: changes no latency; blocks: must not differ."
    )
    return Section("protocol", "May they be compared?", written(table, origin), lead, "comparable")


def _changed(found: Mapping[str, Any], origin: Provenance, number: int, name: str, stamp: str | None) -> Section | None:
    if not found["stages"]:
        text = el("p", "No ledger on both sides: the server's stages were not recorded, or not shown.")
        return Section(f"changed-{number}", f"What changed{name}", text, short="what changed" if not number else "")
    first = (found["changed"] or {}).get("event") or "last_token"
    parts = []
    for event in sorted(found["stages"], key=lambda each: each != first):
        own = found["stages"][event]
        picture = pictures.contributions(f"changed-{number}-{event}", own, found["device"], stamp)
        parts.append(
            el("h3", f"To {_EVENTS[event]}: {words.difference(own['total'])} ({words.interval(own['total'])})")
        )
        table = _stage_table(event, own, found)
        parts.append(figure(picture, table, origin) if picture else written(table, origin))
    lost = found["unmeasured"].get("last_token") or []
    told = f" Not measured on both sides, so in unexplained: {', '.join(map(marks.words, lost))}." if lost else ""
    lead = f"The mean wait's difference, stage by stage; the stages add up to it exactly. Lines: 95 % intervals.{told}"
    return Section(f"changed-{number}", f"What changed{name}", group(parts), lead, "what changed" if not number else "")


def _stage_table(event: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> Table:
    rows: list[Row] = []
    for s in [
        *own["stages"],
        {"stage": "sum", "owner": "", "share": None, "share_ci": None, "percentiles": {}, **own["total"]},
    ]:
        part = f"{share(s['share'])} ({share(s['share_ci'][0])} .. {share(s['share_ci'][1])})" if s["share_ci"] else ""
        owner = owner_words(s["owner"], found["device"])
        middle, top = (s["percentiles"].get(key) for key in ("p50", "p99"))
        rows.append([
            marks.words(s["stage"]), owner, duration(s["a_ms"]), duration(s["b_ms"]), words.difference(s),
            words.interval(s), part, words.difference(middle) if middle else "", words.difference(top) if top else "",
        ])  # fmt: skip
    headers = ["stage", "owner", f"{found['a']}, mean", f"{found['b']}, mean", "difference", "95 % interval",
               "share of the whole", "at p50", "at p99"]  # fmt: skip
    return Table(f"Stages to {_EVENTS[event]}", headers, rows, words=2)


def _metrics(found: Mapping[str, Any], origin: Provenance, number: int, name: str, stamp: str | None) -> Section:
    rows: list[Row] = []
    groups = set()
    for metric, known in found["metrics"].items():
        groups.add(len(rows))
        told = [(key, f) for key, f in known["percentiles"].items() if f["difference_ms"] is not None]
        for i, (key, f) in enumerate(told):
            rows.append(
                [NAMES[metric] if not i else "", key.replace("p999", "p99.9"), *_figure_cells(metric, key, f, stamp)]
            )
    headers = [
        "metric",
        "",
        "answer",
        found["a"],
        found["b"],
        "difference",
        "95 % interval",
        "relative",
        "p, corrected",
    ]
    table = Table("Differences of percentiles", headers, rows, words=3, groups=frozenset(groups))
    lead = (
        "Each interval holds for itself; an answer holds for all of them together (Holm). In brackets: the smallest "
        "difference that would have been found with 80 % probability."
    )
    missing = words.not_estimable(found)
    body = group([written(table, origin) if rows else NOTHING, el("p", missing, class_="lead") if missing else NOTHING])
    return Section(f"metrics-{number}", f"Percentiles{name}", body, lead, "percentiles" if not number else "")


def _figure_cells(metric: str, key: str, f: Mapping[str, Any], stamp: str | None) -> list[Value | str]:
    said = words.answer(f)
    css = "mark missed" if f["confirmed"] and said == "slower" else "mark met" if f["confirmed"] else ""
    told = f"{said}, {stamp}" if stamp else said
    return [
        Value(told, None, {"class_": css} if css else {}),
        Value(duration(f["a_ms"]), f["a_ms"]),
        Value(duration(f["b_ms"]), f["b_ms"]),
        Value(words.difference(f), f["difference_ms"], {"data_difference": f"{metric}.{key}"}),
        words.interval(f),
        words.relative(f),
        words.probability(f["p_adjusted"]),
    ]


def _shift(found: Mapping[str, Any], origin: Provenance, number: int, name: str, stamp: str | None) -> Section:
    parts = []
    for metric, known in found["metrics"].items():
        picture = pictures.shift(f"shift-{number}-{metric}", NAMES[metric], known["shift"], stamp)
        rows: list[Row] = [
            [f"p{p['percentile']:g}", duration(p["a_ms"]), duration(p["b_ms"]), words.difference(p), words.interval(p)]
            for p in known["shift"]
        ]
        table = Table(
            f"Shift of {NAMES[metric]}", ["decile", found["a"], found["b"], "difference", "95 % interval"], rows
        )
        body = figure(picture, table, origin, css="levels") if picture else el("p", "No decile is supported.")
        parts.append(el("div", el("h3", NAMES[metric]), body))
    lead = f"{found['b']} minus {found['a']} at every decile, with its 95 % interval: above the line is slower."
    return Section(
        f"shift-{number}", f"Shift{name}", el("div", *parts, class_="grid2"), lead, "shift" if not number else ""
    )


def _table(document: Mapping[str, Any], origin: Provenance) -> Section | None:
    if not document.get("table"):
        return None
    keys = list(document["table"]["rows"][0]["figures"])
    rows: list[Row] = []
    for row in document["table"]["rows"]:
        figures = [Value(_estimate(row["figures"][key]), row["figures"][key]["value_ms"]) for key in keys]
        extra = [
            Value(
                words.part(row[name], unit), row[name]["value"], {"title": row[name]["why"]} if row[name]["why"] else {}
            )
            for name, unit in words.RARE
        ]
        rows.append([row["name"], row["device"], row["engine"], count(row["requests"]), *figures, *extra])
    named = [f"{NAMES[key.partition('_')[0]]} {key.partition('_')[2]}" for key in keys]
    headers = ["", "device", "engine", "n", *named, "capacity", "per request at the SLA", "energy a request"]
    body = [
        written(Table("All sides", headers, rows, words=3, css="dense"), origin),
        *_missing(document),
        *(el("p", text) for text in words.spreads(document)),
    ]
    return Section("sides", "All sides in one table", group(body), _SIDES, "all sides")


_SIDES = (
    "As each run's own report has them: percentiles are order statistics. Differences above are of smoother estimates "
    "(Harrell and Davis), so the two can lie a little apart."
)


def _estimate(found: Mapping[str, Any]) -> str:
    if found["value_ms"] is None:
        return DASH
    return f"{duration(found['value_ms'])} ({bounds(*found['ci_ms'])})"


def _missing(document: Mapping[str, Any]) -> list[Fragment]:
    """Why a dash stands where it does."""
    reasons = {
        f"{name}: {row[name]['why']}" for row in document["table"]["rows"] for name, _ in words.RARE if row[name]["why"]
    }
    return [el("p", f"{DASH} {'; '.join(sorted(reasons))}.", class_="lead")] if reasons else []


def _method(document: Mapping[str, Any]) -> Section:
    warned = [el("li", text) for text in document.get("warnings", ())]
    told = el("p", f"{document['method']['sentence']}.") if document.get("method") else NOTHING
    body = [el("ul", *warned, class_="warnings") if warned else NOTHING, told, el("pre", document["command"])]
    return Section("method", "How, and how to repeat it", group(body), short="how")
