"""A sweep's points as the suites of a JUnit file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gapmeter.analysis.judge.verdict import INVALID


def suites_of(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every point as ``export.junit`` takes a run; one that has no figures is a run that is not valid."""
    for point in summary["sweep"]["points"]:
        lost = not point["metrics"]
        unsound = lost or point["verdict"] == INVALID
        yield {
            "name": f"{summary['name']}: {point['label']}",
            "verdict": INVALID if lost else point["verdict"],
            "invalid_reasons": [str(point["reason"] or point["verdict"])] if unsound else [],
            "slo": [] if lost else point["slo"],
            "provenance": _provenance(summary, point),
            "load": {"window_s": (point["throughput"] or {}).get("span_s", 0.0)},
        }


def _provenance(summary: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sweep's, with the point's own load and validity; n stands with every case."""
    known = summary.get("provenance")
    if not known:
        return None
    validity = INVALID if point["verdict"] == INVALID or not point["metrics"] else "valid"
    own = {"load": f"{point['label']} of {known['load']}", "validity": validity}
    return {key: value for key, value in {**known, **own}.items() if key != "n"}
