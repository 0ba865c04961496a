"""Which figure of a metric a sweep's points are compared by: one percentile for all of them, or the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.judge import verdict
from gapmeter.analysis.results.distribution import percentile_key

LEVELS = (99.0, 95.0, 90.0, 50.0)


def common_level(points: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The highest of p99, p95, p90 and p50 that every valid point's sample supports.

    None where there is none: then means are compared, which need less.
    """
    shown = [point["metrics"][metric] for point in points if point["metrics"] and point["verdict"] != verdict.INVALID]
    for level in LEVELS:
        if shown and all(found[f"{percentile_key(level)}_ms"] is not None for found in shown):
            return level
    return None


def figure_key(level: float | None) -> str:
    """``p95``, or ``mean``: with ``_ms`` and ``_ci_ms`` behind it, the names in ``metrics``."""
    return "mean" if level is None else percentile_key(level)


def figure_words(metric: str, level: float | None) -> str:
    """``p95 TTFT``, or ``mean TTFT``."""
    return f"{'mean' if level is None else f'p{level:g}'} {metric.upper()}"
