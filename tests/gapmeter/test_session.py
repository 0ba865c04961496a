"""One server, several loads, over real sockets: each run's folder stands for itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.errors import UserError
from gapmeter.options import Options
from gapmeter.records import RecordWriter, RunFolder, read_records
from gapmeter.records.request import RequestRecord
from gapmeter.report.command import Command
from gapmeter.runs.run import Conclusion
from gapmeter.scenarios.model import Scenario
from gapmeter.servers.launch import ServerFailed, ServerProcess, launch
from gapmeter.study import target
from gapmeter.study.resolve import resolve
from gapmeter.study.session import open_session

pytestmark = pytest.mark.whole_run

BASE = (
    "server.engine=simulated", "load.arrivals=constant", "load.rate=60", "load.requests=30", "load.warmup=0",
    "load.timeout=9s", "workload.prompt_tokens=16", "workload.output_tokens=4",
)  # fmt: skip


def scenario(*more: str) -> Scenario:
    return resolve("smoke", [*BASE, *more])


@dataclass(frozen=True, slots=True)
class Loaded:
    """What several loads of one server left."""

    root: Path
    results: list[Conclusion[RunResult]]
    shortened: Conclusion[RunResult]
    pids: set[int]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("session")
    with open_session(scenario(), Options(runs=root, quiet=True), home=root / "server") as session:
        results, pids = [], set()
        for number in range(3):
            results.append(session.load(scenario(f"load.rate={40 + 10 * number}"), into=root / f"load-{number}"))
            pids |= {int(read_records(file).process["pid"]) for file in probe_files(results[-1])}
        long = scenario("load.requests=400", "workload.output_tokens=20")
        shortened = session.load(long, into=root / "shortened", stop_when=lambda seen: len(seen) > 60)
    return Loaded(root, results, shortened, pids)


def probe_files(result: Conclusion[RunResult]) -> list[Path]:
    folder = RunFolder(result.folder)
    return folder.record_files(folder.probe)


def test_the_command_of_each_load_repeats_it(loaded: Loaded) -> None:
    for load in (*loaded.results, loaded.shortened):
        manifest = Manifest.read(load.folder)
        command = Command.parse(manifest.command)
        assert command.words[:3] == ("gapmeter", "run", "smoke")
        assert resolve("smoke", command.settings).digest() == manifest.scenario_digest


def test_the_third_loads_ledgers_balance_and_hold_no_strangers_requests(loaded: Loaded) -> None:
    third = loaded.results[2]
    requests = pd.read_parquet(third.folder / "requests.parquet")
    ledger = pd.read_parquet(third.folder / "ledger.parquet")
    assert third.result.counts.succeeded == 30
    assert third.result.ledger.refused == ()
    assert third.result.ledger.killed_processes == ()
    stages = [
        name
        for name in ledger
        if name.endswith("_ns") and name not in ("transit_ns", "strict_ns", "unstamped_ns", "total_ns")
    ]
    stages.remove("hidden_host_ns")
    assert (ledger[stages].sum(axis=1) - ledger["total_ns"]).abs().max() == 0
    assert ledger["prefill_ns"].notna().all()
    known = set(requests["request_id"])
    for file in probe_files(third):
        assert set(read_records(file).client_ids.values()) <= known | {""}, file.name


def test_the_loads_share_one_server_and_no_text(loaded: Loaded) -> None:
    assert len(loaded.pids) == len(probe_files(loaded.results[0])), "a process was started anew"
    assert [result.result.counts.succeeded for result in loaded.results] == [30] * 3
    assert [Manifest.read(result.folder).repeat for result in loaded.results] == [0, 1, 2]
    assert not (loaded.root / "server" / "probe").exists(), "each load has its part"
    assert all((result.folder / "logs" / "server.log").exists() for result in loaded.results)


def test_a_load_that_is_ended_because_enough_is_known_is_a_shorter_run_and_no_broken_one(loaded: Loaded) -> None:
    result = loaded.shortened.result
    assert next(check for check in result.checks if check.rule == "complete").status == "ok"
    counts = result.counts
    assert 20 < counts.issued < 350
    assert counts.failed == {}
    assert counts.succeeded == counts.measured > 0
    assert result.ledger.refused == ()
    assert result.shortened.in_flight == "aborted"


def test_what_a_session_that_was_killed_left_behind_is_in_no_load(tmp_path: Path) -> None:
    home = RunFolder(tmp_path / "server")
    home.probe.mkdir(parents=True)
    RecordWriter(home.probe / "api-1-1.gap", {"role": "api", "server": "simulated"})
    with open_session(scenario(), Options(runs=tmp_path, quiet=True), home=home.path) as session:
        found = session.load(scenario(), into=tmp_path / "load")
    assert [name for file in probe_files(found) if (name := file.name).startswith("api-1-1")] == []
    assert "several API servers" not in {each.feature for each in found.result.ledger.support or ()}


def test_a_server_that_dies_is_noticed_in_the_load_and_by_the_next(tmp_path: Path) -> None:
    with open_session(scenario(), Options(runs=tmp_path, quiet=True), home=tmp_path / "server") as session:
        killed: list[int] = []

        def kill(seen: Sequence[tuple[int, RequestRecord]]) -> bool:
            if len(seen) > 20 and session.process is not None and not killed:
                killed.append(session.process.pid)
                os.kill(killed[0], signal.SIGKILL)
            return False

        broken = session.load(scenario("load.requests=3000"), into=tmp_path / "broken", stop_when=kill)
        assert broken.result.verdict == "INVALID"
        assert "the server ended" in str(Manifest.read(broken.folder).ended_because)
        assert not session.alive()
        with pytest.raises(ValueError, match="another server"):
            session.load(scenario("server.max_batch=3"), into=tmp_path / "after")
        with pytest.raises(UserError, match="the server ended with signal 9") as raised:
            session.load(scenario(), into=tmp_path / "after")
        assert raised.value.exit_code == errors.UNREACHABLE
        assert not (tmp_path / "after").exists()


class Unending(ServerProcess):
    """A server that seems to survive a SIGKILL, as one does that waits for a disk."""

    def stop(self, grace_s: float = 10.0) -> int:
        super().stop(grace_s)
        raise ServerFailed(f"process {self.pid} could not be ended")


@pytest.mark.parametrize("end", [None, UserError("its own", errors.UNREACHABLE), KeyboardInterrupt("Ctrl-C")])
def test_a_server_that_cannot_be_ended_costs_no_result_and_hides_no_mistake(
    end: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch_unending(*arguments: Any, **more: Any) -> ServerProcess:
        process = launch(*arguments, **more)
        process.__class__ = Unending
        return process

    monkeypatch.setattr(target, "launch", launch_unending)
    raised = pytest.raises(type(end), match=str(end)) if end else contextlib.nullcontext()
    with raised, open_session(scenario(), Options(runs=tmp_path, quiet=True), home=tmp_path / "server") as session:
        assert session.load(scenario()).result.counts.succeeded == 30
        if end:
            raise end
    assert re.search(r"process \d+ could not be ended: it may still hold its port", capsys.readouterr().err)
