"""``--ui``: Locust's real page over HTTP and in a browser, beside a run of the whole command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapmeter.records.follow import new_histograms
from gapmeter.records.histograms import new_histogram
from gapmeter.records.workers import LocustWorker, LocustWorkers
from tests.kit.browser import Tab
from tests.kit.command import ROOT, Command, gapmeter, settings
from tests.kit.runs import write_run
from tests.kit.wait import until

with pytest.MonkeyPatch.context() as context:
    context.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")  # else it patches the sockets of this process
    from gapmeter.web.locust_page import ShownRun, live_rows

STEADY = ("run", "smoke", "--engine", "simulated", *settings(
    "load.generator=locust", "load.rate=40", "load.requests=320", "load.warmup=0", "workload.output_tokens=4",
))  # fmt: skip


def ask(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/stats/requests", timeout=20) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def rows(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (table,) = stats["extended_stats"]
    return {row["what"]: row for row in table["data"]}


def shows(address: str, kind: str, state: str) -> dict[str, Any]:
    """An answer whose table says what it is known from, with something in it; Locust keeps its own part two seconds."""

    def answered() -> dict[str, Any] | None:
        stats = ask(address)
        found = rows(stats).get("TTFT")
        known = found and (found["kind"], stats["state"]) == (kind, state) and found["max"] != "–"
        return stats if known else None

    return until(answered) or {}


@contextlib.contextmanager
def shown(runs: Path, *words: str) -> Iterator[tuple[Command, str]]:
    """The whole command with its page, and the page's address; whatever happens, nothing of it is left."""
    command = Command((*STEADY, "--ui", "--ui-port", "0", *words), runs)
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", command.process.stderr.readline())
        assert address
        yield command, address[0]
    finally:
        command.process.kill()
        command.process.communicate()


@pytest.mark.whole_run
def test_the_page_shows_a_run_while_it_goes_on_and_its_stages_once_they_are_known(tmp_path: Path) -> None:
    with shown(tmp_path) as (command, address):
        with urllib.request.urlopen(address, timeout=20) as site:
            assert '"extended_tabs"' in site.read().decode()
        live = shows(address, "so far", "running")
        assert list(rows(live)) == ["TTFT", "ITL", "TPOT", "E2E"]
        result = shows(address, "result", "stopped")
        (e2e, total) = result["stats"]
        assert (e2e["name"], e2e["num_requests"], total["num_requests"]) == ("E2E", 320, 320)
        told = ""
        while "the page with the result stays" not in told:
            assert command.process.poll() is None
            told = command.process.stderr.readline()
        command.process.send_signal(2)
        done = command.done()
        assert done.left == []
        assert done.out.strip() == str(done.folder.path)
        table, summary = rows(result), done.summary
        slowest = float(table["TTFT"]["max"].replace(",", ""))
        assert slowest == pytest.approx(summary["metrics"]["ttft"]["max_ms"], rel=0.005)
        assert {name: row["owner"] for name, row in table.items() if row["owner"]} == {
            name: stage["owner"] for name, stage in summary["stages"].items()
        }
        assert done.code == summary["exit_code"], "Ctrl-C only ended the page"


@pytest.mark.whole_run
def test_stop_on_the_page_ends_the_run_early_and_reports_it(tmp_path: Path) -> None:
    with shown(tmp_path, "--set", "load.requests=2400", "--ui-keep", "0s") as (command, address):
        shows(address, "so far", "running")
        for strange in ({"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example:80"}):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(f"{address}/stop", method="POST", headers=strange))
        urllib.request.urlopen(urllib.request.Request(f"{address}/stop", method="POST"), timeout=20).close()
        done = command.done()
        assert (done.code, done.left) == (105, [])
        assert done.manifest["ended_because"] == "interrupted"


def test_a_port_that_is_taken_is_told_before_anything_is_launched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = gapmeter(*STEADY, "--ui", "--ui-port", str(port), runs=tmp_path)
    assert done.code == 2
    assert f"--ui: 127.0.0.1:{port} cannot be listened on: " in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"), [(("--ui-keep", "soon"), "--ui-keep"), (("--ui-port", "99999"), "--ui-port 99999 is not a port")]
)
def test_a_mistake_about_the_page_is_a_sentence(words: tuple[str, str], said: str, tmp_path: Path) -> None:
    done = gapmeter(*STEADY, "--ui", *words, runs=tmp_path)
    assert (done.code, said in done.err, "Traceback" in done.err) == (2, True, False)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The page's process with a run that is over. Yields its address."""
    run = write_run(tmp_path / "run", count=400, rate=22.0, failures=3)
    told = json.dumps({"folder": str(run.path), "name": "chat", "url": "http://127.0.0.1:1"})
    command = [sys.executable, "-P", "-m", "gapmeter.web.locust_page", "0"]
    environment = {**os.environ, "LOCUST_SKIP_MONKEY_PATCH": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        try:
            port = int(process.stdout.readline().split()[1])
            process.stdin.write(f"{told}\n".encode())
            process.stdin.flush()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            assert process.wait(20) == 0


@pytest.mark.browser
async def test_our_tab_shows_the_stages_with_their_owners_in_a_browser(tab: Tab, page: str) -> None:
    shows(page, "result", "stopped")
    await tab.call("Page.enable")
    await tab.call("Page.navigate", url=f"{page}/?tab=gapmeter")
    text = await tab.until("document.body?.innerText.includes('tokenize') && document.body.innerText", 60)
    lines = [line.split("\t") for line in text.splitlines() if "\t" in line]
    assert lines[0][:5] == ["What", "Owner", "Known from", "n", "p50 (ms)"]
    assert [line[0] for line in lines[1:4]] == ["TTFT", "ITL", "TPOT"]
    assert ["tokenize", "API server", "measured"] in [line[:3] for line in lines]
    assert float(next(line for line in lines if line[0] == "TTFT")[4].replace(",", "")) > 0


def test_the_page_listens_on_loopback_alone(page: str) -> None:
    port = int(page.rsplit(":", 1)[1])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()


def test_what_workers_elsewhere_report_becomes_one_event_a_request(tmp_path: Path) -> None:
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "master.json").write_text("{}")
    heard: list[tuple[float | None, str]] = []
    shown_run = ShownRun(tmp_path, lambda e2e_ms, why: heard.append((e2e_ms, why)))
    histograms = new_histograms()

    def report(issued: int, finished: int, failed: int) -> None:
        encoded = {name: histogram.encode().decode() for name, histogram in histograms.items()}
        worker = LocustWorker(
            worker=0, host="h", pid=1, state="ready", why="", planned=9, reports=1, issued=issued, finished=finished,
            failed=failed, test_restarts=0, same_clock=True, clock_offset_ns=0, clock_half_width_ns=0,
            estimated_offset_ns=0, estimated_half_width_ns=0, round_trips=0,
        )  # fmt: skip
        LocustWorkers("2.47", "digest", 5557, (worker,), encoded).write(tmp_path / "requests")
        shown_run.look()

    shown_run.look()
    assert heard == []
    for value_ns in (5_000_000, 5_000_000, 70_000_000):
        histograms["e2e"].record_value(value_ns)
    report(5, 4, 1)
    assert sorted(round(e2e_ms) for e2e_ms, _ in heard if e2e_ms is not None) == [5, 5, 70]
    assert [why for e2e_ms, why in heard if e2e_ms is None] == ["failed"]
    assert shown_run.in_flight == 1
    histograms["e2e"].record_value(5_000_000)
    report(5, 5, 1)
    assert len(heard) == 5


def test_a_percentile_that_the_sample_does_not_support_is_a_dash() -> None:
    histogram = new_histogram()
    for value in range(1, 369):
        histogram.record_value(value * 1_000_000)
    (row,) = live_rows({"ttft": histogram})
    assert (row["p50"], row["p99"], row["p999"], row["count"]) == ("184", "364", "–", "368")
    even = new_histogram()
    for _ in range(20):
        even.record_value(999_600)
    assert live_rows({"ttft": even})[0]["p50"] == "1.00", "three digits, as in the report"
    (empty,) = live_rows({"itl": new_histogram()})
    assert (empty["p50"], empty["max"], empty["count"]) == ("–", "–", "0")
