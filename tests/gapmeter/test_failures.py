"""What fails, as a user meets it: the whole command against a server that fails in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.command import SHORT, Done, gapmeter, settings
from tests.kit.servers import faulty

pytestmark = pytest.mark.whole_run

FAULTS = ("none", "none", "status_500", "status_404", "cut", "stall", "silent", "close_unanswered", "garbage", "none")
PATIENCE = settings("load.timeout=5s", "load.stall=2s")  # far more than any good answer takes


def run(runs: Path, *words: str, faults: tuple[str, ...] = FAULTS, lasting: int = 100) -> Done:
    with faulty(faults, lasting=lasting) as url:
        return gapmeter("run", "smoke", *SHORT, *PATIENCE, *words, "--url", url, runs=runs)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("failing"))


def test_every_class_is_counted_and_told_with_its_first_requests(failing: Done) -> None:
    found = {part["class"]: part for part in failing.summary["failures"]}
    assert failing.summary["counts"]["failed"] == {
        "http_5xx": 3, "http_4xx": 3, "cut": 6, "stalled": 3, "timeout": 3, "malformed": 3,
    }  # fmt: skip
    assert {name: part["count"] for name, part in found.items()} == failing.summary["counts"]["failed"]
    assert [e["request_id"].rpartition("-")[2] for e in found["stalled"]["examples"]] == ["000005", "000015", "000025"]
    assert {(e["status"], e["tokens"], e["error"]) for e in found["stalled"]["examples"]} == {
        (200, 2, "no token for 2 s")
    }
    assert found["http_5xx"]["examples"][0]["status"] == 500
    assert "out of luck" in found["http_5xx"]["examples"][0]["error"]


def test_with_failures_counted_the_tail_is_beyond_the_time_out(failing: Done) -> None:
    alone, with_them = (failing.summary[part]["e2e"] for part in ("metrics", "metrics_censored"))
    assert (alone["count"], with_them["count"]) == (9, 30)
    assert with_them["censored_at_ms"] >= 5000
    assert with_them["over_ms"].keys() >= {"p50"}, "two thirds failed"
    assert "timed out" in failing.err
    assert "counting failures as at least 5" in failing.err


def test_the_same_run_can_be_read_by_other_tools_definitions(failing: Done, tmp_path: Path) -> None:
    again = gapmeter("report", str(failing.folder.path), "--definitions", "--json", runs=tmp_path)
    told = json.loads(again.out)["definitions"]
    assert {name: tool["ttft"]["count"] for name, tool in told.items()} == {
        "vllm_bench": 9, "guidellm": 9, "aiperf": 9, "genai_bench": 9,
    }  # fmt: skip
    # The null server sends the role at once, and the first token 5 ms later.
    assert told["vllm_bench"]["ttft"]["p50_ms"] < told["guidellm"]["ttft"]["p50_ms"]
    assert "GuideLLM 0.8.1" in again.err
    assert "definitions" in (failing.folder.report.read_text())


@pytest.mark.parametrize("generator", ["asyncio", "locust"])
def test_retries_make_a_request_of_several_attempts_whichever_generator_asks(generator: str, tmp_path: Path) -> None:
    words = settings("load.retries=2", "load.retry_pause=20ms", f"load.generator={generator}")
    done = run(tmp_path, *words, faults=("none", "status_500", "status_404", "close_unanswered", "cut"), lasting=2)
    counts = done.summary["counts"]
    assert (counts["issued"], counts["succeeded"], counts["failed"]) == (30, 18, {"http_4xx": 6, "cut": 6}), done.err
    assert counts["attempts"] == {
        "total": 54, "asked_again": 12, "then_succeeded": 12, "failed": {"http_5xx": 12, "cut": 12},
    }  # fmt: skip
    table = done.requests
    assert len(table) == 54
    good = table[(table["retry"] == 2)]
    assert (good["outcome"] == "ok").all()
    assert ((good["attempt_due_ns"] - good["due_ns"]) >= 60_000_000).all(), "20 and 40 ms of pauses"
    (told,) = [warning for warning in done.summary["warnings"] if warning["code"] == "retries"]
    assert told["text"].startswith("54 attempts for 30 requests: 12 retried")
    checks = {check["rule"]: check["status"] for check in done.summary["checks"]}
    assert checks["delivered"] == "ok", "what is sent again was not sent late"
