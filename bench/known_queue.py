"""Does a search in real time find a capacity that is known? That of the null server with eight places.

Every request takes a place for its own time, first come, first served: an M/G/8 queue. Its capacity comes from a
simulation that shares no code with the server or the search.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.queues import many_servers
from gapmeter.machine.instrument import Cores, Timing, null_server
from gapmeter.options import Options
from gapmeter.study.capacity import find_capacity

PLACES, MOST_TOKENS = 8, 39
TIMING = Timing(first_ms=10.0, gap_ms=10.0)  # so an answer of k tokens takes a place for k times 10 ms
LEVEL, LIMIT_MS = 99, 200.0
_CEILING = 1000 * PLACES / (TIMING.gap_ms * (1 + MOST_TOKENS) / 2)  # requests per second
_QUEUES, _REQUESTS, _AHEAD, _SEED = 40, 50_000, 1_000, 20
_STEPS = 12
_ASKED = (
    f"workload.output_tokens={{uniform: [1, {MOST_TOKENS}]}}", "load.rate=5", "load.requests=null",
    "load.duration=60s", "load.warmup=auto", f'slo=["ttft p{LEVEL} <= {LIMIT_MS:g} ms"]',
)  # fmt: skip


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """So many searches with the command's defaults. Raises UserError."""
    rows = []
    for number in range(rounds):
        with null_server(Cores.apart(), TIMING, log=None, most_tokens=MOST_TOKENS, places=PLACES) as port:
            asked = [*_ASKED, f"server.url=http://127.0.0.1:{port}", f"seed={number + 1}"]
            found = find_capacity("bench/null.yaml", asked, Options(folder, quiet=True)).result.capacity
        rows.append({"rate": found.rate, "low": found.low, "high": found.high, "held": found.held,
                     "ended": found.ended, "trials": len(found.trials), "seconds": found.seconds})  # fmt: skip
        print(f"bench known_queue: {rows[-1]}", file=sys.stderr, flush=True)
    return {"truth": truth(), "rows": rows}


def truth() -> float:
    """The rate, per second, at which the percentile meets its limit."""
    low, high = 0.3 * _CEILING, 0.99 * _CEILING
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if percentile_ms(middle) <= LIMIT_MS else (low, middle)
    return (low + high) / 2


def percentile_ms(rate: float) -> float:
    """Of the time to first token; at every rate of the same draws."""
    rng = np.random.default_rng(_SEED)
    shape = (_QUEUES, _AHEAD + _REQUESTS)
    gaps = rng.exponential(1000 / rate, shape)
    tokens = rng.integers(1, MOST_TOKENS + 1, shape).astype(np.float64)
    services = np.asarray(TIMING.first_ms + TIMING.gap_ms * (tokens - 1), np.float64)
    waits = many_servers(gaps, services, PLACES)[:, _AHEAD:]
    return float(np.percentile(waits, LEVEL)) + TIMING.first_ms


def table(figures: dict[str, Any]) -> list[str]:
    """A row a search."""
    known = figures["truth"]
    server = f"The null server with {PLACES} places, answers of 1 to {MOST_TOKENS} tokens, {TIMING.gap_ms:g} ms each"
    lines = [
        f"{server}: p{LEVEL} TTFT is {LIMIT_MS:g} ms at {known:.1f} req/s. `gapmeter capacity` with its defaults:",
        "",
        "| found, req/s | off by | 95 % interval | proven to hold | ended | trials | took, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        lines.append(
            f"| {_rate(row['rate'])} | {_off(row['rate'], known)} | {_rate(row['low'])} to {_rate(row['high'])} "
            f"| {_rate(row['held'])} | {row['ended']} | {row['trials']} | {row['seconds']:.0f} |"
        )
    return lines


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _off(value: float | None, known: float) -> str:
    return "–" if value is None else f"{value / known - 1:+.1%}"
