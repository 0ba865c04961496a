"""asyncio and Locust side by side: how late requests leave and first tokens are stamped, in turn, at 200 requests/s."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gapmeter.machine.instrument import Cores, Timing, equal_plan, errors, issue, poisson

RATE, TOKENS, WARM = 200, 64, 256
NAMES = ("asyncio", "locust")
_TEXTS = {
    "lag_p50_ms": "generator lag p50, ms",
    "lag_p99_ms": "generator lag p99, ms",
    "ttft_p50_ms": "TTFT error p50, ms",
    "ttft_p99_ms": "TTFT error p99, ms",
    "chunk_us": "CPU per streamed chunk, µs",
}


def measure(rounds: int = 3, seconds: float = 20.0) -> dict[str, Any]:
    """Each generator issues the round's plan from one process on one core, the null server has the other.

    They take turns at going first. The figures are one list a generator, one value a round. Raises NotMeasured.
    """
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores((cores[0],), (cores[-1],))
    os.sched_setaffinity(0, placed.server)
    try:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for number in range(rounds):
            for name in NAMES if number % 2 == 0 else reversed(NAMES):
                found[name].append(_one(name, placed, number, seconds))
    finally:
        os.sched_setaffinity(0, cores)
    return {"rate": RATE, "seconds": seconds, "tokens": TOKENS, "rounds": found}


def _one(name: str, cores: Cores, seed: int, seconds: float) -> dict[str, float]:
    due = poisson(RATE, round(RATE * seconds), [seed, RATE])
    run = issue(cores, equal_plan(due, TOKENS), Timing(), generator=name, warm=WARM, measure_cpu=True)
    seen = errors(run)
    told = {
        f"{metric}_p{p}_ms": float(np.percentile(getattr(seen, metric), p)) / 1e6
        for metric in ("lag", "ttft")
        for p in (50, 99)
    }
    return told | {"chunk_us": run.cpu_ns / sum(len(record.chunk_ns) for record in run.records) / 1e3}


def table(found: Mapping[str, Any]) -> list[str]:
    head = f"{found['rate']} requests/s, {found['tokens']} tokens 10 ms apart, {found['seconds']:g} s a round"
    lines = [
        f"{head}; a value a round, in turn:",
        "",
        f"| | {' | '.join(NAMES)} |",
        "| --- " * (1 + len(NAMES)) + "|",
    ]
    for key, text in _TEXTS.items():
        cells = [_cell([one[key] for one in found["rounds"][name]]) for name in NAMES]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3g}" for value in values)
