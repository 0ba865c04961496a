"""Raw records are compressed when their run is over, and read the same in either form."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gapmeter.records import RecordWriter, RunFolder, read_records
from gapmeter.records.compression import SUFFIX, compress, open_record
from gapmeter.records.reader import NotRecords
from tests.fuzz.targets import golden
from tests.kit.wait import limited


def test_a_sealed_folder_holds_each_record_once_and_reads_as_before(tmp_path: Path) -> None:
    shutil.copytree(golden("simulated"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    content = {path: path.read_bytes() for part in (folder.requests, folder.probe) for path in part.glob("*.gap")}
    before = {path: read_records(path) for path in content}
    assert content
    hashes = folder.seal()
    for path, data in content.items():
        assert not path.exists()
        packed = path.with_name(path.name + SUFFIX)
        assert str(packed.relative_to(folder.path)) in hashes
        assert packed.stat().st_size < len(data) / 2
        with open_record(packed) as file:
            assert file.read() == data
        after, same = read_records(packed), before[path]
        assert after.blobs == same.blobs
        assert after.complete == same.complete
        for table in ("spans", "counts", "steps", "entries", "emissions", "device"):
            np.testing.assert_array_equal(getattr(after, table), getattr(same, table))
    assert folder.seal() == hashes


def test_what_was_left_of_a_compression_that_was_broken_off_counts_for_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "any", "abcdef")
    for name in ("a.gap", "a.gap.zst", "a.gap.zst.part", "b.gap.zst"):
        (folder.probe / name).write_bytes(b"")
    assert [path.name for path in folder.record_files(folder.probe)] == ["a.gap", "b.gap.zst"]


@pytest.mark.parametrize("damage", ["cut", "other", "more"])
def test_a_damaged_compressed_record_ends_in_a_sentence(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "worker-0.gap"
    writer = RecordWriter(path, {"role": "generator"})
    writer.blob(1, [random.Random(1).randbytes(100_000)])
    writer.close()
    packed = compress(path)
    data = packed.read_bytes()
    packed.write_bytes({"cut": data[:-100], "other": b"x" + data[1:], "more": data + b"more"}[damage])
    with pytest.raises(NotRecords, match=r"worker-0\.gap\.zst: it cannot be unpacked"):
        read_records(packed)


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    uniform = tmp_path / "worker-0.gap"
    with uniform.open("wb") as file:
        file.truncate((1 << 30) + 1)  # sparse: nothing of it is on the disk
    assert compress(uniform) == uniform, "what a reader would refuse is not written"
    bomb = tmp_path / "worker-1.gap.zst"
    with bomb.open("wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
        for _ in range((1 << 30 >> 22) + 1):
            stream.write(bytes(1 << 22))
    with open_record(bomb) as file, pytest.raises(ValueError, match="more than records can be"):
        list(iter(lambda: file.read(1 << 24), b""))


def test_where_there_is_no_room_for_both_a_record_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.gap"
    path.write_bytes(content := random.Random(1).randbytes(1 << 20))
    with limited(resource.RLIMIT_FSIZE, 1 << 16):
        assert compress(path) == path
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == content
