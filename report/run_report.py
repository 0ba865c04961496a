"""What is said of one run."""

from __future__ import annotations

from typing import Any

from gapmeter.report import head, marks
from gapmeter.report.cost import cost_sentence
from gapmeter.report.document import (
    BRIEF,
    EVERYWHERE,
    PAGE,
    Chart,
    Code,
    Column,
    Document,
    Facts,
    Figure,
    Gauge,
    Header,
    Mark,
    Paragraph,
    Row,
    Said,
    Section,
    Stage,
    Table,
    Tone,
    Trust,
    Unit,
    Verdict,
    Warned,
    Warnings,
)
from gapmeter.report.export.junit import slo_interval, slo_value
from gapmeter.report.pictures import Band, Stacks, stages_in
from gapmeter.report.run import Run

_TONES: dict[str, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "open", "INVALID": "bad"}


def document(run: Run) -> Document:
    """The whole report."""
    summary = run.summary
    name = summary["name"] or run.folder.path.name
    return Document(
        title=f"{summary['verdict']} · {name} · gapmeter",
        header=Header(f"{name} @ {head.target(run.manifest)}", head.load(summary), head.caveat(summary)),
        verdict=_verdict(run),
        sections=[_objectives(run), _where(run), _trust(run), _warnings(run)],
        provenance=run.provenance,
        device=run.device,
        version=run.manifest.get("versions", {}).get("gapmeter", ""),
    )


def _verdict(run: Run) -> Verdict:
    summary = run.summary
    said = [
        Said(head.owner_sentence(summary), stage=summary["tail"]["stage"] or "", strong=True),
        Said(head.upgrade_sentence(summary)),
        Said(cost_sentence(summary), on=PAGE),
    ]
    trust = summary["trust"]["valid"]
    return Verdict(
        summary["verdict"], _TONES[summary["verdict"]], head.sentence(summary), head.reasons(summary),
        [one for one in said if one.words],
        Trust(trust, "Valid." if trust else "Not valid.", head.trust_figures(summary)),
        [_gauge(slo) for slo in summary["slo"]],
    )  # fmt: skip


def _answer(slo: dict[str, Any]) -> Mark:
    status = slo["status"]
    return Mark(head.WORDS[status], _TONES[status], head.SIGNS[status], status)


def _gauge(slo: dict[str, Any]) -> Gauge:
    unit: Unit = "share" if slo["metric"] == "errors" else "ms"
    value, low, high, limit = (slo[f"{name}_{unit}"] for name in ("value", "low", "high", "limit"))
    return Gauge(
        _answer(slo), slo["text"], slo_value(slo), slo_interval(slo), Figure(limit, unit), value, low, high,
        slo["infinite"],
    )  # fmt: skip


def _objectives(run: Run) -> Section:
    """Every objective with what was measured, its interval, and what would decide it."""
    rows: list[Row] = []
    for at, (slo, line) in enumerate(zip(run.summary["slo"], head.slo_lines(run.summary), strict=True)):
        unit: Unit = "share" if slo["metric"] == "errors" else "ms"
        measured = Figure(slo[f"value_{unit}"], unit, f"slo.{at}.value_{unit}", text=line.measured)
        rows.append(
            [_answer(slo), Code(slo["text"]), measured, line.interval, Figure(slo["count"], "count"), line.note]
        )
    headers: list[str | Column] = [
        Column("answer", brief=" "), Column("objective", brief="SLO"), Column("measured", wraps=True),
        Column("95 % interval", wraps=True), "n",
        Column("largest part, or what is missing", brief="slow ones wait for", wraps=True),
    ]  # fmt: skip
    none = Paragraph("The scenario names none, so there is nothing to pass or fail.")
    blocks = [Table("Service level objectives", headers, rows, words=2)] if rows else [none]
    return Section(
        "slo", "Service level objectives", blocks, head.confidence_sentence(run.summary) if rows else "", "objectives",
        on=EVERYWHERE,
    )  # fmt: skip


def _where(run: Run) -> Section:
    found = run.summary["tail"]["ttft"]
    typical, slow = bands = [
        Band(name, detail, found[name]["count"], found[name]["total_ms"], found[name]["stages_ms"])
        for name, detail in (("typical", "requests from p45 to p55"), ("slow", "requests from p98.5 up"))
    ]
    stages = stages_in(bands)
    rows: list[Row] = [
        [
            Stage(stage),
            marks.owner(stage, run.device),
            *(Figure(band.parts[stage], "ms", f"tail.ttft.{band.name}.stages_ms.{stage}") for band in bands),
        ]
        for stage in stages
    ]
    table = Table(
        "TTFT by stage",
        ["stage", "owner", Column("typical", "typical (ms)"), Column("slow", "slow (ms)")],
        rows,
        words=2,
    )
    picture = Stacks("TTFT", "requests", typical, slow, head.main_limit(run.summary, "ttft"), run.device)
    return Section(
        "where",
        "Where the time goes",
        [Chart("stack-first-token", picture, "", table, stages=stages)],
        picture.sentence(),
        "where the time goes",
        on=EVERYWHERE,
    )


def _trust(run: Run) -> Section:
    word = "valid" if run.summary["trust"]["valid"] else "NOT valid"
    facts = [("trust", f"{word}: {head.trust_figures(run.summary)}"), ("steady", head.steady_sentence(run.summary))]
    return Section("facts", "", [Facts([fact for fact in facts if fact[1]])], on=BRIEF)


def _warnings(run: Run) -> Section | None:
    items = [Warned(one.text, one.cause, one.flag) for one in head.warnings(run.summary)]
    if not items:
        return None
    return Section("warnings", "Warnings", [Warnings(items)], short="warnings", on=EVERYWHERE)
