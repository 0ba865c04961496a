"""The report's tables, as rows of text; every figure comes from summary.json, with its raw value beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import count, duration, over, share
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.stages import STAGES
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.report import marks
from gapmeter.report.svg import Fragment, el

METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
_STAGE_PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure: where it is in summary.json, its value there, and how it is written."""

    key: str
    raw: str
    text: str
    hint: str


def cell(key: str, figures: Mapping[str, Any], name: str) -> Cell:
    """The figure ``name`` (such as p99_ms) of one distribution, with what it would need if it is not supported."""
    value, short = figures.get(name), name.removesuffix("_ms")
    if value is None and short in figures.get("over_ms", ()):
        return Cell(f"{key}.{name}", "null", over(figures["over_ms"][short]), "so many requests failed")
    if value is None and short in figures.get("infinite", ()):
        return Cell(f"{key}.{name}", "null", "∞", "so many requests were never answered")
    needs = figures.get("needs", {}).get(short)
    hint = f"not estimable: needs {count(needs['requests'])} more requests{_span(needs)}" if needs else ""
    return Cell(f"{key}.{name}", "null" if value is None else repr(value), duration(value), hint)


def _span(needs: Mapping[str, Any]) -> str:
    minutes = needs.get("minutes")
    return f", about {minutes:.0f} min" if minutes and minutes >= 1 else ""


def percentile_names(summary: Mapping[str, Any]) -> dict[str, str]:
    """Column name to title: those always printed, any that an SLO names, and the largest."""
    named = {float(slo["percentile"]) for slo in summary["slo"] if slo["percentile"] is not None}
    known = {f"{percentile_key(p)}_ms": f"p{p:g}" for p in sorted({*PERCENTILES, *named})}
    return {**known, "max_ms": "max"}


@dataclass(frozen=True, slots=True)
class MetricRow:
    metric: str
    origin: str
    first: bool
    cells: list[Cell]
    count: str


def metric_rows(summary: Mapping[str, Any]) -> list[MetricRow]:
    """Every metric counted from due, with failures at their time-out where there are any, and counted from sent.

    Between two tokens it makes no difference when the request was sent.
    """
    names, rows = percentile_names(summary), []
    for metric, title in METRICS.items():
        between = metric in ("itl", "tpot")
        parts = [("metrics", "token to token" if between else "due", summary["metrics"][metric])]
        if summary["failures"]:
            origin = f"{parts[0][1]}, failures at their time-out"
            parts.append(("metrics_censored", origin, summary["metrics_censored"][metric]))
        if not between:
            parts.append(("metrics_from_sent", "sent", summary["metrics_from_sent"][metric]))
        for number, (part, origin, figures) in enumerate(parts):
            cells = [cell(f"{part}.{metric}", figures, name) for name in names]
            rows.append(MetricRow(title if not number else "", origin, not number, cells, count(figures["count"])))
    return rows


@dataclass(frozen=True, slots=True)
class StagePart:
    unmeasured: bool
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class StageRow:
    stage: str
    owner: str
    kind: str
    meaning: str
    swatch: Fragment
    parts: list[StagePart]


def stage_rows(summary: Mapping[str, Any], device: str) -> list[StageRow]:
    """Every stage in the order of the timeline, also the ones that nobody could stamp."""
    first, last = summary["stages_to_first_token"], summary["stages"]
    if not first and not last:
        return []
    return [
        StageRow(
            stage=marks.words(stage.name),
            owner=marks.owner(stage.name, device),
            kind=stage.kind,
            meaning=stage.meaning,
            swatch=_swatch(stage.name),
            parts=[_part("stages_to_first_token", stage.name, first), _part("stages", stage.name, last)],
        )
        for stage in STAGES
    ]


def _part(key: str, name: str, known: Mapping[str, Any]) -> StagePart:
    figures = known.get(name)
    if not figures or figures["kind"] == "unmeasured":
        return StagePart(True, [])
    return StagePart(False, [cell(f"{key}.{name}", figures, p) for p in _STAGE_PERCENTILES])


def _swatch(stage: str) -> Fragment:
    box = el("rect", width=12, height=12, rx=2, fill=marks.fill(stage), class_="segment")
    return el("svg", box, width=12, height=12, class_="swatch", aria_hidden="true")


def residual_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the ledgers left unexplained, and strictly, to each event."""
    rows = []
    for event, figures in summary["residual"].items():
        for which in ("unexplained", "strict"):
            if figures:
                known = figures[which]
                cells = [duration(known[f"{p}_ms"]) for p in ("p50", "p99", "max")]
                cells += [share(known[f"{p}_share"]) for p in ("p50", "p99", "max")]
                rows.append({"event": event.replace("_", " "), "which": which, "cells": cells})
    return rows
