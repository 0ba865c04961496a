"""A probe's file is read block by block, and gives what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gapmeter_probe.records import FILE_HEADER, JSON, MAGIC, SCHEMA_VERSION, Kind

from gapmeter.records import Outcome, RecordWriter, Span, StepFlag, reader


@pytest.mark.parametrize("block", [64, 1000, 1 << 22])
def test_records_are_the_same_however_large_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    spans = [(Span.EGRESS, 1 + n % 3, 1000 + n, 2000 + n, n) for n in range(20_000)]
    writer = RecordWriter(tmp_path / "api.gap", {"role": "api"})
    refs = [writer.request(f"engine-{n}", f"client-{n}") for n in range(3)]
    for code, ref, start, end, n in spans[:7]:
        writer.span(code, ref, start, end, n)
    writer.step(StepFlag.ASYNC, 5, [(refs[0], 9, 0, 0, 1), (refs[1], 1, 9, 0, 0)], running=2, waiting=1, free_blocks=3,
                schedule_ns=77)  # fmt: skip
    for code, ref, start, end, n in spans[7:]:
        writer.span(code, ref, start, end, n)
    writer.emit(5, 99, [(refs[0], 1), (refs[1], 2)])
    writer.counts(Outcome.OK, refs[2], 4, 5, 6, 88)
    writer.json({"type": "note"})
    writer.close()
    monkeypatch.setattr(reader, "_BLOCK", block)
    found = reader.read_records(tmp_path / "api.gap")
    names = ("code", "ref", "start_ns", "end_ns", "n")
    assert [tuple(row) for row in np.stack([found.spans[name] for name in names], axis=1).tolist()] == spans
    assert found.entries.tolist() == [(refs[0], 9, 0, 0, 1), (refs[1], 1, 9, 0, 0)]
    assert (found.entry_step.tolist(), found.steps["schedule_ns"].tolist()) == ([5, 5], [77])
    assert found.emissions.tolist() == [(refs[0], 1), (refs[1], 2)]
    assert (found.emission_step.tolist(), found.emits["at_ns"].tolist()) == ([5, 5], [99])
    assert [(row["ref"], row["cached"], row["at_ns"]) for row in found.counts] == [(refs[2], 6, 88)]
    assert found.client_ids == {ref: f"client-{n}" for n, ref in enumerate(refs)}
    assert ([note["type"] for note in found.notes], found.complete) == (["process", "note"], True)


@pytest.mark.parametrize("cut", [0, 1, 8, 39])
def test_a_block_may_end_with_any_span_or_in_the_middle_of_one(tmp_path: Path, cut: int) -> None:
    writer = RecordWriter(tmp_path / "api.gap", {"role": "api"})
    for at in range(40):
        writer.span(Span.EGRESS, at, at, at + 1)
    writer.close()
    spans = reader.read_records(tmp_path / "api.gap").spans.tobytes()
    for count in range(1, 41):
        block = spans[: count * reader.SPAN_DTYPE.itemsize - cut]
        others, rows, used, closed = reader.frames(block)
        assert used == (count - (cut > 0)) * reader.SPAN_DTYPE.itemsize
        assert (len(others), int(np.diff(rows).sum()), closed) == (0, used, False)


def test_a_note_that_is_nested_too_deeply_is_torn(tmp_path: Path) -> None:
    text = b"[" * 100_000
    size = JSON.size + len(text)
    frame = JSON.pack(size, Kind.JSON, 0, 7) + text
    (tmp_path / "api.gap").write_bytes(FILE_HEADER.pack(MAGIC, SCHEMA_VERSION, 0) + frame)
    assert reader.read_records(tmp_path / "api.gap").notes == [{"type": "torn", "at_ns": 7}]
