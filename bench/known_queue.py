"""Does a search in real time find a capacity that is known? That of the null server with eight places.

Every request takes a place for its own time, first come, first served: with Poisson arrivals an M/G/8 queue. A trace
whose requests come in bursts is searched too. Both capacities come from a simulation that shares no code with the
server or the search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.queues import many_servers
from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.machine.instrument import Cores, Timing, null_server
from gapmeter.options import Options
from gapmeter.study.capacity import find_capacity

PLACES, MOST_TOKENS = 8, 39
TIMING = Timing(first_ms=10.0, gap_ms=10.0)  # so an answer of k tokens takes a place for k times 10 ms
LEVEL, LIMIT_MS = 99, 200.0
_CEILING = 1000 * PLACES / (TIMING.gap_ms * (1 + MOST_TOKENS) / 2)  # requests per second
_QUEUES, _REQUESTS, _AHEAD, _SEED = 40, 50_000, 1_000, 20
_STEPS = 14
_RECORDED, _BURSTINESS, _LAPS = 1_000, 3.0, 40
_SLO = ("load.warmup=auto", "load.requests=null", f'slo=["ttft p{LEVEL} <= {LIMIT_MS:g} ms"]')
_POISSON = (f"workload.output_tokens={{uniform: [1, {MOST_TOKENS}]}}", "load.rate=5", "load.duration=60s")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """So many searches with the command's defaults, of Poisson arrivals and of the trace. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    recording = folder / "bursts.csv"
    at_s, tokens = recorded()
    rows = "".join(f"{at:.6f},32,{count}\n" for at, count in zip(at_s, tokens, strict=True))
    recording.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    trace = ("load.rate=null", "load.arrivals=trace", f"load.trace={{file: {recording}, speed: 5}}",
             "workload.output_tokens=null")  # fmt: skip
    return {
        "poisson": {"truth": capacity(poisson_queue), "rows": _searches(folder, rounds, _POISSON)},
        "trace": {"truth": capacity(trace_queue), "rows": _searches(folder, rounds, trace)},
    }


def _searches(folder: Path, rounds: int, load: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        with null_server(Cores.apart(), TIMING, log=None, most_tokens=MOST_TOKENS, places=PLACES) as port:
            asked = [*_SLO, *load, f"server.url=http://127.0.0.1:{port}", f"seed={number + 1}"]
            found = find_capacity("bench/null.yaml", asked, Options(folder, quiet=True)).result.capacity
        rows.append({"rate": found.rate, "low": found.low, "high": found.high, "held": found.held,
                     "ended": found.ended, "trials": len(found.trials), "seconds": found.seconds})  # fmt: skip
        print(f"bench known_queue: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def capacity(percentile_ms: Callable[[float], float]) -> float:
    """The rate, per second, at which the percentile meets its limit."""
    low, high = 0.05 * _CEILING, 0.99 * _CEILING
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if percentile_ms(middle) <= LIMIT_MS else (low, middle)
    return (low + high) / 2


def poisson_queue(rate: float) -> float:
    """The percentile of the time to first token, in ms; at every rate of the same draws."""
    rng = np.random.default_rng(_SEED)
    shape = (_QUEUES, _AHEAD + _REQUESTS)
    gaps = rng.exponential(1000 / rate, shape)
    return _percentile_ms(gaps, rng.integers(1, MOST_TOKENS + 1, shape))


def trace_queue(rate: float) -> float:
    """That of the trace again and again."""
    at_s, tokens = recorded()
    gaps = np.diff(at_s, append=at_s[-1] * len(at_s) / (len(at_s) - 1))  # to the next request
    return _percentile_ms(
        np.tile(np.roll(gaps, 1) * 1000 / gaps.mean() / rate, (1, _LAPS)), np.tile(tokens, (1, _LAPS))
    )


def recorded() -> tuple[Floats, Ints]:
    """The trace: when each request came, in seconds, with gamma gaps of one on average, and its answer's tokens."""
    rng = np.random.default_rng(_SEED)
    gaps = rng.gamma(1 / _BURSTINESS, _BURSTINESS, _RECORDED)
    return np.cumsum(gaps) - gaps[0], rng.integers(1, MOST_TOKENS + 1, _RECORDED)


def _percentile_ms(gaps_ms: Floats, tokens: Ints) -> float:
    services = np.asarray(TIMING.first_ms + TIMING.gap_ms * (tokens - 1.0), np.float64)
    waits = many_servers(gaps_ms, services, PLACES)[:, _AHEAD:]
    return float(np.percentile(waits, LEVEL)) + TIMING.first_ms


def table(figures: dict[str, Any]) -> list[str]:
    """A row a search."""
    server = (
        f"The null server with {PLACES} places, answers of 1 to {MOST_TOKENS} tokens, {TIMING.gap_ms:g} ms each; the "
        f"rate at which p{LEVEL} TTFT is {LIMIT_MS:g} ms, by `gapmeter capacity` with its defaults. The trace has "
        f"{_RECORDED:,} requests with gamma gaps of burstiness {_BURSTINESS:g}."
    )
    lines = [
        server,
        "",
        "| arrivals | truth, req/s | found | off by | 95 % interval | proven to hold | ended | trials | took, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arrivals, found in figures.items():
        for row in found["rows"]:
            lines.append(
                f"| {arrivals} | {found['truth']:.1f} | {_rate(row['rate'])} | {_off(row['rate'], found['truth'])} "
                f"| {_rate(row['low'])} to {_rate(row['high'])} | {_rate(row['held'])} | {row['ended']} "
                f"| {row['trials']} | {row['seconds']:.0f} |"
            )
    return lines


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _off(value: float | None, known: float) -> str:
    return "–" if value is None else f"{value / known - 1:+.1%}"
