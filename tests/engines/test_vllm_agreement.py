"""vLLM's own metrics of each request against the same intervals from our stamps, on a real server."""

from __future__ import annotations

from pathlib import Path

from bench.agreement import compare, load
from bench.injection import Delayed
from tests.engines.cases import on


@on("vllm")
def test_queue_prefill_and_decode_agree_with_what_vllm_reports(engine: Delayed, tmp_path: Path) -> None:
    """vLLM stamps within calls that we time, near the end that we take: both hold however slow the machine is."""
    found = compare(load(engine.engine, tmp_path, users=12))  # four more than run at once
    assert found["missing"] == 0
    for name, interval in found["intervals"].items():
        assert interval["requests"] >= 100, name
        assert interval["outside"] == 0, (name, interval)
        assert interval["difference_p50_ms"] < interval["call_p50_ms"] / 2 < interval["p50_ms"] / 20, (name, interval)
