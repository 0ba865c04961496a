"""What the probe costs a real engine: throughput, token gaps and CPU time with it and without it, in pairs.

Two servers are started together, one with the probe and one without, on the same cores. Short closed-loop bursts of the
same requests go to one and then to the other, in the order ABBA, while the other idles: each pair meets the same state
of the machine, and its ratio is free of the drift between pairs. Over the logarithms of the pairs' ratios stand the
Hodges-Lehmann estimate and the 95 % interval of Wilcoxon's signed ranks (Hollander, Wolfe, Chicken, Nonparametric
Statistical Methods, 3.2 and 3.3): a burst that the machine disturbed is one rank, however long it took.

*Parts*: one server, from which ``bench/parts/sitecustomize.py`` takes a part of the probe out between bursts and puts
it back. The parts take turns, so each meets the same drift of the machine; two servers of the same kind differ by more
than a part costs.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from numpy.typing import NDArray
from scipy import special

from bench.engine import CHECKOUT, NAME, Engine, Setting, running
from gapmeter.machine.instrument import Cores, kept_to
from gapmeter.records import Kind, read_records
from gapmeter.records.reader import frames

USERS = 4
TOKENS = 32
REQUESTS_PER_USER = 3
_WARM_BURSTS = 3


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: output tokens per second, median and mean gap between chunks, and the server's CPU time per token."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_mean_ms: float
    cpu_us_per_token: float


def measure(
    name: str,
    folder: Path,
    seconds: float = 120.0,
    setting: Setting = Setting(max_batch=USERS),
    *,
    native: bool = True,
) -> dict[str, Any]:
    """As many pairs as fit into ``seconds``, with the probe's C module or without it.

    Raises ServerFailed when a server cannot be had.
    """
    env = {} if native else {"PYTHONPATH": str(CHECKOUT / "bench" / "parts"), "GAPMETER_PYTHON_ONLY": "1"}
    setting = replace(setting, env={**setting.env, **env})
    with (
        running(name, folder / "with", setting) as probed,
        running(name, folder / "without", setting, probe=False) as bare,
        kept_to(Cores.apart().client),
    ):
        pairs = asyncio.run(_pairs(probed, bare, seconds))
    result = {"engine": name, "version": probed.version, "pairs": len(pairs), **ratios(pairs)}
    return result | _records(folder / "with" / "probe", _costs(name, env))


def _costs(name: str, env: Mapping[str, str]) -> dict[str, float]:
    """CPU time of each process's hooks by themselves, µs a step."""
    command = [sys.executable, "-m", "bench.probe_cost", str(USERS), name]
    told = subprocess.run(command, env={**os.environ, **env}, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    rows = (line.split() for line in told.stdout.splitlines()[1:])
    return {role: float(us) for _, role, us, *_ in rows}


async def _pairs(probed: Engine, bare: Engine, seconds: float) -> list[tuple[Burst, Burst]]:
    pairs: list[tuple[Burst, Burst]] = []
    async with aiohttp.ClientSession() as session:
        for k in range(_WARM_BURSTS):
            for engine in (probed, bare):
                await burst(session, engine, k)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(pairs) % 2:
            k = _WARM_BURSTS + len(pairs)
            order = (probed, bare) if len(pairs) % 2 == 0 else (bare, probed)
            found = {engine.url: await burst(session, engine, k) for engine in order}
            pairs.append((found[probed.url], found[bare.url]))
    return pairs


async def burst(session: aiohttp.ClientSession, engine: Engine, number: int) -> Burst:
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


def ratios(pairs: Sequence[tuple[Burst, Burst]]) -> dict[str, Any]:
    """With over without for each figure: ratio, 95 % interval, and the medians of both sides."""
    out: dict[str, Any] = {}
    for name in ("tokens_per_s", "itl_p50_ms", "itl_mean_ms", "cpu_us_per_token"):
        probed, bare = (np.array([getattr(pair[side], name) for pair in pairs]) for side in (0, 1))
        middle, low, high = hodges_lehmann(np.log(probed / bare))
        out[name] = {
            "ratio": math.exp(middle),
            "low": math.exp(low),
            "high": math.exp(high),
            "with_probe": float(np.median(probed)),
            "without": float(np.median(bare)),
        }
    return out


def hodges_lehmann(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median of all pairwise means, and its 95 % interval by the normal approximation of Wilcoxon's signed ranks.

    For 10 values or more, shape (n,).
    """
    n = len(values)
    walsh = np.sort(((values[:, None] + values[None, :]) / 2)[np.triu_indices(n)])
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    below = max(round(n * (n + 1) / 4 - float(special.ndtri(0.975)) * spread), 1)
    return float(np.median(walsh)), float(walsh[below - 1]), float(walsh[len(walsh) - below])


def _records(probe_dir: Path, costs: Mapping[str, float]) -> dict[str, Any]:
    """Records and bytes that each process spent on a step, by its file, and the CPU time of its hooks by themselves."""
    files = {path: read_records(path) for path in sorted(probe_dir.glob("*.gap"))}
    steps = sum(len(file.steps) for file in files.values())
    told = {}
    for path, file in files.items():
        found, end, _ = frames(path.read_bytes())
        count, role = sum(1 for _, kind in found if kind != Kind.JSON), file.process["role"]
        told[role] = {
            "records_a_step": count / steps, "bytes_a_step": end / steps, "cpu_us_a_step": costs[role],
        }  # fmt: skip
    native = all(file.process["native"] for file in files.values())
    return {"native": native, "records": {"steps": steps, "by_process": told}}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown rows."""
    lines = [
        "| engine | probe | pairs | throughput | token gap, mean | token gap, median | CPU a token | without, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = " | ".join(
            interval(result[name]) for name in ("tokens_per_s", "itl_mean_ms", "itl_p50_ms", "cpu_us_per_token")
        )
        cpu = result["cpu_us_per_token"]["without"]
        lines.append(
            f"| {result['engine']} {result['version']} | {_how(result)} | {result['pairs']} | {cells} | {cpu:.0f} |"
        )
    lines += [
        "",
        "| engine | probe | process | records a step | bytes a step | CPU a step by itself, µs |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for role, row in result["records"]["by_process"].items():
            cells = f"{row['records_a_step']:.1f} | {row['bytes_a_step']:.0f} | {row['cpu_us_a_step']:.1f}"
            lines.append(f"| {result['engine']} | {_how(result)} | {role} | {cells} |")
    return lines


def _how(result: dict[str, Any]) -> str:
    return "C" if result["native"] else "Python"


def interval(figure: dict[str, float]) -> str:
    return f"{figure['ratio'] - 1:+.2%} ({figure['low'] - 1:+.2%} to {figure['high'] - 1:+.2%})"


PARTS = ("all", "API server", "engine", "worker", "none")
_WARM_PARTS = 4
_OBEYED_S = 5.0


def measure_parts(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Rounds over all parts for ``seconds``. Raises ServerFailed when the server cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "part"
    told.write_text("")
    env = {"PYTHONPATH": str(CHECKOUT / "bench" / "parts"), "GAPMETER_PARTS": str(told.resolve())}
    parts = [part for part in PARTS if name == "vllm" or part != "worker"]
    with running(name, folder, Setting(max_batch=USERS, env=env)) as engine, kept_to(Cores.apart().client):
        pairs = asyncio.run(_rounds(engine, told, parts, seconds))
    found = {part: ratios(of_part) for part, of_part in pairs.items()}
    return {"engine": name, "version": engine.version, "pairs": len(pairs["all"]), "parts": found}


async def _rounds(
    engine: Engine, told: Path, parts: Sequence[str], seconds: float
) -> dict[str, list[tuple[Burst, Burst]]]:
    pairs: dict[str, list[tuple[Burst, Burst]]] = {part: [] for part in parts}
    number = 0
    async with aiohttp.ClientSession() as session:

        async def one(part: str) -> Burst:
            nonlocal number
            number += 1
            _take_out(engine, told, "" if part == "none" else part)
            return await burst(session, engine, number)

        for _ in range(_WARM_PARTS):
            await one("none")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(pairs["all"]) % 2:
            for part, done in pairs.items():
                if len(done) % 2 == 0:
                    whole = await one("none")
                    done.append((whole, await one(part)))
                else:
                    without = await one(part)
                    done.append((await one("none"), without))
        _take_out(engine, told, "")
    return pairs


def _take_out(engine: Engine, told: Path, part: str) -> None:
    """Tell every process that records, and wait until each has done it. Nothing else is going on meanwhile."""
    assert engine.probe_dir is not None
    pids = {int(path.name.split("-")[1]) for path in engine.probe_dir.glob("*.gap")}
    answers = [told.with_name(f"{told.name}.{pid}") for pid in pids]
    for answer in answers:
        answer.unlink(missing_ok=True)
    told.write_text(part)
    deadline = time.monotonic() + _OBEYED_S
    while not all(answer.exists() for answer in answers):
        for pid in pids:  # again and again: a signal that comes just before a thread goes to sleep does not wake it
            os.kill(pid, signal.SIGUSR2)
        if time.monotonic() > deadline:
            raise RuntimeError(f"a server process did not take out {part!r}")
        time.sleep(0.05)


def parts_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown rows: what is gained when a part is out, so what it takes."""
    lines = [
        "| engine | part | pairs | throughput, with over without | CPU a token | CPU a step, µs |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for part, found in result["parts"].items():
            cpu = found["cpu_us_per_token"]
            saved = (cpu["ratio"] - 1) * cpu["without"] * USERS
            cells = f"{interval(found['tokens_per_s'])} | {interval(cpu)} | {saved:.0f}"
            lines.append(f"| {result['engine']} {result['version']} | {part} | {result['pairs']} | {cells} |")
    return lines
