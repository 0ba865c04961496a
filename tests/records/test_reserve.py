"""Room made ahead of the records changes nothing in the file."""

from __future__ import annotations

import threading
from pathlib import Path

from gapmeter.records import RecordWriter, read_records
from gapmeter.records.follow import RecordTail
from gapmeter.records.request import FINISHED, RequestRecord, encode


def test_a_file_with_reserved_room_is_cut_to_its_records(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "a.gap", {})
    writer.reserve(50 << 20)
    assert (tmp_path / "a.gap").stat().st_size > 50 << 20
    writer.json({"type": "one"})
    writer.reserve(1)
    writer.close()
    writer.reserve(1 << 20)
    assert (tmp_path / "a.gap").stat().st_size < 4096
    assert [note["type"] for note in read_records(tmp_path / "a.gap").notes] == ["process", "one"]


def test_records_written_while_pages_are_readied_and_the_file_grows_are_all_there(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "a.gap", {})
    over = threading.Event()

    def ready() -> None:
        while not over.wait(0.0002):
            writer.prefault(1 << 20)

    thread = threading.Thread(target=ready)
    thread.start()
    try:
        for index in range(400):
            body = bytes([index % 256]) * 50_000
            writer.blob(FINISHED, encode(RequestRecord(index=index, request_id="r", worker=0, due_ns=0, body=body)))
    finally:
        over.set()
        thread.join()
    found = [record for _, record in RecordTail(tmp_path / "a.gap").poll()]
    writer.prefault(1 << 20)
    writer.close()
    writer.prefault(1 << 20)
    assert [record.index for record in found] == list(range(400))
    assert all(record.body == bytes([record.index % 256]) * 50_000 for record in found)
    assert read_records(tmp_path / "a.gap").complete
