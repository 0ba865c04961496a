from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapmeter.cli import main
from tests.analysis.report_frames import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "r", count=300, rate=22.0).path


def test_two_groups_are_explained_with_where_the_figures_are_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(run), "--group", "prompt_tokens > 96", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["a_count"] + told["b_count"] == 300
    assert sum(row["ms"] for row in told["ranked"]) == pytest.approx(told["difference_ms"])
    assert told["provenance"]["scenario"] == "chat-p99"


def test_people_read_a_table_and_the_largest_stage_in_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run), "--group", "rank_percent > 90", "--against", "rank_percent <= 50"]) == 0
    err = capsys.readouterr().err
    assert "rank_percent > 90 waited" in err
    assert "of it queue (capacity)" in " ".join(err.split())


@pytest.mark.parametrize(
    ("condition", "told"),
    [("prompt > 3", "'prompt' is no column"), ("prompt_tokens > 1e9", "holds for 0 of 300 requests; 5 are needed")],
)
def test_a_group_that_cannot_be_is_one_sentence_and_exit_2(
    run: Path, capsys: pytest.CaptureFixture[str], condition: str, told: str
) -> None:
    assert main(["explain", str(run), "--group", condition]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_was_never_analysed_is_told_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path), "--group", "prompt_tokens > 3"]) == 2
    assert "analyse it with: gapmeter report" in capsys.readouterr().err
