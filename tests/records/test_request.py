"""Wire records on disk."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.records import Outcome, read_records
from gapmeter.records.request import (
    FINISHED,
    HEAD_DTYPE,
    ISSUED,
    MOST_ERROR_BYTES,
    Block,
    Flag,
    RequestRecord,
    decode,
    encode,
    trace_ids,
    traceparent,
)
from tests.kit.loads import write_records

_stamp = st.integers(0, 2**62)
_count = st.integers(0, 2**32 - 1)
_text = st.text(max_size=40)
_chunks = st.lists(st.tuples(_stamp, st.binary(max_size=30)), max_size=20)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    chunks = draw(_chunks)
    counts = {n: draw(_count) for n in ("index", "worker", "attempt", "prompt_tokens", "output_tokens", "connection")}
    stamps = {
        f.name: draw(_stamp)
        for f in fields(RequestRecord)
        if f.name.endswith("_ns") and not f.name.startswith("chunk_")
    }
    return RequestRecord(
        **counts,
        **stamps,
        request_id=draw(_text),
        error=draw(_text),
        status=draw(st.integers(0, 999)),
        outcome=draw(st.sampled_from(Outcome)),
        flags=draw(st.sampled_from([Flag(0), Flag.REUSED, Flag.TLS | Flag.RESENT])),
        chunk_ns=np.array([stamp for stamp, _ in chunks], np.int64),
        chunk_bytes=np.array([len(piece) for _, piece in chunks], np.uint32),
        body=b"".join(piece for _, piece in chunks),
    )


def same(one: RequestRecord, other: RequestRecord) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(RequestRecord))


@given(records())
def test_a_record_decodes_to_what_was_encoded(record: RequestRecord) -> None:
    assert same(decode(b"".join(encode(record))), record)


@given(records(), st.data())
def test_a_record_cut_anywhere_is_refused(record: RequestRecord, data: st.DataObject) -> None:
    whole = b"".join(encode(record))
    with pytest.raises(ValueError, match="request record"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_records_come_back_from_a_record_file_with_their_codes(tmp_path: Path) -> None:
    issued = RequestRecord(index=3, request_id="r-3", worker=1, due_ns=5, sent_ns=9)
    finished = RequestRecord(
        index=3, request_id="r-3", worker=1, due_ns=5, sent_ns=9, outcome=Outcome.OK, status=200, body=b"abc",
        chunk_ns=np.array([11, 12], np.int64), chunk_bytes=np.array([1, 2], np.uint32),
    )  # fmt: skip
    write_records(tmp_path / "worker-0.gap", [(ISSUED, issued), finished])
    blobs = read_records(tmp_path / "worker-0.gap").blobs
    assert [code for code, _ in blobs] == [ISSUED, FINISHED]
    assert same(decode(blobs[0][1]), issued)
    assert same(decode(memoryview(blobs[1][1])), finished)


def test_an_issued_request_that_never_ended_counts_as_lost() -> None:
    assert decode(b"".join(encode(RequestRecord(index=0, request_id="a", worker=0, due_ns=1)))).outcome is Outcome.LOST


@pytest.mark.parametrize("outcome", [10, max(Outcome) + 1])
def test_an_outcome_that_is_none_is_damage_in_a_record_and_in_a_block(outcome: int) -> None:
    whole = b"".join(encode(RequestRecord(index=0, request_id="a")))
    at = HEAD_DTYPE.fields["outcome"][1] if HEAD_DTYPE.fields else 0
    damaged = whole[:at] + outcome.to_bytes(4, "little") + whole[at + 4 :]
    for read in (decode, lambda payload: Block.joined([payload])):
        read(whole)
        with pytest.raises(ValueError, match=r"outcome|Outcome"):
            read(damaged)


def test_an_endless_error_text_is_cut() -> None:
    record = RequestRecord(index=0, request_id="a", worker=0, due_ns=1, error="ö" * 5000, body=b"kept")
    back = decode(b"".join(encode(record)))
    assert len(back.error.encode()) <= MOST_ERROR_BYTES + 3
    assert back.body == b"kept"


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
