"""What is said of one run: ``document`` for its page, ``brief`` for the terminal and for Markdown.

The two share every section that they both have; a new one is a function here (or in ``run_*``, by what it is about) and
a line in one or both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from gapmeter.analysis.numbers import bounds, count, share
from gapmeter.analysis.results.comparison import Regression
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import INVALID, RunResult, SloAnswer
from gapmeter.records import RunFolder
from gapmeter.report import cost, run_device, run_percentiles, run_stages, run_time, run_words, words
from gapmeter.report.document import (
    BRIEF,
    MARKDOWN,
    PAGE,
    TERMINAL,
    Block,
    Code,
    Column,
    Columns,
    Document,
    Facts,
    Figure,
    Folded,
    Gauge,
    Header,
    Headers,
    Heading,
    Line,
    Mark,
    Medium,
    Name,
    Paragraph,
    Pre,
    Row,
    Said,
    Section,
    Table,
    Tone,
    Trust,
    Verdict,
    Warned,
    Warnings,
    Words,
    in_ms,
)
from gapmeter.report.run_folder import Run

TONES: dict[str, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "open", "INVALID": "bad"}
_MOST_CLASSES = 4  # of failures, in the terminal; the page has them all
_ANSWERS = {
    "PASS": Mark("met", "good", "v", "PASS"),
    "FAIL": Mark("missed", "bad", "x", "FAIL"),
    "INCONCLUSIVE": Mark("undecided", "open", "?", "INCONCLUSIVE"),
    "INVALID": Mark("not measured", "bad", "-", "INVALID"),
}
_CHECKS = {
    "ok": Mark("ok", "good"),
    "warn": Mark("strained", "open"),
    "broken": Mark("broken", "bad"),
    "unmeasured": Mark("unmeasured"),
}
_FILES = {
    "summary.json": "every figure of this page",
    "manifest.json": "what ran, with what, where",
    "verdict.json": "the verdict alone",
    "requests.parquet": "one row a request: stamps, tokens, outcome",
    "ledger.parquet": "one row a request and event: every stage",
    "gaps.parquet": "one row a token gap: every stage",
    "timeline.parquet": "whose nanoseconds each stretch of a wait was",
    "steps.parquet": "one row a step of the engine",
    "trace.json.gz": "open it in Perfetto",
    "hdr": "HdrHistogram V2 logs",
    "requests": "what the load generator recorded",
    "probe": "what the server's processes recorded",
    "telemetry": "samples of the device, the server's processes and its /metrics",
    "logs": "the server's own log",
}
_RESIDUAL = (
    "In time, and as a share of each request's own wait. Strict counts everything in transit as unexplained too."
)
_BRACKET = (
    "The lower end takes queues and other requests' steps out too, as if every request met an idle engine; the upper "
    "one leaves them as they are and only takes the forwards out, less the host's work that they hid."
)


def brief(result: RunResult, manifest: Manifest, regression: Regression | None = None) -> Document:
    """The summary: did it hold its objectives, where did the time go, may it be believed.

    ``regression``: how it compares with its baseline, where it was held against one.
    """
    sections = [
        _objectives(result, BRIEF),
        _failed_brief(result),
        run_stages.tail(result),
        run_percentiles.definitions(result, TERMINAL),
        run_percentiles.metrics(result),
        _regression(regression) if regression else None,
        Section("cost", "", [Facts(_economy(result, manifest))], on=TERMINAL),
        _facts(result, TERMINAL),
        _facts(result, MARKDOWN),
    ]
    return _around(result, manifest, sections)


def document(folder: RunFolder) -> Document:
    """The page of an analysed run. Raises as ``Run.read`` does."""
    run = Run.read(folder)
    result, manifest = run.result, run.manifest
    sections = [
        run_stages.where(result, run.device),
        run_stages.compute(result),
        _objectives(result, PAGE),
        _failed(result),
        cost.section(result, _economy(result, manifest)),
        _warnings(result),
        run_percentiles.percentiles(run),
        run_percentiles.definitions(result, PAGE),
        run_time.over_time(run),
        run_time.sustained(result),
        run_device.device(run),
        run_device.roofline(result),
        run_percentiles.stages(result, run.device),
        _trust(result),
        _upgrade(result),
        run_stages.one_request(run),
        run_stages.explorer(result, folder.path.name, run.device),
        _repeat(manifest, folder.path),
    ]
    return _around(result, manifest, sections, folder.path.name)


def _around(result: RunResult, manifest: Manifest, sections: Sequence[Section | None], name: str = "run") -> Document:
    name = result.name or name
    caveat = run_words.closed_loop(result) or words.turns_sentence(result.turns) or ""
    return Document(
        title=f"{result.verdict} · {name} · gapmeter",
        header=Header(f"{name} @ {run_words.target(manifest)}", run_words.load(result), caveat),
        verdict=_verdict(result),
        sections=sections,
        provenance=result.provenance,
        device=manifest.device,
        version=manifest.versions.get("gapmeter", ""),
    )


def _verdict(result: RunResult) -> Verdict:
    more = [
        Said(run_words.owner(result), stage=result.tail.stage or "", strong=True),
        Said(run_words.upgrade(result), on=PAGE | TERMINAL),
        Said(run_words.cost_at_most(result), on=PAGE),
    ]
    valid = result.trust.valid
    return Verdict(
        word=result.verdict,
        tone=TONES[result.verdict],
        sentence=run_words.verdict(result),
        reasons=[run_words.as_sentence(reason) for reason in result.invalid_reasons],
        more=[one for one in more if one.words],
        trust=Trust(valid, "Valid." if valid else "Not valid.", words.trust_figures(result)),
        gauges=[_gauge(slo) for slo in result.slo] if result.verdict != INVALID else (),
    )


# --- objectives and failures


def _gauge(slo: SloAnswer) -> Gauge:
    measured, interval = run_words.slo_value(slo), run_words.slo_interval(slo)
    return Gauge(
        _ANSWERS[slo.status], slo.text, measured, interval, Figure(slo.limit, slo.unit), slo.value, slo.low, slo.high,
        slo.infinite,
    )  # fmt: skip


def _objectives(result: RunResult, on: Medium) -> Section:
    """Every objective with what was measured, its interval, and what would decide it."""
    rows: list[Row] = []
    for at, slo in enumerate(result.slo):
        measured = Figure(slo.value, slo.unit, f"slo.{at}.value_{slo.unit}", text=run_words.slo_value(slo))
        note = run_words.slo_note(slo) if on is PAGE else run_words.slo_note(slo).replace("requests", "req")
        rows.append(
            [_ANSWERS[slo.status], Code(slo.text), measured, run_words.slo_interval(slo), count(slo.count), note]
        )
    headers: Headers = [
        Column("answer", brief=" "), Column("objective", brief="SLO"), Column("measured", wraps=True),
        Column("95 % interval", wraps=True), "n",
        Column("largest part, or what is missing", brief="slow ones wait for", wraps=True),
    ]  # fmt: skip
    none = [Paragraph("The scenario names none, so there is nothing to pass or fail.")] if on is PAGE else []
    blocks = [Table("Service level objectives", headers, rows, words=2)] if rows else none
    lead = run_words.confidence(result) if rows else ""
    return Section("slo", "Service level objectives", blocks, lead, "objectives", on)


def _failed(result: RunResult) -> Section | None:
    """What failed, a few of each class by name."""
    if not result.failures:
        return None
    rows, groups = list[Row](), set[int]()
    for found in result.failures:
        groups.add(len(rows))
        for at, one in enumerate(found.examples):
            first = not at
            rows.append([
                run_words.failed_class(found.name) if first else "", Name(one.request_id),
                run_words.status(one), run_words.error(one),
                Figure(found.count, "count") if first else "", Figure(found.share, "share") if first else "",
                Figure(one.at_s, text=f"{one.at_s:.1f} s"), Figure(one.tokens, "count"), Figure(one.waited_ms),
            ])  # fmt: skip
    due = Column("due at", "due at (s)")
    headers: Headers = [
        "class", "request", "status", "what was said", "requests", "share", due, "tokens by then", *in_ms("ended after")
    ]  # fmt: skip
    note = "Of each class the first by due time. How the percentiles change when they count is in their table."
    lead = " ".join(
        run_words.as_sentence(words) for words in (run_words.failed(result), run_words.censored(result)) if words
    )
    table = Table("Requests that failed", headers, rows, words=4, groups=frozenset(groups))
    return Section("failed", table.name, [table, Paragraph(note, "quiet")], lead, "failures")


def _failed_brief(result: RunResult) -> Section | None:
    """How many failed and how, the first of each class, and latency with them counted."""
    status, error = run_words.status, run_words.error
    if not result.failures:
        return None
    first = [
        Line(f"first {found.name}: at {one.at_s:.1f} s, {status(one)}, {one.request_id}: {error(one)}")
        for found in result.failures[:_MOST_CLASSES]
        for one in found.examples[:1]
    ]
    censored = run_words.censored(result)
    lines: list[Words | Line] = [run_words.failed(result), *first, *([censored] if censored else [])]
    return Section("failed", "", [Facts([("failed", *lines)])], on=BRIEF)


# --- may it be believed?


def _warnings(result: RunResult, on: Medium = PAGE) -> Section | None:
    """What was seen, its likely cause, the flag to try."""
    items = [
        Warned(
            run_words.as_sentence(one.text), run_words.stopped(f"Likely: {one.cause}") if one.cause else "", one.flag
        )
        for one in result.warnings
    ]
    return Section("warnings", "Warnings", [Warnings(items)], short="warnings", on=on) if items else None


def _facts(result: RunResult, on: Medium) -> Section:
    """A line for each part that has something to say; in a comment on a pull request the one that is needed."""
    word = "valid" if result.trust.valid else "NOT valid"
    facts = [("trust", f"{word}: {words.trust_figures(result)}")]
    more = [
        ("steady", run_words.steady(result)),
        ("device", words.telemetry_sentence(result.telemetry) if result.telemetry else ""),
        ("roof", words.roofline_line(result.roofline) or ""),
        ("turns", words.turns_sentence(result.turns) or ""),
        ("loop", run_words.closed_loop(result)),
    ]
    facts += [fact for fact in more if fact[1] and on is TERMINAL]
    blocks: list[Block] = [Facts(facts)]
    warnings = _warnings(result)
    return Section("facts", "", [*blocks, *(warnings.blocks if warnings else ())], on=on)


def _economy(result: RunResult, manifest: Manifest) -> cost.Lines:
    simulated = manifest.scenario["server"]["engine"] == "simulated"
    return cost.lines(result, result.goodput.share_ci, simulated=simulated)


def _trust(result: RunResult) -> Section:
    """The residual of the ledgers and every validity rule with what it found."""
    checks: list[Row] = [[Name(one.rule.replace("_", " ")), one.text, _CHECKS[one.status]] for one in result.checks]
    validity = Table("Validity", ["rule", "what was found", "answer"], checks, words=3)
    residual: list[Block] = [Paragraph(f"There is no ledger: {run_stages.no_ledger(result)}", "quiet")]
    rows: list[Row] = []
    for event in ("first_token", "last_token"):
        found = getattr(result.residual, event)
        for which in ("unexplained", "strict") if found else ():
            left, key = getattr(found, which), f"residual.{event}.{which}"
            ms = [Figure(getattr(left, f"{p}_ms"), "ms", f"{key}.{p}_ms") for p in ("p50", "p99", "max")]
            shares = [Figure(getattr(left, f"{p}_share"), "share", f"{key}.{p}_share") for p in ("p50", "p99", "max")]
            rows.append([event.replace("_", " "), which, *ms, *shares])
    if rows:
        names = [Column(f"{p}{of}", f"{p}{unit}") for of, unit in (("", " (ms)"), (", share", ", share"))
                 for p in ("p50", "p99", "worst")]  # fmt: skip
        residual = [Table("Residual", ["to the", "counted", *names], rows, words=2), Paragraph(_RESIDUAL, "quiet")]
    blocks = [Heading("Validity"), validity, Heading("Residual: what the ledger could not explain"), *residual]
    return Section("trust", "Can these figures be trusted?", blocks, short="trust")


def _upgrade(result: RunResult) -> Section | None:
    """The bracket on what a faster device could bring."""
    rows: list[Row] = []
    for metric in ("ttft", "e2e"):
        found = getattr(result.upgrade, metric)
        for p in ("p50", "p90", "p95", "p99") if found else ():
            ends = [
                Figure(getattr(getattr(found, end), f"{p}_ms"), "ms", f"upgrade.{metric}.{end}.{p}_ms")
                for end in ("now", "lower", "upper")
            ]
            rows.append([metric.upper(), p, *ends])
    if not rows:
        return None
    headers: Headers = ["metric", "percentile", *in_ms("now", "lower end", "upper end")]
    table = Table("What a faster device could bring", headers, rows, words=2, css="compact")
    lead = f"{run_words.upgrade(result)} {_BRACKET}"
    return Section("upgrade", f"What a faster {result.upgrade.device} could bring", [table], lead, "faster device")


# --- against a baseline, and again


def _regression(found: Regression) -> Section:
    rows: list[Row] = [
        [row.status, row.name, Figure(row.a_ms), Figure(row.b_ms),
         bounds(*row.ci_ms) if row.ci_ms else "not estimable", share(row.relative)]
        for row in found.rows
    ]  # fmt: skip
    headers: Headers = [" ", "percentile", "baseline", "now", "difference, 95 % interval", "relative"]
    status = Mark(found.status, status=f"**{found.status}**")
    said = Paragraph((status, f" against {found.baseline}: {run_words.stopped(found.sentence)}"))
    return Section("regression", "", [said, Table("Against the baseline", headers, rows, words=2)], on=MARKDOWN)


def _repeat(manifest: Manifest, folder: Path) -> Section:
    """How to run it again, and what it ran on."""
    files = [(name, quote(name), words) for name, words in _FILES.items() if (folder / name).exists()]
    facts, links = Facts(run_words.where_it_ran(manifest)), Facts([(Name(*file), words) for *file, words in files])
    blocks: list[Block] = [
        Pre(manifest.command),
        Columns([[Heading("Where and with what"), facts], [Heading("Files of this run"), links]]),
        Folded("the scenario as it was resolved", [Pre(json.dumps(manifest.scenario, indent=2, ensure_ascii=False))]),
        Folded("the whole manifest", [Pre(json.dumps(manifest.to_json(), indent=1, ensure_ascii=False))]),
    ]
    return Section("repeat", "Repeat it", blocks, short="repeat it")
