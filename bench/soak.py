"""A steady rate for long: does the generator's memory grow, does its lag drift? Against the null server."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.streams import anonymous_kib
from gapmeter.loadgen.fleet import Fleet, make_fleet
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, equal_plan, null_server
from gapmeter.records import Outcome, read_records
from gapmeter.scenarios.values import read_duration

_RATE, _TOKENS = 20, 32
_GROWTH_KIB = 4096.0  # beyond what it had after the first tenth
_DRIFT_MS = 0.1  # of the median lag, last third against first


def seconds(text: str) -> float:
    """90s, 60m, 1h. Raises ValueError for anything else."""
    return read_duration(text) / 1e9


def measure(length_s: float, generator: str = "asyncio") -> dict[str, Any]:
    """Raises NotMeasured when a generator process fails."""
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores((cores[0],), (cores[-1],))
    plan = equal_plan((np.arange(round(_RATE * length_s)) * 1e9 / _RATE).astype(np.int64), _TOKENS)
    with tempfile.TemporaryDirectory(prefix="gapmeter-soak-") as folder:
        path = Path(folder)
        with null_server(placed, Timing(), log=None, most_tokens=_TOKENS) as port:
            url = f"http://127.0.0.1:{port}"
            with make_fleet(plan, url, None, path, placed.client, 1, generator=generator) as fleet:
                memory = _run(fleet)
        size = (path / "worker-0.gap").stat().st_size
        records = read_records(path / "worker-0.gap").requests()
    good = sorted((r.due_ns, r.sent_ns - r.due_ns) for r in records if r.outcome is Outcome.OK)
    lags = [np.array([lag for _, lag in part]) / 1e6 for part in _thirds(good)]
    settled = memory[len(memory) // 10 : -1]  # the last look may meet a process that is leaving
    return {
        "generator": generator,
        "length_s": length_s,
        "rate": _RATE,
        "asked": len(plan),
        "succeeded": len(good),
        "record_bytes": size,
        "memory_kib": [round(kib) for kib in settled[:: max(1, len(settled) // 60)]],
        "growth_kib": float(max(settled[-len(settled) // 10 :]) - settled[0]),
        "lag_p50_ms": [float(np.percentile(lag, 50)) for lag in lags],
        "lag_p99_ms": [float(np.percentile(lag, 99)) for lag in lags],
    }


def _thirds(rows: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    third = len(rows) // 3
    return [rows[:third], rows[third : 2 * third], rows[2 * third :]]


def _run(fleet: Fleet) -> list[float]:
    """The process's own memory once a second, KiB. The plan is part of it, and is freed as it is issued."""
    seen: list[float] = []
    asked = [0.0]
    fleet.start()

    def look() -> None:
        now = time.monotonic()
        if now - asked[0] >= 1:
            asked[0] = now
            seen.append(anonymous_kib(fleet.processes[0].pid))

    codes = fleet.wait(look, 1.0)
    if codes != [0]:
        raise NotMeasured("; ".join(fleet.troubles()) or f"exit codes {codes}")
    return [kib for kib in seen if kib]


def verdict(found: Mapping[str, Any]) -> str:
    """PASS, or FAIL with what failed."""
    failures = []
    if found["succeeded"] != found["asked"]:
        failures.append(f"{found['asked'] - found['succeeded']} requests failed or were lost")
    if found["growth_kib"] > _GROWTH_KIB:
        failures.append(f"memory grew by {found['growth_kib'] / 1024:.1f} MiB")
    drift = found["lag_p50_ms"][-1] - found["lag_p50_ms"][0]
    if not math.isfinite(drift) or drift > _DRIFT_MS:
        failures.append(f"lag drifted by {drift:.2f} ms")
    return f"FAIL: {'; '.join(failures)}" if failures else "PASS"


def table(found: Mapping[str, Any]) -> list[str]:
    pairs = zip(found["lag_p50_ms"], found["lag_p99_ms"], strict=True)
    thirds = " / ".join(f"{p50:.2f}, {p99:.2f}" for p50, p99 in pairs)
    load = f"{found['length_s'] / 60:g} min at {found['rate']} requests/s"
    memory = f"{found['growth_kib'] / 1024:+.1f} MiB after the first tenth ({found['memory_kib'][0] / 1024:.0f} MiB)"
    return [
        f"{verdict(found)}: {load}, {found['succeeded']:,} of {found['asked']:,} answers whole;",
        f"memory {memory}; {found['record_bytes'] / 2**20:.0f} MiB of records on disk;",
        f"lag p50, p99 of the first, second and last third: {thirds} ms",
    ]
