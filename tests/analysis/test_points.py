"""What a sweep's points say together: order, growth, what binds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.device.use import BindingEvidence, binding_of
from gapmeter.analysis.judge.lateness import ReportedLateness
from gapmeter.analysis.numbers import DASH
from gapmeter.analysis.requests.metrics import metric_series
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import LedgerFacts, RunResult
from gapmeter.analysis.results.sweep import FailedRun, Growth, Point
from gapmeter.analysis.results.trust import Check
from gapmeter.analysis.stats.series import level_of_interval
from gapmeter.analysis.sweep.build import _distribution
from gapmeter.analysis.sweep.curves import CurvePoint, axis_of, label
from gapmeter.analysis.sweep.growth import growth_between, means_ms, slow_band
from gapmeter.analysis.sweep.read import Frames, LostRun, MeasuredRun, read_frames, read_runs
from gapmeter.report.growth import _growth_row, growth_sentence
from tests.fuzz.targets import golden


def point(loop: str = "closed", **resolved: Any) -> Point:
    """One of which nothing else is known."""
    values = {key.replace("__", "."): value for key, value in resolved.items()}
    return Point.model_construct(index=0, label=label(values), loop=loop, resolved=values)


def test_curves_join_points_that_differ_in_the_load_alone() -> None:
    points = [
        point(server__max_batch=batch, load__concurrency=users) for users in (8, 1) for batch in (2, 4)
    ]  # fmt: skip
    axis = axis_of(points)
    assert axis.key == "load.concurrency"
    assert axis.series == (("max batch 2", (2, 0)), ("max batch 4", (3, 1)))


def test_closed_and_open_points_are_never_on_one_curve() -> None:
    closed = [point("closed", load__concurrency=users, load__rate=None) for users in (4, 1)]
    opened = [point("open", load__concurrency=None, load__rate=rate) for rate in (5.0, 2.5)]
    axis = axis_of([*closed, *opened])
    assert axis.series == (("closed loop", (1, 0)), ("open loop", (3, 2)))


def test_arrivals_of_two_laws_are_never_on_one_curve() -> None:
    opened = [
        point("open", load__rate=rate, load__concurrency=None, load__arrivals=law)
        for law in ("poisson", "constant") for rate in (8, 4)
    ]  # fmt: skip
    assert [members for _, members in axis_of(opened).series] == [(1, 0), (3, 2)]
    closed = [
        point("closed", load__rate=None, load__concurrency=users, load__arrivals="closed") for users in (1, 2)
    ]  # fmt: skip
    assert axis_of([*opened[:2], *closed]).series == (("open loop", (1, 0)), ("closed loop", (2, 3)))


def test_points_without_numbers_have_no_order_and_words_of_their_own() -> None:
    points = [point("open", server__precision=name) for name in ("float32", "bfloat16")]
    axis = axis_of(points)
    assert axis.key is None
    assert [p.label for p in points] == ["float32", "bfloat16"]
    assert label({"load.rate": 2.5, "load.concurrency": 1}) == "2.5 req/s, 1 user"
    assert label({"load.rate": 2.5}, "conversations") == "2.5 conversations/s"
    assert [label({"load.rate": rate}) for rate in (20.0, 1000.0, 1500.5)] == [
        "20 req/s",
        "1,000 req/s",
        "1,500.5 req/s",
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"load.rate": 1 / 3}, "0.333333 req/s"),
        ({"load.rate": 123456.789}, "123,457 req/s"),
        ({"server.args.top_p": 0.0}, "top p 0"),
        ({"server.max_model_len": None}, "max model len null"),
        ({"server.max_model_len": None, "load.rate": 4.0}, "4 req/s"),
    ],
)
def test_a_point_s_name_is_short_and_never_empty(values: dict[str, Any], name: str) -> None:
    assert label(values) == name


def test_a_point_s_repeats_come_in_their_order_and_a_copy_beside_them_is_none(tmp_path: Path) -> None:
    for name in ("r1", "r10", "r2", "r1.bak", "rough"):
        (tmp_path / name).mkdir()
        FailedRun(reason=name, exit_code=98).write(tmp_path / name)
    assert read_runs(tmp_path) == [LostRun(tmp_path / name, name, 98) for name in ("r1", "r2", "r10")]


def test_repeats_follow_one_another_also_where_the_clock_began_anew_between_them() -> None:
    """The machine was started anew, and the second repeat's stamps are those of the first."""
    result = RunResult.model_construct(ledger=LedgerFacts.model_construct(refused=("not asked for",)))
    run = MeasuredRun(next(golden("sweep").glob("points/*/r1")), result, Manifest.model_construct())
    alone, twice = (metric_series(read_frames([run] * times).measured, "itl") for times in (1, 2))
    assert twice.values.tolist() == alone.values.tolist() * 2
    blocks = twice.clusters[1]
    assert blocks[: alone.count].max() + 10 < blocks[alone.count :].min()


def test_a_damaged_note_of_a_failure_is_named_and_the_other_runs_count(tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        (tmp_path / name).mkdir()
    (tmp_path / "r1" / "failed.json").write_text('{"reason":')
    FailedRun(reason="no memory").write(tmp_path / "r2")
    damaged, other = read_runs(tmp_path)
    assert isinstance(damaged, LostRun)
    assert str(tmp_path / "r1" / "failed.json") in damaged.reason
    assert other == LostRun(tmp_path / "r2", "no memory")


def ledgers(queue_ms: float, count: int = 400) -> pd.DataFrame:
    """Requests of 20 ms and an exponential queue with this mean."""
    rng = np.random.default_rng(3)
    queue = rng.exponential(queue_ms * 1e6, count) if queue_ms else np.zeros(count)
    prefill = rng.normal(15e6, 1e5, count)
    rest = np.full(count, 5e6)
    return pd.DataFrame(
        {"queue_ns": queue, "prefill_ns": prefill, "unexplained_ns": rest, "total_ns": queue + prefill + rest}
    )


def grown(one: pd.DataFrame, two: pd.DataFrame, level: float = 99) -> Growth:
    """From point a to point b, of TTFT."""
    sides = []
    for name, rows in (("a", one), ("b", two)):
        value = float(np.quantile(rows["total_ns"], 0.99)) / 1e6
        about = Point.model_construct(index=len(sides), label=name)
        frames = Frames(rows, {"ttft": rows}, rows, None)
        sides.append(CurvePoint(about, {"ttft": level_of_interval(value, value * 0.9, value * 1.1)}, frames))
    return growth_between(*sides, "ttft", level, "", at_knee=False)


def test_the_growth_from_point_to_point_is_put_into_the_stage_that_grew() -> None:
    found = grown(ledgers(0), ledgers(60))
    assert (found.stage, found.owner) == ("queue", "capacity")
    assert found.share == pytest.approx(1, abs=0.02)
    assert found.share_ci[0] <= found.share <= found.share_ci[1]
    assert found.band_grows_ms == pytest.approx(sum(found.stages_ms.values()))
    assert found.grows_ci_ms[0] < found.grows_ms < found.grows_ci_ms[1]
    said = growth_sentence(found, "GPU")
    assert said.startswith("From a to b p99 TTFT grows by ")
    assert "is queue (contention)" in said


def test_what_falls_is_put_into_the_stage_that_shrank() -> None:
    found = grown(ledgers(60), ledgers(0))
    assert (found.stage, round(found.share or 0.0, 1)) == ("queue", 1.0)
    said = growth_sentence(found, "GPU")
    assert "falls by" in said
    assert "of the saved time of the slowest ones is queue (contention)" in said


def test_a_stage_that_one_point_did_not_measure_is_in_the_remainder_of_both() -> None:
    """As with another engine: here the prefill, 15 ms at either point."""
    known, lacking = ledgers(0), ledgers(60)
    rest = lacking["unexplained_ns"] + lacking["prefill_ns"]
    lacking = lacking.drop(columns="prefill_ns").assign(unexplained_ns=rest)
    for one, two in ((known, lacking), (lacking, known)):
        found = grown(one, two)
        before, after = (slow_band(rows, 99)["total_ns"].mean() / 1e6 for rows in (one, two))
        assert found.band_grows_ms == pytest.approx(after - before) == pytest.approx(sum(found.stages_ms.values()))
        assert (found.stage, found.stages_ms["unexplained"]) == ("queue", pytest.approx(0, abs=1))


def test_a_growth_within_its_interval_is_put_into_no_stage() -> None:
    assert "shows no clear change" in growth_sentence(grown(ledgers(60), ledgers(61)), "GPU")


def test_a_shares_interval_knows_that_neighbors_met_the_same_queue() -> None:
    """A queue that comes in spells of fifty requests: the interval is several times that of the same rows shuffled."""
    rng = np.random.default_rng(5)
    spells = np.repeat(rng.exponential(40e6, 20), 50)
    rows = pd.DataFrame({"queue_ns": spells, "prefill_ns": rng.exponential(60e6, 1000), "unexplained_ns": 0.0})
    rows["total_ns"] = rows["queue_ns"] + rows["prefill_ns"]
    shuffled = rows.sample(frac=1, random_state=1, ignore_index=True)

    def width(after: pd.DataFrame) -> float:
        low, high = grown(ledgers(0), after, 50).share_ci or (0.0, 0.0)
        return float(high or 0.0) - float(low or 0.0)

    assert width(rows) > 2 * width(shuffled)


@given(st.floats(0, 100), st.integers(1, 300))
def test_mean_stages_add_up_to_the_mean_wait(queue_ms: float, count: int) -> None:
    rows = ledgers(queue_ms, count)
    for band in (rows, slow_band(rows, 99)):
        assert sum(means_ms(band).values()) == pytest.approx(band["total_ns"].mean() / 1e6)


CHECKS = [Check(rule="delivered", status="broken", value=12.0, limit=20.0, text="20 a second were due, 12 were sent")]
KNOWN = BindingEvidence("memory bandwidth", "compute", 0.05)
# Mean stages of an answer in ms, checks, evidence, device; what binds, what is behind it, and a word of the reason.
NOT_KNOWN = BindingEvidence()
BINDINGS: dict[str, tuple[dict[str, float], list[Any], BindingEvidence, str, str, str | None, str]] = {
    "decode, roofline known": ({"decode": 80, "scheduling": 10}, [], KNOWN, "GPU", "memory bandwidth", None, "decode"),
    "prefill, roofline known": ({"prefill": 80, "decode": 30}, [], KNOWN, "GPU", "compute", None, "prefill"),
    "decode, roofline unknown": ({"decode": 80, "scheduling": 10}, [], NOT_KNOWN, "CPU", "device", None, "unmeasured"),
    "host": ({"decode": 20, "scheduling": 30, "egress": 10}, [], KNOWN, "GPU", "host", None, "scheduling"),
    "a queue before a device": ({"queue": 80, "decode": 30}, [], KNOWN, "GPU", "queue", "memory bandwidth", "queue"),
    "a queue before a host": ({"queue": 80, "core_wait": 30}, [], NOT_KNOWN, "CPU", "queue", "host", "core wait"),
    "a queue on a long way": (
        {"queue": 80, "network_in": 40, "decode": 30}, [], KNOWN, "GPU", "queue", "memory bandwidth", "decode",
    ),
    "preemptions": ({"preempted": 80, "decode": 30}, [], KNOWN, "GPU", "KV memory", None, "preempted"),
    "the load tester": ({"decode": 80}, CHECKS, KNOWN, "GPU", "load tester", None, "12 were sent"),
    "no stages": ({"unexplained": 80}, [], NOT_KNOWN, "GPU", "unmeasured", None, "no stage"),
    "the client's alone": (
        {"retry": 0, "generator_lag": 0.2, "connect": 0.1, "unexplained": 80}, [], NOT_KNOWN, "GPU", "unmeasured", None,
        "no stage",
    ),
    "a busy link": (
        {"decode": 80}, [], replace(KNOWN, pcie_share=0.7), "GPU", "PCIe transfer", None, "PCIe",
    ),
}  # fmt: skip


def test_a_stage_with_its_resource_s_name_is_named_once() -> None:
    told = binding_of({"queue": 8, "core_wait": 2}, device="CPU").why
    assert told == "80 % of the mean answer is queue; what is waited for is busy with host (core wait)"


@pytest.mark.parametrize("case", BINDINGS)
def test_the_resource_that_binds_follows_the_stated_rule(case: str) -> None:
    stages, checks, evidence, device, resource, behind, word = BINDINGS[case]
    found = binding_of(stages, checks, evidence, device=device)
    assert (found.resource, found.behind) == (resource, behind)
    assert word in found.why


def test_what_the_resource_could_not_be_told_from_is_listed() -> None:
    assert binding_of({"decode": 9}).unmeasured == (
        "whether memory bandwidth or compute bounds decode",
        "PCIe transfer",
    )
    assert binding_of({"decode": 9}, evidence=KNOWN).unmeasured == ()
    assert binding_of({"queue": 1, "egress": 9}, device="CPU").unmeasured == ()


def test_a_stage_of_requests_that_went_the_other_way_is_not_named() -> None:
    found = grown(ledgers(0), ledgers(60)).model_copy(update={"grows_ms": -5.0, "grows_ci_ms": (-8.0, -2.0)})
    assert "queue" not in growth_sentence(found, "GPU")
    assert _growth_row(found, "GPU")[3] == DASH


def test_a_mean_of_token_gaps_has_its_interval_from_all_of_them() -> None:
    """Not from their ledgers, which a server without a probe has none of, and a large run only of some requests."""
    each = np.cumsum(1e6 * np.random.default_rng(1).exponential(8.0, (60, 20)), axis=1).astype(np.int64)
    requests = pd.DataFrame({"outcome": "ok", "token_ns": [at + 10**9 * n for n, at in enumerate(each)]})
    gaps = metric_series(requests, "itl")
    found = _distribution(gaps, "itl", [50.0], len(requests), 60.0, ReportedLateness())
    low, high = found.mean_ci_ms or (0, 0)
    assert low < found.mean_ms < high < 1.4 * low
