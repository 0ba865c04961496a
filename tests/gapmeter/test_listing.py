"""A runs folder is listed by what its folders say of themselves; a broken one is named, not hidden."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.results.run import Provenance
from gapmeter.report import html, words
from gapmeter.report.document import Document, Header, Verdict
from gapmeter.runs.listing import ListedRun, list_known, newest_run
from gapmeter.runs.lock import locked
from gapmeter.runs.sql import ask
from gapmeter.web.runs_page import RunFilter, runs_page

pytestmark = pytest.mark.whole_run


@pytest.fixture(scope="session")
def manifest(finished_run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((finished_run / "manifest.json").read_text())
    return value


@pytest.fixture(scope="session")
def summary(finished_run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((finished_run / "summary.json").read_text())
    return value


PROVENANCE = Provenance(**dict.fromkeys(Provenance.model_fields, "known"))


def folder(runs: Path, name: str, manifest: Any, summary: Any = None) -> Path:
    made = runs / name
    made.mkdir(parents=True)
    for file, content in (("manifest.json", manifest), ("summary.json", summary)):
        if content is not None:
            (made / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return made


def test_a_list_of_runs_waits_for_no_large_module() -> None:
    code = (
        "import sys\n"
        "import gapmeter.report.terminal, gapmeter.runs.listing\n"
        "assert not {'numpy', 'yaml', 'gapmeter.analysis.results.run'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runs_come_in_the_order_in_which_they_began_with_their_figures(
    tmp_path: Path, manifest: dict[str, Any], summary: dict[str, Any]
) -> None:
    folder(tmp_path, "b", manifest | {"started_wall": "2026-01-02T00:00:00"}, summary)
    common = ("schema_version", "status", "scenario", "scenario_digest", "command", "started_wall_ns", "started_ns",
              "hardware", "versions", "git")  # fmt: skip
    swept = {key: manifest[key] for key in common} | {"kind": "sweep", "repeat": 1, "points": [], "order": []}
    folder(tmp_path, "a", swept | {"started_wall": "2026-01-03T00:00:00"}, {})
    (tmp_path / "something-else").mkdir()
    first, second = list_known(tmp_path)
    assert (first.path.name, first.verdict, first.measured) == ("b", summary["verdict"], 30)
    assert first.ttft_p99_ms == summary["metrics"]["ttft"]["p99_ms"]
    assert (first.load, first.model) == ("60 req/s", "builtin:tiny")
    assert (second.kind, second.state, second.measured) == ("sweep", "done", None)


def test_an_attached_server_has_the_model_that_it_names_and_not_the_one_that_would_have_been_launched(
    tmp_path: Path, manifest: dict[str, Any], summary: dict[str, Any]
) -> None:
    scenario = manifest["scenario"]
    attached = scenario | {"server": scenario["server"] | {"engine": "attach", "url": "http://127.0.0.1:8000"}}
    about = manifest | {"scenario": attached, "target": manifest["target"] | {"model": "its-own"}}
    folder(tmp_path, "a", about, summary)
    (found,) = list_known(tmp_path)
    assert (found.engine, found.model) == ("attach", "its-own")
    (tmp_path / "a" / "requests").mkdir()
    assert ask("SELECT model, precision, max_batch FROM runs", tmp_path)[1] == [("its-own", None, None)]


def test_a_sweep_over_an_attached_server_has_the_model_that_it_was_on(tmp_path: Path, manifest: dict[str, Any]) -> None:
    scenario = manifest["scenario"]
    attached = scenario | {"server": scenario["server"] | {"engine": "attach", "url": "http://127.0.0.1:8000"}}
    swept = {name: value for name, value in manifest.items() if name != "target"} | {"kind": "sweep"}
    folder(tmp_path, "a", swept | {"scenario": attached}, {"provenance": {"model": "its-own"}})
    (found,) = list_known(tmp_path)
    assert (found.kind, found.model) == ("sweep", "its-own")


@pytest.mark.parametrize(
    ("validity", "answer", "reason"),
    [
        ("valid", "done", ""),
        ("INVALID", "INVALID", ""),
        ("1 of 2 points without valid figures", "done", "1 of 2 points without valid figures"),
    ],
)
def test_a_sweep_whose_points_are_no_measurement_is_not_simply_done(
    tmp_path: Path, manifest: dict[str, Any], validity: str, answer: str, reason: str
) -> None:
    summary = {"provenance": {"model": "tiny", "validity": validity}}
    folder(tmp_path, "a", manifest | {"kind": "sweep"}, summary)
    (found,) = list_known(tmp_path)
    assert (found.answer, found.reason) == (answer, reason)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema_version": 1, "scenario": 5}', '{"schema_version": 1, "scenario": {"server": "vllm"}}']
)
def test_a_damaged_folder_is_listed_as_such(tmp_path: Path, text: str) -> None:
    folder(tmp_path, "20260102-030405-chat-abc", text)
    (found,) = list_known(tmp_path)
    assert found.state == "damaged" and found.reason and found.started == "2026-01-02T03:04:05"


@pytest.mark.parametrize("kind", ["sweep", "capacity"])
def test_a_studys_summary_that_is_another_is_told_by_its_key(
    tmp_path: Path, manifest: dict[str, Any], kind: str
) -> None:
    folder(tmp_path, "a", manifest | {"kind": kind}, {"capacity": 5})
    (found,) = list_known(tmp_path)
    assert found.state == "damaged" and found.reason.startswith("summary.json: capacity is '5': input should be")


@pytest.mark.parametrize("verdict", ['["a"]', '{"a": 1}', "7"])
def test_a_comparison_whose_verdict_is_no_text_is_damaged(tmp_path: Path, verdict: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.json").write_text(f'{{"sides": [{{"scenario": "x"}}], "verdict": {verdict}}}')
    (found,) = list_known(tmp_path)
    assert (found.state, found.verdict) == ("damaged", None)


def test_a_run_without_results_is_running_while_a_gapmeter_is_at_work_in_it_and_unfinished_later(
    tmp_path: Path, manifest: dict[str, Any]
) -> None:
    """However long it writes nothing: while its server starts, only that one's log may grow."""
    made = folder(tmp_path, "r", manifest | {"status": "running"})
    os.utime(made / "manifest.json", (1, 1))
    with locked(made):
        (found,) = list_known(tmp_path)
        assert (found.state, found.reason) == ("running", ""), "nothing is missing yet"
    (made / "manifest.json").touch()
    (found,) = list_known(tmp_path)
    assert (found.state, found.reason) == ("unfinished", "not analysed")


@pytest.mark.parametrize(("age_s", "state"), [(0, "running"), (300, "unfinished")])
def test_on_a_file_system_without_locks_it_runs_while_it_or_one_of_its_runs_writes(
    tmp_path: Path, manifest: dict[str, Any], age_s: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    made = folder(tmp_path, "s", manifest | {"status": "running"})
    os.utime(made / "manifest.json", (1, 1))
    record = made / "p0" / "r1" / "requests" / "worker-0.gap"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"")
    os.utime(record, (time.time() - age_s,) * 2)
    with locked(made):
        assert list_known(tmp_path)[0].state == state


def test_the_newest_run_is_the_one_that_was_begun_last(tmp_path: Path, manifest: dict[str, Any]) -> None:
    old, new = (folder(tmp_path, f"20260102-03040{n}-chat-abc", manifest) for n in (5, 6))
    os.utime(new / "manifest.json", (1, 1))  # the old one was reported again
    assert newest_run(tmp_path) == new
    assert old.exists()


def test_what_was_written_again_is_read_again(
    tmp_path: Path, manifest: dict[str, Any], summary: dict[str, Any]
) -> None:
    made = folder(tmp_path, "r", manifest, summary | {"verdict": "FAIL"})
    assert list_known(tmp_path)[0].verdict == "FAIL"
    (made / "summary.json").write_text(json.dumps(summary | {"verdict": "PASS"}))
    os.utime(made / "summary.json", ns=(1, 1))
    assert list_known(tmp_path)[0].verdict == "PASS"


def test_there_is_nothing_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert list_known(tmp_path / "none") == []


def test_where_a_p99_has_no_upper_end_the_list_shows_its_bound() -> None:
    listed = ListedRun("run", "runs/a", "", ttft_p99_ms=26.8, p99_at_most_ms={"itl": 31.0}, p99_refused=("itl",))
    assert [listed.p99(metric) for metric in ("ttft", "itl", "e2e")] == ["26.8 ms", "≤ 31.0 ms", "–"]


def test_a_p99_that_is_refused_is_called_so_in_the_list(
    tmp_path: Path, manifest: dict[str, Any], summary: dict[str, Any]
) -> None:
    late = summary["metrics"]["ttft"] | {"p99_ms": None, "at_most": {}, "late_ms": {"p99": 7.5}}
    folder(tmp_path, "a", manifest, summary | {"metrics": summary["metrics"] | {"ttft": late}})
    (found,) = list_known(tmp_path)
    assert found.p99("ttft") == "refused"


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [
        ("PASS", "good"), ("FAIL", "bad"), ("INVALID", "bad"), ("INCONCLUSIVE", "open"), ("SLOWER", "bad"),
        ("FAILS LESS", "good"), ("MIXED", "open"), ("NO DIFFERENCE FOUND", ""), ("NOT COMPARABLE, forced", "bad"),
        ("CHEAPER", "good"), ("NOT ESTABLISHED", "open"), (None, ""),
    ],
)  # fmt: skip
def test_an_answer_has_one_color_in_the_list_and_on_its_own_page(verdict: str | None, tone: str) -> None:
    page = runs_page([ListedRun("run", "runs/a", "", verdict=verdict)], RunFilter(), "runs")
    assert f'<td class="{tone}"><b class="runs-verdict"' in page
    own = html.page(Document("", Header(""), Verdict(verdict or "", words.tone(verdict), ""), [], PROVENANCE))
    assert f'<div class="{f"verdict {tone}".strip()}"' in own


def test_the_list_has_a_heading_and_its_table_a_name_for_those_who_do_not_see_them() -> None:
    page = runs_page([ListedRun("run", "runs/a", "")], RunFilter(), "runs")
    assert page.count("<h1>gapmeter: runs</h1>") == 1
    assert page.count("<table") == page.count('<table class="runs" aria-label=')
