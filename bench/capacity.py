"""Does the capacity search keep its promise? In virtual time, on servers whose capacity is known.

Six kinds: M/M/1, M/D/1, M/G/8 with log-normal and with Pareto services, a batch server that evicts requests, and an
M/M/1's server to which requests come in bursts (gamma gaps). Of each a p95 and a p99, at a low and a high load, whose
limit is the percentile there; with a speed that is the same in all trials, or differs by 3 or 6 %. All with the
command's defaults. And the verdict of a single trial on queues whose quantiles are known (false_claims.py).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench import false_claims
from bench.queues import Queue as KnownQueue
from bench.queues import wait_quantile
from bench.virtual_trials import EVICTING, Asked, Engine, Queue, VirtualOracle, search
from gapmeter.analysis.capacity.search import Goal, held_rate, posterior
from gapmeter.analysis.capacity.trial import Trial
from gapmeter.analysis.results.capacity import FOUND, Ended
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.options import CapacityGoal
from gapmeter.scenarios.slo import Slo

START = 16.0
SERVERS: dict[str, Queue | Engine] = {
    "M/M/1": Queue(1, "exponential", 10.0),
    "M/D/1": Queue(1, "deterministic", 10.0),
    "M/G/8 log-normal": Queue(8, "lognormal", 160.0),
    "M/G/8 Pareto": Queue(8, "pareto", 160.0),
    "batch, evicting": EVICTING,
    "G/M/1, in bursts": Queue(1, "exponential", 10.0, burstiness=4.0),
}
LOADS = {name: (0.7, 0.85) if isinstance(server, Queue) else (0.75, 0.9) for name, server in SERVERS.items()}
EVICTING_CEILING = 35.0  # requests per second; only to place its loads
LEVELS, DRIFTS = (95, 99), (0.0, 0.03, 0.06)
LIMIT_SEED, LIMIT_RUNS, LIMIT_REQUESTS = 7_000_000, 4, 300_000
_EVICTING_REQUESTS, _AHEAD = 15_000, 1_000


@dataclass(frozen=True, slots=True)
class Cell:
    """A server, the load at its capacity, the percentile, and the deviation of its speed between trials."""

    server: str
    load: float
    level: int
    drift: float


_FIRST_SEED = 1000  # the curve's constants were chosen on searches with lower ones


@dataclass(frozen=True, slots=True)
class Found:
    """One search; rates as shares of the true capacity. None: no estimate, or no rate held."""

    rate: float | None
    low: float | None
    high: float | None
    held: float | None
    found: bool
    seconds: float
    requests: int


def measure(repeats: int, minutes: float, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything; ``minutes`` bounds the searches: every cell has as many, ``repeats`` or fewer.

    ``earlier``: figures to go on from, with the seeds after theirs.
    """
    began = time.monotonic()
    cells = [
        Cell(server, load, level, drift)
        for server in SERVERS
        for load, level, drift in itertools.product(LOADS[server], LEVELS, DRIFTS)
    ]
    rows: dict[Cell, list[Found]] = {cell: [] for cell in cells}
    limits: dict[str, float] = dict(earlier["limits_ns"]) if earlier else {}
    for row in earlier["cells"] if earlier else ():
        rows[Cell(row["server"], row["load"], row["level"], row["drift"])] = [
            Found(*each) for each in row["found_each"]
        ]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        places = [place for place in dict.fromkeys((cell.server, cell.load) for cell in cells)
                  if _place(*place, LEVELS[0]) not in limits]  # fmt: skip
        for place, known in zip(places, pool.starmap(limits_ns, places, 1), strict=True):
            limits |= {_place(*place, level): limit for level, limit in zip(LEVELS, known, strict=True)}
        first = min(map(len, rows.values()))
        jobs = [
            (cell, limits[_place(cell.server, cell.load, cell.level)], seed)
            for seed in range(first, first + repeats)
            for cell in cells
            if len(rows[cell]) <= seed
        ]
        for (cell, _, seed), found in zip(jobs, pool.imap(_one_search, jobs), strict=False):
            rows[cell].append(found)
            if cell == cells[-1]:
                _say(f"{seed + 1} searches a cell")
            if time.monotonic() - began > 60 * minutes:
                pool.terminate()
                break
    return {
        "goal": asdict(CapacityGoal()),
        "start": START,
        "limits_ns": limits,
        "cells": [
            asdict(cell) | describe(each) | {"found_each": [list(asdict(found).values()) for found in each]}
            for cell, each in rows.items()
        ],
        "all": describe([found for each in rows.values() for found in each]),
        "stationary": describe([found for cell, each in rows.items() if not cell.drift for found in each]),
        "false_claims": earlier["false_claims"] if earlier else false_claims.measure(),
    }


def _place(server: str, load: float, level: int) -> str:
    return f"{server} at {load:g}, p{level}"


def ceiling_of(server: str) -> float:
    """Requests per second."""
    known = SERVERS[server]
    return known.ceiling if isinstance(known, Queue) else EVICTING_CEILING


def limits_ns(server: str, load: float) -> list[float]:
    """The percentiles of the time to first token at a load, by theory or by long runs."""
    known = SERVERS[server]
    if isinstance(known, Queue) and known.places == 1:
        queue = KnownQueue(server, 1, known.law == "deterministic", known.burstiness)
        return [1e6 * known.service_ms * wait_quantile(queue, load, level / 100) for level in LEVELS]
    count = LIMIT_REQUESTS if isinstance(known, Queue) else _EVICTING_REQUESTS
    waits = []
    for run in range(LIMIT_RUNS):
        due, first, *_ = known(load * ceiling_of(server), np.random.default_rng(LIMIT_SEED + run), count)
        waits.append((first - due)[_AHEAD:])
    return [float(each) for each in np.quantile(np.concatenate(waits), [level / 100 for level in LEVELS])]


def _one_search(job: tuple[Cell, float, int]) -> Found:
    return one_search(*job)


def searched(cell: Cell, limit: float, seed: int) -> tuple[Goal, list[Trial], Ended]:
    """One seeded search with the command's defaults."""
    text = f"ttft p{cell.level}"
    slo = Slo(metric="ttft", percentile=cell.level, limit_ns=round(limit), limit_share=None, text=text)
    asked = Asked(SERVERS[cell.server], (slo,), drift=cell.drift)
    goal = Goal(asked.slos, START, lost_s=asked.warmup_s + asked.around_s)
    # By its cell too: else all cells of one drift would share the speeds that their trials met.
    own = zlib.crc32(repr(cell).encode()) + _FIRST_SEED + seed
    return goal, *search(goal, VirtualOracle(asked, own))


def one_search(cell: Cell, limit: float, seed: int) -> Found:
    """What one search found."""
    goal, trials, ended = searched(cell, limit, seed)
    truth, known, held = cell.load * ceiling_of(cell.server), posterior(goal, trials), held_rate(trials)
    low, high = known.interval(goal.confidence) if known else (None, None)
    middle = known.quantile(0.5) if known else None
    middle, low, high, held = (None if rate is None else round(rate / truth, 4) for rate in (middle, low, high, held))
    seconds = round(sum(trial.outcome.seconds for trial in trials), 1)
    return Found(middle, low, high, held, ended == FOUND, seconds, sum(trial.outcome.requests for trial in trials))


def describe(found: list[Found]) -> dict[str, Any]:
    """Of searches on servers whose capacity is 1."""
    both = [(each.rate, each.low, each.high) for each in found if each.rate and each.low and each.high]
    if not both:
        return {"searches": len(found), "estimates": 0}
    rate, low, high = np.array(both).T
    held = [each.held for each in found if each.held]
    covered, above = int(((low <= 1) & (high >= 1)).sum()), sum(each > 1 for each in held)
    return {
        "searches": len(found), "estimates": len(both), "covered": covered,
        "coverage_ci": share_bounds(covered, len(found)), "too_high": int((low > 1).sum()),
        "too_low": int((high < 1).sum()), "bias": float(np.median(rate) - 1),
        "rms_error": float(np.sqrt(np.mean((rate - 1) ** 2))),
        "half_width": float(np.median((high - low) / 2 / rate)), "held": len(held),
        "held_median": float(np.median(held)) if held else None, "held_above": above,
        "held_above_ci": share_bounds(above, len(found)), "found": sum(each.found for each in found),
        "seconds": float(np.mean([each.seconds for each in found])),
        "requests": float(np.mean([each.requests for each in found])),
    }  # fmt: skip


def _say(text: str) -> None:
    print(f"bench capacity: {text}", file=sys.stderr, flush=True)


def table(figures: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    goal = figures["goal"]
    lines = [
        (
            f"Searches in virtual time with the command's defaults ({goal['budget_s']:g} s, within "
            f"{100 * goal['within']:g} %), beginning at {figures['start']:g} req/s. Rates as shares of the true "
            f"capacity; drift: standard deviation of the server's speed between trials."
        ),
        "",
        (
            "| server | load at capacity | limit | drift | searches | covers | low end above | high end below "
            "| half-width | RMS error | a rate held | at (median) | above the truth | seconds |"
        ),
        "| --- |" + " --- |" * 13,
    ]
    named = [*figures["cells"], {"server": "all", **figures["all"]}, {"server": "stationary", **figures["stationary"]}]
    for row in named:
        if not row["estimates"]:
            lines.append(f"| {row['server']} | no search had an estimate |")
            continue
        where = (f"{row['load']:g}", f"p{row['level']}", _percent(row["drift"], 0)) if "load" in row else ("", "", "")
        n = row["searches"]
        cells = (
            row["server"], *where, f"{n:,}", _percent(row["covered"] / n), _percent(row["too_high"] / n),
            _percent(row["too_low"] / n), _percent(row["half_width"]), _percent(row["rms_error"]),
            _percent(row["held"] / n, 0), "" if row["held_median"] is None else _percent(row["held_median"], 0),
            _percent(row["held_above"] / n), f"{row['seconds']:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *false_claims.table(figures["false_claims"])]


def _percent(part: float, digits: int = 1) -> str:
    return f"{100 * part:.{digits}f} %"
