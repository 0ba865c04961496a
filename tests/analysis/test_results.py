"""Results are what their files hold: the same values come back, and a file that is another is told by its key."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis import results
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.results import Manifest, NotReadable, RunResult
from gapmeter.analysis.results.brief import ManifestBrief, RunBrief
from gapmeter.analysis.results.codec import ResultFile
from gapmeter.analysis.results.distribution import Distribution, Percentile, percentile_key, percentile_of_key
from gapmeter.analysis.results.schema import TYPES, schema
from gapmeter.analysis.results.trust import Ratio
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.scenarios.slo import parse_slo
from tests.kit.results import manifest, manifest_document, result
from tests.kit.runs import simulate

SLOS = [parse_slo("ttft p97.5 <= 500 ms"), parse_slo("errors <= 20 %")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frames = simulate(400, rate=8.0, failures=12, error="boom")
    path = tmp_path_factory.mktemp("run")
    result(build_figures(RunTables(frames.requests, frames.ledger), SLOS, Evidence("open", "poisson", 8.0))).write(path)
    manifest().write(path)
    return path


def test_what_was_written_is_read_back(run: Path) -> None:
    found = RunResult.read(run)
    assert json.loads((run / "summary.json").read_text()) == found.to_json()
    assert RunResult.parse(found.model_dump_json(), run / "summary.json") == found
    assert Manifest.read(run).to_json() == manifest_document()


def kinds_of_files(cls: type[ResultFile] = ResultFile) -> list[type[ResultFile]]:
    for module in pkgutil.iter_modules(results.__path__, f"{results.__name__}."):
        importlib.import_module(module.name)
    own = [cls] if "FILE" in vars(cls) and cls.__module__.startswith(results.__name__) else []
    return own + [kind for inner in cls.__subclasses__() for kind in kinds_of_files(inner)]


@pytest.mark.parametrize("kind", kinds_of_files(), ids=lambda kind: kind.__name__)
def test_what_is_no_such_file_is_told_in_a_sentence_whatever_it_was_to_be(kind: type[ResultFile]) -> None:
    """Also one that is part of several kinds of files, and has no version of its own."""
    for text in ("{", "[]", json.dumps(dict.fromkeys(kind.model_fields, 5))):
        with pytest.raises(NotReadable, match=r"^runs/r/[a-z]+\.json: .+; "):
            kind.parse(text, Path("runs/r") / kind.FILE)


def test_percentiles_stand_side_by_side_in_a_file_and_by_number_in_python(run: Path) -> None:
    document, found = json.loads((run / "summary.json").read_text()), RunResult.read(run)
    ttft = document["metrics"]["ttft"]
    assert list(ttft)[:4] == ["p50_ms", "p50_ci_ms", "p90_ms", "p90_ci_ms"]
    assert found.metrics["ttft"].ms(90.0) == ttft["p90_ms"]
    assert found.metrics["ttft"].at(97.5).value_ms == ttft["p975_ms"]
    assert found.metrics["ttft"].at(33.0) == Percentile()
    assert {"p999"} <= ttft["needs"].keys()
    limit, errors = document["slo"]
    assert (limit["limit_ms"], errors["limit_share"]) == (500, 0.2)
    assert (found.slo[0].limit, found.slo[1].limit) == (500, 0.2)


@given(st.sampled_from([50.0, 90.0, 95.0, 97.5, 98.5, 99.0, 99.9, 99.99, 5.0, 75.0]))
def test_a_percentile_s_name_leads_back_to_it(percentile: float) -> None:
    assert percentile_of_key(percentile_key(percentile)) == percentile


def test_what_is_not_finite_is_nothing_and_numpy_s_numbers_are_python_s() -> None:
    assert Ratio(ratio=float("nan"), ratio_ci=(-np.inf, np.float64(2.0))) == Ratio(ratio=None, ratio_ci=(None, 2.0))
    counted = Distribution(percentiles={}, max_ms=np.nan, mean_ms=np.float64(2), count=np.int64(3), n_eff=1.0)
    assert counted.to_json() == {"max_ms": None, "mean_ms": 2.0, "count": 3, "n_eff": 1.0, "needs": {}, "infinite": []}
    with pytest.raises(ValueError, match="finite number"):
        Distribution(percentiles={}, max_ms=None, mean_ms=None, count=0, n_eff=float("nan"))


def test_a_result_cannot_be_changed(run: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunResult.read(run).name = "other"  # type: ignore[misc]


Change = Callable[[dict[str, Any]], Any]
BROKEN: dict[str, tuple[Change, str]] = {
    "another version": (
        lambda told: told.update(schema_version=1, more=3),
        "schema_version is 1, this gapmeter reads 2",
    ),
    "a key that is missing": (lambda told: told["load"].pop("window_s"), "load.window_s is missing"),
    "a key in a list": (lambda told: told["slo"][1].pop("text"), r"slo\.1\.text is missing"),
    "a key of a variant": (lambda told: told["cost"].pop("reason"), "cost.reason is missing"),
    "a key that is unknown": (lambda told: told["trust"].update(more=3), "trust.more is not a key of it"),
    "a percentile of another form": (
        lambda told: told["metrics"]["ttft"].update(p99x_ms=3),
        "metrics.ttft.p99x_ms is not a key of it",
    ),
    **{
        f"{name} of another kind": (
            lambda told, name=name: told["metrics"]["ttft"].update({name: 5}),
            "metrics.ttft is .*: value error, infinite is a list of percentiles' names, and needs, at_most, late_ms",
        )
        for name in ("needs", "infinite", "at_most", "late_ms")
    },
    "a value of another kind": (
        lambda told: told["counts"].update(measured="many"),
        "counts.measured is 'many': input should be a valid integer",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_another_is_told_by_its_key_with_the_remedy(run: Path, case: str) -> None:
    change, says = BROKEN[case]
    document = json.loads((run / "summary.json").read_text())
    change(document)
    with pytest.raises(NotReadable, match=f"summary.json: {says}.*; analyse it again: gapmeter report {run}"):
        RunResult.parse(json.dumps(document), run / "summary.json")
    with pytest.raises(NotReadable, match="gapmeter report 'my runs/one'"):
        RunResult.parse(json.dumps(document), Path("my runs/one/summary.json"))


KEPT: dict[str, tuple[Change, str]] = {
    "a key that is unknown": (lambda told: told["load"].update(more=3), "scenario.load.more is not a key of it"),
    "a value of another kind": (lambda told: told["load"].update(rate="fast"), "scenario.load.rate is 'fast': .*rate"),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_kept_scenario_that_is_none_is_told_by_file_and_key(run: Path, case: str) -> None:
    change, says = KEPT[case]
    document = json.loads((run / "manifest.json").read_text())
    change(document["scenario"])
    told = Manifest.parse(json.dumps(document), run / "manifest.json")  # for lists of runs, which ask nothing of it
    with pytest.raises(NotReadable, match=f"{run}/manifest.json: {says}.*; read it with the gapmeter that wrote it"):
        _ = told.asked


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_said_to_be_none(run: Path, text: str) -> None:
    with pytest.raises(NotReadable, match=r"summary\.json: is no JSON"):
        RunResult.parse(text, run / "summary.json")
    with pytest.raises(NotReadable, match=r"summary\.json: is not a JSON object"):
        RunResult.parse("[]", run / "summary.json")


def test_a_folder_without_the_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunResult.read(tmp_path)


def test_a_list_of_runs_reads_the_little_that_it_shows(run: Path) -> None:
    brief, whole = RunBrief.read(run), RunResult.read(run)
    assert (brief.verdict, brief.measured) == (whole.verdict, whole.counts.measured)
    assert brief.metrics["ttft"].p99_ms == whole.metrics["ttft"].ms(99.0)
    bounds = {name: metric.at(99.0).at_most for name, metric in whole.metrics.items()}
    assert {name: bound.ms for name, bound in bounds.items() if bound is not None} == {
        name: metric.at_most["p99"].ms for name, metric in brief.metrics.items() if "p99" in metric.at_most
    }
    told, manifest = ManifestBrief.read(run), Manifest.read(run)
    assert (told.kind, told.started_wall) == ("run", manifest.started_wall)
    assert told.model == manifest.asked.server.model


def test_every_schema_is_printed_by_its_name() -> None:
    for name, of in TYPES.items():
        words = [sys.executable, "-P", "-m", "gapmeter.analysis.results.schema", name]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert json.loads(printed) == schema(name, of)
        jsonschema.Draft202012Validator.check_schema(json.loads(printed))


@pytest.mark.parametrize(("name", "file"), [("run", "summary.json"), ("manifest", "manifest.json")])
def test_a_schema_takes_what_is_written_and_refuses_an_unknown_key(run: Path, name: str, file: str) -> None:
    check = jsonschema.Draft202012Validator(schema(name, TYPES[name]))
    document = json.loads((run / file).read_text())
    assert [error.message for error in check.iter_errors(document)] == []
    assert not check.is_valid(document | {"more": 1})
    assert not check.is_valid({key: value for key, value in document.items() if key != "schema_version"})
