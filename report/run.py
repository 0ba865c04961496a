"""What is said of one run: ``document`` for its page, ``brief`` for the terminal and for Markdown.

The two share every section that they both have; a new one is a function here (or in a file of its own, by what it is
about) and a line in one or both. ``words_of`` are the sentences that go into ``summary.json``. Texts that a rule made
of what it found (checks, warnings, reasons) are data and stand in the result; here they are only put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gapmeter.analysis.judge.words import outage_text
from gapmeter.analysis.numbers import count, counted, duration, share, usd
from gapmeter.analysis.results.cost import Cost
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import ClosedLoop, Turn
from gapmeter.analysis.results.run import FAIL, INVALID, PASS, RunResult
from gapmeter.analysis.results.run import Words as RunWords
from gapmeter.analysis.run_figures import RunTables
from gapmeter.records import RunFolder
from gapmeter.report import compute, cost, device, explore, glance, html, percentiles, slo, timeline, trust, waits, why
from gapmeter.report import document as doc
from gapmeter.report.advice import why_and_advice
from gapmeter.report.document import DETAILS, MARKDOWN, PAGE, TERMINAL, Facts, Figure, Name, Row, Said, Section
from gapmeter.report.failures import commonest, failed, failed_in_short
from gapmeter.report.requests import one_request, picked
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.words import as_sentence, reproduce, stopped, tone

if TYPE_CHECKING:
    from gapmeter.analysis.results.regression import Regression

CLOSED_LOOP = (
    "closed loop: each user waited for an answer before asking again, so these latencies are not what "
    "independent users would see at this rate"
)
_FILES = {
    "summary.json": "every figure of this page",
    "manifest.json": "what ran, with what, where",
    "verdict.json": "the verdict alone",
    "requests.parquet": "one row a request: stamps, tokens, outcome",
    "ledger.parquet": "one row a request and event: every stage",
    "gaps.parquet": "one row a token gap: every stage",
    "timeline.parquet": "whose nanoseconds each stretch of a wait was",
    "steps.parquet": "one row a step of the engine",
    "hdr": "HdrHistogram V2 logs",
    "requests": "what the load generator recorded",
    "probe": "what the server's processes recorded",
    "telemetry": "samples of the device, the server's processes and its /metrics",
    "logs": "the server's own log",
}
_CAUSE_SEEN = ("telemetry-gaps",)  # warnings whose cause was seen, not concluded
_WHOSE = {
    "transformers": "Transformers' own continuous batching, behind gapmeter's own HTTP server (not transformers serve)",
    "simulated": "gapmeter's simulated engine: its times are set, and do not represent a real engine",
}


def write(folder: RunFolder, result: RunResult, tables: RunTables) -> RunResult:
    """``summary.json``, ``verdict.json`` and ``report.html`` of a run's folder; ``tables``: the run's.

    Returns the result with its words. Raises OSError.
    """
    result = result.model_copy(update={"words": words_of(result, Manifest.read(folder.path))})
    result.write(folder.path)
    result.verdict_file.write(folder.path)
    html.write(folder.report, document(folder, tables), scripts=[html.asset("request.js")])
    return result


def brief(result: RunResult, manifest: Manifest, regression: Regression | None = None) -> doc.Document:
    """The summary: did it hold its objectives, where did the time go, may it be believed.

    ``regression``: how it compares with its baseline, where it was held against one.
    """
    answers, why_slow = slo.objectives_in_short(result), why_and_advice(result, manifest)
    failures = failed_in_short(result)
    explains = why_slow if why.main_metric(result) else failures
    first = explains if result.verdict == FAIL else None
    warnings = _warnings(result, result.invalid_reasons)
    sections = [
        _regression(regression) if regression else None,
        first,
        answers,
        failures if first is not failures else None,
        *glance.glance(result, manifest),
        why_slow if first is not why_slow else None,
        _trusted(result, why_slow),
        waits.tail(result),
        percentiles.definitions(result),
        percentiles.metrics(result),
        Section("cost", "", [Facts(cost.lines(result, _how(result, manifest)))], on=DETAILS),
        _details(result),
        Section("facts", "", [Facts([("trust", trust.trust_sentence(result))]), *warnings], on=MARKDOWN),
    ]
    return _around(result, manifest, sections, regression)


def document(folder: RunFolder, tables: RunTables | None = None) -> doc.Document:
    """The page of an analysed run; ``tables``: its own, if already made. Raises as ``ReportedRun.read``."""
    run = ReportedRun.read(folder, tables, timeline_columns=("request_id", "stage", "end_ns"))
    result, manifest, openable = run.result, run.manifest, picked(run)
    sections = [
        *glance.glance(result, manifest),
        waits.where(result),
        compute.compute(result),
        slo.objectives(result),
        failed(result),
        cost.section(result, _how(result, manifest)),
        Section("warnings", "Warnings", _warnings(result), short="warnings") if result.warnings else None,
        percentiles.percentiles(run),
        percentiles.definitions(result),
        timeline.over_time(run, openable),
        trust.sustained(result),
        device.device(run),
        device.roofline(result),
        percentiles.stages(result),
        trust.trust(result),
        waits.upgrade(result),
        one_request(run, openable),
        explore.explorer(result),
        _repeat(manifest, folder.path),
    ]
    return _around(result, manifest, sections)


def _around(
    result: RunResult, manifest: Manifest, sections: Sequence[Section | None], regression: Regression | None = None
) -> doc.Document:
    """What was asked of whom, the verdict, and the sections."""
    server = manifest.asked.server
    target: list[object] = [manifest.target.url, manifest.target.model]
    if server.engine != "attach":
        batch = f"max batch {server.max_batch}" if server.max_batch else None
        target = [result.provenance.engine, server.model, server.precision, batch]
    return doc.Document(
        title=f"{result.verdict} · {result.name} · gapmeter",
        header=doc.Header(
            f"{result.name} @ {' · '.join(str(part) for part in target if part)}",
            f"{result.provenance.load}, n = {count(result.counts.measured)}",
            as_sentence(closed_loop_sentence(result.closed_loop) or "") or turns_sentence(result.turns) or "",
        ),
        verdict=_verdict(result, regression),
        sections=sections,
        provenance=result.provenance,
        device=result.device,
    )


def _verdict(result: RunResult, regression: Regression | None) -> doc.Verdict:
    """It; beneath it what slow requests wait for, what a faster device could bring, and the cost where it is known."""
    metric, valid, known, paid = why.main_metric(result), result.trust.valid, result.cost, ""
    anatomy = result.tail.of(metric) if metric else None
    owner = " ".join(map(as_sentence, why.said_of(result)))
    failing = result.verdict == FAIL and metric is None  # by failures, which no faster device would change
    if isinstance(known, Cost):
        each, output = known.per_request_usd, known.per_million_output_tokens_usd_ci
        tokens = f", a million output tokens {usd(output[1])}" if output else ""
        many, _ = cost.many_requests(each)
        who = "a million requests cost" if many > 1 else "a request costs"
        paid = f"At these SLOs {who} at most {usd(many * each)}{tokens}."
    more = [
        Said(owner, on=PAGE, stage=(anatomy.stage if anatomy and anatomy.leading else ""), strong=True),
        Said(as_sentence(commonest(result)) if failing else why.most_an_upgrade_brings(result), on=PAGE),
        Said(_unsteady(result) if valid else "", on=PAGE | MARKDOWN),
        Said(paid, on=PAGE),
    ]
    return doc.Verdict(
        word=f"{result.verdict}, REGRESSED" if regression and regression.status == "REGRESSED" else result.verdict,
        tone=tone(result.verdict),
        sentence=slo.verdict_sentence(result),
        reasons=[as_sentence(reason) for reason in result.invalid_reasons],
        more=[one for one in more if one.words],
        trust=doc.Trust(valid, "Valid." if valid else "Not valid.", trust.trust_figures(result)),
        gauges=[slo.gauge(answer) for answer in result.slo] if result.verdict != INVALID else (),
    )


# --- sections


def _warnings(result: RunResult, told: Sequence[str] = ()) -> list[doc.Block]:
    """What was seen, its likely cause, the flag to try; of what is ``told`` above, its name beside what is new."""
    items = [
        doc.Warned(
            as_sentence(one.code.replace("_", " ") if one.text in told else one.text),
            stopped(f"{'' if one.code in _CAUSE_SEEN else 'Likely: '}{one.cause}") if one.cause else "",
            one.flag,
        )
        for one in result.warnings
        if one.text not in told or one.cause or one.flag
    ]
    return [doc.Warnings(items)] if items else []


def _trusted(result: RunResult, why_slow: Section | None) -> Section:
    """In the terminal: may it be believed, and what speaks against that; of several doubts the first.

    ``why_slow`` stands above it; what that says to try is no doubt.
    """
    facts = [("trust", trust.trust_sentence(result, brief=True))]
    if result.verdict == INVALID:
        facts.append(("rules", "docs/how-it-measures.md: what makes a run INVALID, and when a figure is refused"))
        return Section("trusted", "", [Facts(facts), *_warnings(result, result.invalid_reasons)], on=TERMINAL)
    judged = {slo.metric for slo in result.slo}
    advised = " ".join(str(one.words) for one in why_slow.blocks if isinstance(one, doc.Paragraph)) if why_slow else ""
    told = [one for one in result.warnings if one.code != "errors" or one.flag]  # failures stand above it
    told = [one for one in told if not one.flag or one.flag not in advised]
    doubts = [(one.touches, as_sentence(one.text) + (f" Try {one.flag}." if one.flag else "")) for one in told]
    doubts.append((tuple(judged), _unsteady(result)))
    doubts.sort(key=lambda doubt: not judged & set(doubt[0]))  # then in their order
    if shown := [text for _, text in doubts if text]:
        rest = f" (-v: {len(shown) - 1} more)" if len(shown) > 1 else ""
        facts.append(("caution", f"{shown[0]}{rest}"))
    return Section("trusted", "", [Facts(facts)], on=TERMINAL)


def _unsteady(result: RunResult) -> str:
    """What a verdict is worth where there was no steady state; "" where there was one."""
    if result.steady.state != "unsteady" or not result.slo:
        return ""
    if result.verdict == PASS:
        return "No steady state: the SLOs held in this run, but in a longer one they may not; no cost is given."
    return "No steady state: the figures depend on how long the run was; no cost is given."


def _details(result: RunResult) -> Section:
    """A line for each part that has something to say."""
    steady = (_steady(result), trust.drift_sentence(result.drift))
    facts = [
        ("why", " ".join(map(as_sentence, why.said_of(result)))),
        ("trust", trust.trust_figures(result)),
        ("steady", " ".join(as_sentence(part) for part in steady if part)),
        ("device", device.telemetry_sentence(result.telemetry) if result.telemetry else ""),
        ("roof", device.roofline_line(result.roofline) or ""),
        ("turns", turns_sentence(result.turns) or ""),
        ("loop", as_sentence(closed_loop_sentence(result.closed_loop) or "")),
    ]
    warnings = [] if result.verdict == INVALID else _warnings(result)  # else they stand above, with the reasons
    return Section("facts", "", [Facts([fact for fact in facts if fact[1]]), *warnings], on=DETAILS)


def _how(result: RunResult, manifest: Manifest) -> cost.How:
    return cost.how_of(result, simulated=manifest.asked.server.engine == "simulated")


def _regression(found: Regression) -> Section:
    from gapmeter.report.differences import growth_interval, relative  # few runs are held against a baseline

    rows: list[Row] = [
        [row.status, row.name, Figure(row.a_ms), Figure(row.b_ms),
         relative(row), growth_interval(row) if row.relative_ci else "not estimable"]
        for row in found.rows
    ]  # fmt: skip
    if found.failed is not None:
        failures = found.failed
        rows.append([failures.status, "failed requests", share(failures.a_share), share(failures.b_share), "", ""])
    headers: doc.Headers = [" ", "figure", "baseline", "now", "growth", "95 % interval"]
    status = doc.Mark(found.status, status=f"**{found.status}**")
    said = doc.Paragraph((status, f" against {found.baseline}: {stopped(found.sentence)}"))
    return Section("regression", "", [said, doc.Table("Against the baseline", headers, rows, words=2)], on=MARKDOWN)


def _repeat(manifest: Manifest, folder: Path) -> Section:
    """How to run it again, and what it ran on; what is not known is left out."""
    hardware, git, placement = manifest.hardware, manifest.git, manifest.placement
    versions: Mapping[str, str] = {**manifest.versions, **(manifest.target.versions or {})}
    generator, server = (
        f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, cores))}" if cores else ""  # they begin with 0
        for cores in (placement.generator, placement.server)
    )
    facts = [
        ("started", manifest.started_wall),
        ("server", manifest.target.url),
        ("whose server", _WHOSE.get(manifest.asked.server.engine, "")),
        ("processor", f"{hardware.cpu}, {counted(hardware.cores, 'core')}"),
        ("memory", f"{hardware.memory_gib} GiB"),
        ("GPU", ", ".join(hardware.gpus) or "none"),
        ("system", hardware.system),
        ("load generator ran on", generator),
        ("server ran on", server),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", f"{git.commit[:12]}{' with changes' if git.changed else ''}" if git else ""),
    ]
    where: list[doc.Block] = [doc.Heading("Where and with what"), Facts([fact for fact in facts if fact[1]])]
    files = [(Name(name, quote(name)), words) for name, words in _FILES.items() if (folder / name).exists()]
    links = Facts([*files, ("a trace for Perfetto", doc.Code("gapmeter export RUN --perfetto trace.json.gz"))])
    command, *folded = reproduce(manifest)
    blocks = [command, doc.Columns([where, [doc.Heading("Files of this run"), links]]), *folded]
    return Section("repeat", "Repeat it", blocks, short="repeat it")


# --- sentences


def words_of(result: RunResult, manifest: Manifest) -> RunWords:
    """Everything that is said of a run."""
    telemetry, per_metric = result.telemetry, {"ttft": result.compute.ttft, "e2e": result.compute.e2e}
    return RunWords(
        headline=slo.headline(result),
        slo=tuple(slo.slo_sentence(answer, slo.changed_meanwhile(result, answer)) for answer in result.slo),
        trust=trust.trust_sentence(result),
        steady=_steady(result),
        drift=trust.drift_sentence(result.drift),
        closed_loop=closed_loop_sentence(result.closed_loop),
        turns=turns_sentence(result.turns),
        tail=why.tail_sentences(result),
        upgrade={
            metric: why.upgrade_sentence(bracket, metric, result.device)
            for metric, bracket in why.upgrades(result).items()
        },
        compute={
            metric: sentence
            for metric, shares in per_metric.items()
            if shares and (sentence := compute.compute_sentence(shares, metric, result.device))
        },
        telemetry=device.telemetry_sentence(telemetry) if telemetry else None,
        utilisation=device.utilisation_sentence(telemetry.utilisation) if telemetry else None,
        roofline=device.roofline_sentence(result.roofline),
        cost=cost.cost_sentence(result.cost, simulated=manifest.asked.server.engine == "simulated"),
        energy=cost.energy_sentence(result.energy),
        value=cost.value_sentence(result.value, result.cost),
    )


def _steady(result: RunResult) -> str:
    measured, offered = result.counts.measured, result.load.delivered_rate  # requests, of conversations too
    said = trust.steady_sentence(result.steady, measured=measured, offered=offered)
    return said if result.outage is None else f"{said}; {outage_text(result.outage)}"


def closed_loop_sentence(closed: ClosedLoop | None) -> str | None:
    """What a closed loop's figures are not, and what they would be at the users' own pace; None of an open one."""
    if closed is None:
        return None
    if (correction := closed.corrected) is None:
        return CLOSED_LOOP
    metrics = []
    for name, known in (("TTFT", correction.ttft), ("E2E", correction.e2e)):
        values = {"p50": known.p50_ms, "p99": known.p99_ms, "p95": known.p95_ms, "p90": known.p90_ms}
        shown = [f"{p} {duration(ms)}" for p, ms in values.items() if ms is not None][:2]
        metrics += [f"{name} {', '.join(shown)}"] if shown and known.added else []
    added, pace = count(max(correction.ttft.added, correction.e2e.added)), duration(correction.expected_interval_ms)
    figures = f": {'; '.join(metrics)}" if metrics else ""
    return (
        f"{CLOSED_LOOP}; corrected for {added} requests that users at their pace of {pace} would have sent meanwhile"
        f"{figures}"
    )


def turns_sentence(turns: Sequence[Turn]) -> str | None:
    """TTFT by turn in one line: the median, where the sample supports one; None without conversations."""
    medians = [
        f"turn {turn.turn} {duration(turn.ttft.ms(50.0))} ({turn.prompt_tokens:,.0f} prompt tokens)"
        for turn in turns
        if turn.ttft and turn.ttft.ms(50.0) is not None
    ]
    return f"TTFT p50 by turn: {', '.join(medians)}" if medians else None
