"""A runs folder is listed by what its folders say of themselves; a broken one is named, not hidden."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gapmeter.runs.listing import listing

SCENARIO = {"name": "chat", "server": {"engine": "vllm", "model": "m"}, "load": {"rate": 8.0}}


def folder(runs: Path, name: str, manifest: Any, summary: Any = None) -> Path:
    made = runs / name
    made.mkdir(parents=True)
    for file, content in (("manifest.json", manifest), ("summary.json", summary)):
        if content is not None:
            (made / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return made


def test_runs_come_in_the_order_in_which_they_began_with_their_figures(tmp_path: Path) -> None:
    summary = {
        "verdict": "PASS",
        "counts": {"measured": 5},
        "metrics": {"ttft": {"p99_ms": 1.5}, "itl": {"p99_ms": None}},
    }
    folder(tmp_path, "b", {"schema_version": 1, "scenario": SCENARIO, "started_wall": "2026-01-02T00:00:00"}, summary)
    folder(
        tmp_path,
        "a",
        {"schema_version": 1, "scenario": SCENARIO, "started_wall": "2026-01-03T00:00:00", "kind": "sweep"},
        {"sweep": {}},
    )
    (tmp_path / "something-else").mkdir()
    first, second = listing(tmp_path)
    known = first.entry
    assert (first.name, known.verdict, known.measured, known.ttft_p99_ms) == ("b", "PASS", 5, 1.5)
    assert (known.load, known.model) == ("8 req/s", "m")
    assert (second.entry.kind, second.state, second.entry.measured) == ("sweep", "done", None)


@pytest.mark.parametrize(
    "manifest",
    ["{", "[]", '{"schema_version": 1, "scenario": 5}', '{"schema_version": 1, "scenario": {"server": "vllm"}}'],
)
def test_a_damaged_folder_is_listed_as_such(tmp_path: Path, manifest: str) -> None:
    folder(tmp_path, "20260102-030405-chat-abc", manifest)
    (found,) = listing(tmp_path)
    assert found.state == "damaged" and found.entry.reason and found.entry.started == "2026-01-02T03:04:05"


def test_a_run_without_results_is_running_while_it_writes_and_unfinished_later(tmp_path: Path) -> None:
    made = folder(tmp_path, "r", {"schema_version": 1, "scenario": SCENARIO, "status": "running"})
    assert listing(tmp_path)[0].state == "running"
    os.utime(made / "manifest.json", (1, 1))
    assert listing(tmp_path)[0].state == "unfinished"


def test_what_was_written_again_is_read_again(tmp_path: Path) -> None:
    made = folder(tmp_path, "r", {"schema_version": 1, "scenario": SCENARIO}, {"verdict": "FAIL"})
    assert listing(tmp_path)[0].entry.verdict == "FAIL"
    (made / "summary.json").write_text('{"verdict": "PASS"}')
    os.utime(made / "summary.json", ns=(1, 1))
    assert listing(tmp_path)[0].entry.verdict == "PASS"


def test_there_is_nothing_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert listing(tmp_path / "none") == []
