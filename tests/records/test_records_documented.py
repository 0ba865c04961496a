"""docs/records.md names everything that a file may hold."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import pytest

from gapmeter.records import EntryFlag, Kind, Outcome, Span, StepFlag
from gapmeter.records.request import FIELDS

TEXT = (Path(__file__).parents[2] / "docs" / "records.md").read_text()


@pytest.mark.parametrize("names", [Kind, Span, StepFlag, EntryFlag, Outcome])
def test_every_code_of_the_schema_is_documented(names: type[IntEnum]) -> None:
    missing = [name for name, member in names.__members__.items() if f"| {name} {member.value} |" not in TEXT]
    assert not missing


def test_every_field_of_a_requests_record_is_documented_in_the_order_of_its_layout() -> None:
    sizes = {"I": "u32", "H": "u16", "q": "i64"}
    rows = ["| field | in the head | column | what it is |", "| --- | --- | --- | --- |"]
    for name, stored in FIELDS.items():
        kept = sizes.get(stored.code, "")
        length = "length " if kept and name in ("request_id", "error", "chunk_ns", "body") else ""
        column = f"`{stored.column}`" if stored.column else ""
        rows.append(f"| `{name}` | {length}{kept} | {column} | {stored.text} |")
    table = "\n".join(rows) + "\n"
    assert table in TEXT, table
