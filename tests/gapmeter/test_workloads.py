"""Whole runs of the shapes and workloads that one request a time is not, over two generator processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.kit.command import Done, gapmeter, settings

pytestmark = pytest.mark.whole_run
QUICK = ("server.args.forward_ms=1", "load.processes=2", "load.timeout=9s", "slo=[]")


def run(folder: Path, scenario: str, *more: str) -> Done:
    done = gapmeter("run", scenario, "--engine", "simulated", *settings(*QUICK, *more), runs=folder)
    assert done.out, done.err
    return done


def test_a_trace_is_replayed_with_its_lengths_and_its_shared_blocks(tmp_path: Path) -> None:
    done = run(tmp_path, "replay-chat", "load.trace.speed=15", "server.args.prefix_caching=true")
    lines = (Path(__file__).parents[2] / "scenarios" / "traces" / "chat.jsonl").read_text().splitlines()
    trace = [json.loads(line) for line in lines]
    requests = done.requests.sort_index()
    assert requests["outcome"].tolist() == ["ok"] * len(trace)
    assert requests["prompt_tokens"].tolist() == [entry["input_length"] for entry in trace]
    assert requests["output_tokens"].tolist() == [entry["output_length"] for entry in trace]
    due_ns = requests["due_ns"] - done.manifest["plan"]["t0_ns"]
    assert due_ns.tolist() == [round(entry["timestamp"] * 1e6 / 15) for entry in trace]
    load = done.summary["load"]
    assert load["requested_rate"] is None
    assert load["cached_share"] == pytest.approx(load["prefix_share"], abs=0.03)


CLOSED = ("load.rate=null", "load.arrivals=closed", "load.concurrency=4")


@pytest.mark.parametrize(
    ("generator", "loop"), [("asyncio", ("load.rate=10",)), ("locust", CLOSED)], ids=["open, asyncio", "closed, Locust"]
)
def test_conversations_stay_whole_and_each_turn_follows_the_answer_before_it(
    tmp_path: Path, generator: str, loop: tuple[str, ...]
) -> None:
    done = run(
        tmp_path, "smoke", f"load.generator={generator}", "workload.kind=conversation", *loop,
        "workload.turns={uniform: [2, 4]}", "load.requests=15", "load.think_time={exponential: 100ms}", "load.warmup=0",
    )  # fmt: skip
    requests = done.requests.sort_index().reset_index()
    assert (requests["turn"] == 1).sum() == done.manifest["plan"]["conversations"] == 15
    assert len(requests) == done.manifest["plan"]["planned"]
    for at in np.flatnonzero(requests["turn"] > 1):
        before, turn = requests.iloc[at - 1], requests.iloc[at]
        assert turn["turn"] == before["turn"] + 1
        assert turn["worker"] == before["worker"]
        assert turn["due_ns"] >= before["end_ns"]
        assert turn["prompt_tokens"] > before["prompt_tokens"] + before["output_tokens"]
    assert set(requests["worker"]) == {0, 1}
    assert (requests["prompt_tokens"] == requests["prompt_tokens_asked"]).all()
    assert done.summary["load"]["unit"] == "conversations"
    assert ("4 users in conversations, closed loop" if loop == CLOSED else "conversations/s") in done.err


def test_turns_after_a_failed_one_are_told_and_in_no_latency(tmp_path: Path) -> None:
    done = run(
        tmp_path, "smoke", "workload.kind=conversation", "workload.turns=3", "load.rate=20", "load.requests=30",
        "load.warmup=0", "server.args.fault_error_share=0.3",
    )  # fmt: skip
    requests, counts = done.requests, done.summary["counts"]
    lost = requests[requests["outcome"] == "abandoned"]
    assert len(lost) == counts["abandoned"] > 0
    assert lost["sent_ns"].isna().all()
    assert counts["planned"] == 90 == counts["issued"] + counts["abandoned"]
    assert counts["measured"] == counts["issued"] == counts["succeeded"] + sum(counts["failed"].values())
    assert "abandoned" not in counts["failed"]
    assert any(warning["code"] == "abandoned" for warning in done.summary["warnings"])


def test_a_ramp_is_summed_up_by_its_rates_and_not_called_unsteady(tmp_path: Path) -> None:
    done = run(
        tmp_path, "smoke", "load.rate=null", "load.requests=null", "load.arrivals=ramp",
        "load.ramp={from: 10, to: 60}", "load.duration=4s", "load.warmup=1s",
    )  # fmt: skip
    load = done.summary["load"]
    assert load["requested_rate"] == pytest.approx(35)
    assert load["rate_range"] == [10, 60]
    checks = {check["rule"]: check["status"] for check in done.summary["checks"]}
    assert (checks["rate"], checks["dispersion"]) == ("ok", "ok")
    assert "35 req/s on average (ramp, 10 to 60) open loop" in done.err
    assert not {"unsteady", "warmup"} & {warning["code"] for warning in done.summary["warnings"]}


def test_the_requested_rate_of_a_part_of_a_day_is_that_parts(tmp_path: Path) -> None:
    """A day of four minutes whose mean is 20 a second begins at its lowest, half of that."""
    done = run(
        tmp_path, "smoke", "load.arrivals=diurnal", "load.rate=20", "load.requests=null", "load.duration=5s",
        "load.diurnal={day: 4m, swing: 0.5, peak: 12}",
    )  # fmt: skip
    load = done.summary["load"]
    low, high = load["rate_range"]
    assert low <= load["requested_rate"] <= high < 11


def test_a_closed_loop_with_think_times_says_what_it_is(tmp_path: Path) -> None:
    done = run(
        tmp_path, "smoke", "load.rate=null", "load.arrivals=closed", "load.concurrency=4", "load.requests=40",
        "load.warmup=0", "load.think_time={uniform: [20ms, 60ms]}",
    )  # fmt: skip
    assert done.summary["words"]["closed_loop"].startswith("closed loop: each user waited")
    assert "closed loop" in done.err
    assert "not what independent" in (done.folder.path / "report.html").read_text()
