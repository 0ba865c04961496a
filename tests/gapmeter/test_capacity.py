"""``gapmeter capacity`` as its user meets it: answers, mistakes, a server that dies, Ctrl-C."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapmeter.analysis.capacity.trial import Ask
from gapmeter.analysis.results.capacity import BUDGET, FOUND, UNMEETABLE, CapacityResult
from gapmeter.analysis.results.cost_table import CostTable
from gapmeter.analysis.results.manifest import Manifest, SearchManifest, TrialNote
from gapmeter.cli import main, parser
from gapmeter.commands import flags
from gapmeter.errors import UserError
from gapmeter.machine.instrument import Cores, Timing, null_server
from gapmeter.options import CapacityGoal, Options
from gapmeter.report.command import Command as CommandLine
from gapmeter.runs.archive import archive
from gapmeter.runs.comparison import compare_folders
from gapmeter.runs.run import Conclusion, open_run
from gapmeter.scenarios.model import Scenario
from gapmeter.study.capacities import compared, find_capacities
from gapmeter.study.capacity import Trials, at_rate, begin_search, find_capacity, next_number, search_command
from gapmeter.study.resolve import changes, check_searchable, resolve, searchable_points
from gapmeter.study.study import Study, study_folder
from gapmeter.study.verify import verify
from tests.kit.browser import Tab, opens_well
from tests.kit.command import ROOT, Command, Done, gapmeter, settings
from tests.kit.searches import write_search
from tests.kit.servers import faulty
from tests.kit.wait import until

SMALL = ("capacity", "smoke", "--engine", "simulated", *settings(
    "load.rate=40", "load.warmup=0", "workload.prompt_tokens=16", "workload.output_tokens=2", "server.max_batch=1",
))  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("concurrency",), 2, "--set 'sweep=[]' --set load.arrivals=poisson --set load.rate=1"),
        (
            ("smoke", "--set", "load={arrivals: ramp, ramp: {from: 1, to: 2}, duration: 9s}"),
            2,
            "--set load.arrivals=poisson",
        ),
        (("smoke", "--set", "slo=[]"), 2, "has no SLO"),
        (("smoke", "--target-rps", "50", "--headroom", "100%"), 2, "--headroom 100%: write a percentage"),
        (("smoke", "--headroom", "30%"), 2, "--headroom and --spare go with --target-rps"),
        (("smoke", "--over", "server.max_batch=4,8", "--spare", "1"), 2, "--headroom and --spare go with --target-rps"),
        (("smoke", "--target-rps", "many"), 2, "--target-rps many: not a rate"),
        (("smoke", "--budget", "5s"), 2, "--budget 5s: write a time from 30s"),
        (("smoke", "--target-rps", "50", "--spare", "-1"), 2, "--spare -1"),
        (("no-such-scenario",), 104, "no-such-scenario"),
        (("smoke", "--over", "server.max_batch"), 2, "--over server.max_batch: write KEY=VALUE,VALUE"),
        (("smoke", "--over", "server.max_batch=4"), 2, "--over names a single setting"),
        (("smoke", "--over", "load.rate=4,8"), 2, "--over load.rate: the rate is what a search finds"),
        (("smoke", "--over", "server.max_bach=4,8"), 104, "did you mean server.max_batch"),
        (("smoke", "--resume", "runs/A,runs/B"), 2, "--resume: one search, unless --over is given"),
        (("smoke", "--resume", ""), 2, "--resume is empty; name a folder"),
    ],
)
def test_a_users_mistake_is_one_sentence_that_says_what_to_write(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", *words]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), ("poisson", None)),
        (("load.arrivals=constant",), ("poisson", None)),
        (("load.arrivals=gamma", "load.burstiness=4"), ("gamma", 4.0)),
    ],
)
def test_bursts_stay_bursts_at_another_rate_and_all_else_arrives_at_random(
    words: tuple[str, ...], kept: tuple[str, float | None]
) -> None:
    load = at_rate(resolve("smoke", words), Ask(30.0, 600), 3).load
    assert (load.arrivals, load.burstiness) == kept
    assert (load.rate, load.duration_ns) == (30.0, 20_000_000_000)


def test_a_trace_stays_a_trace_at_another_speed_and_each_trial_has_another_part_of_it() -> None:
    scenario = resolve("replay-chat")
    trials = [at_rate(scenario, Ask(30.0, 600), number).load for number in range(4)]
    for load in trials:
        assert (load.arrivals, load.rate, load.duration_ns) == ("trace", None, 20_000_000_000)
        assert load.trace.loop
        assert load.warmup_ns == 5_000_000_000
        assert load.trace.rate == pytest.approx(30.0)
        assert load.trace.at_rate(load.trace.rate, 0.0).speed == pytest.approx(load.trace.speed)
    assert len({load.trace.start_ns for load in trials}) == 4


def read_back(command: CommandLine) -> Scenario:
    """The scenario that a command line runs."""
    arguments = parser().parse_args(command.words[1:])
    return resolve(arguments.scenario, flags.overrides(arguments))


@pytest.mark.parametrize("variable", ["", "500"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("load.requests=500",),
        ("load.duration=20s", "load.patience=60s"),
        ("load.arrivals=constant", "load.warmup=auto", "repeat=3"),
        ("load.arrivals=gamma", "load.burstiness=4"),
        ("load.arrivals=onoff", "load.onoff={on: 1s, off: 2s}"),
        ("load.arrivals=diurnal", "load.diurnal={hours: [1, 2, 3], day: 60s}"),
    ],
)
@pytest.mark.parametrize("name", ["chat-p99", "smoke"])
def test_a_trials_command_read_back_is_the_trials_own_load(
    name: str, words: tuple[str, ...], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPMETER_LOAD_REQUESTS", variable)
    scenario = resolve(name, words)
    trial = at_rate(scenario, Ask(100 / 3, 617), 3)
    command = CommandLine.of("capacity", name, words).as_run(*changes(scenario, trial))
    assert read_back(command).to_dict() == trial.to_dict()


@pytest.mark.parametrize("seed", [1, 2**63 - 1])
def test_each_trial_has_a_seed_of_its_own_that_a_scenario_may_have(seed: int) -> None:
    trials = [at_rate(resolve("smoke", [f"seed={seed}"]), Ask(30.0, 600), number) for number in (1, 2)]
    assert len({trial.seed for trial in trials}) == 2
    assert all(Scenario.model_validate(trial.to_dict()).seed == trial.seed for trial in trials)


def search(tmp_path: Path, *more: str) -> Done:
    runs = tmp_path / "runs"
    return gapmeter(*SMALL, *more, "--runs", str(runs), runs=runs)


MORE = (
    "--set", 'slo=["ttft p50 <= 60 ms"]', "--set", "load.rate=80", "--within", "80%", "--target-rps", "1000",
    "--spare", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A search with its folder, which nobody may change."""
    return search(tmp_path_factory.mktemp("search"), *MORE, "--budget", "30s")


@pytest.mark.whole_run
@pytest.mark.browser
async def test_its_page_draws_every_trial_with_the_numbers_of_the_summary(searched: Done, tab: Tab) -> None:
    found = searched.summary["capacity"]
    await opens_well(tab, searched.folder.report.resolve(), charts=2 if "latency" in found else 1)
    shown = "[...document.querySelectorAll('#curve circle.point')].map(c => [+c.dataset.rate, +c.dataset.value])"
    drawn = [tuple(pair) for pair in await tab.evaluate(shown)]
    goodputs = [(p["rate"], p["goodput_per_s"]) for p in found["curve"] if p["goodput_per_s"] is not None]
    assert drawn == [pytest.approx(pair) for pair in goodputs]
    shown = shown.replace("#curve circle.point", "#latency circle[data-rate]")
    values = [(t["rate"], t["slos"][0].get("value_ms")) for t in found["trials"]]
    assert {tuple(pair) for pair in await tab.evaluate(shown)} <= set(values)
    links = await tab.evaluate("[...document.querySelectorAll('#trials tbody a')].map(a => a.getAttribute('href'))")
    assert links == [f"{trial['folder']}/report.html" for trial in found["trials"] if trial["folder"]]
    headline = searched.summary["words"]["headline"]
    assert await tab.evaluate("document.querySelector('.verdict .sentence').textContent") == headline[0]


@pytest.mark.whole_run
def test_a_search_says_an_interval_and_servers_can_be_reported_again_and_taken_up(
    searched: Done, tmp_path: Path
) -> None:
    done = searched
    assert done.left == []
    told = " ".join(done.err.split())
    assert "--budget 30s is short" in told
    assert "from 80 req/s a search takes --budget 70s at least" in told
    assert done.out.strip() == str(done.folder.path)
    found = done.summary["capacity"]
    assert done.code == done.summary["exit_code"] in (0, 98), done.err
    assert found["requests"] == sum(trial["requests"] for trial in found["trials"])
    assert all((done.folder.path / trial["folder"] / "report.html").exists() for trial in found["trials"])
    _agree(done.summary)
    before = done.folder.summary.read_bytes()
    moved = tmp_path / "moved"
    shutil.copytree(done.folder.path, moved)
    (moved / "report.html").unlink()
    texts = {kind: tmp_path / f"told.{kind}" for kind in ("junit", "markdown")}
    files = [word for kind, path in texts.items() for word in (f"--{kind}", str(path))]
    assert main(["report", str(moved), "--quiet", "--annotations", *files]) == done.code
    assert done.summary["words"]["headline"][0] in texts["markdown"].read_text()
    assert ET.parse(texts["junit"]).getroot().get("errors") == str(int(done.code != 0))
    assert (moved / "summary.json").read_bytes() == before
    assert "Every trial" in (moved / "report.html").read_text()
    again = search(tmp_path, *MORE, "--budget", "40s", "--resume", str(moved))
    later = json.loads((moved / "summary.json").read_text())
    assert again.out.strip() == str(moved)
    assert later["capacity"]["trials"][: len(found["trials"])] == found["trials"]
    _agree(later)


@pytest.mark.whole_run
def test_a_search_and_one_of_a_dearer_server_are_compared_and_the_table_is_verified(
    searched: Done, tmp_path: Path
) -> None:
    """The same search at ten times the price, as its archive."""
    dear = tmp_path / "dear"
    shutil.copytree(searched.folder.path, dear)
    for path in dear.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["scenario"]["cost"]["usd_per_hour"] = 9.0
        path.write_text(json.dumps(manifest))
    assert main(["report", str(dear), "--quiet"]) in (0, 98)
    made = compare_folders([[searched.folder.path], [archive(dear, tmp_path / "dear.tar.gz")]], runs=tmp_path)
    assert {row.capacity.rate for row in made.result.rows} == {searched.summary["capacity"]["rate"]}
    if made.result.rows[0].per_request_usd:  # a busy machine may find no rate
        ratio = made.result.rows[1].ratio
        assert made.result.cheapest == "A" and ratio is not None
        assert ratio.value == pytest.approx(9.0 / made.result.rows[0].price.usd_per_hour)  # type: ignore[union-attr]
    names = {check.name: check.ok for check in verify(made.folder)}
    assert names["compare.json"] and names["report.html"], names


@pytest.mark.whole_run
def test_settings_are_searched_into_one_table_and_an_earlier_search_of_one_counts(
    searched: Done, tmp_path: Path
) -> None:
    """The second setting is searched from the rate that the first one held, or the scenario's."""
    earlier, runs = tmp_path / "earlier", tmp_path / "runs"
    shutil.copytree(searched.folder.path, earlier)
    over = ("--over", "server.max_batch=1,2", "--budget", "30s", "--runs", str(runs))
    done = gapmeter(*SMALL, *MORE, *over, "--resume", str(earlier), runs=runs)
    table = Path(done.out.strip())
    result = CostTable.read(table)
    assert done.code == (0 if all(row.capacity.low for row in result.rows) else 98), done.err
    assert [row.setting for row in result.rows] == ["simulated, max_batch 1", "simulated, max_batch 2"]
    assert result.rows[0].folders == ("earlier",)
    assert result.rows[0].capacity.rate == searched.summary["capacity"]["rate"]
    (other,) = (path for path in runs.iterdir() if path != table)
    assert json.loads((other / "manifest.json").read_text())["scenario"]["server"]["max_batch"] == 2
    told = (table / "report.html").read_text()
    assert f"../{other.name}/report.html" in told
    assert ("max_batch 2) holds" in told) == (result.rows[1].capacity.low is not None)  # a busy machine may find none
    assert all(check.ok for check in verify(table) if check.name in ("compare.json", "report.html"))
    again = gapmeter(*SMALL, *MORE, *over, "--resume", f"{earlier},{other}", runs=runs)
    rates = [row.capacity.rate for row in CostTable.read(Path(again.out.strip())).rows]
    assert rates == [row.capacity.rate for row in result.rows]
    assert len(list(runs.glob("*-capacity-*"))) == 1  # nothing was searched again
    wrong = gapmeter(*SMALL, *MORE, "--over", "server.max_batch=2,4", "--resume", str(earlier), runs=runs)
    assert (wrong.code, "is no search of one of these settings" in wrong.err) == (2, True)


@pytest.mark.parametrize(("rate", "code"), [(None, 99), (9.0, 0)])
def test_settings_none_of_which_meets_every_slo_end_as_a_search_of_one_does(
    tmp_path: Path, rate: float | None, code: int
) -> None:
    points = searchable_points("chat-p99", ["sweep={server.max_batch: [4, 8]}"])
    found = []
    for name, held in (("one", None), ("other", rate)):
        path = write_search(tmp_path / name, held, held, None if held else 4.0)
        result = CapacityResult.read(path)
        ended = FOUND if held else UNMEETABLE
        result = result.model_copy(update={"capacity": result.capacity.model_copy(update={"ended": ended})})
        found.append([Conclusion(path, result, 0 if held else 99)])
    options, command = Options(runs=tmp_path / "runs", quiet=True), CommandLine.of("capacity", "chat-p99", ())
    assert compared(points, found, options, command, CapacityGoal(), ()).exit_code == code


@pytest.mark.parametrize(("headroom", "planned_with"), [(0.5, 0.5), (None, 0.3)], ids=["its own", "by utilisation"])
def test_searches_that_are_over_are_planned_for_a_load_that_is_asked_for_later(
    tmp_path: Path, headroom: float | None, planned_with: float
) -> None:
    words = ["server.engine=simulated", "cost.utilisation=0.7", "sweep={server.max_batch: [1, 2]}"]
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, point in zip(paths, searchable_points("smoke", words), strict=True):
        asked = {"scenario": point.scenario.to_dict(), "scenario_digest": point.scenario.digest()}
        SearchManifest.read(write_search(path, 10.0, 8.0, 12.0)).model_copy(update=asked).write(path)
    options, goal = Options(runs=tmp_path / "runs", quiet=True), CapacityGoal(target_rps=100.0, headroom=headroom)
    find_capacities("smoke", words, options, goal, paths)
    planned = [SearchManifest.read(path).capacity for path in paths]
    assert [(each.target_rps, each.headroom, each.trials) for each in planned] == [(100.0, planned_with, ())] * 2


@pytest.mark.whole_run
def test_a_trials_command_repeats_its_load_alone_and_a_search_is_no_run(searched: Done) -> None:
    for trial in searched.summary["capacity"]["trials"]:
        manifest = Manifest.read(searched.folder.path / trial["folder"])
        assert read_back(CommandLine.parse(manifest.command)).digest() == manifest.scenario_digest
    with pytest.raises(UserError, match=r"is a capacity search; name one of its runs under trials/, for instance"):
        open_run(searched.folder.path)


def _agree(summary: dict[str, Any]) -> None:
    """Both ends and what follows from them, or no rate."""
    found = summary["capacity"]
    if found["rate"] is None:
        assert found["ended"] == "budget"
        return
    assert found["low"] <= found["rate"] <= found["high"]
    assert found["binding_slo"] == "ttft p50 <= 60 ms"
    assert found["replicas"] == found["planning"]["needed"] + 1
    assert f"{found['low']:.3g}"[:3] in summary["words"]["headline"][0]


@pytest.mark.whole_run
@pytest.mark.alone
def test_where_the_load_tester_gives_up_first_it_says_so_and_no_rate(tmp_path: Path) -> None:
    """The null server answers faster than anyone can ask."""
    with null_server(Cores((), ()), Timing(first_ms=1, gap_ms=1), log=None) as port:
        runs = tmp_path / "runs"
        done = gapmeter(
            "capacity", "smoke", "--url", f"http://127.0.0.1:{port}", "--budget", "90s", "--runs", str(runs),
            *settings("load.rate=3000", "load.warmup=0", "workload.prompt_tokens=16", "workload.output_tokens=2",
                      'slo=["ttft p90 <= 20 s"]'), runs=runs,
        )  # fmt: skip
    found = done.summary["capacity"]
    assert done.code == 98, done.err
    assert (found["rate"], found["ended"]) == (None, "client_limit"), done.err
    held = [trial["rate"] for trial in found["trials"] if trial["verdict"] == "holds"]
    assert found["low"] == max(held, default=None), "the highest that was proven, which takes a slow machine too long"
    least = "not found:" if found["low"] is None else f"at least {found['low']:,.0f} req/s: beyond that"
    lead = f"Capacity {least} the load tester was the limit, not the server"
    assert lead in " ".join(done.err.split())


@pytest.mark.parametrize("folder", ["nowhere", "run"])
def test_only_the_folder_of_a_search_can_be_taken_up(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text('{"kind": "run"}')
    assert main(["capacity", "smoke", "--resume", str(tmp_path / folder)]) == 2
    assert "--resume" in capsys.readouterr().err


def taken_up(tmp_path: Path, ended: str, *words: str) -> Path:
    """A search of smoke that ended so, after two trials at one rate whose folders are gone."""
    scenario = resolve("smoke", words)
    path = write_search(tmp_path / "search", 10.0, 8.0, 12.0)
    manifest = SearchManifest.read(path)
    notes = [TrialNote(rate=8.0, folder=f"trials/0{n}", looks=(20,), ended=1, from_ns=0, seconds=9.0) for n in (1, 2)]
    facts = manifest.capacity.model_copy(update={"ended": ended, "trials": tuple(notes)})
    asked = {"scenario": scenario.to_dict(), "scenario_digest": scenario.digest(), "capacity": facts}
    manifest.model_copy(update=asked).write(path)
    return path


@pytest.mark.parametrize("key", ["cost.usd_per_hour", "telemetry.hz"])
def test_a_study_is_taken_up_at_the_price_and_with_the_telemetry_of_its_runs_and_no_other(
    tmp_path: Path, key: str
) -> None:
    path = taken_up(tmp_path, "found", f"{key}=1")
    with study_folder(tmp_path, resolve("smoke", [f"{key}=1"]), SearchManifest, path) as (_, manifest):
        assert manifest is not None and manifest.status == "running"
    other = study_folder(tmp_path, resolve("smoke", [f"{key}=2"]), SearchManifest, path)
    said = "is a capacity search of another scenario, price or telemetry; begun with: "
    with pytest.raises(UserError, match=said), other:
        pass


@pytest.mark.parametrize(
    ("ended", "reason", "kept"), [("not_measured", None, 1), ("not_measured", "no memory", 1), ("budget", None, 2)]
)
def test_a_trial_that_was_no_measurement_twice_is_run_again_when_its_search_is_taken_up(
    ended: str, reason: str | None, kept: int, tmp_path: Path
) -> None:
    """Where it could not be recorded (``reason``), the one before it was a measurement, and counts."""
    path = taken_up(tmp_path, ended)
    manifest = SearchManifest.read(path)
    first, last = manifest.capacity.trials
    manifest.with_facts(trials=(first, last.model_copy(update={"reason": reason}))).write(path)
    command = CommandLine.of("capacity", "smoke")
    with begin_search(resolve("smoke"), command, Options(), CapacityGoal(), path) as study:
        assert len(study.manifest.capacity.trials) == kept


def test_a_search_that_is_taken_up_uses_no_trial_s_folder_and_seed_again() -> None:
    """One that could not be recorded was left out when it was taken up; those after it count."""
    kept = [
        TrialNote(rate=8.0, folder=f"trials/{number:02d}-8rps", looks=(20,), ended=1, from_ns=0, seconds=9.0)
        for number in (1, 3, 4)
    ]
    assert (next_number(kept), next_number(())) == (5, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"target_rps": -5.0}, {"headroom": 1.0}, {"spare": -1}, {"confidence": 1.5}, {"within": 0.0}, {"budget_s": -1.0},
     {"start": 0.0}, {"target_rps": math.nan}],
    ids=str,
)  # fmt: skip
def test_a_goal_that_no_search_can_have_is_refused_before_there_is_a_folder(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    options, goal = Options(runs=tmp_path / "runs", quiet=True), CapacityGoal(**wrong)
    words = ["server.engine=simulated", "sweep={server.max_batch: [1, 2]}"]
    for begin in (lambda: find_capacity("smoke", words[:1], options, goal),
                  lambda: find_capacities("smoke", words, options, goal)):  # fmt: skip
        with pytest.raises(UserError, match=next(iter(wrong)).partition("_")[0]) as refused:
            begin()
        assert refused.value.exit_code == 2
    assert not options.runs.exists()


def test_the_command_of_a_search_from_python_asks_for_the_same_goal() -> None:
    asked, options = ["load.rate=3"], Options(probe_dir=Path("probe"))
    goal = CapacityGoal(50.0, headroom=0.07, spare=1, confidence=0.999, within=0.005, budget_s=90.5)
    words = search_command("smoke", asked, options, goal).words
    assert words[:5] == ("gapmeter", "capacity", "smoke", "--set", "load.rate=3")
    read = parser().parse_args(words[1:])
    assert read.probe_dir == Path("probe")
    shares = (flags.share_of(f"--{name}", getattr(read, name)) for name in ("headroom", "confidence", "within"))
    budget_s = flags.seconds_of("--budget", read.budget)
    assert goal == CapacityGoal(flags.rate_of("", read.target_rps), next(shares), read.spare, *shares, budget_s)
    assert not CapacityGoal().flags


def test_what_repeats_a_search_that_was_taken_up_has_the_goal_that_it_was_taken_up_with(tmp_path: Path) -> None:
    path = taken_up(tmp_path, "budget")
    command = CommandLine.parse(f"gapmeter capacity smoke --budget 9m --resume {path}")
    with begin_search(resolve("smoke"), command, Options(), CapacityGoal(budget_s=540.0), path) as study:
        assert study.manifest.command == "gapmeter capacity smoke --budget 9m"


def test_why_no_server_was_there_when_a_search_was_taken_up_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    path = taken_up(tmp_path, "interrupted", "server.engine=attach", f"server.url={url}")
    assert main(["capacity", "smoke", "--url", url, "--resume", str(path)]) == 106
    assert f"the server died: no server answers at {url}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("budget_s", "more"), [(240, "--budget 8m"), (50_000, "--budget 1440m"), (86_400, "")])
def test_a_search_goes_on_with_twice_its_time_as_far_as_one_may_ask_for_that(
    tmp_path: Path, budget_s: float, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = taken_up(tmp_path, "budget")
    SearchManifest.read(path).with_facts(budget_s=budget_s).write(path)
    assert main(["report", str(path)]) == 98
    said = capsys.readouterr().err
    assert ("\n go on " in said) is bool(more) and more in said


@pytest.mark.parametrize("flag", ["-v", "--definitions"])
def test_what_would_change_nothing_of_a_search_s_report_is_refused(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(taken_up(tmp_path, "budget")), flag]) == 2
    assert "is a capacity search, and -v and --definitions are for a single run's report" in capsys.readouterr().err


def test_no_budget_is_named_that_one_may_not_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--url", "http://127.0.0.1:9", "--set", "load.rate=0.0001", "--budget", "30s", "--runs", str(tmp_path))
    assert main(["capacity", "smoke", *slow]) == 106
    assert "a search takes longer than any --budget may be" in capsys.readouterr().err


@pytest.mark.parametrize("manifest", ["", "{"], ids=["none", "damaged"])
def test_a_trial_whose_manifest_cannot_be_read_takes_no_search_s_report_along(
    tmp_path: Path, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = taken_up(tmp_path, "budget")
    (path / "trials" / "01" / "requests").mkdir(parents=True)
    if manifest:
        (path / "trials" / "01" / "manifest.json").write_text(manifest)
    assert main(["report", str(path)]) == 98
    assert "trial 01 is not analysed: " in capsys.readouterr().err


@pytest.mark.whole_run
def test_an_slo_that_nothing_can_meet_is_told_with_the_best_seen(tmp_path: Path) -> None:
    """A forward takes longer than the limit, and the limit is no hiccup of a busy machine."""
    slow = settings('slo=["ttft p90 <= 50 ms"]', "load.rate=5", "server.args.forward_ms=60", "workload.output_tokens=1")
    done = search(tmp_path, *slow, "--budget", "60s")
    assert done.code == 99, done.err
    assert "No rate meets every SLO" in done.err
    found = done.summary["capacity"]
    assert (found["rate"], found["ended"]) == (None, "unmeetable")
    assert found["best_seen"]["over"] > 0.9 * found["best_seen"]["count"]


@pytest.mark.whole_run
def test_a_server_that_dies_in_a_trial_ends_the_search_with_what_is_known(tmp_path: Path) -> None:
    done = search(tmp_path, "--set", 'slo=["ttft p50 <= 60 ms"]', "--set", "server.args.fault_die_at=90")
    assert done.code == 106, done.err
    assert done.summary["capacity"]["ended"] == "died"
    assert "the server died" in done.err


@pytest.mark.whole_run
def test_a_server_that_dies_behind_a_proxy_ends_the_search_too(tmp_path: Path) -> None:
    """Whose 502s are no failures of the rate."""
    runs = tmp_path / "runs"
    with faulty(dies_at=90) as url:
        done = gapmeter("capacity", "smoke", "--url", url, "--budget", "60s", "--runs", str(runs),
                        *settings('slo=["errors <= 1 %"]', "load.rate=20", "workload.output_tokens=4"),
                        runs=runs)  # fmt: skip
    assert done.code == 106, done.err
    assert done.summary["capacity"]["ended"] == "died"
    assert "the server died: it answers 502 Bad Gateway" in " ".join(done.err.split())


@pytest.mark.whole_run
def test_a_server_that_lacks_something_of_this_machine_is_not_one_that_cannot_be_reached(tmp_path: Path) -> None:
    few = ["bash", "-c", 'ulimit -n 16; exec "$@"', "few", sys.executable, "-P", "-m", "gapmeter"]
    command = [*few, *SMALL, "--runs", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Too many open files" in ended.stderr) == (98, True), ended.stderr
    (folder,) = tmp_path.iterdir()
    assert gapmeter("report", str(folder), runs=tmp_path).code == 98


@pytest.mark.whole_run
def test_ctrl_c_reports_what_is_known(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = Command((*SMALL, "--set", 'slo=["ttft p50 <= 60 ms"]', "--within", "1%", "--runs", str(runs)), runs)
    until(lambda: list(runs.glob("*/trials/02-*")), 300)
    command.process.send_signal(signal.SIGINT)
    done = command.done()
    assert done.code == 105, done.err
    assert done.left == []
    found = json.loads(done.folder.summary.read_text())["capacity"]
    assert found["ended"] == "interrupted"
    assert found["trials"]


@pytest.mark.parametrize("name", ["concurrency", "dialogue", "batch-size", "rush-hour"])
def test_what_a_search_advises_for_a_scenario_that_it_refuses_can_be_searched(name: str) -> None:
    flags: list[str] = []
    for _ in range(3):  # one thing is told at a time
        try:
            check_searchable(resolve(name, flags), name)
            break
        except UserError as error:
            words = shlex.split(str(error).split(f"gapmeter capacity {name}")[1].split(", or")[0])
            flags += words[1::2]
    check_searchable(resolve(name, flags), name)


def test_what_a_search_advises_for_a_file_whose_name_has_a_blank_can_be_pasted(tmp_path: Path) -> None:
    name = tmp_path / "my own.yaml"
    shutil.copy(ROOT / "scenarios" / "smoke.yaml", name)
    with pytest.raises(UserError, match=f"Write: gapmeter capacity '{name}' --set "):
        check_searchable(resolve(name, ["slo=[]"]), name)


def over(study: Study[SearchManifest], _: object) -> None:
    """A search without a trial."""
    study.note(status="complete", capacity=study.manifest.capacity.model_copy(update={"ended": BUDGET}))


def test_a_search_that_was_stopped_while_it_was_analysed_is_in_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each search's trials are analysed when it is over; the third one's by nobody here."""
    analysed = list[Path]()

    def analyse(path: Path, *_: object) -> None:
        analysed.append(path)
        if len(analysed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("gapmeter.study.capacities.run_search", over)
    monkeypatch.setattr("gapmeter.study.capacity.analyse_trials", analyse)
    words = ("capacity", "smoke", "--engine", "simulated", "--over", "server.max_batch=1,2,4", "--budget", "30s")
    assert main([*words, "--runs", str(tmp_path)]) == 105
    said = " ".join(capsys.readouterr().err.split())
    assert "what a request costs" in said
    assert re.search(rf"go on .* --resume \S*,\S*,{re.escape(str(analysed[-1]))} ", said)


def test_a_search_that_was_stopped_while_it_was_analysed_says_how_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gapmeter.study.capacity.run_search", over)
    monkeypatch.setattr("gapmeter.study.capacity.analyse_trials", stop)
    with pytest.raises(UserError, match="what it found: gapmeter report") as stopped:
        find_capacity("smoke", ["server.engine=simulated"], Options(runs=tmp_path / "my runs", quiet=True))
    assert stopped.value.exit_code == 105
    (folder,) = (tmp_path / "my runs").iterdir()
    assert str(stopped.value).endswith(f"gapmeter report '{folder}'"), "to be pasted"


def test_every_search_on_a_server_that_goes_on_has_texts_of_its_own() -> None:
    study: Any = SimpleNamespace(manifest=SimpleNamespace(slo=()))
    attached = resolve("smoke", ["server.engine=attach", "server.url=http://127.0.0.1:9"])
    first, second, launched = (
        Trials(study, None, each)._texts  # type: ignore[arg-type]
        for each in (attached, attached, resolve("smoke", ["server.engine=simulated"]))
    )
    assert launched == 0 != first != second != 0
