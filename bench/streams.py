"""Many answers open at once, and a steady rate for long, against the null server.

*Streams*: ten thousand open at once; is a record lost, and what memory does each take? *Soak*: 200 requests a second
by one process (two of Locust's), or 5 of a real engine with its probe, and a server that is ended and started anew in
the middle: does the load go on, do the generators' memory or open files grow, does their lag drift?
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.engine import NAME, Setting, running
from gapmeter.loadgen.fleet import make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, equal_plan, null_server, run_to_end
from gapmeter.records import Outcome, read_records
from gapmeter.records.process import allow_many_files, text_of, too_few_files
from gapmeter.records.stream import parse_answer
from gapmeter.scenarios.values import read_duration
from gapmeter.servers.launch import free_port

_PER_S = 1000  # opened
_GAP_S = 2.0
_HELD_S = 10.0  # all are open
_SOAK_RATE, _SOAK_TOKENS = 200, 8
_ENGINE_RATE, _ENGINE_TOKENS = 5, 16
_EVERY_S = 1.0
_GROWTH_KIB = 4096.0  # beyond what it had after the first tenth
_DRIFT_MS = 0.1  # of the median lag, last third against first
_BACK_S = 2.0  # after a server's start its requests succeed


def _own_kib(pid: int) -> float:
    """A process's anonymous memory: without the record file's pages, which are the disk's; 0 once it has gone."""
    lines = text_of(f"/proc/{pid}/status").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0.0)


def measure(streams: int = 10_000, generator: str = "asyncio") -> dict[str, Any]:
    """Open them over some seconds, hold them all, let them end. Raises NotMeasured when this machine cannot."""
    if few := too_few_files(streams, allow_many_files()):
        raise NotMeasured(few)
    tokens = 2 + round((streams / _PER_S + _HELD_S) / _GAP_S)
    plan = equal_plan((np.arange(streams) * 1e9 / _PER_S).astype(np.int64), tokens)
    cores, timing = Cores.apart(), Timing(gap_ms=_GAP_S * 1e3)
    with tempfile.TemporaryDirectory(prefix="gapmeter-streams-") as folder:
        with (
            null_server(cores, timing, log=None, most_tokens=tokens) as port,
            make_fleet(
                plan, f"http://127.0.0.1:{port}", None, Path(folder), cores.client, 1, warm=1, generator=generator
            ) as fleet,
        ):
            pid = fleet.processes[0].pid
            seen = [_own_kib(pid)]
            run_to_end(fleet, lambda: seen.append(_own_kib(pid)), 0.25)
        records = read_records(Path(folder) / "worker-0.gap").requests()
    good = [record for record in records if record.outcome is Outcome.OK]
    whole = [record for record in good if len(parse_answer(record).token_ns) == tokens]
    lag = np.array([r.sent_ns - r.due_ns - (r.connect_end_ns - r.connect_start_ns) for r in good]) / 1e6
    return {
        "asked": streams,
        "recorded": len(records),
        "whole": len(whole),
        "open_at_once": _open_at_once([(record.sent_ns, record.end_ns) for record in good]),
        "tokens": tokens,
        "lag_p50_ms": float(np.percentile(lag, 50)) if len(lag) else None,
        "lag_p99_ms": float(np.percentile(lag, 99)) if len(lag) else None,
        "generator": generator,
        "kib_per_stream": (max(seen) - seen[0]) / streams,
    }


def _open_at_once(stretches: list[tuple[int, int]]) -> int:
    edges = sorted([(start, 1) for start, _ in stretches] + [(end, -1) for _, end in stretches])
    return int(np.cumsum([step for _, step in edges]).max()) if edges else 0


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


def soak(length_s: float, generator: str = "asyncio", engine: str | None = None) -> dict[str, Any]:
    """Against the null server, or a real ``engine``. Raises NotMeasured when a generator process fails."""
    processes = 2 if generator == "locust" else 1
    rate, tokens = (_ENGINE_RATE, _ENGINE_TOKENS) if engine else (_SOAK_RATE, _SOAK_TOKENS)
    plan = equal_plan((np.arange(round(rate * length_s)) * 1e9 / rate).astype(np.int64), tokens, engine and NAME)
    cores, began, away = Cores.apart(), time.monotonic_ns(), (0, 0)
    memory: list[float] = []
    served: list[float] = []
    files: list[int] = []
    with tempfile.TemporaryDirectory(prefix="gapmeter-soak-") as folder, ExitStack() as server:

        def serve(port: int = 0) -> int:
            if not engine:
                return server.enter_context(null_server(cores, Timing(), log=None, most_tokens=tokens, port=port))
            setting = Setting(port=port or free_port(), cores=cores.server)
            server.enter_context(running(engine, Path(tempfile.mkdtemp(dir=folder)), setting))
            return setting.port

        port = serve()
        url = f"http://127.0.0.1:{port}"
        with make_fleet(plan, url, None, Path(folder), cores.client, processes, generator=generator) as fleet:
            pids = [process.pid for process in fleet.processes]

            def look() -> None:
                nonlocal away
                if not away[0] and time.monotonic_ns() - began > length_s * 5e8:
                    ended = time.monotonic_ns()
                    server.close()
                    serve(port)
                    away = ended, time.monotonic_ns()
                if all(each := [_own_kib(pid) for pid in pids]):
                    memory.append(sum(each))
                    files.append(sum(_open_files(pid) for pid in pids))
                if engine and away[0]:
                    others = {child.pid for child in psutil.Process().children(recursive=True)} - set(pids)
                    served.append(sum(_own_kib(pid) for pid in others))

            run_to_end(fleet, look, _EVERY_S)
        outcomes, stretches, size = [], [], 0
        for file in sorted(Path(folder).glob("worker-*.gap")):
            found = read_records(file).requests()
            outcomes += [(r.due_ns, r.sent_ns - r.due_ns, r.outcome is Outcome.OK) for r in found]
            stretches += [(r.sent_ns, r.end_ns) for r in found]
            size += file.stat().st_size
        size += sum(file.stat().st_size for file in Path(folder).rglob("probe/*.gap"))
    return _soaked(plan, sorted(outcomes), away, memory, files) | {
        "open_at_once": _open_at_once(stretches),
        "generator": generator,
        "engine": engine,
        "server_growth_kib": max(served[-len(served) // 10 :]) - served[len(served) // 10] if served else None,
        "processes": processes,
        "length_s": length_s,
        "rate": rate,
        "record_bytes": size,
    }


def _open_files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def _soaked(
    plan: Plan, outcomes: list[tuple[int, int, bool]], away: tuple[int, int], memory: list[float], files: list[int]
) -> dict[str, Any]:
    """``outcomes``: due ns, lag ns, whole; ``away``: from when to when no server was there, ns."""
    good = [(due, lag) for due, lag, whole in outcomes if whole]
    excused = [
        due for due, _, whole in outcomes if not whole and away[0] - _BACK_S * 1e9 <= due <= away[1] + _BACK_S * 1e9
    ]
    third = len(good) // 3
    lags = [np.array([lag for _, lag in part]) / 1e6 for part in (good[:third], good[third:-third], good[-third:])]
    tenth = len(memory) // 10
    settled, open_files = memory[tenth:-1], files[tenth:-1]  # the last look may meet a process that is leaving
    return {
        "asked": len(plan),
        "succeeded": len(good),
        "away_s": (away[1] - away[0]) / 1e9,
        "failed_while_away": len(excused),
        "memory_kib": [round(kib) for kib in settled[:: max(1, len(settled) // 60)]],
        "growth_kib": float(max(settled[-len(settled) // 10 :]) - settled[0]),
        "open_files": [open_files[0], max(open_files), open_files[-1]],
        "lag_p50_ms": [float(np.percentile(lag, 50)) for lag in lags],
        "lag_p99_ms": [float(np.percentile(lag, 99)) for lag in lags],
    }


def soak_failures(found: Mapping[str, Any]) -> list[str]:
    """What a soak should not have met."""
    failures = []
    if lost := found["asked"] - found["succeeded"] - found["failed_while_away"]:
        failures.append(f"{lost:,} requests failed or were lost beside those that met no server")
    if found["growth_kib"] > _GROWTH_KIB:
        failures.append(f"memory grew by {found['growth_kib'] / 1024:.1f} MiB")
    first, _, last = found["open_files"]
    if last > first + found["open_at_once"]:  # connections stay open for the next request
        failures.append(f"open files grew from {first} to {last} for {found['open_at_once']} answers at once")
    drift = found["lag_p50_ms"][-1] - found["lag_p50_ms"][0]
    if not math.isfinite(drift) or drift > _DRIFT_MS:
        failures.append(f"lag drifted by {drift:.2f} ms")
    return failures


def soak_table(found: Mapping[str, Any]) -> list[str]:
    pairs = zip(found["lag_p50_ms"], found["lag_p99_ms"], strict=True)
    thirds = " / ".join(f"{p50:.2f}, {p99:.2f}" for p50, p99 in pairs)
    load = f"{found['length_s'] / 60:g} min at {found['rate']} requests/s by {found['generator']}"
    load += f" of {found['engine']}" if found["engine"] else ""
    grown = found["server_growth_kib"]
    memory = f"{found['growth_kib'] / 1024:+.1f} MiB after the first tenth ({found['memory_kib'][0] / 1024:.0f} MiB)"
    first, most, last = found["open_files"]
    files = f"open files {first}, at most {most}, {last} at the end ({found['open_at_once']} answers at once at most)"
    failures = soak_failures(found)
    verdict = f"FAIL: {'; '.join(failures)}" if failures else "PASS"
    return [
        f"{verdict}: {load} ({found['processes']}), {found['succeeded']:,} of {found['asked']:,} whole;",
        f"{found['failed_while_away']:,} failed while the server was away ({found['away_s']:.1f} s, in the middle);",
        f"memory {memory}; {files};",
        *([] if grown is None else [f"the server's memory after its start anew: {grown / 1024:+.1f} MiB;"]),
        f"{found['record_bytes'] / 2**20:.0f} MiB of records on disk;",
        f"lag p50, p99 of the first, second and last third: {thirds} ms",
    ]
