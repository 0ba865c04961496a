"""A request's trace context follows from its id, as W3C Trace Context writes it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.records.request import trace_ids, traceparent


@given(st.text())
def test_a_traceparent_has_the_form_that_the_standard_asks_for(request_id: str) -> None:
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", traceparent(request_id))
    assert match and (int(match[1], 16), int(match[2], 16)) == trace_ids(request_id)
    assert all(trace_ids(request_id))


def test_only_a_traced_request_carries_the_header_and_each_try_has_its_own() -> None:
    address = Address.of("http://127.0.0.1:1")
    assert b"traceparent" not in address.request("/v1", b"{}", "r1")
    first = Exchange(0, "r1", address.request("/v1", b"{}", "r1", traced=True))
    again = first.again()
    for exchange in (first, again):
        assert f"\r\ntraceparent: {traceparent(exchange.request_id)}\r\n".encode() in exchange.data
    assert first.data.count(b"traceparent") == again.data.count(b"traceparent") == 1
