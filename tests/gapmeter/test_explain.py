"""``gapmeter explain``: groups are conditions of SQL on a run's requests; what makes the one slower is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.cli import main
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.report.run_folder import ReportedRun
from gapmeter.runs import explain
from gapmeter.runs.comparison import compare_folders
from gapmeter.runs.explain import holds
from tests.kit.runs import write_run

COLUMNS = {
    "tokens": pd.Series([10, 64, 65, None], dtype="Int64"),
    "ms": pd.Series([1.5, 2.0, np.nan, 300.0]),
    "reason": pd.Series(["stop", "length", "length", "stop"]),
    "index": pd.Series([0, 1, 2, 3]),
}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tokens > 64", [2]), ("tokens >= 64", [1, 2]), ("64 < tokens", [2]), ("10 < tokens and tokens <= 65", [1, 2]),
        ("reason == 'length' and ms < 5", [1]), ("tokens > 64 or ms > 100", [2, 3]), ("ms != 2", [0, 3]),
        ("not reason = 'stop'", [1, 2]), ("ms > -1", [0, 1, 3]), ("ms < tokens", [0, 1]), ("index > 1", [2, 3]),
        ("not tokens > 64", [0, 1]), ("not ms < 2", [1, 3]), ("tokens in (10, 65)", [0, 2]),
        ("not (tokens > 64 or ms > 100)", [0, 1]), ("tokens between 60 and 65", [1, 2]), ("reason like 's%'", [0, 3]),
        ("tokens > 64 -- as written", [2]), ("ms > (select avg(ms) from requests)", [3]),
    ],
)  # fmt: skip
def test_a_condition_holds_for_the_rows_that_it_says_and_never_for_an_unknown_value(text: str, rows: list[int]) -> None:
    assert np.flatnonzero(holds(text, COLUMNS) == 1).tolist() == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("token > 3", 'column "token" not found'),
        ("tokens >", "syntax error"),
        ("tokens", "write one as: prompt_tokens > 64"),
        ("reason > 3", "Cannot compare values of type VARCHAR"),
        ("10 < tokens <= 64", "use AND to combine comparisons"),
        ('reason = "stop"', 'column "stop" not found'),
        ("tokens > 3 from requests; drop table requests; select 1", "more than one"),
        ("tokens > 3) or (true", "syntax error"),
        ("tokens > (select count(*) from read_text('/etc/hostname'))", "disabled by configuration"),
        ("unnest([true, true])", "UNNEST"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(UserError, match="is not a condition") as refused:
        holds(text, COLUMNS)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value).replace(repr(text), "")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abct oken><=!&|()[]{}.,'\"0123456789-+*_\\\n", max_size=60))
def test_no_text_does_anything_but_hold_or_be_refused(text: str) -> None:
    try:
        assert len(holds(text, COLUMNS)) == 4
    except UserError:
        pass


@pytest.mark.whole_run
def test_two_groups_are_explained_with_where_the_figures_are_from(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(finished_run), "--group", "rank_percent > 50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["a_count"] + found["b_count"] == 30
    assert sum(row["ms"] for row in found["ranked"]) == pytest.approx(found["difference_ms"])
    assert found["provenance"]["scenario"] == "smoke"


@pytest.mark.whole_run
def test_the_rest_has_none_for_which_the_condition_is_unknown(finished_run: Path) -> None:
    found = explain.explain(finished_run, "nullif(index % 3, 0) > 1 -- and of every third it is unknown").difference
    assert (found.a_count, found.b_count) == (10, 10)


def test_of_a_condition_that_answers_differently_each_time_the_rest_are_those_for_which_it_did_not_hold(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "r", count=240).path
    found = explain.explain(run, "random() < 0.5").difference
    assert found.a_count + found.b_count == 240


def test_a_column_that_a_table_lacks_is_named_in_words(tmp_path: Path) -> None:
    run, other = (write_run(tmp_path / name, count=240).path for name in "ab")
    table = pd.read_parquet(run / "requests.parquet")
    table.drop(columns="outcome").to_parquet(run / "requests.parquet")
    with pytest.raises(UserError, match="cannot be read as an analysed run: it has no 'outcome'; analyse it again"):
        explain.explain(run, "rank_percent > 50")
    with pytest.raises(UserError, match="cannot be read as an analysed run: it has no 'outcome'; analyse it again"):
        compare_folders([[run], [other]], runs=tmp_path / "runs")


@pytest.mark.whole_run
def test_a_strangers_words_in_a_manifest_reach_no_terminal_as_they_are(
    run_copy: Callable[[], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_copy()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(explain, "_SHOWN", 99)  # also the rows of the device, however small
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["device"] = manifest["scenario"]["server"]["model"] = "\x1b[2J[red]GPU"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["explain", str(run), "--group", "rank_percent > 50"]) == 0
    said = "".join(capfd.readouterr())
    assert "\x1b[2J" not in said
    assert "[red]" in said


@pytest.mark.whole_run
def test_people_read_a_table_and_the_largest_stage_in_a_sentence(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(finished_run), "--group", "rank_percent > 80", "--against", "rank_percent <= 50"]) == 0
    out = capsys.readouterr().out
    table = out.partition("stage (owner)")[2].partition("\n smoke ")[0]  # beneath it is where the figures are from
    assert max(map(len, table.splitlines())) <= 80
    said = " ".join(out.split())
    assert "rank_percent > 80 waited" in said
    assert "stage (owner) these others difference share" in said
    assert "95 % interval" in said, "in a column, or under each row"


@pytest.mark.whole_run
@pytest.mark.parametrize(("ends", "shares"), [((1.0, 9.0), True), ((-1.0, 9.0), False)])
def test_stages_have_no_shares_of_a_difference_that_is_not_proven(
    finished_run: Path, capsys: pytest.CaptureFixture[str], ends: tuple[float, float], shares: bool
) -> None:
    found = explain.explain(finished_run, "rank_percent > 80")
    explain.show(replace(found, difference=found.difference.model_copy(update={"difference_ci_ms": ends})))
    assert bool(re.search(r"s +[-<> \d.,]+ %", capsys.readouterr().out)) is shares, "behind a difference, in ms"


@pytest.mark.whole_run
@pytest.mark.parametrize(
    ("condition", "says"),
    [("prompt > 3", 'column "prompt" not found'), ("prompt_tokens > 1e9", "holds for 0 of 30 requests; 5 are needed")],
)
def test_a_group_that_cannot_be_is_one_sentence_and_exit_2(
    finished_run: Path, capsys: pytest.CaptureFixture[str], condition: str, says: str
) -> None:
    assert main(["explain", str(finished_run), "--group", condition]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.whole_run
def test_a_folder_that_was_never_analysed_is_told_how(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "summary.json").unlink()
    assert main(["explain", str(run), "--group", "prompt_tokens > 3"]) == 2
    assert "no summary.json; analyse it first: gapmeter report" in capsys.readouterr().err


def test_a_folder_of_something_else_is_not_sent_to_be_analysed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path), "--group", "prompt_tokens > 3"]) == 2
    assert "is not a run's folder: it has no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize(("incomplete", "said"), [("stopped by Ctrl-C", True), ("", False)])
def test_a_run_that_is_no_measurement_is_told_before_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], incomplete: str, said: bool, form: tuple[str, ...]
) -> None:
    path = write_run(tmp_path / "r", count=200, rate=15.0, evidence={"incomplete": incomplete}).path
    assert main(["explain", str(path), "--group", "prompt_tokens > 96", *form]) == 0
    assert capsys.readouterr().err.startswith(f"gapmeter: {path} is INVALID: ") is said


def test_groups_that_lie_in_one_stretch_are_told_so_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain.explain(write_run(tmp_path / "r", count=200, rate=15.0).path, "prompt_tokens > 96")
    explain.show(replace(found, difference=found.difference.model_copy(update={"stretches": 1})))
    assert ", in 1 stretch." in " ".join(capsys.readouterr().out.split())


def test_due_s_counts_from_where_the_time_axis_of_the_report_begins(finished_run: Path) -> None:
    """At the first request of all, of the warm-up too."""
    _, requests, rows, origin_ns = explain._read(finished_run, "ttft")
    due_s = explain.columns_of(requests, rows, origin_ns)["due_s"]
    run = ReportedRun.read(RunFolder(finished_run))
    assert due_s.tolist() == pytest.approx(((requests["due_ns"] - run.origin_ns) / 1e9).tolist())
    assert origin_ns == run.origin_ns
