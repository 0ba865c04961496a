"""``gapmeter capacity`` as its user meets it: answers, mistakes, a server that dies, Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from gapmeter.cli import main
from tests.browser import Tab
from tests.gapmeter.command import Command, Done, gapmeter
from tests.pages import opens_well

SMALL = (
    "capacity", "smoke", "--engine", "simulated", "--set", "load.rate=40", "--set", "load.warmup=0", "--set",
    "workload.prompt_tokens=16", "--set", "workload.output_tokens=2", "--set", "server.max_batch=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("concurrency",), 2, "--set load.arrivals=poisson --set load.concurrency=null"),
        (("replay-chat",), 2, "--set load.arrivals=poisson"),
        (("smoke", "--set", "slo=[]"), 2, "has no SLO"),
        (("smoke", "--headroom", "100%"), 2, "--headroom 100%: write per cent"),
        (("smoke", "--target-rps", "many"), 2, "--target-rps many: not a rate"),
        (("smoke", "--budget", "5s"), 2, "--budget 5s: write a time from 30s"),
        (("smoke", "--spare", "-1"), 2, "--spare -1"),
        (("no-such-scenario",), 104, "no-such-scenario"),
    ],
)
def test_a_users_mistake_is_one_sentence_that_says_what_to_write(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", *words]) == code
    assert said in capsys.readouterr().err


def search(tmp_path: Path, *more: str) -> Done:
    runs = tmp_path / "runs"
    return gapmeter(*SMALL, *more, "--runs", str(runs), runs=runs)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A search with its folder, which nobody may change."""
    return search(tmp_path_factory.mktemp("search"), "--set", 'slo=["ttft p50 <= 60 ms"]', "--within", "80%",
                  "--budget", "40s", "--target-rps", "1000", "--spare", "1")  # fmt: skip


@pytest.mark.whole_run
@pytest.mark.browser
async def test_its_page_draws_every_trial_with_the_numbers_of_the_summary(searched: Done, tab: Tab) -> None:
    await opens_well(tab, searched.folder.report.resolve(), charts=2)
    found = searched.summary["capacity"]
    shown = "[...document.querySelectorAll('#curve circle.point')].map(c => [+c.dataset.rate, +c.dataset.value])"
    drawn = [tuple(pair) for pair in await tab.evaluate(shown)]
    goodputs = [(p["rate"], p["goodput_per_s"]) for p in found["curve"] if p["goodput_per_s"] is not None]
    sure = [(t["rate"], t["confidence"] if t["leaning"] == "holds" else 1 - t["confidence"])
            for t in found["trials"] if t["confidence"] is not None]  # fmt: skip
    assert drawn == [pytest.approx(pair) for pair in (*goodputs, *sure)]
    links = await tab.evaluate("[...document.querySelectorAll('#trials tbody a')].map(a => a.getAttribute('href'))")
    assert links == [f"{trial['folder']}/report.html" for trial in found["trials"] if trial["folder"]]
    assert await tab.evaluate("document.querySelector('.verdict .sentence').textContent") == found["headline"][0]


@pytest.mark.whole_run
def test_a_search_says_rate_interval_and_servers_and_can_be_reported_again(searched: Done, tmp_path: Path) -> None:
    done = searched
    assert done.left == []
    assert done.out.strip() == str(done.folder.path)
    found = done.summary["capacity"]
    assert done.code == done.summary["exit_code"] in (0, 98), done.err
    assert found["requests"] == sum(trial["requests"] for trial in found["trials"])
    assert all((done.folder.path / trial["folder"] / "report.html").exists() for trial in found["trials"])
    if done.code == 0:
        assert found["low"] <= found["rate"] <= found["high"]
        assert found["binding_slo"] == "ttft p50 <= 60 ms"
        assert found["binding_stage"]
        assert found["replicas"] == found["planning"]["needed"] + 1
    before = done.folder.summary.read_bytes()
    moved = tmp_path / "moved"
    shutil.copytree(done.folder.path, moved)
    (moved / "report.html").unlink()
    assert main(["report", str(moved), "--quiet"]) == done.code
    assert (moved / "summary.json").read_bytes() == before
    assert "Every trial" in (moved / "report.html").read_text()


@pytest.mark.whole_run
def test_an_slo_that_nothing_can_meet_is_told_with_the_best_seen(tmp_path: Path) -> None:
    done = search(tmp_path, "--set", 'slo=["ttft p90 <= 1 ms"]', "--budget", "60s")
    assert done.code == 99, done.err
    assert "No rate holds every SLO" in done.err
    found = done.summary["capacity"]
    assert (found["rate"], found["ended"]) == (None, "unmeetable")
    assert found["best_seen"]["share_over"] > 0.9


@pytest.mark.whole_run
def test_a_server_that_dies_in_a_trial_ends_the_search_with_what_is_known(tmp_path: Path) -> None:
    done = search(tmp_path, "--set", 'slo=["ttft p50 <= 60 ms"]', "--set", "server.args.fault_die_at=90")
    assert done.code == 106, done.err
    assert done.summary["capacity"]["ended"] == "died"
    assert "the server died" in done.err


@pytest.mark.whole_run
def test_ctrl_c_reports_what_is_known(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = Command((*SMALL, "--set", 'slo=["ttft p50 <= 60 ms"]', "--within", "1%", "--runs", str(runs)), runs)
    end = time.monotonic() + 60
    while not list(runs.glob("*/trials/02-*")) and time.monotonic() < end:
        time.sleep(0.1)
    command.process.send_signal(signal.SIGINT)
    done = command.done()
    assert done.code == 105, done.err
    assert done.left == []
    found = json.loads(done.folder.summary.read_text())["capacity"]
    assert found["ended"] == "interrupted"
    assert found["trials"]
