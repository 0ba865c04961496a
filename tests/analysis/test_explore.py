from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.ledger.explore import describe_pairs, difference, pairs
from gapmeter.analysis.ledger.tail import describe_bands
from gapmeter.analysis.ledger.upgrade import describe_compute
from gapmeter.analysis.results.latency import GroupDifference, GroupStage
from gapmeter.analysis.stages import owner_of
from gapmeter.report.compute import compute_sentence
from gapmeter.report.explore import difference_sentence
from tests.kit.series import ar1


def _ledgers(**stages_ms: Floats) -> pd.DataFrame:
    table = pd.DataFrame({f"{name}_ns": values * 1e6 for name, values in stages_ms.items()})
    table["unexplained_ns"] = 0.0
    table["total_ns"] = table.sum(axis=1)
    table["request_id"] = [f"r{i}" for i in range(len(table))]
    return table


def test_the_stage_that_was_made_longer_is_ranked_first_and_its_interval_holds_the_truth() -> None:
    rng = np.random.default_rng(3)
    slow = rng.random(800) < 0.3
    rows = _ledgers(queue=rng.exponential(5, 800) + 7 * slow, prefill=rng.normal(20, 2, 800), egress=np.full(800, 1.0))
    found = difference(rows, slow, ~slow)
    first = found.ranked[0]
    assert first.stage == "queue"
    assert first.ci_ms[0] < 7 < first.ci_ms[1]
    assert found.difference_ci_ms[0] > 0
    assert difference_sentence(found, "these", "those").startswith("these waited 7")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"queue": 4.0, "prefill": -5.0, "decode": 3.0},
         "longer than b; queue (contention) took 4.00 ms longer, the other stages together less"),
        ({"queue": 1.0, "decode": 1.0}, "2.00 ms longer than b, 1.00 ms of it queue (contention)"),
        ({"queue": 1.0, "decode": -3.0},
         "2.00 ms less than b; decode (GPU) took 3.00 ms less, the other stages together longer"),
    ],
)  # fmt: skip
def test_the_stage_that_is_named_went_the_way_of_the_difference(stages: dict[str, float], said: str) -> None:
    ranked = [
        GroupStage(
            stage=stage, owner=owner_of(stage), a_ms=9.0, b_ms=9.0 - ms, ms=ms, ci_ms=(None, None), share=None
        )
        for stage, ms in sorted(stages.items(), key=lambda item: -abs(item[1]))
    ]  # fmt: skip
    whole = sum(stages.values())
    found = GroupDifference(
        a_count=50, b_count=50, a_ms=20.0, b_ms=20.0 - whole, difference_ms=whole, difference_ci_ms=(None, None),
        stretches=9, ranked=tuple(ranked),
    )  # fmt: skip
    told = difference_sentence(found, "a", "b")
    assert said in told
    assert told.endswith("; they lie in too few stretches of the run for an interval")


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float64, (60, 3), elements=st.floats(0, 1e4)), st.integers(5, 55))
def test_the_stages_differences_add_up_to_the_difference_of_the_waits(parts: Floats, cut: int) -> None:
    rows = _ledgers(queue=parts[:, 0], prefill=parts[:, 1], decode=parts[:, 2])
    a = np.arange(60) < cut
    found = difference(rows, a, ~a)
    waited = rows["total_ns"].to_numpy() / 1e6
    assert found.difference_ms == pytest.approx(waited[a].mean() - waited[~a].mean(), abs=1e-6)
    assert sum(row.ms for row in found.ranked) == pytest.approx(found.difference_ms, abs=1e-6)


def test_intervals_of_two_alike_groups_hold_zero_as_often_as_they_say_though_neighbors_are_alike() -> None:
    """An autoregressive series with rho 0.9: drawn one by one, requests would promise five times too much."""
    rng, hits, trials, n = np.random.default_rng(11), 0, 120, 1500
    for _ in range(trials):
        series = ar1(rng, 0.9, n)
        a = (np.arange(n) // 150) % 2 == 0
        found = difference(_ledgers(queue=series + 50), a, ~a).difference_ci_ms
        hits += found[0] <= 0 <= found[1]
    assert hits / trials > 0.8


def test_a_group_in_too_few_stretches_gets_no_interval() -> None:
    rows = _ledgers(queue=np.random.default_rng(1).exponential(5, 600))
    a = np.arange(600) < 20
    found = difference(rows, a, ~a)
    assert found.difference_ci_ms == (None, None)
    assert all(row.ci_ms == (None, None) for row in found.ranked)


def _requests(n: int) -> pd.DataFrame:
    rng = np.random.default_rng(4)
    return pd.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(n)],
            "prompt_tokens": pd.Series(rng.integers(8, 200, n), dtype="Int64"),
            "output_tokens": pd.Series(np.full(n, 8), dtype="Int64"),
            "cached_tokens": pd.Series(np.where(np.arange(n) % 3 == 0, 16, 0), dtype="Int64"),
        }
    )


def test_the_pairs_of_a_run_are_those_that_it_has() -> None:
    requests = _requests(400)
    keys = [pair.key for pair in pairs(requests, np.random.default_rng(1).exponential(5, 400), {})]
    assert keys == ["slowest-1", "slowest-10", "prompts", "halves", "cached"]
    assert pairs(_requests(700), np.arange(700.0), {})[0].a.sum() == 7, "one per cent"


def test_each_pair_is_described_with_both_sizes() -> None:
    rng = np.random.default_rng(7)
    requests = _requests(400)
    tokens = requests["prompt_tokens"].to_numpy(np.float64)
    rows = _ledgers(prefill=tokens / 10, queue=rng.exponential(1, 400))
    found = describe_pairs(requests, {"ttft": rows}, {})["ttft"]
    prompts = next(pair for pair in found if pair.key == "prompts")
    assert prompts.ranked[0].stage == "prefill"
    assert prompts.a_count + prompts.b_count < 400
    assert prompts.difference_ms > 5


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float64, (80, 2), elements=st.floats(0, 1e3)))
def test_every_band_s_stages_add_up_to_its_mean_wait(parts: Floats) -> None:
    rows = _ledgers(queue=parts[:, 0], decode=parts[:, 1])
    bands = describe_bands({"ttft": rows})["ttft"]
    every = [bands.typical, bands.slow.p90, bands.slow.p985, bands.slow.p99, *bands.spread]
    for band in filter(None, every):
        assert sum(band.stages_ms.values()) == pytest.approx(band.total_ms, abs=1e-6)
    assert sum(b.count * b.total_ms for b in bands.spread) == pytest.approx(rows["total_ns"].sum() / 1e6, abs=1e-3)


def test_a_band_of_fewer_than_seven_requests_is_not_told_of() -> None:
    bands = describe_bands({"ttft": _ledgers(queue=np.arange(300.0))})["ttft"].slow
    assert bands.p999 is None
    assert bands.p99 is None
    assert bands.p90.count == 30


def test_the_device_s_share_is_what_its_stages_took_and_unmeasured_parts_are_null() -> None:
    rng = np.random.default_rng(9)
    forward, queue = rng.exponential(6, 900), rng.exponential(2, 900)
    steps = pd.DataFrame({"step": [0, 1, 2], "forward_start_ns": [0, 100, 200], "forward_end_ns": [50, 150, 250]}) + 1
    found = describe_compute({"e2e": _ledgers(prefill=forward / 2, decode=forward / 2, queue=queue)}, steps, "GPU")
    told = found.e2e.all
    assert told.total_ms == pytest.approx((forward + queue).mean())
    assert told.compute.share == pytest.approx(forward.sum() / (forward + queue).sum())
    assert told.compute.share_ci[0] < told.compute.share < told.compute.share_ci[1]
    assert told.host is None
    assert found.busy_share == pytest.approx(150 / 250)
    rows, two = {"e2e": _ledgers(prefill=forward, queue=queue)}, pd.concat([steps, steps.head(2).add([3, 25, 25])])
    assert describe_compute(rows, two, "GPU").busy_share == pytest.approx(200 / 250), "what is at once counts once"
    again = describe_compute(rows, two, "GPU", engine_steps=(3, 5))
    assert (again.engines, again.busy_share) == (2, pytest.approx((150 + 100) / 2 / 250)), "one of two may be idle"
    slow = told.compute.model_copy(update={"share": 0.0466, "share_ci": (0.0094, 0.101)})
    band = found.e2e.slow.model_copy(update={"compute": slow})
    said = str(compute_sentence(found.e2e.model_copy(update={"slow": band}), "e2e", "GPU"))
    assert "computed for the slowest" in said and "during 4.7 % (0.94 to 10 %) of their time" in said
