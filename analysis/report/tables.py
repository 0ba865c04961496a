"""The report's tables, as rows of text; every figure comes from summary.json, with its raw value beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.report import marks
from analysis.report.numbers import DASH, count, duration, share
from analysis.report.svg import Fragment, el
from analysis.stages import STAGES

PERCENTILES = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "p999_ms", "max_ms")
PERCENTILE_NAMES = ("p50", "p90", "p95", "p99", "p99.9", "max")
METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
_STAGE_PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure: where it is in summary.json, its value there, and how it is written."""

    key: str
    raw: str
    text: str


def cell(key: str, value: float | None) -> Cell:
    return Cell(key, "null" if value is None else repr(value), duration(value))


@dataclass(frozen=True, slots=True)
class MetricRow:
    metric: str
    origin: str
    first: bool
    cells: list[Cell]
    count: str


def metric_rows(summary: dict[str, Any]) -> list[MetricRow]:
    """Every metric counted from due, and the same from sent; between two tokens there is no difference."""
    rows = []
    for name, title in METRICS.items():
        for part, origin in (("metrics", "due"), ("metrics_from_sent", "sent")):
            known = summary.get(part, {}).get(name)
            if known is not None and not (origin == "sent" and name in ("itl", "tpot")):
                cells = [cell(f"{part}.{name}.{p}", known.get(p)) for p in PERCENTILES]
                between = name in ("itl", "tpot")
                rows.append(
                    MetricRow(title, "token to token" if between else origin, origin == "due", cells, count(known.get("count")))
                )
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


def stage_rows(summary: dict[str, Any]) -> list[StageRow]:
    """Every stage in the order of the timeline, also the ones that nobody could stamp."""
    first, last = summary.get("stages_to_first_token", {}), summary.get("stages", {})
    if not first and not last:
        return []
    return [
        StageRow(
            stage=marks.words(stage.name),
            owner=stage.owner,
            kind=stage.kind,
            meaning=stage.meaning,
            swatch=_swatch(stage.name),
            parts=[_part("stages_to_first_token", stage.name, first), _part("stages", stage.name, last)],
        )
        for stage in STAGES
    ]


def _part(key: str, name: str, known: dict[str, Any]) -> StagePart:
    figures = known.get(name)
    if not figures or figures.get("max_ms") is None:
        return StagePart(True, [])
    return StagePart(False, [cell(f"{key}.{name}.{p}", figures.get(p)) for p in _STAGE_PERCENTILES])


def _swatch(stage: str) -> Fragment:
    box = el("rect", width=12, height=12, rx=2, fill=marks.fill(stage), class_="segment")
    return el("svg", box, width=12, height=12, class_="swatch", aria_hidden="true")


def residual_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What the ledgers left unexplained, and strictly, to each event."""
    rows = []
    for event, figures in summary.get("residual", {}).items():
        for which in ("unexplained", "strict"):
            known = (figures or {}).get(which)
            if known:
                cells = [duration(known.get("p50_ms")), duration(known.get("p99_ms"))]
                cells += [share(known.get("p50_share")), share(known.get("p99_share"))]
                rows.append({"event": f"to the {event.replace('_', ' ')}", "which": which, "cells": cells})
    return rows


__all__ = ["DASH", "METRICS", "PERCENTILE_NAMES", "metric_rows", "residual_rows", "stage_rows"]
