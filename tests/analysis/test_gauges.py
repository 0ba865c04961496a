"""The objectives' gauges: where a figure and its interval lie beside the limit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gapmeter.report.gauges import gauges

SLO: dict[str, Any] = {
    "text": "ttft p99 <= 100 ms", "metric": "ttft", "percentile": 99.0, "status": "PASS", "limit_ms": 100.0,
    "value_ms": 50.0, "low_ms": 40.0, "high_ms": 80.0, "infinite": False, "count": 900, "needs": None, "stage": "queue",
}  # fmt: skip


def drawn(**changes: Any) -> str:
    return str(gauges({"slo": [{**SLO, **changes}]}))


def position(source: str, css: str, name: str) -> float:
    found = re.search(rf'<\w+ [^>]*class="{css}"[^>]*>', source)
    assert found
    told = re.search(rf'\b{name}="([\d.]+)%"', found[0])
    assert told
    return float(told[1])


def test_value_interval_and_limit_lie_in_proportion() -> None:
    source = drawn()
    limit = position(source, "limit", "x1")
    assert position(source, "at", "cx") == pytest.approx(limit / 2, abs=0.01)
    assert position(source, "sure", "x") == pytest.approx(0.4 * limit, abs=0.01)
    assert position(source, "sure", "width") == pytest.approx(0.4 * limit, abs=0.01)


def test_an_interval_without_an_upper_end_reaches_the_edge_and_says_so() -> None:
    source = drawn(status="INCONCLUSIVE", value_ms=None, high_ms=None, needs={"requests": 500, "minutes": 2.0})
    assert position(source, "sure open", "x") + position(source, "sure open", "width") == pytest.approx(100)
    assert "above 40.0 ms" in source
    assert 'class="at"' not in source


def test_a_value_far_beyond_its_limit_is_marked_at_the_edge() -> None:
    source = drawn(status="FAIL", value_ms=900.0, low_ms=700.0, high_ms=1200.0)
    assert "▸" in source
    assert 'class="at"' not in source


def test_a_run_without_objectives_has_no_gauges() -> None:
    assert str(gauges({"slo": []})) == ""


def test_a_percentile_that_failures_reach_is_never_met_and_marked_at_the_edge() -> None:
    source = drawn(status="FAIL", value_ms=None, low_ms=None, high_ms=None, infinite=True)
    assert "▸" in source
    assert "<span>never</span>" in source
