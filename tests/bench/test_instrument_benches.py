"""What the benches of the load tester itself conclude, and that they run against the real null server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import peers, streams
from bench.peer_tools import TOOLS
from gapmeter.records.process import SPARE, too_few_files

ROOT = Path(__file__).parents[2]
STEADY: dict[str, Any] = {
    "generator": "asyncio", "processes": 1, "length_s": 3600.0, "rate": 200, "asked": 720_000, "succeeded": 719_600,
    "away_s": 1.5, "failed_while_away": 400, "record_bytes": 2**29,
    "memory_kib": [60_000, 60_100], "growth_kib": 100.0, "open_files": [40, 60, 40], "open_at_once": 20,
    "lag_p50_ms": [0.05, 0.05, 0.06], "lag_p99_ms": [0.2, 0.2, 0.3], "engine": None, "server_growth_kib": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"succeeded": 719_599}, "1 requests failed or were lost"),
        ({"open_files": [40, 90, 90]}, "open files grew from 40 to 90"),
        ({"growth_kib": 50_000.0}, "memory grew by 48.8 MiB"),
        ({"lag_p50_ms": [0.05, 0.2, 0.4]}, "lag drifted by 0.35 ms"),
        ({"lag_p50_ms": [0.4, 0.2, 0.05]}, ""),
    ],
)
def test_a_soak_fails_for_a_loss_for_growth_for_open_files_and_for_drift(change: dict[str, Any], expected: str) -> None:
    failures = streams.soak_failures(STEADY | change)
    assert len(failures) == bool(expected)
    assert expected in "; ".join(failures)
    assert streams.soak_table(STEADY | change)[0].startswith("FAIL" if expected else "PASS")


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("60m", 3600), ("1.5h", 5400)])
def test_a_soaks_length_has_a_unit(text: str, expected: float) -> None:
    assert streams.seconds(text) == expected


@pytest.mark.parametrize("text", ["60", "m", "1d", "-1m"])
def test_a_length_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write "):
        streams.seconds(text)


@pytest.mark.parametrize(
    ("streams_asked", "most", "enough"),
    [(10_000, 10_000 + SPARE, True), (10_000, 10_000, False), (1, 20, False), (10_000, -1, True), (0, SPARE, True)],
)
def test_too_low_a_limit_of_open_files_is_told_with_the_remedy(streams_asked: int, most: int, enough: bool) -> None:
    told = too_few_files(streams_asked, most)
    assert (told == "") == enough
    if not enough:
        assert f"ulimit -Hn {streams_asked + SPARE}" in told


def test_streams_that_this_machine_cannot_open_are_not_tried() -> None:
    asked = "from bench import streams; streams.measure(1000)"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 500; exec {sys.executable} -c '{asked}'"], capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1,000 streams at once need 1,240 open files, and a process may have 500 here" in done.stderr


@pytest.mark.whole_run
def test_many_streams_at_once_lose_no_record() -> None:
    found = streams.measure(300)
    assert found["asked"] == found["recorded"] == found["whole"] == found["open_at_once"] == 300
    assert streams.table(found)[0] == "PASS: 300 answers open at once from one process;"


@pytest.mark.whole_run
def test_a_soak_goes_on_where_its_server_is_ended_and_started_anew() -> None:
    found = streams.soak(10)
    assert 1 < found["failed_while_away"] < found["asked"] / 2
    assert found["succeeded"] + found["failed_while_away"] == found["asked"]


def test_a_tool_that_is_not_there_is_named_in_the_table_with_the_reason() -> None:
    names = [tool.name for tool in TOOLS]
    figures = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "dispersion", "cpu_s"), 1.0)
    good = figures | {"rate": 20.0, "tokens_per_s": 100_000.0}
    rounds = [{name: good if name != "guidellm" else {"missing": "not installed here"} for name in names}]
    found = {
        "versions": dict.fromkeys(names, "1"),
        "commands": {name: {"open": f"run {name}"} for name in names},
        "notes": {},
        "rounds": [*rounds, {name: good | {"rate": 22.0} for name in names if name != "guidellm"}],
    }
    rows = {line.split()[1]: line for line in peers.table(found) if line.startswith("| ")}
    assert "not measured: not installed here" in rows["guidellm"]
    assert "21.0 (20.0 .. 22.0)" in rows["gapmeter"]
    assert "run gapmeter" in peers.table(found)


def test_answers_that_a_tool_cut_off_as_it_ended_are_not_those_that_it_counted() -> None:
    left = np.array([50, 60, 70]) * 1_000_000
    told = peers.Reported(np.full(2, 51.0), np.full(2, 10.0), span_s=1.0, itl_is_mean=True)
    sent = peers._counted([(0, left), (1_000_000, left), (2_000_000, left[:1])], 2)
    found = peers._figures(told, sent)
    assert found["tokens_per_s"] == 6
    assert found["itl_p50_ms"] == pytest.approx(0.0)


def test_a_tools_figures_are_compared_with_the_log_of_the_requests_that_it_counted() -> None:
    left = np.array([50, 60, 70]) * 1_000_000
    asked_first = (0, left + 5_000_000_000)  # a request before the run proper: the tool does not count it
    sent = [(at * 10_000_000, left + at * 10_000_000) for at in range(20)]
    told = peers.Reported(np.full(20, 51.0), np.full(40, 10.0), span_s=2.0)
    found = peers._figures(told, [asked_first, *sent][-20:])
    assert found["ttft_p50_ms"] == pytest.approx(1.0)
    assert found["itl_p99_ms"] == pytest.approx(0.0)
    assert found["rate"] == pytest.approx(100.0)
    assert found["tokens_per_s"] == pytest.approx(30.0)
