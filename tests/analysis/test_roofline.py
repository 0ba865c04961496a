"""The roofline's arithmetic, by hand, for a small model and a known table of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.device.roofline import _pairs, describe_roofline, least_forwards, ratio, step_work
from gapmeter.analysis.device.telemetry import describe_telemetry, describe_utilisation
from gapmeter.analysis.device.use import binding_evidence
from gapmeter.analysis.judge.warnings import device_warnings
from gapmeter.analysis.ledger.trace import EMISSION, ENTRY, STEP_SPAN, Trace
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.device import Experts, PeakRate
from gapmeter.records import EntryFlag, Span
from gapmeter.report.device import roofline, roofline_sentence
from tests.analysis.test_telemetry import GPU, started, write
from tests.kit.results import PEAKS, WEIGHTS, manifest
from tests.kit.telemetry import IDLE, read

PROMPT, LAST = int(EntryFlag.PROMPT), int(EntryFlag.PROMPT | EntryFlag.LAST_CHUNK)


def trace(entries: list[tuple[int, int, int, int, int]], forwards: list[tuple[int, int, int]]) -> Trace:
    """``entries``: step, request, tokens, before, flags. ``forwards``: step, start, end."""
    spans = [(step, Span.FORWARD, 0, start, end) for step, start, end in forwards]
    return Trace(
        request_spans={}, step_spans=np.array(spans, STEP_SPAN), process_spans={},
        steps=np.array([(1,)], [("seq", "<i8")]), entries=np.array(entries, ENTRY), emissions=np.empty(0, EMISSION),
        unmeasured=frozenset(), notes=[],
    )  # fmt: skip


def stamped(spans: list[tuple[int, ...]]) -> Trace:
    """``spans``: step, code, n, start, end."""
    return replace(trace([], []), step_spans=np.array(spans, STEP_SPAN))


def test_a_decode_step_reads_its_weights_once_and_every_sequences_cache() -> None:
    found = step_work(trace([(1, 0, 1, 9, 0), (1, 1, 1, 19, 0)], [(1, 100, 1100)]), WEIGHTS)
    (row,) = found.to_dict("records")
    assert (row["decoding"], row["prompts"], row["kv_tokens"], row["forward_ns"]) == (2, 0, 30, 1000)
    assert row["bytes"] == 4000 + (10 + 20) * 2 * 32
    # 2 x 800 for the body and 2 x 200 for the head, of two tokens each; 4 x 2 layers x 8 x 30 pairs
    assert row["operations"] == 2 * (2 * 800 + 2 * 200) + 4 * 2 * 8 * 30


def test_a_prompt_multiplies_for_every_token_but_the_head_only_for_the_one_that_it_makes() -> None:
    whole = step_work(trace([(1, 0, 4, 0, LAST)], [(1, 0, 50)]), WEIGHTS)
    assert whole["operations"].tolist() == [2 * 800 * 4 + 2 * 200 + 4 * 2 * 8 * (1 + 2 + 3 + 4)]
    chunk = step_work(trace([(1, 0, 3, 5, PROMPT)], [(1, 0, 50)]), WEIGHTS)
    assert chunk["operations"].tolist() == [2 * 800 * 3 + 4 * 2 * 8 * (6 + 7 + 8)]
    assert chunk["prompt_tokens"].tolist() == [3]


def test_a_layer_with_a_window_reads_no_more_than_that() -> None:
    weights = WEIGHTS.model_copy(update={"sliding_layers": 1, "window": 8})
    found = step_work(trace([(1, 0, 1, 19, 0)], [(1, 0, 50)]), weights)
    assert found.bytes.tolist() == [4000 + (20 + 8) * 32]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30))
def test_pairs_in_a_window_are_those_that_counting_gives(before: int, tokens: int, window: int) -> None:
    seen = [min(before + i, window) for i in range(1, tokens + 1)]
    arrays = np.array([float(before)]), np.array([float(tokens)])
    assert _pairs(*arrays, window).tolist() == [sum(seen)]
    assert _pairs(*arrays, None).tolist() == [sum(before + i for i in range(1, tokens + 1))]


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    experts = Experts(parameters=8000, bytes=16000.0, count=8, per_token=2)
    found = step_work(trace([(1, 0, 1, 0, 0)], [(1, 0, 50)]), WEIGHTS.model_copy(update={"experts": experts}))
    assert found.bytes.tolist() == [pytest.approx(4000 + 16000 * 2 / 8 + 2 * 32)]
    assert found.operations.tolist() == [2 * (800 + 2000) + 2 * 200 + 4 * 2 * 8]


def test_steps_without_a_forward_are_left_out() -> None:
    found = step_work(trace([(1, 0, 1, 0, 0), (2, 0, 1, 1, 0)], [(2, 5, 25)]), WEIGHTS)
    assert found.step.tolist() == [2] and found.start_ns.tolist() == [5]


def test_a_ratio_is_of_sums_and_its_interval_covers_it() -> None:
    found = ratio(np.array([10.0, 30.0]), np.array([1.0, 3.0]), PeakRate(peak=20.0, low=16.0))
    assert found.share == 0.5 and found.achieved == 10.0
    assert found.low == 0.5 and found.high == 10 / 16  # no scatter: only the device's own spread is left


@given(st.integers(30, 200), st.floats(0.01, 0.4), st.integers(0, 2**32 - 1))
def test_the_interval_of_a_ratio_holds_its_estimate(steps: int, scatter: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ns = draw.uniform(1, 2, steps)
    found = ratio(3 * ns * (1 + scatter * draw.standard_normal(steps)), ns, PeakRate(peak=10.0, low=10.0))
    assert found.low <= found.share <= found.high


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        ns = draw.uniform(1, 2, 100)
        found = ratio(3 * ns + draw.standard_normal(100), ns, PeakRate(peak=10.0, low=10.0))
        hits += found.low <= 0.3 <= found.high
    assert 0.91 <= hits / 400 <= 0.98


def about(peaks: dict[str, Any] | None = None, **server: Any) -> Manifest:
    target = {"weights": WEIGHTS.to_json(), "peaks": PEAKS | (peaks or {}), "tensor_parallel": 1}
    return manifest(target=target, scenario={"server": server})


def decode_steps(ns: int) -> Trace:
    entries = [(step, 0, 1, 9, 0) for step in range(40)]
    return trace(entries, [(step, 10_000 * step, 10_000 * step + ns) for step in range(40)])


def test_decode_that_reads_at_most_of_the_bandwidth_is_bound_by_it_and_has_a_least_time() -> None:
    # 4000 + 10 x 64 bytes at 10 GB/s take 464 ns; the forward takes 580
    found = describe_roofline(decode_steps(580), about(), (0, 10**9))
    decode = found.decode
    assert decode.mbu.share == pytest.approx(0.8)
    assert decode.mbu.high == pytest.approx(0.8 * 10 / 9)
    assert decode.itl_least_ms.mean == pytest.approx(464e-6)
    assert decode.bound == "memory bandwidth" and not decode.cache_resident
    assert "even at full bandwidth a token takes at least 0.464 µs with 1.0 sequences" in str(roofline_sentence(found))
    assert found.prefill is None


def test_decode_that_is_far_from_either_roof_is_bound_by_neither() -> None:
    found = describe_roofline(decode_steps(9000), about(), (0, 10**9))
    assert found.decode.bound == "neither"
    assert "neither reading nor computing explains half of its time" in str(roofline_sentence(found))


def test_a_model_that_fits_into_the_cache_is_not_held_against_memory() -> None:
    peaks = {"llc_bytes": 1 << 20, "cached": {"median": 90.0, "low": 50.0, "high": 100.0, "repeats": 9}}
    found = describe_roofline(decode_steps(580), about(peaks), (0, 10**9))
    decode = found.decode
    assert decode.cache_resident
    assert decode.mbu.share == pytest.approx(0.08) and decode.mbu_of_memory == pytest.approx(0.8)
    assert "memory is not the limit" in str(roofline_sentence(found))


def test_prefill_is_held_against_the_peak_of_its_precision_or_called_unmeasured() -> None:
    entries = [(step, 0, 16, 0, LAST) for step in range(30)]
    prompts = trace(entries, [(step, 10**6 * step, 10**6 * step + 60_000) for step in range(30)])
    operations = 2 * 800 * 16 + 2 * 200 + 4 * 2 * 8 * 16 * 17 / 2
    found = describe_roofline(prompts, about(), (0, 10**9))
    assert found.prefill.mfu.share == pytest.approx(operations / 60_000 / 1e3 / 0.02)
    assert found.prefill.bound == "neither"
    quick = [(step, 10**6 * step, 10**6 * step + 600) for step in range(30)]  # about what its weights take to be read
    assert describe_roofline(trace(entries, quick), about(), (0, 10**9)).prefill.bound != "neither"
    found = describe_roofline(prompts, about(precision="bfloat16"), (0, 10**9))
    assert found.prefill.mfu is None and "bfloat16" in str(found.prefill.why)


def test_a_gpu_is_held_against_the_catalogue_times_the_gpus_that_share_the_model() -> None:
    def told(gpu: str, precision: str = "bfloat16") -> Manifest:
        target = {"weights": WEIGHTS.to_json(), "tensor_parallel": 2}
        asked = {"server": {"precision": precision}, "cost": {"gpu": "H100"}}  # which pays for it, and is not there
        return manifest(hardware={"gpus": [gpu]}, target=target, scenario=asked)

    found = describe_roofline(decode_steps(580), told("NVIDIA H100 80GB HBM3, 81559 MiB, 570.1"), (0, 10**9))
    assert found.device.bandwidth_gb_s.peak == 6700
    assert found.device.tflops.peak == pytest.approx(2 * 989.4)
    four_bits = describe_roofline(decode_steps(580), told("NVIDIA B200, 183359 MiB, 570.1", "nvfp4"), (0, 10**9))
    assert four_bits.device.tflops.peak == 18_000
    unknown = describe_roofline(decode_steps(580), told("Some GPU of 2031"), (0, 10**9))
    assert "not in the catalogue" in str(unknown.why)


def test_the_least_time_of_a_forward_is_that_of_its_bytes_or_of_its_operations_without_the_head() -> None:
    """Step 1 decodes one token, step 2 computes a prompt of 4,000."""
    entries = [(1, 0, 1, 9, 0), (2, 0, 4000, 0, LAST)]
    steps = trace(entries, [(1, 0, 10**7), (2, 10**7, 2 * 10**7)])
    target = {"weights": WEIGHTS.to_json(), "tensor_parallel": None}
    gpu = manifest(hardware={"gpus": ["NVIDIA H200, 143771 MiB, 570.1"]}, target=target,
                   scenario={"server": {"precision": "bfloat16"}})  # fmt: skip
    found = least_forwards(steps, gpu)
    work, head = step_work(steps, WEIGHTS), WEIGHTS.step_bytes * WEIGHTS.head_parameters / WEIGHTS.step_parameters
    reading, multiplying = (work["bytes"][0] - head) / 4800, work["operations"][1] / 989.4e3
    assert multiplying > (work["bytes"][1] - head) / 4800, "a prompt that is long enough multiplies for longer"
    assert found[0].tolist() == [1, 2] and found[1] == pytest.approx([reading, multiplying])
    assert least_forwards(steps, about()) is None, "a CPU's forwards are not launched"


@pytest.mark.parametrize(("engine", "why"), [("simulated", "computes nothing"), ("attach", "attached server")])
def test_what_has_no_roofline_says_why(engine: str, why: str) -> None:
    found = describe_roofline(decode_steps(580), about(engine=engine), (0, 10**9))
    assert found.decode is None and roofline_sentence(found) is None and why in str(found.why)


def test_the_evidence_for_what_binds_is_read_from_the_result_and_none_where_unmeasured(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "pcie", [{"at_ns": t, "gpu": 0, "pcie_rx_kb_s": 12_601_600, "pcie_tx_kb_s": 0} for t in range(9)])
    telemetry = describe_telemetry(read(tmp_path), None, about(), (0, 10), None)
    roofline = describe_roofline(decode_steps(580), about(), (0, 10**9))
    found = binding_evidence(roofline, telemetry)
    assert (found.decode_bound, found.prefill_bound) == ("memory bandwidth", None)
    assert found.pcie_share == pytest.approx(0.2)
    assert binding_evidence(roofline, None).pcie_share is None


def test_a_forwards_share_is_of_the_window_and_of_the_steps() -> None:
    spans = [
        (1, Span.SCHEDULE, 0, 0, 10), (1, Span.FORWARD, 0, 20, 80), (1, Span.UPDATE, 0, 90, 100),
        (2, Span.SCHEDULE, 0, 200, 210), (2, Span.FORWARD, 1, 220, 280), (2, Span.UPDATE, 0, 290, 300),
    ]  # fmt: skip
    found = describe_utilisation((), (), stamped(spans), (0, 400), 0)
    assert found.forward_share_of_window == 120 / 400
    assert found.forward_share_of_step == 120 / 200
    assert not found.forward_by_device, "of one of them only the host's time is known"
    assert describe_utilisation((), (), None, (0, 400), 0).forward_share_of_window is None


def test_engines_that_take_turns_are_each_busy_for_half_of_the_time() -> None:
    spans = [
        (step, code, int(code == Span.FORWARD), start, start + 100)
        for step, start in ((1, 0), (2, 100)) for code in (Span.LOOP, Span.FORWARD, Span.DEVICE_STEP)
    ]  # fmt: skip
    found = describe_utilisation((), (), replace(stamped(spans), engine_steps=(1, 2)), (0, 200), 0)
    assert found.forward_share_of_window == 0.5
    assert found.forward_share_of_step == 1
    assert (found.device.busy_share, found.device.idle_share, found.device.forward_share) == (0.5, 0.5, 0.5)
    assert found.device.waiting_share == 0 and found.device.steps == 2


def test_what_a_device_did_in_the_warm_up_is_in_no_share_of_the_measured_window() -> None:
    """Its first step was launched for as long as it lasted, half of it by kernels; of the second nothing is known."""
    spans = [
        (1, Span.HOST_LAUNCH, 0, 0, 100), (1, Span.FORWARD, 1, 0, 100), (1, Span.DEVICE_STEP, 0, 0, 100),
        (2, Span.HOST_LAUNCH, 0, 100, 110),
        (3, Span.HOST_LAUNCH, 0, 200, 230), (3, Span.FORWARD, 1, 220, 260), (3, Span.DEVICE_STEP, 0, 210, 260),
    ]  # fmt: skip
    ran = np.array([(Span.KERNELS, 10, 60)], [("code", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
    sampled = {"type": "kernels", "kernels": 1, "start_ns": 0, "end_ns": 150, "sum_ns": 50, "communication_ns": 0,
               "copies_ns": 0}  # fmt: skip
    known = replace(stamped(spans), process_spans={("worker", 7): ran}, notes=[sampled])
    told = [
        (use.launching_share, use.untimed_steps, use.kernels.steps, use.kernels.busy_share)
        for window in ((0, 400), (200, 400))
        if (use := describe_utilisation((), (), known, window, 0).device)
    ]
    assert told == [(110 / 140, 1, 1, 90 / 140), (10 / 40, 0, 1, 1.0)]
    bare = replace(known, process_spans={}, notes=[])
    doubts = {
        window: [one.text.split(":")[0] for one in device_warnings(bare, window)]
        for window in ((0, 400), (200, 400), (0, 150), None)
    }
    untimed, bound = "the device reported no times for 1 of {} steps", "for {} % of the forwards' time the GPU only"
    assert doubts == {
        (0, 400): [untimed.format(3), f"{bound.format(71)} kept up with its host"], (200, 400): [],
        (0, 150): [untimed.format(2), f"{bound.format(100)} kept up with its host"], None: [],
    }  # fmt: skip


def test_what_a_step_reads_is_told_in_gigabytes_where_that_is_shorter() -> None:
    found = describe_roofline(decode_steps(580), about(), (0, 10**9))
    large = found.decode.model_copy(update={"bytes_mean": 16.06e9, "weight_bytes": 999.97e6})
    result = RunResult.model_construct(roofline=found.model_copy(update={"decode": large}))
    (table,) = roofline(result).blocks
    told = {str(row[0]): (str(row[1]), str(row[2])) for row in table.rows}["bytes that a decode step reads"]
    assert told[0].startswith("weights 1.0 GB, ") and told[1] == "16.1 GB"


def test_the_link_of_a_strangers_gpu_binds_nothing(tmp_path: Path) -> None:
    started(tmp_path, [GPU, GPU | {"gpu": 1, "pids": [99]}])
    write(tmp_path, "processes", [{"at_ns": 0, "pid": 7, **IDLE}])
    rows = [{"at_ns": t, "gpu": g, "pcie_rx_kb_s": 60_000_000 * g, "pcie_tx_kb_s": 0} for t in range(9) for g in (0, 1)]
    write(tmp_path, "pcie", rows)
    telemetry = describe_telemetry(read(tmp_path), None, about(), (0, 10), None)
    roofline = describe_roofline(decode_steps(580), about(), (0, 10**9))
    assert binding_evidence(roofline, telemetry).pcie_share == 0
