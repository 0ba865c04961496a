"""What the command line does is a call from Python, too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gapmeter
from gapmeter.cli import parser
from gapmeter.commands.measure import workers_of
from gapmeter.loadgen.fleet import Workers
from gapmeter.options import Options
from gapmeter.scenarios.source import scenario_file
from tests.kit.command import SHORT

SETTINGS = ["server.engine=simulated", *(word for word in SHORT if word != "--set")]


def test_every_public_name_is_there_and_no_other() -> None:
    for name in gapmeter.__all__:
        assert callable(getattr(gapmeter, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gapmeter.nothing  # noqa: B018


@pytest.mark.parametrize("patience_s", [45.0, 5.1234567, 1_000_000.0, 2_592_000.0])
def test_options_are_read_back_from_their_flags(patience_s: float) -> None:
    workers = Workers(3, "::1", 6000, patience_s)
    read = parser().parse_args(["run", "smoke", *Options(workers=workers, locustfile=Path("users.py")).flags])
    assert workers_of(read.workers, read.listen, read.patience) == workers and read.locustfile == Path("users.py")


@pytest.mark.whole_run
def test_a_run_is_made_opened_asked_and_compared_in_a_line_each(tmp_path: Path) -> None:
    options = gapmeter.Options(runs=str(tmp_path), quiet=True)  # type: ignore[arg-type] # a notebook's user writes a text
    scenario = tmp_path / "mine.yaml"
    shutil.copy(scenario_file("smoke"), scenario)
    first, second = (gapmeter.run(scenario, SETTINGS, options) for _ in range(2))
    assert first.exit_code in (0, 98, 99)
    run = gapmeter.open(first.folder)
    assert run.result == first.result and run.manifest.command.startswith(f"gapmeter run {scenario} --set ")
    assert len(run.requests) == first.result.counts.measured == 30
    assert gapmeter.compare([[first.folder], str(second.folder)], runs=tmp_path).result.sides[1].runs == (
        second.folder.name,
    )
    assert gapmeter.explain(str(first.folder), "rank_percent > 50").difference.a_count == 15
    assert all(check.ok for check in gapmeter.verify(first.folder))
    assert [listed.kind for listed in gapmeter.list_runs(tmp_path)] == ["run", "run", "compare"]
    assert gapmeter.sql("SELECT count(*) FROM requests", tmp_path)[1] == [(60,)]
    assert gapmeter.archive(first.folder, tmp_path / "run.tar.gz").exists()
    assert run.export(csv=tmp_path / "figures")
    (first.folder / "report.html").unlink()
    with pytest.raises(gapmeter.UserError, match=f"gapmeter report {first.folder}"):
        run.report()
    assert gapmeter.report_again(str(first.folder), quiet=True).result == first.result
