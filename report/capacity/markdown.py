"""A capacity search as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.numbers import DASH
from gapmeter.report.export.markdown import origin_line, plain


def markdown_of_search(summary: Mapping[str, Any]) -> str:
    """What was found, and a table with a line a trial. Ends with a line feed."""
    search = summary["capacity"]
    rows = [["rate, req/s", "verdict", "confidence"], ["--:", "---", "--:"]]
    rows += [[f"{trial['rate']:.3g}", str(trial["verdict"]), _sure(trial)] for trial in search["trials"]]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    said = "\n\n".join(plain(sentence) for sentence in summary["headline"])
    from_where = f"\n{origin_line(summary['provenance'])}\n" if summary.get("provenance") else ""
    return f"### {plain(str(summary['name']))}: capacity\n\n{said}\n\n{table}\n{from_where}"


def _sure(trial: Mapping[str, Any]) -> str:
    return DASH if trial["confidence"] is None else f"{100 * trial['confidence']:.0f} %"
