"""How often does a capacity trial claim the wrong thing, on queues whose quantiles are known?

At the limit itself, where it is hardest: where a percentile is exactly at its limit, a claim that it holds may be made
in 5 % of trials, and one that it fails too. And how soon a server is found out that is asked for more than it serves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.queues import QUEUES, Queue, lindley, requests_to_settle, wait_quantile
from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.read import count_values
from gapmeter.analysis.capacity.trial import find, hopeless, plan_looks
from gapmeter.analysis.results.capacity import FAILS, HOLDS, UNDECIDED
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.scenarios.slo import Slo, parse_slo

SEED, REPLICATIONS, FIRST_LOOK, MOST = 4107, 400, 20, 8000
LOADS, OVERLOADS, USUAL = (0.7, 0.85, 0.9, 0.95), (1.02, 1.05, 1.1, 1.3), 0.9
LEVELS, SINGLE = (99.0, 95.0), tuple(queue for queue in QUEUES if queue.servers == 1)


def measure(replications: int = REPLICATIONS) -> dict[str, Any]:
    """Shares of trials with a wrong claim at the limit; how many requests it takes to find an overload out."""
    cases = [(level, queue) for level in LEVELS for queue in SINGLE]
    return {
        "seed": SEED,
        "longest": MOST,
        "at_the_limit": [at_limit(level, queue, load, replications) for level, queue in cases for load in LOADS],
        "overloaded": [overloaded(99.0, SINGLE[0], load, replications // 4) for load in OVERLOADS],
    }


def at_limit(level: float, queue: Queue, load: float, replications: int) -> dict[str, Any]:
    """``growth``: trials in which a growing queue was seen at the 5 % level at any look, be it far from a verdict."""
    limit, slo = wait_quantile(queue, load, level / 100), _slo(level)
    ahead = requests_to_settle(load)
    found = [_trial(slo, limit, load, *_run(queue, load, ahead, seed)) for seed in range(replications)]
    verdicts = [verdict for verdict, _, _ in found]
    holds, fails = verdicts.count(HOLDS), verdicts.count(FAILS)
    return {
        "level": level, "queue": queue.name, "load": load, "trials": replications, "holds": holds, "fails": fails,
        "holds_ci": share_bounds(holds, replications), "fails_ci": share_bounds(fails, replications),
        "growth": sum(grown for _, _, grown in found),
    }  # fmt: skip


def overloaded(level: float, queue: Queue, load: float, replications: int) -> dict[str, Any]:
    """A server that starts empty, under the limit of one at load ``USUAL``."""
    limit, slo = wait_quantile(queue, USUAL, level / 100), _slo(level)
    found = [_trial(slo, limit, load, *_run(queue, load, 0, seed)) for seed in range(replications)]
    return {
        "load": load, "trials": replications, "fails": sum(verdict == FAILS for verdict, _, _ in found),
        "holds": sum(verdict == HOLDS for verdict, _, _ in found),
        "requests": float(np.median([count for _, count, _ in found])),
    }  # fmt: skip


def _run(queue: Queue, load: float, ahead: int, seed: int) -> tuple[Floats, Floats]:
    """Due times and waits of ``MOST`` requests; a mean service takes 1."""
    rng = np.random.default_rng([SEED, int(queue.deterministic), round(100 * load), seed])
    gaps = rng.exponential(1 / load, (1, ahead + MOST))
    services = np.ones_like(gaps) if queue.deterministic else rng.exponential(1.0, gaps.shape)
    return np.cumsum(gaps[0])[ahead:], lindley(gaps, services)[0, ahead:]


def _slo(level: float) -> Slo:
    """Its limit stands for the queue's, which is in units of a mean service and counted by ``_trial`` itself."""
    return parse_slo(f"ttft p{level:g} <= 1 s")


def _trial(slo: Slo, limit: float, load: float, due: Floats, waits: Floats) -> tuple[str, int, bool]:
    """The verdict, after how many requests, and whether the queue seemed to grow. A unit of time is a nanosecond."""
    looks, grown, verdict = plan_looks([slo], MOST, FIRST_LOOK), False, UNDECIDED
    for look in looks:
        of = slice(look.count)
        counts = [count_values(waits[of], due[of], limit, slo.percentile or 0.0, 1e9 * load)]
        grown = grown or counts[0].stable <= 0.05 / len(looks)
        verdict = find([slo], counts, look).verdict
        if verdict != UNDECIDED or hopeless([slo], counts, look, looks[-1]):
            break
    return verdict, look.count, grown


def table(figures: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    lines = [
        (
            f"One trial of at most {figures['longest']:,} requests on a queue whose percentile is exactly at its limit "
            f"(the nominal share of each wrong claim is 5 %), seed {figures['seed']}:"
        ),
        "",
        "| limit | queue | load | trials | says that it holds, % | says that it fails, % | saw the queue grow |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures["at_the_limit"]:
        parts = [
            f"{100 * row[word] / row['trials']:.1f} ({100 * row[f'{word}_ci'][0]:.1f} .. "
            f"{100 * row[f'{word}_ci'][1]:.1f})"
            for word in ("holds", "fails")
        ]
        lines.append(
            f"| p{row['level']:g} | {row['queue']} | {row['load']:g} | {row['trials']} | {' | '.join(parts)} | "
            f"{row['growth']} |"
        )
    lines += ["", "| offered, times what it serves | trials | fails | holds | requests until told (median) |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    return lines + [
        f"| {row['load']:g} | {row['trials']} | {row['fails']} | {row['holds']} | {row['requests']:,.0f} |"
        for row in figures["overloaded"]
    ]
