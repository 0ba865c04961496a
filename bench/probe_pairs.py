"""What the probe costs a real engine: throughput, token gaps and CPU time with it and without it, in pairs.

Two servers are started together, one with the probe and one without, on the same cores. Short closed-loop bursts of the
same requests go to one and then to the other, in the order ABBA, while the other idles: each pair meets the same state
of the machine, and its ratio is free of the drift between pairs. The interval is Student's, over the logarithms of the
pairs' ratios.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from scipy import stats

from bench.engine import CHECKOUT, NAME, Engine, Setting, running
from recording import Kind, read_records
from recording.reader import frames
from servers.vllm import find_python

USERS = 4
TOKENS = 32
REQUESTS_PER_USER = 3
_WARM_BURSTS = 3
# CPU time of a recorded call over that of a bare one, in the interpreter that runs the engine: median of nine.
_COST = """
import json, os, sys, tempfile, time
from gapmeter_probe.writer import RecordWriter
now, count = time.monotonic_ns, 20_000
def bare(): pass
def recorded():
    start = now(); bare(); writer.span(112, 7, start, now())
def cost(call):
    begun = time.thread_time_ns()
    for _ in range(count): call()
    return (time.thread_time_ns() - begun) / count / 1e3
with tempfile.TemporaryDirectory() as folder:
    writer = RecordWriter(os.path.join(folder, "cost.gap"), {})
    print(json.dumps(sorted(cost(recorded) - cost(bare) for _ in range(9))[4]))
    writer.close()
"""


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: output tokens per second, median and mean gap between chunks, and the server's CPU time per token."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_mean_ms: float
    cpu_us_per_token: float


def measure(name: str, folder: Path, seconds: float = 120.0) -> dict[str, Any]:
    """As many pairs as fit into ``seconds``. Raises ServerFailed when a server cannot be had."""
    setting = Setting(max_batch=USERS)
    with (
        running(name, folder / "with", setting) as probed,
        running(name, folder / "without", setting, probe=False) as bare,
    ):
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(mine)})
        try:
            pairs = asyncio.run(_pairs(probed, bare, seconds))
        finally:
            os.sched_setaffinity(0, mine)
    result = {"engine": name, "version": probed.version, "pairs": len(pairs), **_ratios(pairs)}
    python = str(find_python(CHECKOUT)) if name == "vllm" else sys.executable
    return result | {"records": _records(folder / "with" / "probe", _record_cost_us(python))}


async def _pairs(probed: Engine, bare: Engine, seconds: float) -> list[tuple[Burst, Burst]]:
    pairs: list[tuple[Burst, Burst]] = []
    async with aiohttp.ClientSession() as session:
        for k in range(_WARM_BURSTS):
            for engine in (probed, bare):
                await _burst(session, engine, k)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(pairs) % 2:
            k = _WARM_BURSTS + len(pairs)
            order = (probed, bare) if len(pairs) % 2 == 0 else (bare, probed)
            found = {engine.url: await _burst(session, engine, k) for engine in order}
            pairs.append((found[probed.url], found[bare.url]))
    return pairs


async def _burst(session: aiohttp.ClientSession, engine: Engine, number: int) -> Burst:
    """``USERS`` at once, each asking ``REQUESTS_PER_USER`` times; texts that no earlier burst has sent."""
    before, begun = _cpu_ns(engine), time.monotonic()
    users = (_user(session, engine, f"{number} {user}") for user in range(USERS))
    gaps = [gap for own in await asyncio.gather(*users) for gap in own]
    seconds, tokens = time.monotonic() - begun, USERS * REQUESTS_PER_USER * TOKENS
    cpu_us = (_cpu_ns(engine) - before) / 1e3
    return Burst(tokens / seconds, float(np.median(gaps)) / 1e6, float(np.mean(gaps)) / 1e6, cpu_us / tokens)


async def _user(session: aiohttp.ClientSession, engine: Engine, name: str) -> list[int]:
    gaps: list[int] = []
    for k in range(REQUESTS_PER_USER):
        body = {
            "model": NAME, "stream": True, "max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True,
            "temperature": 0, "messages": [{"role": "user", "content": f"{name} {k} " + "how long does it take " * 8}],
        }  # fmt: skip
        async with session.post(f"{engine.url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            stamps = [time.monotonic_ns() async for chunk in answer.content.iter_any() if chunk]
        gaps += np.diff(stamps).tolist()
    return gaps


def _cpu_ns(engine: Engine) -> int:
    """CPU time that all threads of the server's processes have had so far (the kernel counts it in ns)."""
    top = psutil.Process(engine.process.pid)
    total = 0
    for process in (top, *top.children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total


def _ratios(pairs: Sequence[tuple[Burst, Burst]]) -> dict[str, Any]:
    """With over without for each figure: ratio, 95 % interval, and the medians of both sides."""
    out: dict[str, Any] = {}
    for name in ("tokens_per_s", "itl_p50_ms", "itl_mean_ms", "cpu_us_per_token"):
        probed, bare = (np.array([getattr(pair[side], name) for pair in pairs]) for side in (0, 1))
        logs = np.log(probed / bare)
        half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        out[name] = {
            "ratio": math.exp(logs.mean()),
            "low": math.exp(logs.mean() - half),
            "high": math.exp(logs.mean() + half),
            "with_probe": float(np.median(probed)),
            "without": float(np.median(bare)),
        }
    return out


def _record_cost_us(python: str) -> float:
    """CPU time of one stamped and recorded call in that interpreter."""
    path = os.pathsep.join(str(CHECKOUT / part) for part in ("servers/probe", "."))
    told = subprocess.run(
        [python, "-c", _COST], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    return float(json.loads(told.stdout))


def _records(probe_dir: Path, record_us: float) -> dict[str, Any]:
    """Records, bytes and CPU time of recording that each process spent on a step, by its file.

    The CPU time is the count of records times what one costs, ``record_us``: it does not drift with the machine's load.
    """
    files = {path: read_records(path) for path in sorted(probe_dir.glob("*.gap"))}
    steps = sum(len(file.steps) for file in files.values())
    told = {}
    for path, file in files.items():
        found, end, _ = frames(path.read_bytes())
        count = sum(1 for _, kind in found if kind != Kind.JSON)
        told[file.process["role"]] = {
            "records_a_step": count / steps, "bytes_a_step": end / steps, "cpu_us_a_step": count / steps * record_us,
        }  # fmt: skip
    return {"steps": steps, "record_us": record_us, "by_process": told}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown rows."""
    lines = [
        "| engine | pairs | throughput | token gap, mean | token gap, median | server CPU a token | that without, µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = " | ".join(
            _interval(result[name]) for name in ("tokens_per_s", "itl_mean_ms", "itl_p50_ms", "cpu_us_per_token")
        )
        cpu = result["cpu_us_per_token"]["without"]
        lines.append(f"| {result['engine']} {result['version']} | {result['pairs']} | {cells} | {cpu:.0f} |")
    lines += ["", "| engine | process | records a step | bytes a step | CPU a step, µs |", "|---|---|---|---|---|"]
    for result in results:
        for role, row in result["records"]["by_process"].items():
            cells = f"{row['records_a_step']:.1f} | {row['bytes_a_step']:.0f} | {row['cpu_us_a_step']:.1f}"
            lines.append(f"| {result['engine']} | {role} | {cells} |")
    return lines


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['ratio'] - 1:+.2%} ({figure['low'] - 1:+.2%} to {figure['high'] - 1:+.2%})"
