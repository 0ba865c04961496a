"""A sweep as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.numbers import DASH, bounds, duration
from gapmeter.analysis.sweep.compared import figure_key
from gapmeter.analysis.sweep.read import written_tokens
from gapmeter.report.export.markdown import origin_line, plain


def markdown_of_points(summary: Mapping[str, Any]) -> str:
    """What was found, and a table with a line a point. Ends with a line feed."""
    sweep = summary["sweep"]
    levels = {metric: figure_key(sweep["levels"][metric]) for metric in ("ttft", "itl")}
    head = ["point", "verdict", "tokens/s", f"TTFT {levels['ttft']}", "95 %", f"ITL {levels['itl']}", "95 %", "binds"]
    rows = [_row(sweep["points"][at], levels) for series in sweep["series"] for at in series["points"]]
    lines = [head, ["---"] * 2 + ["--:"] * 5 + ["---"], *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    said = "\n\n".join(plain(sentence) for sentence in sweep["headline"])
    from_where = f"\n{origin_line(summary['provenance'])}\n" if summary.get("provenance") else ""
    return f"### {plain(str(summary['name']))}: {len(rows)} points\n\n{said}\n\n{table}\n{from_where}"


def _row(point: Mapping[str, Any], levels: Mapping[str, str]) -> list[str]:
    name = plain(str(point["label"]))
    if not point["metrics"]:
        return [name, str(point["verdict"]), *[DASH] * 5, plain(str(point["reason"] or ""))]
    cells = []
    for metric, key in levels.items():
        found = point["metrics"][metric]
        cells += [duration(found[f"{key}_ms"]), bounds(*(found[f"{key}_ci_ms"] or (None, None)))]
    return [name, str(point["verdict"]), written_tokens(point), *cells,
            str(point["binding"]["resource"])]  # fmt: skip
