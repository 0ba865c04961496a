"""The rows of our table on Locust's page: from histograms while a run goes on, from its summary once that is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hdrh.histogram import HdrHistogram

KEY = "gapmeter"
_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
_COLUMNS = {
    "what": "What", "owner": "Owner", "kind": "Known from", "count": "n", "p50": "p50 (ms)", "p90": "p90 (ms)",
    "p95": "p95 (ms)", "p99": "p99 (ms)", "p999": "p99.9 (ms)", "max": "Max (ms)",
}  # fmt: skip
_UNKNOWN = "–"
_TAIL = 0.025  # of a 95 % interval, on either side

Row = dict[str, Any]


def structure() -> list[dict[str, str]]:
    """The table's columns, as Locust's page wants them."""
    return [{"key": key, "title": title} for key, title in _COLUMNS.items()]


def live_rows(histograms: Mapping[str, HdrHistogram]) -> list[Row]:
    """So far, the warm-up included. No stages: those are known once the server's stamps are joined to ours."""
    return [_live(_NAMES[name], histogram) for name, histogram in histograms.items()]


def result_rows(summary: Mapping[str, Any]) -> list[Row]:
    """What the analysis found: the metrics, then each stage to the last token, then what nobody owns."""
    metrics = [_result(_NAMES[name], "", "result", values) for name, values in summary["metrics"].items()]
    stages = [
        _result(name, values["owner"], values["kind"], values) for name, values in (summary["stages"] or {}).items()
    ]
    rest = (summary["residual"] or {}).get("last_token", {}).get("unexplained")
    return [*metrics, *stages, *([_result("unexplained", "", "the rest", rest)] if rest else [])]


def supported(count: int, percentile: float) -> bool:
    """Whether a sample of ``count`` has an order statistic on either side of the percentile's 95 % interval.

    That is: p^n and (1 - p)^n are at most 2.5 % (David and Nagaraja, Order Statistics, 7.1).
    """
    share = percentile / 100
    return count > 0 and max(share, 1 - share) ** count <= _TAIL


def _live(name: str, histogram: HdrHistogram) -> Row:
    count = histogram.get_total_count()
    values = {
        key: histogram.get_value_at_percentile(percentile) / 1e6 if supported(count, percentile) else None
        for key, percentile in _PERCENTILES.items()
    }
    most = histogram.get_max_value() / 1e6 if count else None
    return _row(name, "", "so far", count, {**values, "max": most})


def _result(name: str, owner: str, kind: str, values: Mapping[str, Any]) -> Row:
    figures = {key: values.get(f"{key}_ms") for key in (*_PERCENTILES, "max")}
    return _row(name, owner, kind, values.get("count"), figures)


def _row(name: str, owner: str, kind: str, count: int | None, values: Mapping[str, float | None]) -> Row:
    texts = {key: _text(value) for key, value in values.items()}
    return {"what": name, "owner": owner, "kind": kind, "count": _UNKNOWN if count is None else f"{count:,}", **texts}


def _text(value: float | None) -> str:
    """Three significant figures, as the histograms have; a dash where the sample does not support a figure."""
    if value is None or not math.isfinite(value):
        return _UNKNOWN
    digits = 0 if not value else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def joined(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What is added to an answer of ``/stats/requests``. The page sorts by ``name``: here, the rows' own order."""
    return [{"key": KEY, "data": [{"name": f"{place:03d}", **row} for place, row in enumerate(rows)]}]
