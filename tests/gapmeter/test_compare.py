from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gapmeter import errors
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.comparison import Comparison
from gapmeter.analysis.results.cost_table import CostTable
from gapmeter.analysis.results.regression import Regression, RegressionRow
from gapmeter.analysis.results.schema import schema
from gapmeter.cli import main
from gapmeter.commands.flags import share_of
from gapmeter.errors import UserError
from gapmeter.options import Options
from gapmeter.report.export.junit import annotations_of, junit, suite_of_run
from gapmeter.runs.archive import archive
from gapmeter.runs.comparison import compare_folders
from gapmeter.runs.listing import find_listed
from gapmeter.runs.run import Conclusion
from gapmeter.study.comparison import Baseline, alternating, check_baseline, compare_in_turn, judged_against
from gapmeter.study.resolve import resolve
from gapmeter.study.session import open_session
from tests.kit.command import SHORT, SIMULATED, gapmeter
from tests.kit.compared import folder
from tests.kit.searches import write_search


@pytest.fixture(scope="module")
def runs(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    folder(home / "three", slots=3)
    folder(home / "eight", slots=8)
    folder(home / "twin", slots=8)
    folder(home / "stranger", slots=8, changes={"scenario__load__rate": 9.0, "versions__gapmeter": "9"})
    folder(home / "future", slots=8, changes={"schema_version": 9})
    folder(home / "killed", slots=8, changes={"status": "incomplete", "ended_because": "killed " * 30})
    shutil.copytree(finished_run, home / "unanalysed")
    (home / "unanalysed" / "summary.json").unlink()
    (home / "damaged").mkdir()
    (home / "damaged" / "manifest.json").write_text('{"schema_version": 1}')
    for name in ("three", "eight", "twin", "stranger", "future", "killed"):
        complete(home / name, finished_run)
    return home


def complete(folder: Path, whole: Path) -> None:
    """What a virtual run's manifest and summary do not say is what a whole run's say."""
    for name in ("manifest.json", "summary.json"):
        own, others = (json.loads((path / name).read_text()) for path in (folder, whole))
        for slo in own["slo"]:
            slo.update({"limit_ns": 9_000_000_000, "limit_share": None} if name == "manifest.json" else {})
            slo.setdefault("text", f"{slo['metric']} p{slo['percentile']:g} <= 9 s")
        (folder / name).write_text(json.dumps(joined(own, others)))


def joined(own: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: joined(value, others[key]) if key in NESTED and isinstance(others.get(key), dict) else value
        for key, value in own.items()
    }
    return {**others, **both}


NESTED = ("scenario", "server", "load", "hardware", "target", "plan")


def test_two_runs_are_compared_into_a_folder_with_page_and_document(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(runs / "three"), str(runs / "eight"), "--runs", str(tmp_path)]
    assert main([*words, "--markdown", str(tmp_path / "told.md")]) == errors.OK
    out, err = capsys.readouterr()
    made = Path(out.strip())
    assert made.parent == tmp_path
    assert "-compare-" in made.name
    document = json.loads((made / "compare.json").read_text())
    assert document["verdict"] == "MIXED"
    assert document["command"].startswith("gapmeter compare ")
    assert "<!doctype html>" in (made / "report.html").read_text()
    answer = "E2E p50"
    assert 0 < err.index(answer) < err.index("server.max_batch: 3 | 8"), "the answer first, then what differs"
    page = (made / "report.html").read_text()
    assert page.index(answer) < page.index("Can they be compared?</h2>")
    assert "MIXED" in (tmp_path / "told.md").read_text()


def test_sides_of_several_runs_may_be_named_by_flags_and_the_document_goes_to_standard_output(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--a", str(runs / "three"), "--b", str(runs / "eight"), "--json", "--quiet", "--runs", str(tmp_path)]
    assert main(["compare", *flags]) == errors.OK
    out, err = capsys.readouterr()
    assert json.loads(out)["sides"][1]["runs"] == ["eight"]
    assert err == ""


@pytest.mark.parametrize(
    ("b", "status", "code"), [("eight", "WITHIN", errors.OK), ("three", "REGRESSED", errors.SLO_MISSED)]
)
def test_a_comparison_is_a_gate_where_it_is_told_how_much_b_may_grow(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], b: str, status: str, code: int
) -> None:
    words = ["compare", str(runs / "twin"), str(runs / b), "--max-regression", "10%", "--json"]
    words += ["--markdown", str(tmp_path / "said.md")]
    assert main([*words, "--factor", "server.max_batch", "--runs", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert f"{status}: " in (tmp_path / "said.md").read_text()
    assert ("exit=99 regressed against its baseline" in err) == (code == errors.SLO_MISSED)
    assert json.loads(out)["regression"]["status"] == status
    assert f"gapmeter: {status} against {runs / 'twin'}: " in err


def test_a_gate_is_for_two_sides(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *(str(runs / name) for name in ("eight", "twin", "three")), "--max-regression", "5%"]
    assert main([*words, "--factor", "server.max_batch", "--runs", str(tmp_path)]) == errors.USAGE
    assert "--max-regression judges runs, B against A" in capsys.readouterr().err


def test_three_sides_are_also_told_in_one_table_and_how_far_identical_devices_lie_apart(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *(str(runs / name) for name in ("eight", "twin", "three")), "--runs", str(tmp_path)]
    assert main([*words, "--factor", "server.max_batch"]) == errors.OK
    out, err = capsys.readouterr()
    lines = err.splitlines()
    (head,) = (at for at, line in enumerate(lines) if "per request at the SLO" in line)
    assert [line.split()[:2] for line in lines[head + 1 : head + 4]] == [[side, "240"] for side in "ABC"]
    page = (Path(out.strip()) / "report.html").read_text()
    for part in ("per request at the SLO", "energy a request", "Spread between identical devices (A, B"):
        assert part in " ".join(err.split()) and part in page, part


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One on a GPU that holds three times as many requests for twice the price, and one of another SLO."""
    home = tmp_path_factory.mktemp("searches")
    for name, rate, usd in (("small", 50, 1.0), ("large", 150, 2.0)):
        cost = {"gpu": "L4", "gpus_per_replica": 1, "usd_per_hour": usd}
        more: dict[str, Any] = {"scenario": {"cost": cost}, "hardware": {"gpus": [f"{name}, 1 MiB, 1"]}}
        write_search(home / name, rate, 0.97 * rate, 1.03 * rate, target_rps=200.0, **more)
    write_search(home / "stranger", 50, 48, 52, slo="ttft p99 <= 900 ms")
    return home


def test_searches_are_compared_in_one_table_by_what_a_request_costs(
    searches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(searches / "small"), str(searches / "large"), "--runs", str(tmp_path)]
    assert main([*words, "--markdown", str(tmp_path / "told.md")]) == errors.OK
    out, err = capsys.readouterr()
    made = Path(out.strip())
    kept = CostTable.read(made)
    assert (kept.verdict, kept.cheapest) == ("CHEAPER", "B")
    page = (made / "report.html").read_text()
    for told in (err, (tmp_path / "told.md").read_text(), page):
        shown = " ".join(told.split())
        assert kept.words.headline in shown
        assert "150 (146 .. 154)" in shown and "in whole replicas" in shown
        assert "For 200 req/s, in whole replicas, a million requests cost" in shown
    assert "B (large) serves a request for 0.67 (0." in kept.words.headline
    listed = find_listed(made)
    assert (listed.kind, listed.verdict) == ("compare", "CHEAPER")
    document = json.loads((made / "compare.json").read_text())
    assert not list(jsonschema.Draft202012Validator(schema("costs", CostTable)).iter_errors(document))


@pytest.mark.parametrize("gone", ["name", "server", "workload", "load", "cost"])
def test_a_key_that_is_gone_from_a_scenario_ends_no_comparison_in_a_traceback(
    gone: str, searches: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for whole in (searches / "small", runs / "eight"):
        shutil.copytree(whole, lacking := tmp_path / whole.name)
        manifest = json.loads((lacking / "manifest.json").read_text())
        del manifest["scenario"][gone]
        (lacking / "manifest.json").write_text(json.dumps(manifest))
        words = ["compare", str(whole), str(lacking), "--force", "--runs", str(tmp_path)]
        refused = gone == "load" and whole.parent == searches
        assert main(words) == (errors.USAGE if refused else errors.OK)
        assert ("manifest.json: scenario.load is missing; read it with" in capsys.readouterr().err) == refused


def test_an_archive_is_compared_like_the_folder_that_it_holds(searches: Path, runs: Path, tmp_path: Path) -> None:
    packed = archive(searches / "large", tmp_path / "large.tar.gz")
    found = compare_folders([[searches / "small"], [packed]], runs=tmp_path).result
    assert [row.folders for row in found.rows] == [("small",), ("large",)]
    assert found.command == f"gapmeter compare {searches / 'small'} {packed}", "what repeats it"
    run = archive(runs / "eight", tmp_path / "eight.tar.gz")
    assert isinstance(compare_folders([[runs / "three"], [run]], runs=tmp_path).result, Comparison)


def test_an_archive_of_a_run_without_figures_is_to_be_unpacked_and_reported_first(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(runs / "eight", tmp_path / "bare"))
    (bare / "summary.json").unlink()
    packed = archive(bare, tmp_path / "my run.tar.gz")
    assert f"to check it: gapmeter verify '{packed}'" in capsys.readouterr().err
    with pytest.raises(UserError) as refused:
        compare_folders([[runs / "three"], [packed]], runs=tmp_path)
    assert str(refused.value).endswith(f"analyse it first: tar xf '{packed}' && gapmeter report bare")


def test_a_run_beside_a_search_is_a_row_and_other_slos_are_not_comparable(
    searches: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [str(searches / "small"), str(searches / "stranger"), str(runs / "eight")]
    assert main(["compare", *sides, "--runs", str(tmp_path)]) == errors.NOT_VALID
    out, err = capsys.readouterr()
    assert [row.kind for row in CostTable.read(Path(out.strip())).rows] == ["capacity", "capacity", "run"]
    assert "slo: ttft p99 <= 500 ms | ttft p99 <= 900 ms" in " ".join(err.split())


def test_what_compares_the_valid_runs_is_told_where_each_side_keeps_two(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("again", "bad"):
        shutil.copytree(runs / "three", tmp_path / name)
    summary = tmp_path / "bad" / "summary.json"
    summary.write_text(
        json.dumps({**json.loads(summary.read_text()), "verdict": "INVALID", "invalid_reasons": ["late"]})
    )
    a, b = [tmp_path / "bad", runs / "three", tmp_path / "again"], [runs / "eight", runs / "twin"]

    def told(a: list[Path]) -> str:
        sides = [",".join(map(str, side)) for side in (a, b)]
        assert main(["compare", *sides, "--runs", str(tmp_path)]) == errors.NOT_VALID
        return capsys.readouterr().err

    said = told(a)
    assert "A (bad) is not valid as a measurement" in " ".join(said.split())
    command = next(line for line in said.splitlines() if "gapmeter compare " in line).partition("compare ")[2].split()
    paths = [[Path(path).resolve() for path in side.split(",")] for side in command]
    assert paths == [[path.resolve() for path in side] for side in (a[1:], b)]
    assert "gapmeter compare " not in told(a[:2]), "one run a side tells too little"


MISTAKES = {
    "one side": (["three"], 2, "two sides"),
    "the same run twice": (["three", "three"], 2, "named twice"),
    "no run": (["three", "nowhere"], 2, "does not exist"),
    "not analysed": (["three", "unanalysed"], 2, "gapmeter report"),
    "damaged": (["three", "damaged"], 98, "is damaged: manifest.json: status is missing"),
    "two things differ": (["three", "stranger"], 98, "--factor"),
    "another version of the format": (["three", "future"], 2, "schema_version is 9, this gapmeter reads 1"),
    "a run that was killed": (["eight", "killed"], 98, "B is not valid as a"),
    "pairs of nothing": (["--run", "smoke", "--pairs", "2"], 2, "--a server.max_batch=4"),
    "a single pair": (["--run", "smoke", "--a", "server.max_batch=4", "--pairs", "1"], 2, "or add --force"),
    "no pairs": (["--run", "smoke", "--a", "server.max_batch=4", "--pairs", "0"], 2, "at least 1"),
    "an override that sets nothing": (["--run", "smoke", "--a", "server.max_batch"], 2, "KEY=VALUE"),
    "a factor that is no key": (["three", "eight", "--factor", "server.max_bach"], 2, "did you mean server.max_batch?"),
    "a factor like no key": (["three", "eight", "--factor", "xyz"], 2, "write one such as server.max_batch"),
    "overrides of runs that are there": (["three", "eight", "--set", "load.rate=2"], 2, "--run SCENARIO"),
    "pairs of runs that are there": (["three", "eight", "--pairs", "2"], 2, "--run SCENARIO"),
    "a probe of runs that are there": (["three", "eight", "--probe-dir", "p"], 2, "--run SCENARIO"),
    "a probe of a server that we launch": (
        ["--run", "smoke", "--a", "server.max_batch=4", "--set", "server.engine=simulated", "--probe-dir", "p"],
        2,
        "a server that we launch has its own",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_compared_is_told_with_its_remedy(
    mistake: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, code, says = MISTAKES[mistake]
    named = [str(runs / word) if word.isalpha() and word != "smoke" else word for word in words]
    assert main(["compare", *named, "--runs", str(tmp_path)]) == code
    err = capsys.readouterr().err
    assert says in err
    assert err.strip().splitlines()[-1].startswith(f"exit={code} ")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("smoke", "--set", "server.url=http://127.0.0.1:9", "--a", "server.max_batch=1", "--b", "server.max_batch=2"),
         104, "server.max_batch cannot be changed on a server that runs already"),
        (("smoke", "--set", "server.url=http://127.0.0.1:9", "--set", "server.ready_timeout=1s", "--a", "seed=1", "--b",
          "seed=2", "--factor", "server.max_batch"), 106, "no server answers at"),
        (("concurrency", "--set", "server.engine=simulated", "--a", "seed=1", "--b", "seed=2"),
         2, "concurrency is a sweep, which this does not run; name one point of it with --set 'sweep=[]'"),
        (("smoke", "--a", "seed=1", "--b", "seed=2", "--factor", "max_batch"), 2, "did you mean server.max_batch?"),
        (("smoke", "--set", "slo=[errors <= 1 %]", "--a", "seed=1", "--b", "seed=2", "--max-regression", "5%"),
         2, "a regression check needs an SLO on a percentile; these runs have none"),
    ],
)  # fmt: skip
def test_what_would_compare_nothing_is_refused_before_any_load(
    words: tuple[str, ...], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--run", *words, "--runs", str(tmp_path)]) == code
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.whole_run
def test_a_server_that_goes_on_is_asked_new_texts_in_every_run_of_a_comparison(tmp_path: Path) -> None:
    """Else all runs but the first would find their prompts in its cache; also those held against a baseline."""
    options = Options(runs=tmp_path, quiet=True)
    with open_session(resolve("smoke", ["server.engine=simulated"]), options, home=tmp_path / "server") as session:
        load = ("load.requests=30", "load.rate=60", "load.warmup=0", "workload.output_tokens=2")
        url = f"server.url={session.target.about.url}"
        sides = ["load.timeout=20s"], ["load.timeout=30s"]
        made = compare_in_turn("smoke", *sides, 2, [url, *load], options)
        earlier = ",".join(map(str, tmp_path.glob("*-smoke-*")))
        changes = (url, *load, "repeat=2", 'slo=["ttft p50 <= 9 s"]')
        held = ["--baseline", earlier, "--factor", "load.timeout", *(f"--set={change}" for change in changes)]
        for _ in range(2):
            assert main(["run", "smoke", *held, "--quiet", "--runs", str(tmp_path)]) in (0, errors.NOT_VALID)
    runs = sorted(path for path in tmp_path.glob("*-smoke-*"))
    plans = [json.loads((path / "manifest.json").read_text())["plan"]["digest"] for path in runs]
    assert len(set(plans)) == len(plans) == 8
    assert "plan" not in [fact.key for fact in made.result.protocol[0].facts if fact.meaning == "blocks"]


def test_runs_are_made_in_turn() -> None:
    assert ["".join("AB"[side] for side in alternating(pairs)) for pairs in (1, 2, 4)] == ["AB", "ABBA", "ABBAABBA"]


@pytest.mark.parametrize(("text", "limit"), [("5%", 0.05), (" 2.5 % ", 0.025)])
def test_a_limit_is_a_share(text: str, limit: float) -> None:
    assert share_of("--max-regression", text) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("flag", "least", "most"),
    [
        ("--confidence", 0.5, 0.999),
        ("--within", 0.005, 1.0),
        ("--headroom", 0.0, 0.95),
        ("--max-regression", 0.0, 10.0),
    ],
)
def test_a_share_may_be_either_end_of_its_range(flag: str, least: float, most: float) -> None:
    assert [share_of(flag, f"{100 * end:g}%") for end in (least, most)] == [least, most]


@pytest.mark.parametrize("text", ["5", "0.05", "-5%", "five"])
def test_a_limit_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--max-regression .*: write a percentage from 0% to 1000%"):
        share_of("--max-regression", text)


def regression(status: str) -> Regression:
    row = RegressionRow.model_construct(
        name="ttft p90", status=status, sentence="TTFT p90 100 ms -> 120 ms, +20 %", a_ms=100.0, b_ms=120.0,
        relative=0.2, relative_ci=(0.15, 0.25),
    )  # fmt: skip
    return Regression.model_construct(status=status, limit=0.05, baseline="base", rows=(row,), sentence=row.sentence)


@pytest.mark.parametrize(
    ("status", "part", "level"),
    [("REGRESSED", "failure", "error"), ("UNDECIDED", "skipped", "warning"), ("WITHIN", None, None)],
)
def test_a_regression_is_a_case_in_junit_and_an_annotation(
    runs: Path, status: str, part: str | None, level: str | None
) -> None:
    result = RunResult.read(runs / "three").model_copy(update={"name": "chat", "verdict": "PASS", "slo": ()})
    suite = suite_of_run(result, regression(status))
    cases = ET.fromstring(junit([suite])).findall("./testsuite/testcase")
    assert [case.get("name") for case in cases][1] == "ttft p90 at most 5.0 % slower against base"
    assert [child.tag for child in cases[1]] == ([part] if part else [])
    lines = annotations_of(suite)
    expected = f"::{level} title=chat%3A ttft p90 {status}::TTFT p90 100 ms -> 120 ms, +20 %25"
    assert lines == ([expected] if level else [])


def test_a_baseline_needs_slos_with_percentiles_before_any_load(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SIMULATED, "--runs", str(tmp_path), "--baseline", str(runs / "three")]
    assert main(words) == errors.USAGE
    assert "needs an SLO on a percentile" in capsys.readouterr().err
    assert main([*SIMULATED, "--max-regression", "5%"]) == errors.USAGE
    assert "--baseline RUN" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_baseline_was_not_made_with_is_told_before_any_load(runs: Path, tmp_path: Path) -> None:
    """At a tenth of the rate a server that became slower would pass."""
    slo = 'slo=["ttft p50 <= 1 s"]'
    base = shutil.copytree(runs / "eight", tmp_path / "base")
    told = json.loads((base / "manifest.json").read_text())
    told["scenario"] = resolve("smoke", [slo, "load.rate=40"]).to_dict()
    (base / "manifest.json").write_text(json.dumps(told))
    baseline = Baseline((base,), 0.05)
    slower, same = (
        resolve("smoke", [slo, *words]) for words in (["load.rate=4"], ["load.rate=40", "server.max_batch=4"])
    )
    with pytest.raises(UserError, match=r"had load\.rate 40, now 4; to compare all the same, add --factor load\.rate"):
        check_baseline(baseline, slower)
    check_baseline(replace(baseline, factors=("load.rate",)), slower)
    check_baseline(baseline, same)
    with pytest.raises(UserError, match="named twice"):
        check_baseline(replace(baseline, folders=(base, base)), same)


HELD = {"a slower run": ("three", "eight", "REGRESSED", errors.SLO_MISSED),
        "the same again": ("eight", "twin", "WITHIN", errors.OK)}  # fmt: skip


@pytest.mark.parametrize("case", HELD)
def test_a_run_that_regressed_ends_with_99_and_one_that_did_not_with_0(case: str, runs: Path, tmp_path: Path) -> None:
    name, against, status, code = HELD[case]
    result = Conclusion(runs / name, RunResult.read(runs / name), errors.OK)
    baseline = Baseline((runs / against,), 0.05, ("server.max_batch",))
    (judged,) = judged_against([result], 1, baseline, tmp_path, quiet=True)
    assert "one run per side: the interval leaves out" in judged.regression.sentence
    assert (judged.regression.status, judged.exit_code) == (status, code)


def test_runs_are_held_against_several_and_three_are_made_where_the_scenario_says_nothing(
    runs: Path, tmp_path: Path
) -> None:
    result = Conclusion(runs / "three", RunResult.read(runs / "three"), errors.OK)
    baseline = Baseline((runs / "eight", runs / "twin"), 0.05, ("server.max_batch",))
    (judged,) = judged_against([result], 1, baseline, tmp_path, quiet=True)
    assert judged.regression.runs == (2, 1)
    assert judged.regression.baseline == "eight, twin"
    once, twice = (resolve("smoke", [f"repeat={count}"]) for count in (1, 2))
    assert [baseline.repeats(scenario) for scenario in (once, twice)] == [3, 2]
    assert replace(baseline, force=True).repeats(once) == 1


FORWARD_MS = {"a": 10, "b": 30}
STATUSES = {"REGRESSED": 99, "UNDECIDED": 0, "NOT ESTIMABLE": 0, "NOT COMPARABLE": 98}


@pytest.mark.whole_run
def test_runs_in_turn_are_compared_and_a_run_is_held_against_one_of_them(tmp_path: Path) -> None:
    """What a busy machine allows to be claimed differs; what the slower step adds to the ledgers does not."""
    slo = ("--set", 'slo=["ttft p50 <= 5 s"]')
    load = ("load.rate=20", "workload.output_tokens=2")
    settings = ("--set", "server.engine=simulated", *SHORT, *slo, *(w for each in load for w in ("--set", each)))
    sides = [word for side, ms in FORWARD_MS.items() for word in (f"--{side}", f"server.args.forward_ms={ms}")]
    done = gapmeter("compare", "--run", "smoke", *settings, *sides, "--pairs", "1", "--force", "--json", "--runs",
                    str(tmp_path), runs=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    document = json.loads(done.out)
    (compared,) = document["comparisons"]
    stages = {each["stage"]: each["difference_ms"] for each in compared["stages"]["last_token"]["stages"]}
    assert sum(stages.get(stage, 0.0) for stage in ("prefill", "decode", "interference")) == pytest.approx(40, rel=0.4)
    assert {found["verdict"] for found in compared["metrics"].values()} <= {"slower", "not estimable"}
    assert {"factor"} == {f["meaning"] for f in document["protocol"][0]["facts"] if f["key"].startswith("server.")}
    baseline = next(path for path in tmp_path.glob("*-smoke-*") if path.name == document["sides"][0]["runs"][0])
    judged = gapmeter(
        "run", "smoke", *settings, "--set", "server.args.forward_ms=30", "--baseline", str(baseline), "--force",
        "--factor", "server.args", "--json", "--annotations", "--markdown", str(tmp_path / "told.md"),
        runs=tmp_path / "ci",
    )  # fmt: skip
    told = json.loads(judged.out)["regression"]
    assert told["status"] in STATUSES, told
    assert judged.code in (STATUSES[told["status"]], errors.NOT_VALID), judged.err  # the run may be invalid by itself
    if told["status"] == "NOT COMPARABLE":  # a busy machine made one of the runs invalid, which is what it should say
        assert "validity" in told["sentence"]
    elif told["status"] == "REGRESSED":
        name = next(row["name"] for row in told["rows"] if row["status"] == "REGRESSED")
        assert name in ("ttft p50", "mean ttft")  # the mean tells where thirty requests do not support their median
        assert f"::error title=smoke%3A {name} REGRESSED::" in judged.err
    assert told["status"] in (tmp_path / "told.md").read_text()
    assert judged.code == 0 or judged.last_line.startswith(f"exit={judged.code} ")
