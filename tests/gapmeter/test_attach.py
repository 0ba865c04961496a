from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from gapmeter.keys import Keys
from gapmeter.records import RecordWriter, RunFolder, Span
from gapmeter.report.command import Command
from gapmeter.scenarios.read import load_scenario
from gapmeter.servers.launch import Service, free_port, launch
from gapmeter.servers.models import resolve_model
from gapmeter.servers.simulated import simulated_command
from gapmeter.study.conclusion import describe
from gapmeter.study.load import ProbeFolder
from tests.kit.command import SHORT, Done, Scenes, at_once, gapmeter
from tests.kit.servers import answering, faulty, passing_on

pytestmark = pytest.mark.whole_run

KEY = "sk-secret-0123456789"
ATTACH = ("run", "smoke", *SHORT)
INSIDE = ("tokenize", "queue", "prefill", "sampling", "detokenize")


@contextlib.contextmanager
def simulated(folder: Path, env: dict[str, str], **flags: bool) -> Iterator[str]:
    """A server that somebody else has started; its address."""
    port = free_port()
    model = resolve_model("builtin:tiny")
    spec = simulated_command(sys.executable, Service(model, "served", port, 8, "float32", flags))
    url = f"http://127.0.0.1:{port}"
    with launch(spec.command, spec.env | env, (), folder / "server.log", f"{url}/health", 60):
        yield url


def bare(runs: Path) -> Done:
    with simulated(runs.parent / "bare-server", {}) as url:
        return gapmeter(*ATTACH, "-v", "--url", f"{url}/v1/", "--api-key", KEY, runs=runs)


def probed(runs: Path) -> Done:
    """One server, two runs: the second names everything, the first lets the server's environment say it."""
    probe = runs.parent / "probe"
    with simulated(runs.parent / "probed-server", {"GAPMETER_PROBE_DIR": str(probe)}) as url:
        found = gapmeter(*ATTACH, "--url", url, runs=runs.parent / "found")
        assert found.code in (0, 98), found.err
        named = ("--probe-dir", str(probe), "--tokenizer", str(resolve_model("builtin:tiny")), "--model", "served")
        return gapmeter(*ATTACH, "--url", url, *named, runs=runs)


def met_before(runs: Path) -> Done:
    """The same prompts twice, of a server that keeps what it has met."""
    with simulated(runs.parent / "caching-server", {}, prefix_caching=True) as url:
        words = (*ATTACH, "--set", "workload.prompt_tokens=96", "--url", url)
        first = gapmeter(*words, runs=runs.parent / "fresh")
        assert "cached" not in [warning["code"] for warning in first.summary["warnings"]]
        return gapmeter(*words, runs=runs)


def uncounted(runs: Path) -> Done:
    with faulty(("uncounted",)) as url:
        return gapmeter(*ATTACH, "--url", url, runs=runs)


def refused(answer: bytes, *words: str) -> Callable[[Path], Done]:
    def scene(runs: Path) -> Done:
        with answering(answer) as url:
            return gapmeter(*ATTACH, "--url", url, *words, runs=runs)

    return scene


def modelled(models: tuple[str, ...], *words: str) -> Callable[[Path], Done]:
    def scene(runs: Path) -> Done:
        with faulty(models=models) as url:
            return gapmeter(*ATTACH, "--url", url, *words, runs=runs)

    return scene


def piped(runs: Path) -> Done:
    """A probe folder that holds a pipe by the name of records."""
    folder = runs.parent / "pipes"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "api-1-1.gap")
    return modelled(("builtin:tiny",), "--probe-dir", str(folder))(runs)


def http(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


# What is there, the exit code, and what the sentence must say.
REFUSALS: dict[str, tuple[Callable[[Path], Done], int, str]] = {
    "wants a key": (refused(http("401 Unauthorized")), 106, "answered 401 Unauthorized; pass --api-key"),
    "wants another key": (
        refused(http("401 Unauthorized"), "--api-key", "wrong"),
        106,
        "401 Unauthorized; that is not the key it takes",
    ),
    "cannot be sent this key": (refused(b"", "--api-key", "ends\r\n"), 2, "the API key has characters that HTTP"),
    "has no such page": (refused(http("404 Not Found")), 106, "answered 404 Not Found; is it the address of"),
    "is another one": (refused(http("200 OK", "<html>")), 106, "does not list models as OpenAI-compatible servers do"),
    "names no model": (refused(http("200 OK", '{"data": [{"id": null}]}')), 106, "does not list models as OpenAI"),
    "speaks no HTTP": (refused(b"220 mail ESMTP\r\n"), 106, "no server answers at"),
    "says nothing": (refused(b"", "--set", "server.ready_timeout=1s"), 106, "timed out; is it running"),
    "serves no model": (modelled(()), 106, "serves no model"),
    "serves several models": (modelled(("a", "b")), 104, "serves a, b, not builtin:tiny; name one with --model"),
    "serves another model": (modelled(("a",), "--model", "b"), 104, "serves a, not b; name one with --model"),
    "has an empty probe folder": (modelled(("a",), "--probe-dir", "tests"), 2, "tests holds no probe records"),
    "has a pipe for probe records": (piped, 2, "pipes holds no probe records"),
    "has no probe folder": (modelled(("a",), "--probe-dir", "no/such"), 2, "no/such is no folder"),
    "has no such tokenizer": (modelled(("a",), "--tokenizer", "/no/such"), 104, "no tokenizer at /no/such"),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Scenes]:
    tmp = tmp_path_factory.mktemp("attach")
    every = {"bare": bare, "probed": probed, "uncounted": uncounted, "met": met_before} | {
        name: scene for name, (scene, _, _) in REFUSALS.items()
    }
    scenes = {name: partial(scene, tmp / f"runs-{number}") for number, (name, scene) in enumerate(every.items())}
    with at_once(scenes, request) as futures:
        yield futures


@pytest.mark.parametrize("name", REFUSALS)
def test_a_server_that_cannot_be_measured_is_refused_before_anything_is_recorded(name: str, scenes: Scenes) -> None:
    done = scenes[name].result()
    _, code, says = REFUSALS[name]
    assert (done.code, done.out, done.left) == (code, "", []), done.err
    assert says in done.err
    assert "Traceback" not in done.err
    assert not list(done.runs.glob("*"))


def test_prompts_that_the_server_has_met_in_an_earlier_run_are_told(scenes: Scenes) -> None:
    done = scenes["met"].result()
    (told,) = [warning for warning in done.summary["warnings"] if warning["code"] == "cached"]
    assert done.summary["load"]["cached_share"] > 0.5 > 0.1 > done.summary["load"]["prefix_share"]
    assert "--set seed=N" in told["flag"]


def ledger(done: Done) -> pd.DataFrame:
    return pd.read_parquet(done.folder.path / "ledger.parquet").set_index("request_id")


def test_without_probe_and_tokenizer_the_report_has_what_the_client_can_know(scenes: Scenes) -> None:
    done = scenes["bare"].result()
    assert done.code in (0, 98), done.err
    assert done.summary["counts"]["succeeded"] == 30
    assert all(row["count"] for row in done.summary["metrics"].values())
    table = ledger(done)
    assert table["generator_lag_ns"].notna().all()
    for stage in INSIDE:
        assert table[f"{stage}_ns"].isna().all(), stage
    assert "the server's stages are unmeasured" in done.err.lower()
    assert "prompt lengths are counted in words" in " ".join(done.err.lower().split())
    assert done.manifest["target"]["model"] == "served"
    assert (done.requests["prompt_tokens"] > 0).all(), "usage tells the prompt's length"


def test_a_server_that_counts_no_tokens_has_every_figure_that_needs_no_count(scenes: Scenes) -> None:
    done = scenes["uncounted"].result()
    assert done.code in (0, 98), done.err
    summary = done.summary
    assert summary["counts"]["succeeded"] == 30
    assert done.requests["output_tokens"].isna().all()
    assert [summary["metrics"][name]["count"] for name in ("ttft", "tpot", "e2e")] == [30, 0, 30]
    assert summary["throughput"]["requests_per_s"] > 0
    assert summary["throughput"]["output_tokens_per_s"] is None
    assert summary["throughput"]["prompt_tokens_per_s"] is None


def test_with_the_probe_folder_and_the_tokenizer_every_stage_is_measured(scenes: Scenes) -> None:
    done = scenes["probed"].result()
    assert done.code in (0, 98), done.err
    table = ledger(done)
    for stage in INSIDE:
        assert table[f"{stage}_ns"].notna().all(), stage
    assert (table.groupby(level=0).size() == 2).all()
    assert len(table) == 60
    assert done.summary["ledger"]["refused"] == []
    assert (done.requests["prompt_tokens"] == done.requests["prompt_tokens_asked"]).all()
    assert done.manifest["plan"]["prompt_tokens_exact"]


def test_a_local_server_says_itself_where_its_probe_writes(scenes: Scenes) -> None:
    scenes["probed"].result()
    (found,) = (scenes["probed"].result().runs.parent / "found").iterdir()
    table = pd.read_parquet(found / "ledger.parquet")
    assert table["prefill_ns"].notna().all()
    assert list((found / "probe").glob("*.gap.zst"))


def test_behind_a_proxy_the_servers_processes_are_those_that_record(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    with simulated(tmp_path / "server", {"GAPMETER_PROBE_DIR": str(probe)}) as url, passing_on(url) as proxy:
        done = gapmeter(*ATTACH, "--url", proxy, "--probe-dir", str(probe), runs=tmp_path / "runs")
    names = {process["name"] for process in done.summary["telemetry"]["processes"]}
    assert names and all("gapmeter.servers.simulated" in name for name in names), names


def test_records_of_a_server_that_ran_earlier_are_left_where_they_are(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "any", "0" * 12)
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "torn.gap").write_bytes(b"no records")
    old = RecordWriter(probe / "old.gap", {"role": "engine"})
    old.close()
    source = ProbeFolder(probe)
    source.begin()
    new = RecordWriter(probe / "new.gap", {"role": "engine"})  # of a server that runs on: its file has no end yet
    new.span(Span.INGRESS, new.request("r"), 5, 6)
    assert source.take(folder, complete=True, all_files=False) == 1
    assert [file.name for file in folder.probe.iterdir()] == ["new.gap"]
    new.close()


def test_an_api_key_is_nowhere_in_the_runs_folder(scenes: Scenes) -> None:
    done = scenes["bare"].result()
    files = [file for file in done.folder.path.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []
    assert "--api-key" not in json.loads(done.folder.manifest.read_text())["command"]


@pytest.mark.parametrize(("host", "here"), [("127.0.0.2", True), ("192.0.2.1", False)])
def test_a_manifest_says_whether_the_server_that_was_asked_is_on_this_machine(host: str, here: bool) -> None:
    scenario = load_scenario("smoke", ["server.engine=attach", f"server.url=http://{host}:8000"])
    assert describe(scenario, Command.of("run", "smoke"), Keys.within({}, None)).server_here is here
