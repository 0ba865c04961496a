"""One process's record file, cut into the parts of several loads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.records import Outcome, RecordFile, RecordWriter, Span, read_records
from gapmeter.records.excerpt import Growing


def load(writer: RecordWriter, names: list[str], at: int) -> None:
    """One load's records: each request is named, steps, emits and ends."""
    refs = [writer.request(f"engine-{name}", name) for name in names]
    writer.step(0, at, [(ref, 1, 0, 0, 0) for ref in refs], running=1, waiting=0, free_blocks=9, schedule_ns=at)
    writer.emit(at, at, [(ref, 1) for ref in refs])
    for ref in refs:
        writer.span(Span.EGRESS, ref, at, at + 1)
        writer.counts(Outcome.OK, ref, 3, 1, 0, at + 1)


def cut(growing: Growing, target: Path, *, complete: bool = True) -> RecordFile:
    growing.cut(target, complete=complete)
    return read_records(target)


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / "core.gap", {"role": "core"})


def test_each_load_has_its_own_requests_and_what_the_process_said_before(tmp_path: Path, writer: RecordWriter) -> None:
    writer.json({"type": "settings", "max_batch": 4})
    growing = Growing(Path(writer.path))
    for number, names in enumerate((["a", "b"], ["c"], ["d", "e"])):
        growing.begin()
        load(writer, names, 100 * number + 7)
        part = cut(growing, tmp_path / f"part-{number}.gap")
        assert sorted(part.client_ids.values()) == names
        assert part.steps["seq"].tolist() == [100 * number + 7]
        assert len(part.counts) == len(names)
        assert part.process["role"] == "core"
        assert [note["type"] for note in part.notes] == ["process", "settings"]
        assert part.complete
        assert len(part.entries) == len(part.emissions) == len(names)
    writer.close()


def test_a_part_larger_than_the_kernel_moves_in_one_call_is_copied_whole(
    tmp_path: Path, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves 2 GiB at most; here, 1,000 bytes."""
    read, send = os.pread, os.sendfile
    monkeypatch.setattr(os, "pread", lambda fd, count, at: read(fd, min(count, 1000), at))
    monkeypatch.setattr(os, "sendfile", lambda to, fd, at, count: send(to, fd, at, min(count, 1000)))
    growing = Growing(Path(writer.path))
    growing.begin()
    for at in range(100):
        load(writer, [f"{at}"], at)
    part = cut(growing, tmp_path / "part.gap")
    assert part.complete
    assert part.steps["seq"].tolist() == [*range(100)]
    writer.close()


def test_a_request_of_before_that_is_still_at_work_is_named_again(tmp_path: Path, writer: RecordWriter) -> None:
    growing = Growing(Path(writer.path))
    lasting = writer.request("engine-lasting", "lasting")
    writer.request("engine-over", "over")
    growing.begin()
    load(writer, ["new"], 5)
    writer.counts(Outcome.ABORTED, lasting, 3, 1, 0, 9)
    part = cut(growing, tmp_path / "part.gap")
    assert sorted(part.client_ids.values()) == ["lasting", "new"]
    assert part.client_ids[lasting] == "lasting"
    copied = (tmp_path / "part.gap").read_bytes()
    assert copied.index(b"engine-lasting") < copied.index(b"engine-new"), "ahead of what refers to it"
    writer.close()


def test_a_process_that_died_leaves_a_part_without_an_end_and_one_that_closed_leaves_one_with(
    tmp_path: Path, writer: RecordWriter
) -> None:
    growing = Growing(Path(writer.path))
    growing.begin()
    load(writer, ["a"], 5)
    assert not cut(growing, tmp_path / "died.gap", complete=False).complete
    writer.close()
    assert cut(growing, tmp_path / "closed.gap", complete=False).complete


def test_what_the_writer_has_reserved_and_not_filled_is_waited_for(tmp_path: Path, writer: RecordWriter) -> None:
    growing = Growing(Path(writer.path))
    growing.begin()
    hole = writer._reserve(40)
    load(writer, ["behind"], 5)
    with open(writer.path, "r+b") as file:  # another thread's record, there a little later
        file.seek(hole)
        file.write((40).to_bytes(4, "little") + bytes([2, 0, Span.CANARY, 0]) + bytes(32))
    assert sorted(cut(growing, tmp_path / "part.gap").client_ids.values()) == ["behind"]
    writer.close()


def test_a_file_that_is_no_record_file_never_grows(tmp_path: Path) -> None:
    (tmp_path / "other.gap").write_bytes(b"anything else, as long as it may be: longer than a head")
    growing = Growing(tmp_path / "other.gap")
    growing.begin()
    growing.advance()
    assert not growing.is_record
    assert not growing.grew()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_the_parts_of_all_loads_are_the_whole(tmp_path_factory: pytest.TempPathFactory, counts: list[int]) -> None:
    tmp = tmp_path_factory.mktemp("parts")
    writer = RecordWriter(tmp / "core.gap", {"role": "core"})
    growing, spans, ids = Growing(tmp / "core.gap"), 0, set()
    for number, count in enumerate(counts):
        growing.begin()
        load(writer, [f"{number}-{k}" for k in range(count)], number)
        part = cut(growing, tmp / f"{number}.gap")
        spans += len(part.spans)
        ids |= set(part.client_ids.values())
    writer.close()
    whole = read_records(tmp / "core.gap")
    assert spans == len(whole.spans)
    assert ids == set(whole.client_ids.values())
