"""Which runs the docs' pictures are taken of."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.screenshots import FIRST, chosen, newest, pictures_of
from gapmeter.runs.listing import ListedRun


def listed(folder: Path, name: str, kind: str, engine: str, verdict: str | None, *, page: bool = True) -> ListedRun:
    (folder / name).mkdir()
    if page:
        (folder / name / "report.html").write_text("<title>")
    return ListedRun(kind, str(folder / name), "", engine=engine, verdict=verdict)


def test_without_names_it_is_the_newest_valid_run_of_every_engine_and_the_newest_of_each_other_kind(
    tmp_path: Path,
) -> None:
    known = [
        listed(tmp_path, "old", "run", "vllm", "PASS"),
        listed(tmp_path, "sweep-1", "sweep", "vllm", None),
        listed(tmp_path, "vllm", "run", "vllm", "FAIL"),
        listed(tmp_path, "sweep-2", "sweep", "transformers", None),
        listed(tmp_path, "transformers", "run", "transformers", "PASS"),
        listed(tmp_path, "bad", "run", "vllm", "INVALID"),
        listed(tmp_path, "refused", "compare", "", "NOT COMPARABLE"),
        listed(tmp_path, "no-page", "capacity", "vllm", None, page=False),
    ]
    found = newest(known)
    assert [each.path.name for each in found] == ["transformers", "vllm", "sweep-2"]
    pictures = pictures_of(found)
    assert [(page.parent.name, picture.file) for page, picture in pictures[len(FIRST) :]] == [
        ("vllm", "report-vllm.png"), ("sweep-2", "report-sweep.png"),
    ]  # fmt: skip
    assert {page.parent.name for page, _ in pictures[: len(FIRST)]} == {"transformers"}


def test_a_name_without_a_page_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gapmeter report .* makes it"):
        chosen([tmp_path], tmp_path)
