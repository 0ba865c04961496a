"""A folder of runs can be listed, and asked by SQL; nothing that is asked changes anything or reads anything else."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gapmeter import errors
from gapmeter.cli import main
from gapmeter.errors import UserError
from gapmeter.runs.listing import list_runs
from gapmeter.runs.sql import ask
from tests.kit.command import Command
from tests.kit.wait import until

pytestmark = pytest.mark.whole_run


@pytest.fixture(scope="module")
def runs(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, a sweep of one point, a comparison, a run that was killed, a foreign folder and a damaged one."""
    home = tmp_path_factory.mktemp("many") / "it's all here"
    shutil.copytree(finished_run, home / "20260102-000000-second-bbbbbb")
    shutil.copytree(finished_run, home / "20260101-000000-first-aaaaaa")
    shutil.copytree(finished_run, home / "20260103-000000-smoke-sweep-cccccc" / "points" / "a")
    for name, stamp in (("20260102-000000-second-bbbbbb", "02"), ("20260101-000000-first-aaaaaa", "01")):
        change(home / name / "manifest.json", started_wall=f"2026-01-{stamp}T00:00:00+0000")
    older = home / "20260101-000000-first-aaaaaa"
    for table in ("steps", "gaps"):
        (older / f"{table}.parquet").unlink()
    common = ("schema_version", "status", "scenario", "scenario_digest", "command", "started_wall_ns", "started_ns",
              "hardware", "versions", "git")  # fmt: skip
    run = json.loads((older / "manifest.json").read_text())
    sweep = {key: run[key] for key in common} | {"kind": "sweep", "repeat": 1, "points": [], "order": []}
    sweep["started_wall"] = "2026-01-03T00:00:00+0000"
    written(home / "20260103-000000-smoke-sweep-cccccc" / "manifest.json", sweep)
    written(home / "20260104-000000-compare-dddddd" / "compare.json", {})
    killed = home / "20260105-000000-killed-eeeeee"
    (killed / "requests").mkdir(parents=True)
    shutil.copy(older / "manifest.json", killed)
    change(killed / "manifest.json", status="running", started_wall="2026-01-05T00:00:00+0000")
    os.utime(killed / "manifest.json", (1, 1))
    (home / "20260106-000000-foreign-ffffff" / "requests").mkdir(parents=True)
    broken = home / "20260107-000000-broken-999999" / "manifest.json"
    broken.parent.mkdir()
    broken.write_text("{no")
    return home


def written(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def change(path: Path, **values: Any) -> None:
    written(path, {**json.loads(path.read_text()), **values})


def test_runs_are_listed_oldest_first_with_their_kind_and_damaged_ones_as_such(runs: Path) -> None:
    entries = list_runs(runs)
    assert [entry.kind for entry in entries] == ["run", "run", "sweep", "compare", "run", "damaged"]
    assert [Path(entry.folder).name[:8] for entry in entries] == [f"2026010{day}" for day in (1, 2, 3, 4, 5, 7)]
    first = entries[0]
    assert (first.name, first.engine, first.measured) == ("smoke", "simulated", 30)
    assert entries[4].reason.startswith("not analysed")
    assert entries[5].reason.startswith("manifest.json: ")


def test_the_list_is_a_table_or_one_document(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(runs)]) == errors.OK
    lines = [line for line in capsys.readouterr().out.splitlines() if "2026010" in line]
    assert len(lines) == 6
    assert "damaged" in lines[-1] and "broken" in lines[-1]
    assert " unfinished " in lines[4] and lines[4].endswith("eeeeee (not analysed)"), "nothing was recorded"
    assert main(["runs", "--runs", str(runs), "--json"]) == errors.OK
    assert [entry["kind"] for entry in json.loads(capsys.readouterr().out)][:2] == ["run", "run"]


def test_only_a_run_with_records_is_to_be_reported_and_a_long_reason_does_not_widen_the_list(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Path(shutil.copytree(runs / "20260105-000000-killed-eeeeee", tmp_path / "20260105-000000-killed-eeeeee"))
    (killed / "requests" / "worker-0.gap").write_bytes(b"x")
    change(killed / "manifest.json", ended_because="the server did not start: " + "log " * 100)
    for file in killed.rglob("*"):
        os.utime(file, (1, 1))
    assert main(["runs", "--runs", str(tmp_path)]) == errors.OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "2026010" in line]
    told = line.partition("eeeeee (")[2]
    assert told.startswith("the server did not start: ") and told.endswith(" …; run gapmeter report on it)")
    assert len(told) < 100


def test_a_link_that_leads_nowhere_takes_no_list_along(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Path(shutil.copytree(runs / "20260105-000000-killed-eeeeee", tmp_path / "20260105-000000-killed-eeeeee"))
    (killed / "requests" / "worker-0.gap").symlink_to("nowhere")
    assert main(["runs", "--runs", str(tmp_path)]) == errors.OK
    assert "eeeeee (not analysed)" in capsys.readouterr().out


def test_no_folder_of_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        list_runs(tmp_path / "none")
    with pytest.raises(UserError, match="there are no runs in"):
        ask("SELECT 1", tmp_path)


def test_every_table_has_the_rows_of_all_runs_with_the_run_that_they_belong_to(runs: Path) -> None:
    headers, rows = ask("SELECT run, count(*) FROM requests GROUP BY run ORDER BY run", runs)
    assert headers[0] == "run"
    names = ["20260101-000000-first-aaaaaa", "20260102-000000-second-bbbbbb",
             "20260103-000000-smoke-sweep-cccccc/points/a"]  # fmt: skip
    assert rows == [(name, 30) for name in names]
    (whole,) = ask("SELECT count(*) FROM runs", runs)[1]
    assert whole == (4,)  # the one that was killed has no figures, and is a run
    _, stages = ask("SELECT run, sum(total_ns) > 0 FROM ledger WHERE event = 'last_token' GROUP BY ALL", runs)
    assert len(stages) == 3 and all(positive for _, positive in stages)
    assert len(ask("SELECT DISTINCT run FROM steps", runs)[1]) == 2


@pytest.mark.parametrize(
    "scenario", [{}, {"name": "a", "server": "vllm"}, {"name": "a", "server": {"max_batch": "many"}}]
)
def test_a_run_whose_manifest_does_not_say_what_it_was_is_left_out(
    scenario: dict[str, Any], runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (tmp_path / name / "requests").mkdir(parents=True)
        shutil.copy(runs / "20260105-000000-killed-eeeeee" / "manifest.json", tmp_path / name)
    change(tmp_path / "a" / "manifest.json", scenario=scenario)
    assert ask("SELECT run FROM runs", tmp_path)[1] == [("b",)]
    assert "a is left out: " in capsys.readouterr().err


def test_a_run_s_row_agrees_with_its_summary(runs: Path, finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    query = "SELECT verdict, ttft_max_ms, measured, engine, summary->>'$.load.loop' FROM runs WHERE run LIKE '%first%'"
    assert ask(query, runs)[1] == [
        (summary["verdict"], summary["metrics"]["ttft"]["max_ms"], 30, "simulated", "open")
    ]  # fmt: skip


def test_runs_without_a_table_leave_its_columns_empty(tmp_path: Path, finished_run: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "a")
    (tmp_path / "a" / "steps.parquet").unlink()
    assert ask("SELECT count(*) FROM steps", tmp_path)[1] == [(0,)]


def test_a_damaged_table_is_left_out_and_said(
    tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished_run, tmp_path / name)
    (tmp_path / "a" / "requests.parquet").write_text("no")
    assert ask("SELECT DISTINCT run FROM requests", tmp_path)[1] == [("b",)]
    assert "requests.parquet is left out: " in capsys.readouterr().err


@pytest.mark.parametrize("silent", ["a", "b"])  # the first or the last of them
def test_a_run_whose_requests_were_never_answered_is_among_the_others(
    tmp_path: Path, finished_run: Path, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished_run, tmp_path / name)
    requests = pd.read_parquet(tmp_path / silent / "requests.parquet")
    nothing = dict.fromkeys(("token_ns", "chunk_tokens", "first_token_ns"))
    requests.assign(outcome="refused", **nothing).to_parquet(tmp_path / silent / "requests.parquet")
    query = "SELECT run, count(len(token_ns)), count(first_token_ns) FROM requests GROUP BY run ORDER BY run"
    answered = {"a": 30, "b": 30} | {silent: 0}
    assert ask(query, tmp_path)[1] == [(run, n, n) for run, n in answered.items()]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "runs"),
    [
        ({"filename": ["x"]}, ["a", "foreign"]),
        ({"gapmeter_file": ["x"]}, ["a"]),
        ({"index": [{"nested": 1}]}, ["a"]),
        ({"index": ["a text"]}, ["a", "foreign"]),
    ],
)
def test_no_foreign_table_breaks_the_others(
    tmp_path: Path, finished_run: Path, table: dict[str, list[Any]], runs: list[str]
) -> None:
    shutil.copytree(finished_run, tmp_path / "a")
    shutil.copytree(finished_run, tmp_path / "foreign")
    pd.DataFrame(table).to_parquet(tmp_path / "foreign" / "requests.parquet")
    assert ask("SELECT DISTINCT run FROM requests ORDER BY run", tmp_path)[1] == [(run,) for run in runs]
    assert len(ask("SELECT * FROM requests", tmp_path)[1]) == 30 + len(runs) - 1


@pytest.mark.parametrize(
    "query",
    [
        "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b",
        "SELECT max(length(repeat('a', 100000000 + a.range::INT))) FROM range(1000) a",  # DuckDB does not look up here
    ],
)
def test_a_query_under_way_is_ended_by_a_signal(tmp_path: Path, finished_run: Path, query: str) -> None:
    shutil.copytree(finished_run, tmp_path / "a")
    command = Command(("sql", query, "--runs", str(tmp_path)), tmp_path)
    until(lambda: len(list(Path(f"/proc/{command.process.pid}/task").iterdir())) > 1)  # DuckDB's threads
    time.sleep(0.5)
    command.process.send_signal(signal.SIGINT)
    done = command.done()
    assert (done.code, done.out, done.err) == (105, "", "gapmeter: interrupted\nexit=105 interrupted\n")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT nope FROM runs", 'column "nope" not found'),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM nowhere", "nowhere does not exist"),
        ("SELECT * FROM request_table", "does not exist; there are runs, requests, ledger, gaps, steps"),
        ("CREATE TABLE a (b int)", "one SELECT at a time"),
        ("DELETE FROM runs", "one SELECT at a time"),
        ("COPY runs TO 'x.csv'", "one SELECT at a time"),
        ("SELECT 1; SELECT 2", "one SELECT at a time"),
        ("", "one SELECT at a time"),
        ("ATTACH 'x.db'", "one SELECT at a time"),
        ("SET threads = 1", "one SELECT at a time"),
        ("SELECT * FROM read_text('/etc/hostname')", "disabled by configuration"),
        ("SELECT * FROM '/etc/passwd'", "does not exist"),
        ("SELECT * FROM glob('/etc/*')", "disabled by configuration"),
    ],
)
def test_what_is_no_question_about_the_runs_is_one_sentence(runs: Path, query: str, says: str) -> None:
    with pytest.raises(UserError, match=r".+") as error:
        ask(query, runs)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == errors.USAGE


def test_a_link_among_the_tables_opens_nothing(tmp_path: Path, finished_run: Path) -> None:
    folder = tmp_path / "runs" / finished_run.name
    shutil.copytree(finished_run, folder)
    (folder / "gaps.parquet").unlink()
    (folder / "gaps.parquet").symlink_to("/etc/hostname")
    (tmp_path / "runs" / "linked").symlink_to("/")
    assert ask("SELECT count(*) FROM gaps", tmp_path / "runs")[1] == [(0,)]
    for name in ("/etc/hostname", folder / "gaps.parquet"):
        with pytest.raises(UserError):
            ask(f"SELECT * FROM read_csv('{name}')", tmp_path / "runs")


def test_a_time_with_a_zone_is_a_sentence(runs: Path) -> None:
    with pytest.raises(UserError, match="CAST"):
        ask("SELECT TIMESTAMPTZ '2026-01-01 00:00:00+00'", runs)


def test_an_answer_is_a_table_or_csv_or_one_document(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sql", "SELECT run, measured, concurrency FROM runs WHERE measured > 0 ORDER BY 1", "--runs", str(runs)]
    assert main(words) == errors.OK
    assert "20260101-000000-first-aaaaaa" in capsys.readouterr().out
    main([*words, "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (rows[0]["measured"], rows[0]["concurrency"]) == ("30", "")
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)[0]["concurrency"] is None
    assert main(["sql", "SELECT 'NaN'::DOUBLE AS x", "--runs", str(runs), "--json"]) == errors.OK
    assert json.loads(capsys.readouterr().out) == [{"x": None}]
    assert main(["sql", "SELECT 1234567890.5::DOUBLE AS x, 1/3 AS y", "--runs", str(runs)]) == errors.OK
    assert capsys.readouterr().out.split()[-2:] == ["1234567890.5", "0.333333"]
    main(["sql", "SELECT 1715299200123456512::DOUBLE AS x, -1e15 AS y, 1e19 AS z", "--runs", str(runs)])
    assert capsys.readouterr().out.split()[-3:] == ["1715299200123456512", "-1000000000000000", "1e+19"]
    assert main(["sql", "SELECT a.run, b.run FROM runs a, runs b", "--runs", str(runs), "--json"]) == errors.USAGE
    assert "two columns are called run, and JSON has room for one" in capsys.readouterr().err
