"""Sweeps through the command line, on the simulated engine: one server, shuffled points, failures, resumption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.results import Manifest
from gapmeter.analysis.results.manifest import SweepManifest
from gapmeter.analysis.results.sweep import FailedRun, SweepResult
from gapmeter.errors import NOT_VALID, UNREACHABLE, USAGE, UserError
from gapmeter.loadgen.arrivals import warmup_span
from gapmeter.loadgen.fleet import Workers
from gapmeter.options import Options
from gapmeter.records import RunFolder, read_records
from gapmeter.report.export.junit import annotations_of, suites_of_sweep
from gapmeter.runs.explain import explain
from gapmeter.runs.run import open_run
from gapmeter.study.comparison import Baseline, check_baseline
from gapmeter.study.resolve import changes, resolve, resolve_points, settings_of
from gapmeter.study.study import Study, is_finished
from gapmeter.study.sweep import _takes, order_of, report_sweep, run_sweep
from gapmeter.study.verify import check_all
from tests.kit.browser import Tab, opens_well
from tests.kit.command import SHORT, Command, Done, gapmeter, settings
from tests.kit.results import figure_at, manifest_document
from tests.kit.servers import faulty
from tests.kit.wait import until

REQUESTS = 100  # of a point: fewer seldom support any percentile
QUICK = ("run", "smoke", "--engine", "simulated", *SHORT)
POINTS = [
    {"load.rate": 40}, {"load.rate": 60}, {"server.max_batch": 48, "load.rate": 50},
    {"server.args.no_such_flag": 1, "load.rate": 60},
]  # fmt: skip
# Slow enough that no figure is refused because a busy machine sent a request late, and with room for all at once.
UNHURRIED = settings("server.args.forward_ms=200", "server.max_batch=64", "workload.output_tokens=2")


def sweep_of(points: Any) -> tuple[str, str]:
    return "--set", f"sweep={json.dumps(points)}"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 99))
def test_every_point_is_visited_once_a_repeat_and_servers_follow_each_other(
    servers: list[str], repeats: int, seed: int
) -> None:
    groups = order_of(servers, repeats, seed)
    assert groups == order_of(servers, repeats, seed)
    assert len(groups) == len(set(servers)), "each server is started once"
    assert sorted(v for group in groups for v in group) == [(p, r) for p in range(len(servers)) for r in range(repeats)]
    for group in groups:
        assert len({servers[point] for point, _ in group}) == 1
        size = len(group) // repeats
        for repeat in range(repeats):
            assert {r for _, r in group[repeat * size : (repeat + 1) * size]} == {repeat}, "repeats are interleaved"


def test_what_repeats_one_point_reads_back_whatever_its_letters() -> None:
    (point,) = resolve_points("smoke", ['sweep=[{server.model: "models/🤖"}]'])
    for words in (settings_of(point), changes(resolve("smoke"), point.scenario)):
        assert resolve("smoke", words).server.model == "models/🤖"


def test_points_are_not_run_in_the_order_of_their_values() -> None:
    orders = {tuple(point for point, _ in order_of(["one"] * 6, 1, seed)[0]) for seed in range(20)}
    assert len(orders) > 10


@pytest.mark.parametrize("name", ["concurrency", "batch-size"])
def test_the_shipped_sweeps_take_nine_minutes_of_load_at_most(name: str) -> None:
    loads = [point.scenario.load for point in resolve_points(name, ())]
    assert sum((load.longest_ns or 0) + warmup_span(load)[0] for load in loads) <= 9 * 60e9
    assert all(load.may_last_longer for load in loads), "until there are enough requests"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Done:
    runs = tmp_path_factory.mktemp("sweep")
    more = settings("repeat=2", f"load.requests={REQUESTS}")
    return gapmeter(*QUICK, *UNHURRIED, *sweep_of(POINTS), *more, runs=runs)


@pytest.mark.whole_run
@pytest.mark.browser
async def test_its_page_draws_every_point_with_the_numbers_of_the_summary(swept: Done, tab: Tab) -> None:
    await opens_well(tab, swept.folder.report.resolve(), charts=3)
    sweep = swept.summary["sweep"]
    known = [point for point in sweep["points"] if point["metrics"]]
    sums = """Object.values(Object.groupBy(document.querySelectorAll('#stages svg [data-stage][data-point]'),
      part => part.closest('svg.chart').querySelector('title').textContent + ' ' + part.dataset.point)).map(
      parts => [parts[0].closest('svg.chart').querySelector('title').textContent.split(' ')[1].toLowerCase(),
                +parts[0].dataset.point, parts.reduce((sum, part) => sum + +part.dataset.ms, 0)])"""
    drawn = {(metric, point): ms for metric, point, ms in await tab.evaluate(sums)}
    for point in known:
        for metric, found in point["stages"].items():
            if found and (metric, point["index"]) in drawn:
                whole = sum(ms for ms in found["stages_ms"].values() if ms > 0)
                assert drawn[metric, point["index"]] == pytest.approx(whole, rel=1e-5)
    assert {point for _, point in drawn} == {point["index"] for point in known}
    cells = "[...document.querySelectorAll('#points [data-key]')].map(c => [c.dataset.key, c.dataset.value])"
    for key, value in await tab.evaluate(cells):
        assert json.loads(value) == figure_at(swept.summary, key)
    headline = swept.summary["words"]["headline"]
    assert await tab.evaluate("document.querySelector('.verdict .sentence').textContent") == headline[0]


def pids(folder: Path) -> set[int]:
    return {int(read_records(file).process["pid"]) for file in (folder / "probe").glob("*.gap.zst")}


@pytest.mark.whole_run
def test_a_sweep_measures_what_it_can_and_says_why_the_rest_failed(swept: Done) -> None:
    assert (swept.code, swept.left) == (98, []), swept.err
    assert swept.out.strip() == str(swept.folder.path), "one line for programs"
    points = swept.summary["sweep"]["points"]
    assert [point["values"] for point in points] == POINTS
    assert [len(point["repeats"]) for point in points] == [2, 2, 2, 2]
    assert [bool(point["metrics"]) for point in points] == [True, True, True, False]
    assert points[3]["verdict"] == "FAILED"
    assert points[3]["loop"] == points[0]["loop"], "the load that it would have had"
    assert "no_such_flag" in points[3]["reason"] or "no-such-flag" in points[3]["reason"]
    assert "exit=98 not every point is a valid measurement" in swept.err
    assert "Traceback" not in swept.err


@pytest.mark.whole_run
def test_the_server_is_started_anew_only_where_one_of_its_keys_changes(swept: Done) -> None:
    points = swept.summary["sweep"]["points"]
    first, second, third = (
        set().union(*(pids(swept.folder.path / run["folder"]) for run in point["repeats"])) for point in points[:3]
    )
    assert first == second
    assert not first & third
    assert len(first) == len(third)


@pytest.mark.whole_run
def test_every_point_is_a_run_of_its_own_with_fresh_texts_and_balanced_ledgers(swept: Done) -> None:
    repeats = []
    for point in swept.summary["sweep"]["points"][:3]:
        for run in point["repeats"]:
            folder = RunFolder(swept.folder.path / run["folder"])
            summary, manifest = json.loads(folder.summary.read_text()), json.loads(folder.manifest.read_text())
            assert summary["counts"]["succeeded"] == REQUESTS
            assert summary["ledger"]["refused"] == []
            assert folder.report.exists()
            assert manifest["scenario"]["load"]["rate"] == point["values"]["load.rate"]
            assert "--set 'sweep=[]'" in manifest["command"]
            repeats.append(manifest["repeat"])
    assert len(set(repeats)) == 6, "no two runs ask with the same texts"


@pytest.mark.whole_run
def test_figures_of_a_point_are_those_of_its_requests_and_stages_add_up(swept: Done) -> None:
    point = swept.summary["sweep"]["points"][0]
    valid = [run for run in point["repeats"] if run["verdict"] != "INVALID"] or point["repeats"]
    assert point["metrics"]["ttft"]["count"] == REQUESTS * len(valid)
    for metric in ("ttft", "e2e", "itl"):
        found = point["stages"][metric]
        assert found["mean_ms"] == pytest.approx(point["metrics"][metric]["mean_ms"], rel=2e-3), metric
        assert sum(found["stages_ms"].values()) == pytest.approx(found["mean_ms"])
    assert 0 < point["batch"]["running"] <= 64
    assert point["binding"]["resource"] in ("queue", "host", "device", "network", "load tester")


@pytest.mark.whole_run
def test_summary_and_page_are_made_again_from_the_points_folders(swept: Done, tmp_path: Path) -> None:
    copy = tmp_path / "moved"
    shutil.copytree(swept.folder.path, copy)
    (copy / "summary.json").unlink()
    outlets = ("--junit", str(tmp_path / "junit.xml"), "--markdown", str(tmp_path / "sweep.md"))
    again = gapmeter("report", str(copy), *outlets, runs=tmp_path)
    assert again.code == 98, again.err
    assert json.loads((copy / "summary.json").read_text()) == swept.summary
    assert (copy / "report.html").stat().st_size < 500_000
    suites = ET.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == [
        f"smoke: {point['label']}" for point in swept.summary["sweep"]["points"]
    ]
    assert "| 40 req/s, max batch 64 |" in (tmp_path / "sweep.md").read_text()


@pytest.mark.whole_run
def test_a_sweep_is_annotated_by_its_points_and_is_no_run_for_what_takes_one(swept: Done) -> None:
    suites = suites_of_sweep(SweepResult.read(swept.folder.path))
    lines = [line for suite in suites for line in annotations_of(suite)]
    assert [line for line in lines if "is not valid" in line and "such_flag" in line.replace("-", "_")]
    for use in (open_run, lambda path: explain(path, "prompt_tokens > 1")):
        with pytest.raises(UserError, match=r"is a sweep; name one of its runs under points/, for instance"):
            use(swept.folder.path)
    with pytest.raises(UserError, match="is a sweep"):
        check_baseline(Baseline((swept.folder.path,), 0.05), resolve("smoke", ()))


@pytest.mark.whole_run
def test_the_page_says_what_the_summary_says(swept: Done) -> None:
    text = swept.folder.report.read_text()
    summary = swept.summary["sweep"]
    found = re.findall(r'data-value="([^"]*)" data-key="([^"]*)"', text)
    assert found
    for value, key in found:
        assert json.loads(value) == figure_at(swept.summary, key)
    columns = re.findall(r'data-stage="(\w+)" data-ms="([^"]*)" data-point="0"', text)
    drawn = sum(float(ms) for _, ms in columns)
    parts = summary["points"][0]["stages"].values()
    assert drawn == pytest.approx(sum(part["mean_ms"] for part in parts), rel=1e-4)
    assert "default-src 'none'" in text, "the page asks the network for nothing"
    for point in summary["points"][:3]:
        assert f'href="{point["repeats"][0]["folder"].replace("=", "%3D")}/report.html"' in text


@pytest.mark.whole_run
def test_an_interrupted_sweep_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    points = sweep_of({"load.rate": [30, 40, 50]})
    command = Command((*QUICK, *points, "--set", "load.requests=40"), tmp_path)
    until(lambda: list(tmp_path.glob("*/points/*/r1/summary.json")), 90)
    command.process.send_signal(signal.SIGINT)
    stopped = command.done()
    assert (stopped.code, stopped.left) == (105, []), stopped.err
    (folder,) = tmp_path.iterdir()
    assert stopped.out.strip() == str(folder), "what is finished is reported"
    assert "Not finished." in (folder / "report.html").read_text()
    done = {path for path in folder.glob("points/*/r1") if is_finished(path)}
    assert 1 <= len(done) < 3
    assert f"--resume {folder}" in stopped.err
    before = {path: (path / "manifest.json").stat().st_mtime_ns for path in done}
    other = gapmeter(*QUICK, *sweep_of({"load.rate": [30]}), "--resume", str(folder), runs=tmp_path)
    assert (other.code, "is a sweep of another scenario" in other.err) == (2, True)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as another gapmeter that is at work there
    again = (*QUICK, *points, "--set", "load.requests=40", "--resume", str(folder))
    for words in (again, ("report", str(folder))):
        refused = gapmeter(*words, runs=tmp_path)
        assert refused.code == 2 and "another gapmeter is at work" in refused.err
    os.close(held)
    resumed = gapmeter(*again, runs=tmp_path)
    assert resumed.out.strip() == str(folder), resumed.err
    assert [bool(point["metrics"]) for point in resumed.summary["sweep"]["points"]] == [True] * 3
    assert {path: (path / "manifest.json").stat().st_mtime_ns for path in done} == before, "finished runs are kept"
    assert json.loads(RunFolder(folder).manifest.read_text())["status"] == "complete"


@pytest.mark.whole_run
def test_a_point_in_which_somebody_elses_server_died_is_measured_again_by_resuming(tmp_path: Path) -> None:
    """Also where a proxy before it goes on."""
    points = sweep_of({"load.rate": [50, 60, 70]})
    with faulty(dies_at=45) as url:
        words = ("run", "smoke", "--url", url, *SHORT, *points)
        died = gapmeter(*words, runs=tmp_path)
    assert died.code == 98, died.err
    assert [point["verdict"] for point in died.summary["sweep"]["points"]].count("FAILED") == 2
    assert len(list(died.folder.path.glob("points/*/r1/requests"))) == 2, "no third point was begun"
    with faulty(port=int(url.rpartition(":")[2])):
        resumed = gapmeter(*words, "--resume", str(died.folder.path), runs=tmp_path)
    assert [point["metrics"]["ttft"]["count"] for point in resumed.summary["sweep"]["points"]] == [30] * 3


@pytest.mark.whole_run
def test_a_sweep_none_of_whose_servers_start_says_so(tmp_path: Path) -> None:
    done = gapmeter(*QUICK, *sweep_of([{"server.args.no_such_flag": 1}]), "--json", runs=tmp_path)
    assert done.code == 106, done.err
    assert json.loads(done.out)["sweep"]["points"][0]["verdict"] == "FAILED"


@pytest.mark.whole_run
def test_points_of_users_who_wait_end_at_a_planned_look(tmp_path: Path) -> None:
    closed = settings(
        "load.arrivals=closed", "load.concurrency=1", "load.requests=null", "load.warmup=0", "load.duration=2s",
        "load.patience=20s", "workload.output_tokens=2", "workload.prompt_tokens=16",
    )  # fmt: skip
    users = sweep_of({"load.concurrency": [1, 4]})
    done = gapmeter("run", "smoke", "--engine", "simulated", *closed, *users, runs=tmp_path)
    assert "sweep of 2 points, 2 runs, 4 to 40 s of load" in done.err
    for point in done.summary["sweep"]["points"]:
        result = open_run(done.folder.path / point["repeats"][0]["folder"]).result
        assert result.shortened is not None and result.shortened.after_s == 2, "an SLO on errors asks for no percentile"


def test_hours_of_load_are_told_in_minutes_as_they_are_read() -> None:
    asked = ("load.requests=null", "load.duration=125m", "load.warmup=0")
    assert _takes([resolve("smoke", asked).load], 1) == ", 125 min of load"


@pytest.mark.whole_run
def test_a_point_without_a_measured_request_is_not_valid_and_loses_no_other(tmp_path: Path) -> None:
    closed = {"arrivals": "closed", "concurrency": 2, "requests": None, "duration": "600ms", "warmup": "200ms"}
    asked = [word for key, value in closed.items() for word in ("--set", f"load.{key}={json.dumps(value)}")]
    points = [{"server.args.forward_ms": 2}, {"server.args.forward_ms": 900}]
    done = gapmeter("run", "smoke", "--engine", "simulated", *asked, *sweep_of(points), "--json", runs=tmp_path)
    assert done.code == 98, done.err
    fast, slow = json.loads(done.out)["sweep"]["points"]
    assert (slow["verdict"], slow["metrics"]["ttft"]["count"]) == ("INVALID", 0)
    assert fast["metrics"]["ttft"]["count"] > 0


@pytest.mark.whole_run
def test_points_of_which_every_request_failed_say_how_in_one_line(tmp_path: Path) -> None:
    failing = ("--set", "server.args.fault_error_share=1", *sweep_of([{"load.rate": 40}, {"load.rate": 60}]))
    done = gapmeter(*QUICK, *failing, runs=tmp_path)
    why = "40 req/s, 60 req/s: fail: all requests failed: HTTP 500"
    assert why in " ".join(done.err.split())
    assert why in done.folder.report.read_text()


def test_servers_that_die_as_soon_as_they_are_ready_end_a_sweep_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("the server died", UNREACHABLE)

    @contextlib.contextmanager
    def dead(*_: Any, home: Path, **__: Any) -> Iterator[Any]:
        started.append(home.name)
        yield SimpleNamespace(alive=lambda: False, visit=refuse)

    monkeypatch.setattr("gapmeter.study.sweep.open_session", dead)
    overrides = ("server.engine=simulated", f"sweep={json.dumps({'load.rate': [30, 40]})}")
    result = run_sweep("smoke", overrides, Options(runs=tmp_path, quiet=True))
    assert (started, result.exit_code) == (["1.0", "1.1"], UNREACHABLE)
    assert [point.verdict for point in result.result.sweep.points] == ["FAILED"] * 2


def unmeasured_sweep(home: Path, **fields: Any) -> RunFolder:
    """A sweep's folder with one point, of which no run was measured."""
    (home / "points" / "001" / "r1").mkdir(parents=True)
    shared = {name: value for name, value in manifest_document().items() if name in SweepManifest.model_fields}
    point = {"values": {}, "resolved": {}, "digest": "a", "folder": "points/001"}
    SweepManifest.model_validate({**shared, "repeat": 1, "points": [point], "order": [[[0, 0]]], **fields}).write(home)
    return RunFolder(home)


@pytest.mark.parametrize(("status", "code"), [("running", 105), ("interrupted", 105), ("complete", 98)])
def test_a_sweep_of_which_nothing_was_measured_does_not_blame_the_server(
    tmp_path: Path, status: str, code: int
) -> None:
    """It was killed, was interrupted, or lost its points' figures."""
    folder = unmeasured_sweep(tmp_path, status=status)
    assert report_sweep(folder.path, quiet=True).exit_code == code


def test_a_sweep_all_of_whose_points_failed_has_figures_that_are_checked(tmp_path: Path) -> None:
    folder = unmeasured_sweep(tmp_path, status="complete")
    FailedRun(reason="no such model", exit_code=104).write(tmp_path / "points" / "001" / "r1")
    assert report_sweep(tmp_path, quiet=True).exit_code == 104
    assert [check.name for check in check_all(tmp_path) if check.ok] == ["summary.json", "report.html"]
    document = json.loads(folder.summary.read_text())
    document["sweep"]["points"][0]["reason"] = "nothing"
    folder.summary.write_text(json.dumps(document))
    assert "sweep.points[0].reason" in next(check.seen for check in check_all(tmp_path) if not check.ok)


def test_a_run_whose_load_never_began_is_checked_in_words(tmp_path: Path) -> None:
    document = manifest_document(plan={"t0_ns": None})
    run = RunFolder.at(tmp_path / "run")
    Manifest.model_validate({**document, "ended_because": "the server was not ready"}).write(run.path)
    seen = {check.name: check.seen for check in check_all(run.path)}
    assert seen["figures"] == "no request was recorded: the server was not ready"


def test_a_sweep_whose_folder_is_renamed_ends_and_makes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(_: Any) -> None:
        (folder,) = tmp_path.iterdir()
        folder.rename(tmp_path / "renamed")
        raise UserError("the run's folder was renamed", NOT_VALID)

    @contextlib.contextmanager
    def living(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(alive=lambda: True, visit=rename)

    monkeypatch.setattr("gapmeter.study.sweep.open_session", living)
    overrides = ("server.engine=simulated", f"sweep={json.dumps({'load.rate': [30, 40]})}")
    with pytest.raises(UserError, match="was deleted or renamed during the run") as ended:
        run_sweep("smoke", overrides, Options(runs=tmp_path, quiet=True))
    assert ended.value.exit_code == NOT_VALID
    assert [path.name for path in tmp_path.iterdir()] == ["renamed"]


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        ({"load.concurrency": [4, 1]}, "--workers 2: they cannot share 1 users"),
        ({"load.processes": [1, 3]}, r"--workers 2: each sends from one process; leave out load.processes \(3\)"),
    ],
)
def test_what_one_point_cannot_do_is_told_before_the_first_one_runs(
    tmp_path: Path, swept: dict[str, list[int]], said: str
) -> None:
    closed = ("load.arrivals=closed", "load.rate=null", "load.warmup=auto", "load.concurrency=4")
    overrides = ("server.engine=simulated", *closed, f"sweep={json.dumps(swept)}")
    with pytest.raises(UserError, match=said) as refused:
        run_sweep("smoke", overrides, Options(runs=tmp_path, quiet=True, workers=Workers(2)))
    assert refused.value.exit_code == USAGE
    assert not list(tmp_path.iterdir())


def test_a_study_that_cannot_write_says_why_and_how_it_goes_on(tmp_path: Path) -> None:
    folder = unmeasured_sweep(tmp_path, command="gapmeter run smoke")
    study = Study(tmp_path, SweepManifest.read(tmp_path), Options())
    folder.manifest.with_suffix(".json.part").mkdir()
    with pytest.raises(UserError) as ended:
        study.note(status="complete")
    assert str(ended.value) == (
        f"{tmp_path} cannot be written: Is a directory; fix that, then continue with: "
        f"gapmeter run smoke --resume {tmp_path}"
    )
    assert ended.value.exit_code == NOT_VALID


def test_the_settings_of_a_server_that_runs_already_cannot_be_swept_over(tmp_path: Path) -> None:
    url = ("--url", "http://127.0.0.1:9")
    done = gapmeter("run", "smoke", *url, *sweep_of({"server.max_batch": [1, 2]}), runs=tmp_path)
    assert done.code == 104, done.err
    assert "server.max_batch cannot be changed on a server that runs already" in done.err
    assert not list(tmp_path.iterdir())


def test_what_is_no_sweep_cannot_be_taken_up(tmp_path: Path) -> None:
    done = gapmeter("run", "smoke", "--resume", "anywhere", runs=tmp_path)
    assert (done.code, "smoke has no sweep to resume" in done.err) == (2, True)
