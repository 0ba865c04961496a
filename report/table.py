"""A sweep in the terminal: a line a point, and what there is to learn from them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gapmeter import errors
from gapmeter.analysis.numbers import DASH, bounds, duration, significant
from gapmeter.analysis.sweep.compared import figure_key
from gapmeter.analysis.sweep.read import written_tokens
from gapmeter.report.marks import words

_STYLES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "INVALID": "red", "FAILED": "red", "MISSING": ""}
_WIDTH = 100


def print_sweep(summary: Mapping[str, Any], folder: Path, code: int) -> None:
    """The table on standard error."""
    terminal = sys.stderr.isatty()
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True, force_terminal=terminal)
    console.print(render_sweep(summary, folder, code))


def render_sweep(summary: Mapping[str, Any], folder: Path, code: int) -> Text:
    """The table, the knee, where the page lies."""
    sweep = summary["sweep"]
    text = Text.assemble((f"{summary['name']}: {len(sweep['points'])} points", "bold"), "\n")
    rows = _rows(sweep)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        words = (0, len(row) - 2, len(row) - 1)
        cells = [cell.ljust(width) if at in words else cell.rjust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        line = "  ".join(cells).rstrip()
        style = _STYLES.get(row[-2], "") if number else "dim"
        text.append(f"\n {line}", style)
    for point in sweep["points"]:
        if point["reason"]:
            said = f"! {point['label']}: {point['verdict'].lower()}: {point['reason']}"
            text.append(f"\n{_wrapped(said)}")
    text.append("\n")
    for sentence in sweep["headline"]:
        text.append(f"\n{_wrapped(sentence)}")
    text.append(f"\n\n report  {folder / 'report.html'}\n ")
    return text.append(f"exit={code} {_meaning(code)}", "bold")


def _rows(sweep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's cells, its head first; p50 beside the percentile that all points support, unless that is it."""
    ttft, itl = (figure_key(sweep["levels"][metric]) for metric in ("ttft", "itl"))
    middle = () if ttft == "p50" else ("TTFT p50",)
    head = ("point", "tokens/s", "batch", *middle, f"TTFT {ttft}", "95 % interval", f"ITL {itl}", "95 % interval",
            "verdict", "binds")  # fmt: skip
    order = [at for series in sweep["series"] for at in series["points"]]
    return [head, *(_row(sweep["points"][at], ttft, itl, len(head)) for at in order)]


def _row(point: Mapping[str, Any], ttft: str, itl: str, cells: int) -> tuple[str, ...]:
    if not point["metrics"]:
        return (point["label"], *[DASH] * (cells - 3), point["verdict"], "")
    first, gaps = point["metrics"]["ttft"], point["metrics"]["itl"]
    middle = () if ttft == "p50" else (duration(first["p50_ms"]),)
    batch = point["batch"]["running"]
    return (
        point["label"], written_tokens(point), _number(batch), *middle,
        duration(first[f"{ttft}_ms"]), bounds(*(first[f"{ttft}_ci_ms"] or (None, None))),
        duration(gaps[f"{itl}_ms"]), bounds(*(gaps[f"{itl}_ci_ms"] or (None, None))), point["verdict"],
        _binds(point),
    )  # fmt: skip


def _number(value: float | None) -> str:
    return DASH if value is None else significant(value)


def _binds(point: Mapping[str, Any]) -> str:
    found = point["binding"]
    stages = point["stages"].get("e2e", {}).get("stages_ms", {})
    largest = max(stages, key=lambda stage: stages[stage]) if stages else ""
    behind = f" / {found['behind']}" if found["behind"] else ""
    return f"{found['resource']}{behind} ({words(largest)})" if largest else str(found["resource"])


def _meaning(code: int) -> str:
    if code == errors.OK:
        return "every point was measured"
    return "not every point is a valid measurement" if code == errors.NOT_VALID else errors.MEANING[code]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" ", subsequent_indent="   ", break_long_words=False)
