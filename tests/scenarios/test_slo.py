"""SLOs are written in the field's words, with a unit, and never guessed at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.scenarios.errors import BadValue
from gapmeter.scenarios.slo import LATENCIES, Slo, parse_slo

MISTAKES = {
    "ttft p99 <= 500": "the limit 500 lacks its unit; write 500 ms or 500 s",
    "ttft p99 <= 500 min": '"min" is not a unit of time; write 500 ms or 500 s',
    "ttft <= 500 ms": "ttft lacks its percentile; write ttft p99 <= 500 ms",
    "ttft p100 <= 500 ms": "p100 is not a percentile; write one between p0 and p100, for instance p99",
    "ttft p9.9.9 <= 500 ms": '"9.9.9" is not a number; write for instance ttft p99 <= 500 ms or errors <= 1 %',
    "ttft p99 < 500 ms": '"<" is not a comparison; an SLO is an upper limit, write <=',
    "ttft p99 >= 500 ms": '">=" is not a comparison; an SLO is an upper limit, write <=',
    "ttft p99 <= 0 ms": "a limit of 0 ms can never hold; write what users can wait, for instance 500 ms",
    "tpto p95 <= 50 ms": '"tpto" is not a metric; did you mean tpot? write ttft, itl, tpot, e2e or errors',
    "latency p95 <= 50 ms": '"latency" is not a metric; write ttft, itl, tpot, e2e or errors',
    "errors <= 0.01": 'the limit "0.01" lacks its unit; write 0.01 %',
    "errors p99 <= 1 %": "errors is a share and has no percentile; write errors <= 1 %",
    "errors <= 101 %": "101 % is more than every request; write at most 100 %",
    "errors <= 0 %": "no run can show that nothing ever fails; write for instance errors <= 0.1 %",
    "ttft p9.9 <= 5 ms": "p9.9 has too many digits; write whole ones below p10, and at most six digits above",
    "ttft p99.99999 <= 5 ms": "p99.99999 has too many digits; write whole ones below p10, and at most six digits above",
    "be quick": '"be quick" is not an SLO; write ttft p99 <= 500 ms or errors <= 1 %',
    "": '"" is not an SLO; write ttft p99 <= 500 ms or errors <= 1 %',
}


@pytest.mark.parametrize(("text", "says"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_in_an_slo_says_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_slo(text)
    assert caught.value.text == says


@pytest.mark.parametrize("value", [None, 3, ["ttft p99 <= 500 ms"], {"ttft": 3}])
def test_what_is_no_text_is_no_slo(value: object) -> None:
    with pytest.raises(BadValue, match="is not an SLO"):
        parse_slo(value)


@given(
    metric=st.sampled_from(LATENCIES),
    percentile=st.sampled_from([50.0, 90.0, 99.0, 99.9, 99.99]),
    milliseconds=st.integers(1, 10_000),
    space=st.sampled_from(["", " ", "  "]),
)
def test_a_limit_is_the_same_in_any_unit_and_spacing(
    metric: str, percentile: float, milliseconds: int, space: str
) -> None:
    limits = [f"{milliseconds}{space}ms", f"{milliseconds / 1000:f}{space}s", f"{milliseconds * 1000}{space}us"]
    parsed = [parse_slo(f"{metric} p{percentile:g}{space}<={space}{limit}") for limit in limits]
    assert {slo.limit_ns for slo in parsed} == {milliseconds * 1_000_000}
    assert {(slo.metric, slo.percentile, slo.limit_share) for slo in parsed} == {(metric, percentile, None)}
    assert [parse_slo(slo.text) for slo in parsed] == parsed


@pytest.mark.parametrize("text", ["errors <= 0.00005 %", "itl p99 <= 0.00005 s", "ttft p50 <= 86400 s"])
def test_a_limit_of_any_size_can_be_read_back(text: str) -> None:
    assert parse_slo(parse_slo(text).text) == parse_slo(text)


def test_micro_may_be_the_greek_letter() -> None:
    assert parse_slo("itl p50 <= 500 \u03bcs") == parse_slo("itl p50 <= 500 \u00b5s")


def test_errors_are_a_share() -> None:
    assert parse_slo("errors <= 0.5%") == Slo(
        metric="errors", percentile=None, limit_ns=None, limit_share=0.005, text="errors <= 0.5 %"
    )
