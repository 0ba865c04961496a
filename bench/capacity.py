"""Does the capacity search keep its promise? Against the simulated engine, whose capacity is known.

In virtual time: the truth by brute force, with its own error; then many seeded searches, how often their interval
covers the truth, and what plain bisection with trials of a fixed length costs for the same accuracy. And the verdict of
a single trial on queues whose quantiles are known (false_claims.py).
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from bench import false_claims
from bench.virtual_trials import CHAT, SMALL, Asked, VirtualOracle, VirtualTrial
from gapmeter.analysis.capacity.search import Goal, posterior, search
from gapmeter.analysis.results.capacity import FAILS, HOLDS
from gapmeter.analysis.stats.exact import share_bounds

START, WITHIN = 16.0, 0.08
GOAL = Goal(SMALL.promises, START, within=WITHIN, lost_s=2.0, first_look=20)  # the budget of the command's default
TRUTH_RATES, TRUTH_SEEDS, TRUTH_REQUESTS = (131.0, 134.0, 137.0, 140.0, 143.0), 16, 50_000
# A p99 far above what is usual, as in the scenario chat-p99: with the command's defaults, all of them.
P99_GOAL, P99_REPEATS = Goal(CHAT.promises, START, within=0.1, lost_s=9.0, first_look=20), 200
P99_RATES = (69.0, 70.0, 71.0, 72.0)
FIXED, FIXED_WITHIN = (1000, 3000, 6000), 0.01
_TRUTH, _SEARCH, _PLAIN = 1_000_000, 0, 2_000_000  # what is added to seeds, so that no two parts share arrivals

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Found:
    """One repeat. ``requests`` counts all that were issued, in ``trials`` trials."""

    seed: int
    rate: float
    low: float
    high: float
    requests: int
    trials: int
    ended: str
    binding: str


def measure(repeats: int, minutes: float) -> dict[str, Any]:
    """Everything; ``minutes`` bounds the searches, of which fewer are then reported, as many as were run."""
    truth, error = true_capacity()
    _say(f"the truth is {truth:.2f} req/s, standard error {error:.2f}")
    began = time.monotonic()
    found = _in_parallel(one_search, range(repeats), began + 60 * minutes, "searches")
    plain = {n: _plain_runs(n, truth, max(24, len(found) // 16)) for n in FIXED}
    return {
        "truth": {"rate": truth, "standard_error": error, "rates": TRUTH_RATES, "seeds": TRUTH_SEEDS,
                  "requests_each": TRUTH_REQUESTS},
        "goal": asdict(GOAL),
        "seeds": [0, repeats - 1],
        "asked": repeats,
        "search": describe(found, truth),
        "plain": plain,
        "same_accuracy": _same_accuracy(describe(found, truth), plain),
        "p99": measure_p99(),
        "false_claims": false_claims.measure(),
        "minutes": (time.monotonic() - began) / 60,
    }  # fmt: skip


def measure_p99(repeats: int = P99_REPEATS) -> dict[str, Any]:
    """Searches for a p99 within the default budget: how many have both ends, how many cover the truth, how wide."""
    truth, error = true_capacity(CHAT, P99_RATES)
    found = _in_parallel(one_p99_search, range(repeats), math.inf, "searches at p99")
    both = [each for each in found if each]
    return {
        "truth": {"rate": truth, "standard_error": error},
        "repeats": repeats,
        "both_ends": len(both),
        "covered": sum(low <= truth <= high for low, _, high in both),
        "median_error": float(np.median([middle for _, middle, _ in both]) / truth - 1),
        "ends_in_the_median": [float(np.median([each[at] for each in both])) for at in (0, 2)],
    }


def one_p99_search(seed: int) -> tuple[float, float, float] | None:
    """One seeded search: lower end, rate, upper end; None where it has not both ends."""
    trials, _ = search(P99_GOAL, VirtualOracle(CHAT, _SEARCH + seed))
    if not {HOLDS, FAILS} <= {trial.verdict for trial in trials}:
        return None
    known = posterior(trials)
    low, high = known.interval(P99_GOAL.confidence)
    return low, known.quantile(0.5), high


def true_capacity(asked: Asked = SMALL, rates: tuple[float, ...] = TRUTH_RATES) -> tuple[float, float]:
    """The rate at which the share beyond the tighter limit is what it may be, and its standard error.

    A straight line through log share against log rate, from long runs around it; the error by leaving out one seed
    after the other (jackknife).
    """
    jobs = list(itertools.product([asked], rates, range(TRUTH_SEEDS)))
    shares = np.array(list(_in_parallel(_true_share, jobs, math.inf, "long runs"))).reshape(len(rates), -1)
    allowed = asked.promises[0].share

    def solve(of: np.ndarray[Any, Any]) -> float:
        slope, intercept = np.polyfit(np.log(rates), np.log(of.mean(axis=1)), 1)
        return float(np.exp((math.log(allowed) - intercept) / slope))

    left = np.array([solve(np.delete(shares, seed, axis=1)) for seed in range(TRUTH_SEEDS)])
    spread = (TRUTH_SEEDS - 1) / TRUTH_SEEDS * float(((left - left.mean()) ** 2).sum())
    return solve(shares), math.sqrt(spread)


def one_search(seed: int) -> Found:
    """One seeded search."""
    trials, ended = search(GOAL, VirtualOracle(SMALL, _SEARCH + seed))
    known = posterior(trials)
    low, high = known.interval(GOAL.confidence)
    above = min((t for t in trials if t.verdict == "fails"), key=lambda t: abs(t.rate - high))
    return Found(
        seed, known.quantile(0.5), low, high, sum(t.outcome.requests for t in trials), len(trials), ended,
        GOAL.promises[above.finding.promise].text,
    )  # fmt: skip


def plain_bisection(length: int, seed: int) -> tuple[float, int]:
    """What one would do by hand: trials of one length, "holds" where the measured share is within what is allowed.

    Doubling to a bracket, then halving it until it is narrower than FIXED_WITHIN; the rate found, and all requests.
    """
    spent, number, low, high, rate = 0, 0, 0.0, math.inf, START
    while high == math.inf or not low or high / low > 1 + FIXED_WITHIN:
        number += 1
        trial = VirtualTrial(SMALL, rate, (_PLAIN + seed, length, number))
        counts = trial.count(length)
        spent += trial.issued
        if all(c.over <= c.count * p.share for c, p in zip(counts, SMALL.promises, strict=True)):
            low = rate
        else:
            high = rate
        rate = rate * 2 if high == math.inf else rate / 2 if not low else math.sqrt(low * high)
    return rate, spent


def describe(found: Sequence[Found], truth: float) -> dict[str, Any]:
    """How good they were against the truth. Errors are of the logarithm, as good as shares of the rate."""
    errors = np.log([each.rate / truth for each in found])
    covered = sum(each.low <= truth <= each.high for each in found)
    return {
        "repeats": len(found),
        "median": float(np.median([each.rate for each in found])),
        "median_error": float(np.median([each.rate for each in found]) / truth - 1),
        "median_absolute_error": float(np.median(np.abs(errors))),
        "rms_error": float(np.sqrt(np.mean(errors**2))),
        "covered": covered,
        "coverage": covered / len(found),
        "coverage_ci": share_bounds(covered, len(found)),
        "too_high": sum(each.low > truth for each in found),
        "too_low": sum(each.high < truth for each in found),
        "half_width": float(np.median([(each.high - each.low) / 2 / each.rate for each in found])),
        "requests": float(np.mean([each.requests for each in found])),
        "trials": float(np.mean([each.trials for each in found])),
        "ended": dict(Counter(each.ended for each in found)),
        "binding": dict(Counter(each.binding for each in found)),
    }


def _plain_runs(length: int, truth: float, repeats: int) -> dict[str, Any]:
    jobs = [(length, seed) for seed in range(repeats)]
    found = list(_in_parallel(_plain_one, jobs, math.inf, f"plain bisections of {length}"))
    errors = np.log([rate / truth for rate, _ in found])
    return {
        "repeats": repeats,
        "rms_error": float(np.sqrt(np.mean(errors**2))),
        "median_absolute_error": float(np.median(np.abs(errors))),
        "requests": float(np.mean([spent for _, spent in found])),
    }


def _same_accuracy(ours: dict[str, Any], plain: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """How many requests plain bisection takes for our RMS error: on the line between two lengths' logarithms."""
    ordered = sorted(plain.values(), key=lambda each: each["requests"])
    for low, high in itertools.pairwise(ordered):
        if high["rms_error"] <= ours["rms_error"] <= low["rms_error"]:
            part = math.log(low["rms_error"] / ours["rms_error"]) / math.log(low["rms_error"] / high["rms_error"])
            requests = math.exp((1 - part) * math.log(low["requests"]) + part * math.log(high["requests"]))
            return {"plain_requests": requests, "ratio": requests / ours["requests"]}
    return None


def _true_share(job: tuple[Asked, float, int]) -> float:
    asked, rate, seed = job
    trial = VirtualTrial(asked, rate, (_TRUTH + seed, round(rate * 10)))
    return float((trial.values_ns(TRUTH_REQUESTS)[0] > asked.limits_ns[0]).mean())


def _plain_one(job: tuple[int, int]) -> tuple[float, int]:
    return plain_bisection(*job)


def _in_parallel(work: Callable[[In], Out], jobs: Iterable[In], until: float, what: str) -> list[Out]:
    """In order, on all cores; what is not done by ``until`` (of time.monotonic) is left out."""
    out: list[Out] = []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for result in pool.imap(work, jobs):
            out.append(result)
            if len(out) % 100 == 0:
                _say(f"{len(out)} {what}")
            if time.monotonic() > until:
                pool.terminate()
                break
    return out


def _say(text: str) -> None:
    print(f"bench capacity: {text}", file=sys.stderr, flush=True)


def table(figures: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    truth, ours = figures["truth"], figures["search"]
    low, high = ours["coverage_ci"]
    lines = [
        (
            f"Capacity of a known server in virtual time: {truth['rate']:.2f} req/s (standard error "
            f"{truth['standard_error']:.2f}, by brute force)."
        ),
        "",
        "| | repeats | RMS error | median error | interval covers (95 % interval of that) | requests |",
        "| --- | --- | --- | --- | --- | --- |",
        (
            f"| capacity search | {ours['repeats']:,} | {_percent(ours['rms_error'])} | "
            f"{_percent(ours['median_error'])} | "
            f"{ours['covered']:,} of {ours['repeats']:,} ({_percent(low)} .. {_percent(high)}) | "
            f"{ours['requests']:,.0f} |"
        ),
    ]
    for length, plain in figures["plain"].items():
        lines.append(
            f"| plain bisection, {int(length):,} a trial | {plain['repeats']:,} | {_percent(plain['rms_error'])} | | "
            f"none | {plain['requests']:,.0f} |"
        )
    same = figures["same_accuracy"]
    if same:
        lines += ["", f"For the same RMS error plain bisection takes {same['ratio']:.2f} times as many requests."]
    p99 = figures["p99"]
    low, high = p99["ends_in_the_median"]
    lines += [
        "",
        (
            f"A p99 far above what is usual, with the command's defaults (7 minutes): {p99['both_ends']} of "
            f"{p99['repeats']} searches have both ends, {p99['covered']} cover {p99['truth']['rate']:.1f} req/s "
            f"(standard error {p99['truth']['standard_error']:.1f}); {low:.1f} .. {high:.1f} in the median."
        ),
        "",
    ]
    return lines + false_claims.table(figures["false_claims"])


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"
