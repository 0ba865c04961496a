"""Ten thousand answers open at once against the null server: is a record lost, and what does a stream take?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapmeter.loadgen.fleet import Fleet, make_fleet
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, equal_plan, null_server
from gapmeter.records import Outcome, read_records
from gapmeter.records.process import allow_many_files, too_few_files
from gapmeter.records.request import RequestRecord
from gapmeter.records.stream import parse_answer

_PER_S = 1000  # opened
_GAP_S = 2.0
_HELD_S = 10.0  # all are open


def measure(streams: int = 10_000, processes: int = 1, generator: str = "asyncio") -> dict[str, Any]:
    """Open them over some seconds, hold them all, let them end. Raises NotMeasured when this machine cannot."""
    if few := too_few_files(-(-streams // processes), allow_many_files()):
        raise NotMeasured(few)
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores((cores[0],), tuple(cores[-processes:]))
    tokens = 2 + round((streams / _PER_S + _HELD_S) / _GAP_S)
    plan = equal_plan((np.arange(streams) * 1e9 / _PER_S).astype(np.int64), tokens)
    with tempfile.TemporaryDirectory(prefix="gapmeter-streams-") as folder:
        path = Path(folder)
        with null_server(placed, Timing(gap_ms=_GAP_S * 1e3), log=None, most_tokens=tokens) as port:
            url = f"http://127.0.0.1:{port}"
            with make_fleet(plan, url, None, path, placed.client, processes, warm=1, generator=generator) as fleet:
                before, most = _own_kib(fleet), _run(fleet)
        files = [read_records(file) for file in sorted(path.glob("worker-*.gap"))]
        records = [record for file in files for record in file.requests()]
    return _judge(records, streams, tokens) | {
        "generator": generator,
        "processes": processes,
        "kib_per_stream": (most - before) / streams,
    }


def _run(fleet: Fleet) -> float:
    """To the end; the most memory of their own that the generator processes had, KiB."""
    most = [0.0]
    fleet.start()

    def look() -> None:
        most[0] = max(most[0], _own_kib(fleet))

    codes = fleet.wait(look, 0.25)
    if any(codes):
        raise NotMeasured("; ".join(fleet.troubles()) or f"exit codes {codes}")
    return most[0]


def _own_kib(fleet: Fleet) -> float:
    """Anonymous memory: without the record file's pages, which are the disk's, and shared libraries."""
    return sum(anonymous_kib(process.pid) for process in fleet.processes)


def anonymous_kib(pid: int) -> float:
    """A process's own memory, KiB; 0 once it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")), 0.0)


def _judge(records: list[RequestRecord], streams: int, tokens: int) -> dict[str, Any]:
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
    }


def table(found: Mapping[str, Any]) -> list[str]:
    kept = found["whole"] == found["asked"] == found["recorded"]
    word = "PASS" if kept else "FAIL"
    return [
        f"{word}: {found['open_at_once']:,} answers open at once from {found['processes']} process(es);",
        f"{found['recorded']:,} of {found['asked']:,} records, {found['whole']:,} whole, of {found['tokens']} tokens;",
        f"{found['kib_per_stream']:.1f} KiB of memory a stream;",
        f"lag p50 {found['lag_p50_ms']:.2f} ms, p99 {found['lag_p99_ms']:.2f} ms",
    ]
