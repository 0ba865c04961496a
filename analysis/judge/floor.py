"""The load tester's own floor on the machine of the run, as its manifest holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.numbers import duration
from gapmeter.analysis.requests.metrics import stamps_ns

COMMAND = "gapmeter calibrate"
METRICS = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Limit:
    """The highest rate of one generator process that was exact. Not ``reached``: it can do more than that."""

    per_s: float
    reached: bool


@dataclass(frozen=True, slots=True)
class Floor:
    """What the load tester itself adds, in ms: ``errors_ms[metric] = (p50, p99)``; and how much one process takes."""

    errors_ms: Mapping[str, tuple[float, float]]
    chunk_us: float
    tokens: Limit
    requests: Limit
    quick: bool
    measured: str

    @property
    def sentence(self) -> str:
        """The p99s, for a line of figures."""
        return "floor p99 " + ", ".join(f"{m.upper()} {duration(p99)}" for m, (_, p99) in self.errors_ms.items())


def read_floor(manifest: Mapping[str, Any]) -> Floor | None:
    """The run's generator's floor; None when its machine was not calibrated for it, or in another form."""
    known = manifest.get("calibration") or {}
    try:
        found = known["generators"][manifest["scenario"]["load"]["generator"]]
        return Floor(
            errors_ms={m: (float(found[f"{m}_p50_ms"]), float(found[f"{m}_p99_ms"])) for m in METRICS},
            chunk_us=float(found["chunk_us"]),
            tokens=_limit(found["tokens"]),
            requests=_limit(found["requests"]),
            quick=bool(found["quick"]),
            measured=str(found["measured_wall"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


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


def floor_part(floor: Floor | None, requests: pd.DataFrame) -> dict[str, Any] | None:
    """The floor as summary.json has it, with the shares of one process's limits that the busiest second took."""
    if floor is None:
        return None
    tokens, sent = busiest_second(requests)
    errors = {
        f"{m}_p{p}_ms": value for m, pair in floor.errors_ms.items() for p, value in zip((50, 99), pair, strict=True)
    }
    return {
        **errors,
        "chunk_us": floor.chunk_us,
        "tokens_per_s": floor.tokens.per_s,
        "requests_per_s": floor.requests.per_s,
        "tokens_share": tokens / floor.tokens.per_s,
        "requests_share": sent / floor.requests.per_s,
        "quick": floor.quick,
        "measured": floor.measured,
    }


def _limit(found: Mapping[str, Any]) -> Limit:
    per_s = float(found["per_s"])
    if not (math.isfinite(per_s) and per_s > 0):
        raise ValueError(f"{per_s} is no rate")
    return Limit(per_s, found["ended_by"] == "client")


def _most(at_ns: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    if not len(at_ns):
        return 0.0
    return float(np.bincount((at_ns - at_ns.min()) // 1_000_000_000).max())
