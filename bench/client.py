"""What the load tester itself costs and how exact it is, against the null server's log.

Server on one core, generator on another, repeated; each figure is the median of the rounds, with lowest and highest.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from gapmeter.analysis.arrays import Ints
from gapmeter.machine.instrument import Cores, Timing, departures, equal_plan, issue, kept_to, poisson, stamp_errors
from gapmeter.records.stream import parse_answer

STREAMS = 64
MOST_TOKENS = 16384

# What each figure is, and what it is meant to be at most (or, for tokens/s, at least).
FIGURES = {
    "chunk_us": (
        "CPU per streamed chunk, 64 streams, 10 ms between tokens, in step as a batch sends them, µs",
        "<= 12",
    ),
    "chunk_apart_us": ("… at times of their own, so that each wakes the process, µs", ""),
    "tokens_per_s": ("tokens/s one core takes in and keeps, 64 streams, tokens due every 0.1 ms", ">= 200,000"),
    "arrived_per_s": ("… until the last has come; collecting the records follows", ""),
    "ttft20_p50_ms": ("TTFT error at 20 requests/s, p50, ms", "<= 0.15"),
    "ttft20_p99_ms": ("TTFT error at 20 requests/s, p99, ms", "<= 0.1"),
    "wait20_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag20_p50_ms": ("generator lag at 20 requests/s, p50, ms", ""),
    "lag20_p99_ms": ("generator lag at 20 requests/s, p99, ms", "< 0.3"),
    "rate20": ("delivered rate, 20 asked, requests/s", ""),
    "dispersion20": ("… dispersion of delivered over that of planned arrivals", "1"),
    "ttft200_p50_ms": ("TTFT error at 200 requests/s, p50, ms", ""),
    "ttft200_p99_ms": ("TTFT error at 200 requests/s, p99, ms", "<= 0.1"),
    "wait200_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag200_p50_ms": ("generator lag at 200 requests/s, p50, ms", ""),
    "lag200_p99_ms": ("generator lag at 200 requests/s, p99, ms", "< 0.5"),
    "rate200": ("delivered rate, 200 asked, requests/s", ""),
    "dispersion200": ("… dispersion of delivered over that of planned arrivals", "1"),
    "ttft1000_p50_ms": ("TTFT error at 1,000 requests/s, 64,000 tokens/s, p50, ms", ""),
    "ttft1000_p99_ms": ("TTFT error at 1,000 requests/s, p99, ms", ""),
    "wait1000_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag1000_p50_ms": ("generator lag at 1,000 requests/s, p50, ms", ""),
    "lag1000_p99_ms": ("generator lag at 1,000 requests/s, p99, ms", ""),
    "rate1000": ("delivered rate, 1,000 asked, requests/s", ""),
    "dispersion1000": ("… dispersion of delivered over that of planned arrivals", "1"),
    "ttft20_busy_p50_ms": ("TTFT error at 20 requests/s, a program that never sleeps on the same core, p50, ms", ""),
    "ttft20_busy_p99_ms": ("… p99, ms", "<= 0.15"),
    "wait20_busy_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag20_busy_p99_ms": ("… generator lag, p99, ms", ""),
    "ttft200_busy_p50_ms": ("… at 200 requests/s, p50, ms", ""),
    "ttft200_busy_p99_ms": ("… p99, ms", "<= 0.15"),
    "wait200_busy_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag200_busy_p99_ms": ("… generator lag, p99, ms", ""),
}


def measure(rounds: int = 3) -> dict[str, list[float]]:
    """Each figure, one value a round. Raises NotMeasured."""
    cores, found = Cores.apart(), []
    with kept_to(cores.server):
        for seed in range(rounds):
            found.append({name: value for part in PARTS for name, value in part(cores, seed).items()})
    return {name: [figures[name] for figures in found] for name in FIGURES if name in found[0]}


def table(figures: dict[str, list[float]]) -> list[str]:
    """One line a figure: median, lowest and highest, and what is aimed at."""
    lines = ["```"]
    for name, values in figures.items():
        text, aim = FIGURES[name]
        middle, low, high = (_figure(f(values)) for f in (np.median, min, max))
        lines.append(f"{text:<92} {middle:>9}  {low:>9} .. {high:<9} {aim}")
    return [*lines, "```"]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def chunk_cost(cores: Cores, seed: int) -> dict[str, float]:
    """CPU time of the generator process, kernel included, over the reads that brought a chunk or more."""
    apart = np.sort(np.random.default_rng(seed).uniform(0, 0.5e9, STREAMS)).astype(np.int64)
    found = {}
    for name, due in (("chunk_us", np.zeros(STREAMS, np.int64)), ("chunk_apart_us", apart)):
        run = issue(cores, equal_plan(due, tokens=800), Timing(), warm=STREAMS, measure_cpu=True)
        found[name] = run.chunk_us
    return found


def intake(cores: Cores, seed: int) -> dict[str, float]:
    """Tokens over the time from the first to the last arrival, and over the CPU time if that is longer.

    The records of answers are collected as these end, here all at once, after the last token.
    """
    run = issue(
        cores, equal_plan(np.arange(STREAMS) * 1000, MOST_TOKENS), Timing(gap_ms=0.1), warm=STREAMS, measure_cpu=True
    )
    stamps = np.concatenate([record.chunk_ns for record in run.records])
    tokens = sum(len(parse_answer(record).token_ns) for record in run.records)
    span_ns = float(stamps.max() - stamps.min())
    return {"tokens_per_s": tokens / max(span_ns, run.cpu_ns) * 1e9, "arrived_per_s": tokens / span_ns * 1e9}


def exactness(cores: Cores, seed: int, rate: int, seconds: int, *, busy: bool = False) -> dict[str, float]:
    """Poisson arrivals, 64 tokens 10 ms apart: how late requests leave, and how late first tokens are stamped.

    The error is counted from before the server's write call, so that its duration is part of it. ``busy``: beside a
    program that never sleeps, on the client's core.
    """
    due = poisson(rate, rate * seconds, [seed, rate])
    with neighbor(cores.client) if busy else contextlib.nullcontext():
        run = issue(cores, equal_plan(due, tokens=64), Timing(), warm=STREAMS)
    left = departures(run.server)
    error = np.array([parse_answer(r).token_ns[0] - left[r.request_id][1][0] for r in run.records]) / 1e6
    lag = stamp_errors(run).lag / 1e6
    sent = np.sort(np.array([r.sent_ns for r in run.records]))
    name = f"{rate}_busy" if busy else str(rate)
    waits = [r.chunk_wait_ns for r in run.records if len(r.chunk_wait_ns)]
    found = {f"wait{name}_p99_ms": float(np.percentile(np.concatenate(waits), 99)) / 1e6} if waits else {}
    found |= {
        f"ttft{name}_p50_ms": float(np.percentile(error, 50)),
        f"ttft{name}_p99_ms": float(np.percentile(error, 99)),
        f"lag{name}_p50_ms": float(np.percentile(lag, 50)),
        f"lag{name}_p99_ms": float(np.percentile(lag, 99)),
    }
    if busy:
        return found
    return found | {
        f"rate{rate}": (len(sent) - 1) / float(sent[-1] - sent[0]) * 1e9,
        f"dispersion{rate}": _dispersion(sent - sent[0]) / _dispersion(due - due[0]),
    }


@contextlib.contextmanager
def neighbor(cores: Iterable[int], asleep_s: float = 0.0) -> Iterator[None]:
    """A program on these cores that never sleeps, or sleeps so long after working as long."""
    spin = (
        f"import os, time; os.sched_setaffinity(0, {set(cores)!r})\n"
        f"while True:\n    until = time.monotonic() + {asleep_s or 1.0}\n"
        f"    while time.monotonic() < until: pass\n    time.sleep({asleep_s})"
    )
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            yield
        finally:
            process.kill()


PARTS: tuple[Callable[[Cores, int], dict[str, float]], ...] = (
    chunk_cost,
    intake,
    lambda cores, seed: exactness(cores, seed, 20, 25),
    lambda cores, seed: exactness(cores, seed, 200, 8),
    lambda cores, seed: exactness(cores, seed, 1000, 8),
    lambda cores, seed: exactness(cores, seed, 20, 25, busy=True),
    lambda cores, seed: exactness(cores, seed, 200, 8, busy=True),
)


def _dispersion(at_ns: Ints) -> float:
    """Variance over mean of the arrivals in 100 ms: 1 for a Poisson process."""
    counts = np.bincount((at_ns // 100_000_000).astype(np.int64))
    return float(counts.var() / counts.mean())
