"""What each part of the probe costs a real engine: the same server with a part out and in again, in pairs.

``bench/parts/sitecustomize.py`` takes the parts out. Bursts as in ``probe_pairs``; the parts take turns, so each meets
the same drift of the machine, and there is one server only: two of the same kind differ by more than a part costs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine import CHECKOUT, Engine, Setting, running
from bench.probe_pairs import USERS, Burst, burst, interval, ratios

PARTS = ("all", "API server", "engine", "worker", "none")
_WARM_BURSTS = 4
_OBEYED_S = 5.0


def measure(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Rounds over all parts for ``seconds``. Raises ServerFailed when the server cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "part"
    told.write_text("")
    env = {"PYTHONPATH": str(CHECKOUT / "bench" / "parts"), "GAPMETER_PARTS": str(told.resolve())}
    parts = [part for part in PARTS if name == "vllm" or part != "worker"]
    with running(name, folder, Setting(max_batch=USERS, env=env)) as engine:
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(mine)})
        try:
            pairs = asyncio.run(_rounds(engine, told, parts, seconds))
        finally:
            os.sched_setaffinity(0, mine)
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


def table(results: Sequence[dict[str, Any]]) -> list[str]:
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
