"""What the load generator itself costs and how exact it is, against the null server's log.

Server on one core, generator on another, repeated; each figure is the median of the rounds, with lowest and highest.
``generators``: asyncio and Locust side by side at 200 requests/s, in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peer_tools import TOOLS, Load
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.machine.instrument import (
    Cores,
    Timing,
    departures,
    equal_plan,
    errors,
    issue,
    kept_to,
    null_server,
    poisson,
)
from gapmeter.records.stream import parse_answer
from gapmeter.servers.models import resolve_model

Ints = NDArray[np.int64]
STREAMS = 64
MOST_TOKENS = 16384
CLOSED = Load("closed", rate=0.0, requests=8192, tokens=128, streams=STREAMS)
_DENSE = Timing(first_ms=5, gap_ms=0.1)
_STAGGERED_NS = 1_200_000_000  # users start over a second

# What each figure is, and what it is meant to be at most (or, for tokens/s, at least).
FIGURES = {
    "chunk_us": (
        "CPU per streamed chunk, 64 streams, 10 ms between tokens, in step as a batch sends them, µs",
        "<= 12",
    ),
    "chunk_apart_us": ("… at times of their own, so that each wakes the process, µs", ""),
    "bare_us": ("… of a protocol on the same loop that only stamps and keeps, at times of their own, µs", ""),
    "tokens_per_s": ("tokens/s one core takes in, 64 streams, tokens due every 0.1 ms", ">= 200,000"),
    "busy": ("… share of that core in use meanwhile", ""),
    "reader_tokens_per_s": ("tokens/s a bare reader takes in: the null server's own limit", ""),
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
    "ttft20_busy_p50_ms": (
        "TTFT error at 20 requests/s, a program that never sleeps on the same core, p50, ms",
        "",
    ),
    "ttft20_busy_p99_ms": ("… p99, ms", "<= 0.15"),
    "wait20_busy_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag20_busy_p99_ms": ("… generator lag, p99, ms", ""),
    "ttft200_busy_p50_ms": ("… at 200 requests/s, p50, ms", ""),
    "ttft200_busy_p99_ms": ("… p99, ms", "<= 0.15"),
    "wait200_busy_p99_ms": ("… from the kernel's stamp to the read, p99, ms: in no latency", ""),
    "lag200_busy_p99_ms": ("… generator lag, p99, ms", ""),
    "closed_tokens_per_s": ("tokens/s in a closed loop, 64 users, 128-token answers due every 0.1 ms, one core", ""),
    "closed_locust_tokens_per_s": ("… under Locust", ""),
    "closed_vllm_tokens_per_s": ("… by vLLM's own client (bench serve), in the same round", "at most half"),
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
        found[name] = run.cpu_ns / sum(len(record.chunk_ns) for record in run.records) / 1e3
    return found


def intake(cores: Cores, seed: int) -> dict[str, float]:
    """Tokens over the time from the first to the last arrival."""
    run = issue(
        cores, equal_plan(np.arange(STREAMS) * 1000, MOST_TOKENS), Timing(gap_ms=0.1), warm=STREAMS, measure_cpu=True
    )
    stamps = np.concatenate([record.chunk_ns for record in run.records])
    tokens = sum(len(parse_answer(record).token_ns) for record in run.records)
    span_ns = float(stamps.max() - stamps.min())
    return {"tokens_per_s": tokens / span_ns * 1e9, "busy": run.cpu_ns / span_ns}


def chunk_floor(cores: Cores, seed: int) -> dict[str, float]:
    """The same streams read by a protocol that does nothing else: what the kernel and the event loop cost here."""
    with null_server(cores, Timing(), log=None) as port:
        command = [sys.executable, "-m", "bench.bare", str(port), str(cores.client[0]), str(STREAMS), "800"]
        return {"bare_us": float(subprocess.run(command, capture_output=True, check=True).stdout)}


def server_limit(cores: Cores, seed: int) -> dict[str, float]:
    """The same load taken in by a reader that does nothing but read."""
    with null_server(cores, Timing(gap_ms=0.1), log=None, most_tokens=MOST_TOKENS) as port, kept_to(cores.client):
        return {"reader_tokens_per_s": bare_reader(port)}


def exactness(cores: Cores, seed: int, rate: int, seconds: int, *, busy: bool = False) -> dict[str, float]:
    """Poisson arrivals, 64 tokens 10 ms apart: how late requests leave, and how late first tokens are stamped.

    The error is counted from before the server's write call, so that its duration is part of it. ``busy``: beside a
    program that never sleeps, on the client's core.
    """
    due = poisson(rate, rate * seconds, [seed, rate])
    with neighbour(cores.client) if busy else contextlib.nullcontext():
        run = issue(cores, equal_plan(due, tokens=64), Timing(), warm=STREAMS)
    left = departures(run.server)
    error = np.array([parse_answer(r).token_ns[0] - left[r.request_id][1][0] for r in run.records]) / 1e6
    lag = errors(run).lag / 1e6
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
def neighbour(cores: tuple[int, ...]) -> Iterator[None]:
    """A program that never sleeps, on these cores."""
    spin = f"import os; os.sched_setaffinity(0, {cores!r})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            yield
        finally:
            process.kill()


def closed(cores: Cores, seed: int) -> dict[str, float]:
    """64 users, each asking again at once, by both generators and by vLLM's client, one after the other.

    Ours are counted while all users ask; vLLM's by what it says of its own requests, without its start.
    """
    found = {}
    for name, generator in (("closed_tokens_per_s", "asyncio"), ("closed_locust_tokens_per_s", "locust")):
        plan = replace(
            equal_plan(np.zeros(CLOSED.requests, np.int64), CLOSED.tokens), loop="closed", concurrency=STREAMS
        )
        run = issue(cores, plan, _DENSE, generator=generator, warm=STREAMS)
        due = np.sort([record.due_ns for record in run.records])
        low, high = due[0] + _STAGGERED_NS, due[-STREAMS]
        stamps = np.concatenate([parse_answer(record).token_ns for record in run.records])
        found[name] = float(((stamps >= low) & (stamps < high)).sum() / (high - low) * 1e9)
    tool = next(tool for tool in TOOLS if tool.name == "vllm-bench")
    if not tool.python.exists():
        return found
    tokenizer = resolve_model("builtin:tiny")
    with tempfile.TemporaryDirectory(prefix="gapmeter-closed-") as folder:
        with null_server(cores, _DENSE, log=None, most_tokens=CLOSED.tokens) as port:
            words = tool.command(f"http://127.0.0.1:{port}", replace(CLOSED, seed=seed), tokenizer, Path(folder))
            subprocess.run(
                ["taskset", "-c", str(cores.client[0]), *words],
                env={**os.environ, **tool.environment}, capture_output=True, check=True,
            )  # fmt: skip
        span_s = tool.read(Path(folder)).span_s
    return found | {"closed_vllm_tokens_per_s": CLOSED.requests * CLOSED.tokens / span_s}


PARTS: tuple[Callable[[Cores, int], dict[str, float]], ...] = (
    chunk_cost,
    chunk_floor,
    intake,
    server_limit,
    lambda cores, seed: exactness(cores, seed, 20, 25),
    lambda cores, seed: exactness(cores, seed, 200, 8),
    lambda cores, seed: exactness(cores, seed, 20, 25, busy=True),
    lambda cores, seed: exactness(cores, seed, 200, 8, busy=True),
    closed,
)


def bare_reader(port: int) -> float:
    """Tokens a second that leave the server when nothing but recv happens on the other side."""
    body = json.dumps({"model": "null", "messages": [], "stream": True, "max_tokens": MOST_TOKENS}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    poll, left, space, begun = select.epoll(), {}, bytearray(1 << 18), 0
    for _ in range(STREAMS):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        poll.register(sock, select.EPOLLIN)
        left[sock.fileno()] = (sock, [0])
    ends = 0
    while ends < STREAMS:
        for number, _ in poll.poll():
            sock, seen = left[number]
            size = sock.recv_into(space)
            begun = begun or time.monotonic_ns()
            seen[0] += size
            ends += bytes(space[max(0, size - 7) : size]).endswith(b"\n0\r\n\r\n")
    elapsed = time.monotonic_ns() - begun
    for sock, _ in left.values():
        sock.close()
    poll.close()
    return STREAMS * MOST_TOKENS / elapsed * 1e9


def _dispersion(at_ns: Ints) -> float:
    """Variance over mean of the arrivals in 100 ms: 1 for a Poisson process."""
    counts = np.bincount((at_ns // 100_000_000).astype(np.int64))
    return float(counts.var() / counts.mean())


_RATE, _TOKENS = 200, 64
_TEXTS = {
    "lag_p50_ms": "generator lag p50, ms",
    "lag_p99_ms": "generator lag p99, ms",
    "ttft_p50_ms": "TTFT error p50, ms",
    "ttft_p99_ms": "TTFT error p99, ms",
    "chunk_us": "CPU per streamed chunk, µs",
}


def generators(rounds: int = 3, seconds: float = 20.0) -> dict[str, Any]:
    """Each generator issues the round's plan from one process on one core, the null server has the other.

    They take turns at going first. The figures are one list a generator, one value a round. Raises NotMeasured.
    """
    cores = Cores.apart()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in GENERATORS}
    with kept_to(cores.server):
        for number in range(rounds):
            for name in GENERATORS if number % 2 == 0 else reversed(GENERATORS):
                found[name].append(_at_200(name, cores, number, seconds))
    return {"rate": _RATE, "seconds": seconds, "tokens": _TOKENS, "rounds": found}


def _at_200(name: str, cores: Cores, seed: int, seconds: float) -> dict[str, float]:
    due = poisson(_RATE, round(_RATE * seconds), [seed, _RATE])
    run = issue(cores, equal_plan(due, _TOKENS), Timing(), generator=name, warm=4 * STREAMS, measure_cpu=True)
    seen = errors(run)
    found = {
        f"{metric}_p{p}_ms": float(np.percentile(getattr(seen, metric), p)) / 1e6
        for metric in ("lag", "ttft")
        for p in (50, 99)
    }
    return found | {"chunk_us": run.cpu_ns / sum(len(record.chunk_ns) for record in run.records) / 1e3}


def generators_table(found: Mapping[str, Any]) -> list[str]:
    head = f"{found['rate']} requests/s, {found['tokens']} tokens 10 ms apart, {found['seconds']:g} s a round"
    lines = [f"{head}; a value a round, in turn:", "", f"| | {' | '.join(found['rounds'])} |", "| --- | --- | --- |"]
    for key, text in _TEXTS.items():
        cells = [" / ".join(f"{one[key]:.3g}" for one in rounds) for rounds in found["rounds"].values()]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines
