"""Answers byte by byte, and sizes that lie; whatever else a stranger may send is tried in ``tests/test_fuzz.py``."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gapmeter_probe.records import FILE_HEADER, HEAD, Kind

from gapmeter.records import Outcome, RecordWriter, read_records
from gapmeter.records.reader import NotRecords, frames
from gapmeter.records.stream import parse_answer
from gapmeter.servers.null.server import chunk as http_chunk
from tests.fuzz.feed import feed
from tests.kit.streams import comparable
from tests.records.test_excerpt import load

CORPUS = sorted((Path(__file__).parents[1] / "fuzz" / "corpus").iterdir())
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_every_seed_of_the_corpus_is_read_byte_by_byte_as_it_is_at_once(path: Path) -> None:
    whole = path.read_bytes()
    at_once, slowly = feed([whole]), feed([whole[k : k + 1] for k in range(len(whole))])
    assert (at_once.outcome, at_once.status) == (slowly.outcome, slowly.status)
    if at_once.outcome is Outcome.OK:
        assert comparable(parse_answer(at_once)) == comparable(parse_answer(slowly))


def test_a_chunk_size_that_lies_is_no_answer() -> None:
    assert feed([ANSWER + b"ffffffffffffffffff\r\n" + http_chunk(b"x")]).outcome is Outcome.MALFORMED


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole record file with every kind of frame."""
    writer = RecordWriter(tmp_path_factory.mktemp("records") / "core.gap", {"role": "core"})
    load(writer, ["a", "b", "c"], 7)
    writer.blob(1, [b"what came over the wire"])
    writer.close()
    return Path(writer.path).read_bytes()


@pytest.mark.parametrize("kind", [Kind.EMIT, Kind.BLOB], ids=lambda kind: kind.name)
def test_a_frame_that_says_that_it_holds_more_than_it_does_is_named(
    kind: Kind, recorded: bytes, tmp_path: Path
) -> None:
    whole = bytearray(recorded)
    others = frames(recorded[FILE_HEADER.size :]).others
    at = FILE_HEADER.size + next(offset for offset, found in others if found == kind)
    held_at = {Kind.EMIT: 12, Kind.BLOB: 8}[kind]
    whole[at + held_at : at + held_at + 4] = struct.pack("<I", 200)
    (tmp_path / "broken.gap").write_bytes(whole)
    with pytest.raises(NotRecords, match=f"damaged at byte {at}"):
        read_records(tmp_path / "broken.gap")


def test_a_request_of_a_number_that_no_process_reaches_is_named(recorded: bytes, tmp_path: Path) -> None:
    """Tables have room for as many as the largest says."""
    whole = bytearray(recorded)
    others = frames(recorded[FILE_HEADER.size :]).others
    at = FILE_HEADER.size + next(offset for offset, found in others if found == Kind.REQUEST)
    whole[at + 8 : at + 12] = struct.pack("<I", 1 << 31)
    (tmp_path / "broken.gap").write_bytes(whole)
    with pytest.raises(NotRecords, match=f"damaged at byte {at}"):
        read_records(tmp_path / "broken.gap")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.END], ids=lambda kind: kind.name)
def test_a_frame_too_short_for_its_kind_is_named(kind: Kind, recorded: bytes, tmp_path: Path) -> None:
    used = FILE_HEADER.size + frames(recorded[FILE_HEADER.size :]).used
    (tmp_path / "broken.gap").write_bytes(recorded[:used] + HEAD.pack(HEAD.size, kind, 0))
    with pytest.raises(NotRecords, match=f"damaged at byte {used}"):
        read_records(tmp_path / "broken.gap")
