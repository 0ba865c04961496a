"""Whatever bytes come, however they are cut: an outcome with a name, and the same answer for the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gapmeter_probe.records import EMIT, FILE_HEADER, Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.analysis.requests.definitions import chunks
from gapmeter.records import Outcome, RecordWriter, read_records
from gapmeter.records.reader import NotRecords, frames
from gapmeter.records.stream import events, parse_answer
from gapmeter.servers.null.server import PreparedAnswer
from gapmeter.servers.null.server import chunk as http_chunk
from tests.fuzz.feed import ENDED, feed
from tests.kit.streams import comparable, wire
from tests.records.test_excerpt import load

CORPUS = sorted((Path(__file__).parents[1] / "fuzz" / "corpus").iterdir())
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: st.DataObject, whole: bytes) -> list[bytes]:
    if len(whole) < 2:
        return [whole] if whole else []
    at = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=40)))
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


def mutated(data: st.DataObject, whole: bytes) -> bytes:
    """Some bytes replaced, left out or put in."""
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(whole)))
        gone, new = data.draw(st.integers(0, 20)), data.draw(st.binary(max_size=12))
        whole = whole[:at] + new + whole[at + gone :]
    return whole


def answers() -> st.SearchStrategy[bytes]:
    """HTTP answers of our own null server, and of the corpus."""
    script = PreparedAnswer("chat", 1, 8, coded=True)
    good = [HEAD + script.start + bytes(script.tokens(0, k - 1)) + script.end(k) for k in (1, 2, 8)]
    return st.sampled_from([*good, *(path.read_bytes() for path in CORPUS)])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), ends=st.booleans())
def test_arbitrary_bytes_at_arbitrary_split_points_end_in_an_outcome_and_raise_nothing(
    data: st.DataObject, ends: bool
) -> None:
    whole = data.draw(st.one_of(st.binary(max_size=400), st.binary(max_size=200).map(HEAD.__add__)))
    record = feed(cut(data, whole), ends=ends)
    assert record.outcome in ENDED
    assert bool(record.error) == (record.outcome is not Outcome.OK) or record.outcome in (
        Outcome.HTTP_4XX, Outcome.HTTP_5XX,
    )  # fmt: skip
    answer = parse_answer(record)
    assert len(answer.token_ns) == answer.chunk_tokens.sum()
    list(chunks(record))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), whole=answers(), ends=st.booleans())
def test_an_answer_that_was_damaged_on_its_way_ends_in_an_outcome_and_raises_nothing(
    data: st.DataObject, whole: bytes, ends: bool
) -> None:
    record = feed(cut(data, mutated(data, whole)), ends=ends)
    assert record.outcome in ENDED
    parse_answer(record)
    list(chunks(record))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), whole=answers())
def test_the_same_bytes_are_the_same_answer_in_whatever_pieces_they_come(data: st.DataObject, whole: bytes) -> None:
    whole = mutated(data, whole)
    at_once, in_pieces = feed([whole] if whole else []), feed(cut(data, whole))
    if at_once.outcome is Outcome.MALFORMED or in_pieces.outcome is Outcome.MALFORMED:
        # How much of a broken answer was read before it broke depends on the pieces; that it broke does not, unless it
        # was complete before: what comes behind an answer in a later read belongs to nobody.
        assert {at_once.outcome, in_pieces.outcome} <= {Outcome.MALFORMED}
        return
    assert (at_once.outcome, at_once.status, at_once.body) == (in_pieces.outcome, in_pieces.status, in_pieces.body)
    assert comparable(parse_answer(at_once)) == comparable(parse_answer(in_pieces))
    assert [text for _, text in events(at_once)] == [text for _, text in events(in_pieces)]


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300), data=st.data())
def test_a_body_means_the_same_in_whatever_pieces_it_comes(body: bytes, data: st.DataObject) -> None:
    pieces = cut(data, body)
    whole, parts = wire([body] if body else []), wire(pieces)
    assert comparable(parse_answer(whole)) == comparable(parse_answer(parts))
    assert [text for _, text in events(whole)] == [text for _, text in events(parts)]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_every_seed_of_the_corpus_is_read_byte_by_byte_as_it_is_at_once(path: Path) -> None:
    whole = path.read_bytes()
    at_once, slowly = feed([whole]), feed([whole[k : k + 1] for k in range(len(whole))])
    assert (at_once.outcome, at_once.status) == (slowly.outcome, slowly.status)
    if at_once.outcome is Outcome.OK:
        assert comparable(parse_answer(at_once)) == comparable(parse_answer(slowly))


def test_a_chunk_size_that_lies_is_no_answer() -> None:
    assert feed([HEAD + b"ffffffffffffffffff\r\n" + http_chunk(b"x")]).outcome is Outcome.MALFORMED


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole record file with every kind of frame."""
    writer = RecordWriter(tmp_path_factory.mktemp("records") / "core.gap", {"role": "core"})
    load(writer, ["a", "b", "c"], 7)
    writer.blob(1, [b"what came over the wire"])
    writer.close()
    return Path(writer.path).read_bytes()


def test_a_frame_that_says_that_it_holds_more_than_it_does_is_named(recorded: bytes, tmp_path: Path) -> None:
    whole = bytearray(recorded)
    whole_frames = frames(recorded[FILE_HEADER.size :])[0]
    at = FILE_HEADER.size + next(offset for offset, kind in whole_frames if kind == Kind.EMIT)
    *before, _, at_ns = EMIT.unpack_from(whole, at)
    EMIT.pack_into(whole, at, *before, 200, at_ns)
    (tmp_path / "broken.gap").write_bytes(whole)
    with pytest.raises(NotRecords, match=f"damaged at byte {at}"):
        read_records(tmp_path / "broken.gap")
