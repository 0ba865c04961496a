"""Many answers open at once, and a steady rate for long, against the null server.

*Streams*: ten thousand open at once; is a record lost, and what memory does each take? *Soak*: does the generator's
memory grow, does its lag drift?
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapmeter.loadgen.fleet import Fleet, make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, equal_plan, null_server
from gapmeter.records import Outcome, read_records
from gapmeter.records.process import allow_many_files, too_few_files
from gapmeter.records.request import RequestRecord
from gapmeter.records.stream import parse_answer
from gapmeter.scenarios.values import read_duration

_PER_S = 1000  # opened
_GAP_S = 2.0
_HELD_S = 10.0  # all are open
_SOAK_RATE, _SOAK_TOKENS = 20, 32
_GROWTH_KIB = 4096.0  # beyond what it had after the first tenth
_DRIFT_MS = 0.1  # of the median lag, last third against first


def _issue(
    plan: Plan, timing: Timing, generator: str, every_s: float, warm: int | None = None
) -> tuple[list[RequestRecord], list[float], int]:
    """From one process: the records, its own memory (KiB, before the start and then every so often), bytes on disk."""
    cores, tokens = Cores.apart(), int(plan.output_tokens.max())
    with tempfile.TemporaryDirectory(prefix="gapmeter-streams-") as folder:
        path = Path(folder)
        with null_server(cores, timing, log=None, most_tokens=tokens) as port:
            url = f"http://127.0.0.1:{port}"
            with make_fleet(plan, url, None, path, cores.client, 1, warm=warm, generator=generator) as fleet:
                memory = _run(fleet, every_s)
        file = path / "worker-0.gap"
        return read_records(file).requests(), memory, file.stat().st_size


def _run(fleet: Fleet, every_s: float) -> list[float]:
    pid = fleet.processes[0].pid
    seen, asked = [_own_kib(pid)], 0.0
    fleet.start()

    def look() -> None:
        nonlocal asked
        if (now := time.monotonic()) - asked >= every_s:
            asked = now
            seen.append(_own_kib(pid))

    codes = fleet.wait(look, every_s)
    if any(codes):
        raise NotMeasured("; ".join(fleet.troubles()) or f"exit codes {codes}")
    return [kib for kib in seen if kib]


def _own_kib(pid: int) -> float:
    """A process's anonymous memory: without the record file's pages, which are the disk's; 0 once it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")), 0.0)


def measure(streams: int = 10_000, generator: str = "asyncio") -> dict[str, Any]:
    """Open them over some seconds, hold them all, let them end. Raises NotMeasured when this machine cannot."""
    if few := too_few_files(streams, allow_many_files()):
        raise NotMeasured(few)
    tokens = 2 + round((streams / _PER_S + _HELD_S) / _GAP_S)
    plan = equal_plan((np.arange(streams) * 1e9 / _PER_S).astype(np.int64), tokens)
    records, memory, _ = _issue(plan, Timing(gap_ms=_GAP_S * 1e3), generator, 0.25, warm=1)
    good = [record for record in records if record.outcome is Outcome.OK]
    whole = [record for record in good if len(parse_answer(record).token_ns) == tokens]
    edges = sorted([(record.sent_ns, 1) for record in good] + [(record.end_ns, -1) for record in good])
    lag = np.array([r.sent_ns - r.due_ns - (r.connect_end_ns - r.connect_start_ns) for r in good]) / 1e6
    return {
        "asked": streams,
        "recorded": len(records),
        "whole": len(whole),
        "open_at_once": int(np.cumsum([step for _, step in edges]).max()) if edges else 0,
        "tokens": tokens,
        "lag_p50_ms": float(np.percentile(lag, 50)) if len(lag) else None,
        "lag_p99_ms": float(np.percentile(lag, 99)) if len(lag) else None,
        "generator": generator,
        "kib_per_stream": (max(memory) - memory[0]) / streams,
    }


def table(found: Mapping[str, Any]) -> list[str]:
    kept = found["whole"] == found["asked"] == found["recorded"]
    word = "PASS" if kept else "FAIL"
    return [
        f"{word}: {found['open_at_once']:,} answers open at once from one process;",
        f"{found['recorded']:,} of {found['asked']:,} records, {found['whole']:,} whole, of {found['tokens']} tokens;",
        f"{found['kib_per_stream']:.1f} KiB of memory a stream;",
        f"lag p50 {found['lag_p50_ms']:.2f} ms, p99 {found['lag_p99_ms']:.2f} ms",
    ]


def seconds(text: str) -> float:
    """90s, 60m, 1h. Raises ValueError for anything else."""
    return read_duration(text) / 1e9


def soak(length_s: float, generator: str = "asyncio") -> dict[str, Any]:
    """Raises NotMeasured when a generator process fails."""
    plan = equal_plan((np.arange(round(_SOAK_RATE * length_s)) * 1e9 / _SOAK_RATE).astype(np.int64), _SOAK_TOKENS)
    records, (_, *memory), size = _issue(plan, Timing(), generator, 1.0)
    good = sorted((r.due_ns, r.sent_ns - r.due_ns) for r in records if r.outcome is Outcome.OK)
    third = len(good) // 3
    parts = (good[:third], good[third : 2 * third], good[2 * third :])
    lags = [np.array([lag for _, lag in part]) / 1e6 for part in parts]
    settled = memory[len(memory) // 10 : -1]  # the last look may meet a process that is leaving
    return {
        "generator": generator,
        "length_s": length_s,
        "rate": _SOAK_RATE,
        "asked": len(plan),
        "succeeded": len(good),
        "record_bytes": size,
        "memory_kib": [round(kib) for kib in settled[:: max(1, len(settled) // 60)]],
        "growth_kib": float(max(settled[-len(settled) // 10 :]) - settled[0]),
        "lag_p50_ms": [float(np.percentile(lag, 50)) for lag in lags],
        "lag_p99_ms": [float(np.percentile(lag, 99)) for lag in lags],
    }


def soak_verdict(found: Mapping[str, Any]) -> str:
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


def soak_table(found: Mapping[str, Any]) -> list[str]:
    pairs = zip(found["lag_p50_ms"], found["lag_p99_ms"], strict=True)
    thirds = " / ".join(f"{p50:.2f}, {p99:.2f}" for p50, p99 in pairs)
    load = f"{found['length_s'] / 60:g} min at {found['rate']} requests/s"
    memory = f"{found['growth_kib'] / 1024:+.1f} MiB after the first tenth ({found['memory_kib'][0] / 1024:.0f} MiB)"
    return [
        f"{soak_verdict(found)}: {load}, {found['succeeded']:,} of {found['asked']:,} answers whole;",
        f"memory {memory}; {found['record_bytes'] / 2**20:.0f} MiB of records on disk;",
        f"lag p50, p99 of the first, second and last third: {thirds} ms",
    ]
