"""The objectives' gauges: where a figure and its interval lie beside the limit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.report.document import Figure, Gauge, Mark
from gapmeter.report.pictures import gauge_line
from gapmeter.report.slo import slo_interval
from gapmeter.report.words import more_requests

GAUGE = Gauge(Mark("met"), "ttft p99 <= 100 ms", "50.0 ms", "40.0 .. 80.0 ms", Figure(100.0), 50.0, 40.0, 80.0)


def drawn(**changes: Any) -> str:
    return str(gauge_line(replace(GAUGE, **changes)))


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
    source = drawn(value=None, high=None, interval="above 40.0 ms")
    assert position(source, "sure open", "x") + position(source, "sure open", "width") == pytest.approx(100)
    assert "above 40.0 ms" in source
    assert 'class="at"' not in source


def test_a_bound_alone_is_a_band_from_0() -> None:
    source = drawn(value=None, low=None, high=80.0, interval="at most 80.0 ms (97 % sure)")
    assert position(source, "sure", "x") == 0
    assert position(source, "sure", "width") == pytest.approx(0.8 * position(source, "limit", "x1"), abs=0.01)


def test_a_value_far_beyond_its_limit_is_marked_at_the_edge() -> None:
    source = drawn(value=900.0, low=700.0, high=1200.0)
    assert "▸" in source
    assert 'class="at"' not in source


def test_a_percentile_that_failures_reach_is_never_met_and_marked_at_the_edge() -> None:
    source = drawn(value=None, low=None, high=None, never=True, measured="never")
    assert "▸" in source
    assert "<title>never, " in source


@pytest.mark.parametrize("low", [None, 53.4])
def test_a_limit_that_so_many_exceed_is_missed_by_their_share_and_not_by_an_end_below_it(low: float | None) -> None:
    missed = SloAnswer.model_construct(
        metric="ttft", basis="share", limit=75.0, low=low, high=None, at_most=None, late=None, beyond=37, count=77
    )
    assert slo_interval(missed) == "48 % beyond the limit"
    assert slo_interval(missed.model_copy(update={"low": 80.0})) == "80.0 ms or more"


def test_one_request_more_is_one() -> None:
    assert more_requests(Needs(requests=1, minutes=None)) == "1 more request"
    assert more_requests(Needs(requests=1200, minutes=None)) == "1,200 more requests"
    assert more_requests(Needs(requests=19383, minutes=20.0)) == "19,000 more requests"


def test_a_share_of_no_requests_has_no_interval() -> None:
    none = SloAnswer.model_construct(metric="errors", late=None, low=None, high=None, count=0)
    assert slo_interval(none) == "not estimable"
