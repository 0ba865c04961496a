"""``--locustfile``: the example of the docs through the whole command, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from gapmeter.cli import main
from tests.kit.command import gapmeter, settings

FILE = ("--locustfile", "docs/locustfile.py")
CLOSED = settings(
    "load.arrivals=closed", "load.rate=null", "load.requests=null", "load.concurrency=4", "load.duration=8s",
    "load.warmup=0",
)  # fmt: skip
RUN = ("run", "smoke", "--engine", "simulated")


@pytest.mark.whole_run
def test_the_example_of_the_docs_yields_a_ledger_like_any_other_run(tmp_path: Path) -> None:
    done = gapmeter(*RUN, *FILE, *CLOSED, runs=tmp_path)
    assert done.left == []
    summary, plan = done.summary, done.manifest["plan"]
    assert (summary["load"]["loop"], summary["load"]["locustfile"]) == ("closed", "locustfile.py")
    assert "users of locustfile.py, closed loop" in " ".join(done.err.split())
    assert summary["closed_loop"]["corrected"] is None, "nobody knows these users' pace"
    assert plan["locustfile"]["name"] == "locustfile.py"
    assert summary["counts"]["succeeded"] > 20
    assert summary["residual"]["last_token"]["unexplained"]["p50_share"] is not None
    ledger = pd.read_parquet(done.folder.path / "ledger.parquet")
    assert set(ledger["request_id"]) == set(done.requests["request_id"])
    assert done.requests["prompt_tokens"].nunique() > 2, "conversations grow"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*RUN, *FILE), 2, "its users wait for answers, but smoke is an open loop; write --set load.arrivals=closed"),
        ((*RUN, "--locustfile", "nothing.py", *CLOSED), 2, "--locustfile nothing.py: there is no such file"),
        ((*RUN, *FILE, *CLOSED, "--set", "load.generator=asyncio"), 2, "its users are Locust's; write load.generator="),
        ((*RUN, *FILE, *CLOSED, "--workers", "2"), 2, "its users live in one process"),
        (
            (*RUN, *FILE, *CLOSED[:4], "--set", "load.concurrency=2", "--set", "load.warmup=0"),
            2,
            "set a time instead: --set load.requests=null",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_a_sentence(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    done = gapmeter(*words, runs=tmp_path)
    assert (done.code, "Traceback" in done.err) == (code, False)
    assert said in " ".join(done.err.split())


def test_a_file_that_is_no_python_is_told_with_its_line_before_a_server_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("import locust\nclass Mine(\n")
    words = ["run", "smoke", "--url", "http://127.0.0.1:9", "--locustfile", str(tmp_path / "mine.py"), *CLOSED]
    assert main(words) == 2
    assert f"{tmp_path}/mine.py:2: " in " ".join(capsys.readouterr().err.split())


HELD = """
from gevent.monkey import get_original
from gapmeter.locust import GapmeterUser
from locust import constant, task

class Busy(GapmeterUser):
    wait_time = constant(0)

    @task
    def ask_and_compute(self):
        self.ask("A question.", max_tokens=16)
        get_original("time", "sleep")(0.05)
"""


@pytest.mark.whole_run
def test_figures_that_users_who_hold_up_the_loop_have_spoilt_are_refused_by_all_that_pools_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They lie far below the limit even so: the runs are valid, and yet the figures may not be told."""
    (tmp_path / "held.py").write_text(HELD)
    points = json.dumps([{"server.max_batch": 4}, {"server.max_batch": 3}])
    limits = settings('slo=["ttft p50 <= 30 s"]', "load.duration=15s", f"sweep={points}")
    done = gapmeter(*RUN, "--locustfile", str(tmp_path / "held.py"), *CLOSED, *limits, runs=tmp_path / "runs")
    swept = done.summary["sweep"]
    for point in swept["points"]:
        assert (point["verdict"], point["slo"][0]["status"]) == ("PASS", "PASS"), point["reason"]
        ttft = point["metrics"]["ttft"]
        assert ttft["late_ms"]["p50"] > 1
        assert (ttft["p50_ms"], ttft["mean_ms"]) == (None, None)
    assert "refused" in done.err
    runs = [str(done.folder.path / point["repeats"][0]["folder"]) for point in swept["points"]]
    words = ["compare", *runs, "--runs", str(tmp_path / "compared"), "--max-regression", "5%"]
    assert main(words) == 98, "a gate on a refused figure does not open"
    said = " ".join(capsys.readouterr().err.split())
    assert "p50 cannot be compared: refused: up to" in said
    (compared,) = (tmp_path / "compared").glob("*/compare.json")
    (pair,) = json.loads(compared.read_text())["comparisons"]
    figure = pair["metrics"]["ttft"]["percentiles"]["p50"]
    assert (figure["a_ms"], figure["difference_ms"], figure["confirmed"]) == (None, None, False)
    assert figure["late_ms"] > 1
