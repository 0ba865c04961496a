"""The load tester's own floor on the machine of the run, and how near to it the run came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import stamps_ns
from gapmeter.analysis.results.manifest import GeneratorFloor, Manifest
from gapmeter.analysis.results.trust import FloorShares

COMMAND = "gapmeter calibrate"


def floor_of(manifest: Manifest) -> GeneratorFloor | None:
    """The run's generator's floor; None when its machine was not calibrated for it."""
    calibration = manifest.calibration
    return calibration.generators.get(manifest.asked.load.generator) if calibration else None


def busiest_second(requests: pd.DataFrame) -> tuple[float, float]:
    """Tokens that arrived, and requests that were sent, in the busiest second of the busiest generator process."""
    workers = requests["worker"] if "worker" in requests else np.zeros(len(requests), np.int64)
    tokens = sent = 0.0
    for _, own in requests.groupby(workers):
        left = stamps_ns(own, "sent_ns")
        arrived = [np.asarray(stamps, np.int64) for stamps in own.get("token_ns", ()) if stamps is not None]
        tokens = max(tokens, _most(np.concatenate(arrived) if arrived else np.empty(0, np.int64)))
        sent = max(sent, _most(left[left >= 0]))
    return tokens, sent


def describe_floor(floor: GeneratorFloor | None, requests: pd.DataFrame) -> FloorShares | None:
    """The floor, with the shares of one process's limits that the busiest second took."""
    if floor is None:
        return None
    tokens, sent = busiest_second(requests)
    return FloorShares(
        ttft_p50_ms=floor.ttft_p50_ms,
        ttft_p99_ms=floor.ttft_p99_ms,
        itl_p50_ms=floor.itl_p50_ms,
        itl_p99_ms=floor.itl_p99_ms,
        e2e_p50_ms=floor.e2e_p50_ms,
        e2e_p99_ms=floor.e2e_p99_ms,
        chunk_us=floor.chunk_us,
        tokens_per_s=floor.tokens.per_s,
        requests_per_s=floor.requests.per_s,
        tokens_share=tokens / floor.tokens.per_s,
        requests_share=sent / floor.requests.per_s,
        quick=floor.quick,
        measured=floor.measured_wall,
    )


def _most(at_ns: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    if not len(at_ns):
        return 0.0
    return float(np.bincount((at_ns - at_ns.min()) // 1_000_000_000).max())
