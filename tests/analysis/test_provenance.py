from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis import provenance
from gapmeter.analysis.provenance import made_by, provenance_as_asked, provenance_of
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.stats import hdr
from gapmeter.analysis.tables import write_table
from tests.kit.results import manifest
from tests.kit.runs import read_hlog, write_run
from tests.kit.searches import write_search


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_run(tmp_path_factory.mktemp("run") / "r", count=120, rate=12.0)


@pytest.fixture(scope="module")
def origin(run: Any) -> Provenance:
    return provenance_of(Manifest.read(run.path), RunResult.read(run.path))


def test_a_line_says_what_where_how_many_when_and_how_to_repeat_it(origin: Provenance) -> None:
    assert origin.line() == (
        "chat-p99 59803e1742db · builtin:tiny · float32 · transformers 5.19.0 · A processor, 2 cores · "
        "12 req/s open loop, 11 s · n = 120 · valid · 2026-01-02 · gapmeter run chat-p99"
    )


def test_an_attached_server_s_model_is_the_one_that_it_serves_whatever_the_scenario_would_have_launched(
    run: Any,
) -> None:
    about = manifest(scenario={"server": {"engine": "attach"}}, target={"url": "http://127.0.0.1:1", "model": "served"})
    found = provenance_of(about, RunResult.read(run.path))
    assert (found.model, found.precision) == ("served", "unknown")


@pytest.mark.parametrize("named", ["served", None])
def test_so_is_it_in_a_study_of_an_attached_server(tmp_path: Path, named: str | None) -> None:
    path = write_search(tmp_path / "s", 10.0, 9.0, 11.0, scenario={"server": {"engine": "attach"}})
    found = provenance_as_asked(SearchManifest.read(path), named, load="Poisson", n="9", validity="valid")
    assert (found.model, found.precision) == (named or "unknown", "unknown")


@pytest.mark.parametrize(
    ("url", "noted", "hardware"),
    [
        ("http://192.168.0.7:8000", True, "A processor, 2 cores"), ("http://127.0.0.1:8000", False, "unknown"),
        ("http://127.0.0.1:8000", None, "A processor, 2 cores"), ("http://[::1]:8000/v1", None, "A processor, 2 cores"),
        ("https://llm.example", None, "unknown"),
    ],
)  # fmt: skip
def test_the_load_tester_s_machine_is_no_device_of_a_server_elsewhere(
    run: Any, url: str, noted: bool | None, hardware: str
) -> None:
    server = {"engine": "attach", "url": url}
    about = manifest(scenario={"server": server}, target={"url": url}, server_here=noted)
    assert provenance_of(about, RunResult.read(run.path)).hardware == hardware


def test_what_is_not_known_is_left_out_of_the_line_and_told_in_the_facts() -> None:
    parts = dict.fromkeys(("digest", "model", "precision", "hardware", "load", "command", "date", "engine"), "unknown")
    known = Provenance(scenario="s", n="3", validity="INVALID", **parts)
    assert known.line() == "s · n = 3 · INVALID"
    assert known.stamp == "INVALID"
    assert known.facts()["precision"] == "unknown"


@pytest.mark.parametrize(
    ("gpus", "words"),
    [([], "A processor, 2 cores"), (["NVIDIA H100, 81559 MiB, 550"] * 2 + ["NVIDIA L4"], "2 x NVIDIA H100, NVIDIA L4")],
)
def test_the_hardware_is_the_gpus_where_there_are_any(run: Any, gpus: list[str], words: str) -> None:
    assert provenance_of(manifest(hardware={"gpus": gpus}), RunResult.read(run.path)).hardware == words


def test_a_parquet_file_carries_it_in_its_metadata(tmp_path: Path, origin: Provenance) -> None:
    write_table(tmp_path / "t.parquet", pd.DataFrame({"a": [1]}), origin.facts())
    assert pd.read_parquet(tmp_path / "t.parquet").attrs["provenance"] == origin.facts()


def test_an_hdr_log_carries_it_as_a_comment_that_readers_pass_over(tmp_path: Path, origin: Provenance) -> None:
    histogram, _ = hdr.histogram_of(np.array([5_000_000]))
    path = tmp_path / "ttft.hlog"
    hdr.write_hlog(path, histogram, 1.0, 2.0, origin.line())
    assert f"#[{origin.line()}]" in path.read_text(encoding="utf-8")
    assert read_hlog(path)["ttft"].get_total_count() == 1


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of another gapmeter, whose hash ``made_by`` then makes."""
    for name in ("analysis", "records", "report"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("one")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "analysis" / "provenance.py"))
    return tmp_path


@pytest.mark.parametrize("package", ["analysis", "records", "report"])
@pytest.mark.parametrize("name", ["code.py", "gpus.yaml", "page.html", "page.css", "page.js"])
def test_the_hash_tells_apart_whatever_figures_words_and_pages_are_made_by(package: str, name: str, code: Path) -> None:
    """Without the report's code in it, a page by other code was taken for one that somebody had changed."""
    before = made_by.__wrapped__().analysis
    (code / package / name).write_text("another")
    assert made_by.__wrapped__().analysis != before


@pytest.mark.parametrize(
    "name",
    ["_events.abi3.so", "_events.c", "_events.pyi", "code.py~", ".code.py.swp", "#code.py#", "code.py.orig",
     "__pycache__/code.cpython-311.pyc"],
)  # fmt: skip
def test_it_is_the_same_whatever_a_compiler_or_an_editor_leaves_there(name: str, code: Path) -> None:
    before = made_by.__wrapped__().analysis
    (code / "records" / name).parent.mkdir(exist_ok=True)
    (code / "records" / name).write_text("built")
    assert made_by.__wrapped__().analysis == before


def test_every_file_that_is_installed_beside_the_modules_counts() -> None:
    root = Path(provenance.__file__).resolve().parent.parent
    built = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = built["package-data"]["*"]
    kept = [path for part in provenance._CODE_OF_FIGURES for each in patterns for path in (root / part).rglob(each)]
    assert {path.suffix for path in kept} == set(provenance._SOURCES) - {".py"}
