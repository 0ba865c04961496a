"""docs/records.md names everything that a file may hold."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import pytest

from gapmeter.records import CoreThread, EntryFlag, Kind, Outcome, Span, StepFlag

TEXT = (Path(__file__).parents[2] / "docs" / "records.md").read_text()


@pytest.mark.parametrize("names", [Kind, Span, StepFlag, EntryFlag, Outcome, CoreThread])
def test_every_code_of_the_schema_is_documented(names: type[IntEnum]) -> None:
    missing = [name for name, member in names.__members__.items() if f"| {name} {member.value} |" not in TEXT]
    assert not missing
