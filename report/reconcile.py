"""The same run by other tools' definitions, as rows that the page and the terminal share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import count, duration

_TITLES = {"ttft": "TTFT", "itl": "ITL", "icl": "ICL", "tpot": "TPOT", "e2e": "E2E"}
_OURS = {
    "ttft": "from when it was due to the first chunk that carries a token",
    "itl": "gaps between chunks that carry tokens, pooled",
    "tpot": "(last - first token) / (tokens - 1), one a request",
    "e2e": "from when it was due to the last chunk that carries a token",
}


@dataclass(frozen=True, slots=True)
class DefinitionRow:
    """One tool's figure of one metric; ``first``: the first row of its metric."""

    metric: str
    who: str
    p50: str
    p99: str
    mean: str
    n: str
    differs: str
    first: bool


def definition_rows(summary: Mapping[str, Any]) -> list[DefinitionRow]:
    """A row a metric and tool, ours first; none unless the summary has ``definitions``."""
    if not summary.get("definitions"):
        return []
    return [row for metric in _TITLES for row in _rows(summary, metric)]


def _rows(summary: Mapping[str, Any], metric: str) -> Iterator[DefinitionRow]:
    first = True
    if metric in _OURS:
        yield _row(metric, "gapmeter", summary["metrics"][metric], _OURS[metric], first=True)
        first = False
    if metric in ("ttft", "e2e"):
        sent = summary["metrics_from_sent"][metric]
        yield _row(metric, "gapmeter, from sent", sent, "the same from when its last byte was sent", first=False)
    for tool in summary["definitions"].values():
        if metric in tool:
            found = tool[metric]
            yield _row(metric, f"{tool['name']} {tool['version']}", found, found["differs"], first=first)
            first = False


def _row(metric: str, who: str, figures: Mapping[str, Any], differs: str, *, first: bool) -> DefinitionRow:
    p50, p99, mean = (duration(figures[name]) for name in ("p50_ms", "p99_ms", "mean_ms"))
    return DefinitionRow(_TITLES[metric], who, p50, p99, mean, count(figures["count"]), differs, first)
