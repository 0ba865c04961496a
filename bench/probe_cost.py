"""What the probe costs a real engine: throughput and CPU time with its hooks and without, in pairs.

One server, from which ``bench/unhook/sitecustomize.py`` takes the probe's hooks out between bursts and puts them back:
two servers of one kind differ by more than a probe costs. Short closed-loop bursts of the same requests, with and
without, follow each other in the order ABBA: each pair meets the same state of the machine, and its ratio is free of
the drift between pairs. Over the logarithms of the pairs' ratios stand the Hodges-Lehmann estimate and the 95 %
interval of Wilcoxon's signed ranks (Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 3.2 and 3.3): a burst
that the machine disturbed is one rank, however long it took. Pairs between which nothing was taken out tell what is
left to chance.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from scipy import special

from bench.engine import NAME, Engine, Setting, running
from gapmeter.analysis.arrays import Floats
from gapmeter.machine.hardware import CHECKOUT
from gapmeter.machine.instrument import Cores, kept_to

USERS = 4
TOKENS = 32
REQUESTS_PER_USER = 3
_WARM_BURSTS = 4
_OBEYED_S = 5.0
_PARTS = ("all", "none")  # of the hooks, that are taken out


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: output tokens per second, and the server's CPU time per token."""

    tokens_per_s: float
    cpu_us_per_token: float


def measure(
    name: str, folder: Path, seconds: float, setting: Setting = Setting(max_batch=USERS), *, native: bool = True
) -> dict[str, Any]:
    """As many pairs as fit into ``seconds``, with the probe's C module or without it.

    Raises ServerFailed when the server cannot be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    switch = folder / "part"
    switch.write_text("none")
    env = {"PYTHONPATH": str(CHECKOUT / "bench" / "unhook"), "GAPMETER_UNHOOK": str(switch.resolve())}
    env |= {} if native else {"GAPMETER_PYTHON_ONLY": "1"}
    with running(name, folder, replace(setting, env={**setting.env, **env})) as engine, kept_to(Cores.apart().client):
        pairs = asyncio.run(_pairs(engine, switch, seconds))
    found = {part: ratios(of_part) for part, of_part in pairs.items()}
    return {"engine": name, "version": engine.version, "native": native, "pairs": len(pairs["all"]), "parts": found}


async def _pairs(engine: Engine, switch: Path, seconds: float) -> dict[str, list[tuple[Burst, Burst]]]:
    """By what was taken out: bursts with everything, each with the burst beside it."""
    pairs: dict[str, list[tuple[Burst, Burst]]] = {part: [] for part in _PARTS}
    number = 0
    async with aiohttp.ClientSession() as session:

        async def one(part: str) -> Burst:
            nonlocal number
            number += 1
            _take_out(engine, switch, part)
            return await burst(session, engine, number)

        for _ in range(_WARM_BURSTS):
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
        _take_out(engine, switch, "none")
    return pairs


def _take_out(engine: Engine, switch: Path, part: str) -> None:
    """Tell every process that records, and wait until each has done it. Nothing else is going on meanwhile."""
    pids = {int(path.name.split("-")[1]) for path in engine.probe_dir.glob("*.gap")}
    answers = [switch.with_name(f"{switch.name}.{pid}") for pid in pids]
    for answer in answers:
        answer.unlink(missing_ok=True)
    switch.write_text(part)
    deadline = time.monotonic() + _OBEYED_S
    while not all(answer.exists() for answer in answers):
        for pid in pids:  # again and again: a signal that comes just before a thread goes to sleep does not wake it
            os.kill(pid, signal.SIGUSR2)
        if time.monotonic() > deadline:
            raise RuntimeError(f"a server process did not take out {part!r}")
        time.sleep(0.05)


async def burst(session: aiohttp.ClientSession, engine: Engine, number: int) -> Burst:
    """``USERS`` at once, each asking ``REQUESTS_PER_USER`` times; texts that no earlier burst has sent."""
    before, begun = _cpu_ns(engine), time.monotonic()
    await asyncio.gather(*(_user(session, engine, f"{number} {user}") for user in range(USERS)))
    seconds, tokens = time.monotonic() - begun, USERS * REQUESTS_PER_USER * TOKENS
    return Burst(tokens / seconds, (_cpu_ns(engine) - before) / 1e3 / tokens)


async def _user(session: aiohttp.ClientSession, engine: Engine, name: str) -> None:
    for k in range(REQUESTS_PER_USER):
        body = {
            "model": NAME, "stream": True, "max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True,
            "temperature": 0, "messages": [{"role": "user", "content": f"{name} {k} " + "how long does it take " * 8}],
        }  # fmt: skip
        async with session.post(f"{engine.url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()


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
    for name in ("tokens_per_s", "cpu_us_per_token"):
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


def hodges_lehmann(values: Floats) -> tuple[float, float, float]:
    """Median of all pairwise means, and its 95 % interval by the normal approximation of Wilcoxon's signed ranks.

    For 10 values or more, shape (n,).
    """
    n = len(values)
    walsh = np.sort(((values[:, None] + values[None, :]) / 2)[np.triu_indices(n)])
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    below = max(round(n * (n + 1) / 4 - float(special.ndtri(0.975)) * spread), 1)
    return float(np.median(walsh)), float(walsh[below - 1]), float(walsh[len(walsh) - below])


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown rows: what is gained when the hooks are out, so what they take."""
    lines = [
        "| engine | probe | taken out | pairs | throughput, with over without | CPU a token | CPU a step, µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        engine = f"{result['engine']} {result['version']} | {'C' if result['native'] else 'Python'}"
        for part, found in result["parts"].items():
            cpu = found["cpu_us_per_token"]
            saved = (cpu["ratio"] - 1) * cpu["without"] * USERS
            cells = f"{_interval(found['tokens_per_s'])} | {_interval(cpu)} | {saved:.0f}"
            lines.append(f"| {engine} | {part} | {result['pairs']} | {cells} |")
    return lines


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['ratio'] - 1:+.2%} ({figure['low'] - 1:+.2%} to {figure['high'] - 1:+.2%})"
