"""Does ``gapmeter compare`` keep its promise? Identical runs must not differ, and a known change must be found.

Runs in virtual time: the simulated engine's own loop and scheduler, jitter in every stage (log-normal, 10 %), at light
load and at one where requests queue. *A/A*: the same arrivals, other service times; and once more with other arrivals,
which are not compared in pairs. *A/B*: the same arrivals, and one stage's nominal time changed.

*The gate* (``measure_gate``): three runs a side whose speed differs from run to run, and B slower by a known factor:
how often is the alarm false, a growth of twice the limit missed, or found? And what is said of a side that drops its
slowest requests.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.queues import lindley
from bench.virtual_run import Traffic, virtual_run
from bench.virtual_server import Settings
from gapmeter.analysis.arrays import Bools
from gapmeter.analysis.compare import claims
from gapmeter.analysis.compare.aligned import EVENTS
from gapmeter.analysis.compare.build import pair_of
from gapmeter.analysis.compare.claims import FAMILY, judge_pair
from gapmeter.analysis.compare.differences import Differences, compare_sides
from gapmeter.analysis.compare.sides import RunColumns
from gapmeter.analysis.results.comparison import FASTER, NOTHING, SLOWER, UNKNOWN
from gapmeter.analysis.results.regression import REGRESSED, WITHIN, RegressionStatus
from gapmeter.analysis.stages import STAGE_NAMES
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.scenarios.slo import LATENCIES
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import StageTimes

PAIRS = 400
RESAMPLES = 300
_LEVEL = 0.05
LOADS: dict[str, Traffic] = {
    "light": Traffic(requests=450, rate=20.0, output_median=6.0),
    "queueing": Traffic(requests=300, rate=50.0, output_median=6.0),
}
_TIMES = StageTimes(
    template_ns=0, update_ns=0, output_ns=0, detokenize_ns=0, egress_ns=0, forward_ns=5_000_000, jitter=0.1,
)  # fmt: skip
_LIMITS = Limits(max_sequences=4)


@dataclass(frozen=True, slots=True)
class Change:
    """One stage's nominal time multiplied; ``expected`` is the ledger's stage that it must be put into."""

    name: str
    field: str
    factor: float
    expected: str
    pairs: int


CHANGES = (
    Change("forward +5 %", "forward_ns", 1.05, "decode", 100),
    Change("forward +1 %", "forward_ns", 1.01, "decode", 60),
    Change("input preparation +5 %", "input_prep_ns", 1.05, "input_prep", 60),
    Change("input preparation +50 %", "input_prep_ns", 1.5, "input_prep", 60),
)


@dataclass(frozen=True, slots=True)
class Job:
    """The comparisons of one seed: an A/A pair, an unpaired one, and the A/B pairs that take this seed."""

    load: str
    seed: int
    changes: tuple[Change, ...]


def measure() -> dict[str, Any]:
    """All comparisons, by kind: see ``summarize``. Half of the pairs at each load."""
    loads = list(LOADS)
    jobs = [Job(loads[i % len(loads)], i, tuple(c for c in CHANGES if i < c.pairs)) for i in range(PAIRS)]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        rows = [row for found in pool.imap_unordered(compare_seed, jobs, chunksize=4) for row in found]
    return summarize(sorted(rows, key=lambda row: (row["kind"], row["load"], row["seed"])))


def compare_seed(job: Job) -> list[dict[str, Any]]:
    """One row a comparison: which figures differ by themselves, what is claimed, and which stage is named."""
    a, again, elsewhere = (_run(job, service, arrivals, _TIMES) for service, arrivals in ((0, 0), (1, 0), (2, 1)))
    rows = [_row("A/A", job, a, again), _row("A/A, other arrivals", job, a, elsewhere)]
    for change in job.changes:
        times = replace(_TIMES, **{change.field: round(getattr(_TIMES, change.field) * change.factor)})
        rows.append(_row(change.name, job, a, _run(job, 3, 0, times), change.expected))
    return rows


def _run(job: Job, service: int, arrivals: int, times: StageTimes) -> RunColumns:
    """``service`` and ``arrivals`` number the independent streams of this seed."""
    traffic = LOADS[job.load]
    settings = Settings(_LIMITS, replace(times, seed=10 * job.seed + service))
    return virtual_run(traffic.arrivals(10 * job.seed + arrivals), settings, f"{job.seed}/{service}", traffic.warmup)


def _row(kind: str, job: Job, a: RunColumns, b: RunColumns, expected: str = "") -> dict[str, Any]:
    found = compare_sides([a], [b], dict.fromkeys(LATENCIES, FAMILY), resamples=RESAMPLES)
    (verdict,) = claims.judge([found], {})
    change = claims.what_changed(found, verdict, "GPU")
    figures = {str(c.figure): c.difference.p for c in verdict.claims}
    return {
        "kind": kind,
        "load": job.load,
        "seed": job.seed,
        "p": figures,
        "word": verdict.word,
        "metrics": dict(verdict.metrics),
        "stage": change.stage if change else None,
        "cause": change.cause if change else None,
        "expected": expected,
        "left_over_ns": _left_over(found),
    }


def _left_over(found: Differences) -> float:
    """By how much the stages' differences miss that of the whole, in ns."""
    return max(
        abs(sum(d.value or 0.0 for d in ledger.stages.values()) - (ledger.total.value or 0.0))
        for ledger in found.ledgers.values()
    )


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For A/A: shares of false differences; for A/B: of found ones, and of those put into the right stage."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return {
        "nominal": _LEVEL,
        "resamples": RESAMPLES,
        "left_over_ns": max(row["left_over_ns"] for row in rows),
        "null": {kind: _null(own) for kind in kinds if kind.startswith("A/A") and (own := _of(rows, kind))},
        "change": {kind: _found(own) for kind in kinds if not kind.startswith("A/A") and (own := _of(rows, kind))},
    }


def _of(rows: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def _null(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figures = {}
    for name in rows[0]["p"]:
        known = [row["p"][name] for row in rows if row["p"][name] is not None]
        figures[name] = _share(sum(p <= _LEVEL for p in known), len(known))
    return {
        "headline": _share(sum(_differs(row["word"]) for row in rows), len(rows)),
        "by_load": _by_load(rows, _differs),
        "metrics": {
            metric: _share(sum(_differs(row["metrics"][metric]) for row in rows), len(rows)) for metric in LATENCIES
        },
        "figures_alone": figures,
    }


def _found(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    slower = [row for row in rows if row["word"] == SLOWER]
    named = [row for row in slower if row["stage"]]
    expected = rows[0]["expected"]
    return {
        "expected": expected,
        "found": _share(len(slower), len(rows)),
        "explained": _share(len(named), len(slower)),
        "right_cause": _share(sum(row["cause"] == expected for row in named), len(slower)),
        "largest_stage": dict(Counter(str(row["stage"]) for row in named)),
        "by_load": _by_load(rows, lambda word: word == SLOWER),
    }


def _differs(word: str) -> bool:
    return word not in (NOTHING, UNKNOWN)


def _by_load(rows: Sequence[Mapping[str, Any]], counts: Callable[[str], bool]) -> dict[str, Any]:
    """The share of headlines that ``counts`` is true of, at each load that was run."""
    words = {load: [row["word"] for row in rows if row["load"] == load] for load in LOADS}
    return {load: _share(sum(map(counts, own)), len(own)) for load, own in words.items() if own}


def _share(hits: int, count: int) -> dict[str, Any]:
    """With Clopper and Pearson's 95 % interval."""
    low, high = share_bounds(hits, count)
    return {"hits": hits, "of": count, "share": hits / count if count else None, "ci": [low, high]}


# --- the gate

LIMIT = 0.05
RUN_SPREADS = (0.01, 0.02, 0.03, 0.05)  # standard deviation of the logarithm of a run's speed
GROWTHS = (0.0, 0.05, 0.10, 0.20)
DROPPED = (0.01, 0.02, 0.05)
GATE_REPEATS = 400
_GATE_SLOS = (("ttft", 50.0), ("ttft", 95.0))
_GATE_PERCENTILES = {"ttft": (50.0, 90.0, 95.0, 99.0), "itl": (), "tpot": (), "e2e": ()}
_GATE_REQUESTS, _GATE_RESAMPLES, _A_SIDE = 600, 50, 3
_TTFT_NS, _TTFT_SPREAD, _GATE_LOAD, _WAIT = 100e6, 0.15, 0.5, 0.05


def measure_gate() -> dict[str, Any]:
    """Shares of answers by run-to-run spread and growth, and where B dropped requests, with their 95 % intervals."""
    cells = [(share, count, GATE_REPEATS // 8) for share in DROPPED for count in (1, _A_SIDE)]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        spreads = pool.starmap(gate_cell, [(spread, GATE_REPEATS) for spread in RUN_SPREADS], chunksize=1)
        dropped = pool.starmap(dropped_cell, cells, chunksize=1)
    return {"limit": LIMIT, "runs": _A_SIDE, "requests": _GATE_REQUESTS, "spreads": spreads, "dropped": dropped}


def gate_cell(spread: float, repeats: int) -> dict[str, Any]:
    """At one run-to-run spread: what the gate says at each growth, and how often any difference is claimed."""
    words: list[str] = []
    statuses: dict[float, list[RegressionStatus]] = {growth: [] for growth in GROWTHS}
    for seed in range(repeats):
        rng = np.random.default_rng([seed, round(1000 * spread)])
        a, b = ([scaled(queue_run(rng), rng.normal(0, spread)) for _ in range(_A_SIDE)] for _ in range(2))
        for growth, found in statuses.items():
            word, status = gate(a, [scaled(run, np.log1p(growth)) for run in b])
            found.append(status)
            words += [word] if growth == 0 else []
    of = {growth: Counter(found) for growth, found in statuses.items()}
    return {
        "spread": spread,
        "any_difference": _share(sum(map(_differs, words)), repeats),
        "regressed": {f"{growth:g}": _share(found[REGRESSED], repeats) for growth, found in of.items()},
        "within": {f"{growth:g}": _share(found[WITHIN], repeats) for growth, found in of.items()},
    }


def dropped_cell(share: float, runs: int, repeats: int) -> dict[str, Any]:
    """B is A, request for request, but the slowest ``share`` of each run's requests never answers."""
    found = []
    for seed in range(repeats):
        a = [queue_run(np.random.default_rng([seed, number, 9])) for number in range(runs)]
        found.append(gate(a, [dropping(run, share) for run in a]))
    return {
        "share": share,
        "runs": runs,
        "faster": _share(sum(word == FASTER for word, _ in found), repeats),
        "within": _share(sum(status == WITHIN for _, status in found), repeats),
        "regressed": _share(sum(status == REGRESSED for _, status in found), repeats),
    }


def gate(a: Sequence[RunColumns], b: Sequence[RunColumns]) -> tuple[str, RegressionStatus]:
    """The comparison's word, and the gate's answer."""
    found = compare_sides(a, b, _GATE_PERCENTILES, resamples=_GATE_RESAMPLES)
    (verdict,) = claims.judge([found], {}, _GATE_SLOS)
    judged = judge_pair(pair_of(("A", "B"), found, verdict, "GPU"), _GATE_SLOS, LIMIT, "", "")
    assert judged.status != "NOT COMPARABLE"
    return verdict.word, judged.status


def queue_run(rng: np.random.Generator, load: float = _GATE_LOAD) -> RunColumns:
    """A run's TTFT: log-normal service and the wait of an M/M/1 queue."""
    n = _GATE_REQUESTS
    gaps, services = rng.exponential(1 / load, (1, n)), rng.exponential(1.0, (1, n))
    ttft = _TTFT_NS * (rng.lognormal(0, _TTFT_SPREAD, n) + _WAIT * lindley(gaps, services)[0])
    planned = np.stack([np.arange(n), np.zeros(n), np.cumsum(gaps[0]) * _TTFT_NS, np.ones(n), np.ones(n)], axis=1)
    nothing, ledgers = np.full(n, np.nan), dict.fromkeys(EVENTS, np.full((n, len(STAGE_NAMES)), np.nan))
    return RunColumns(
        "", True, planned.astype(np.int64), np.ones(n, bool), np.full(n, 60e9),
        {"ttft": ttft, "e2e": nothing, "tpot": nothing}, np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64),
        ledgers,
    )  # fmt: skip


def scaled(run: RunColumns, log_factor: float) -> RunColumns:
    """The same run on a server that takes exp(``log_factor``) times as long for everything."""
    factor = math.exp(log_factor)
    values = {metric: factor * own for metric, own in run.values.items()}
    return replace(run, values=values, gaps_ns=factor * run.gaps_ns)


def dropping(run: RunColumns, share: float, given_ns: float = 60e9) -> RunColumns:
    """The same run, but the requests with the longest TTFT fail, without a token."""
    lost = np.zeros(run.count, bool)
    lost[np.argsort(run.values["ttft"])[run.count - round(share * run.count) :]] = True
    return without(run, lost, given_ns)


def without(run: RunColumns, lost: Bools, given_ns: float) -> RunColumns:
    """The same run, but these requests fail."""
    return replace(
        run,
        good=run.good & ~lost,
        given_ns=np.where(lost, given_ns, run.given_ns),
        values={metric: np.where(lost, np.inf, own) for metric, own in run.values.items()},
        gaps_ns=np.where(lost[run.gap_owner], np.inf, run.gaps_ns),
        ledgers={event: np.where(lost[:, None], np.nan, own) for event, own in run.ledgers.items()},
    )


def gate_table(figures: Mapping[str, Any]) -> list[str]:
    """As Markdown."""
    limit = figures["limit"]
    runs = f"{figures['runs']} runs a side of {figures['requests']} requests, limit {limit:.0%}; SLOs p50 and p95"
    lines = [
        f"{runs}; per cent of gates, by run-to-run spread.", "",
        "| spread, % | any difference | REGRESSED: A = B | +5 % | +10 % | +20 % | WITHIN: A = B | +5 % | +10 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in figures["spreads"]:
        cells = [row["any_difference"], *row["regressed"].values(), *list(row["within"].values())[:3]]
        lines.append(f"| {100 * row['spread']:g} | {' | '.join(map(_percent, cells))} |")
    lines += [
        "",
        "| B = A, its slowest dropped, % | runs a side | called faster | WITHIN | REGRESSED |",
        "|---|---|---|---|---|",
    ]
    for row in figures["dropped"]:
        cells = [row["faster"], row["within"], row["regressed"]]
        lines.append(f"| {100 * row['share']:g} | {row['runs']} | {' | '.join(map(_percent, cells))} |")
    return lines


def table(figures: Mapping[str, Any]) -> list[str]:
    """As Markdown."""
    lines = ["| identical runs | pairs | false headlines, % | light | queueing | TTFT | ITL | TPOT | E2E |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for kind, own in figures["null"].items():
        cells = [own["headline"], *(own["by_load"].get(load) for load in LOADS), *own["metrics"].values()]
        lines.append(f"| {kind} | {own['headline']['of']} | {' | '.join(map(_percent, cells))} |")
    lines += ["", "| one figure by itself, at 5 % | " + " | ".join(figures["null"]) + " |"]
    lines.append("|---|" + "---|" * len(figures["null"]))
    names = next(iter(figures["null"].values()))["figures_alone"]
    for name in names:
        cells = [own["figures_alone"][name] for own in figures["null"].values()]
        lines.append(f"| {name} | {' | '.join(map(_percent, cells))} |")
    lines += [
        "",
        "| one stage changed | pairs | found, % | light | queueing | put into that stage, % | largest stage |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, own in figures["change"].items():
        cells = [own["found"], *(own["by_load"].get(load) for load in LOADS), own["right_cause"]]
        largest = ", ".join(f"{stage} {n}" for stage, n in sorted(own["largest_stage"].items(), key=lambda e: -e[1]))
        lines.append(f"| {kind} | {own['found']['of']} | {' | '.join(map(_percent, cells))} | {largest} |")
    return lines


def _percent(found: Mapping[str, Any] | None) -> str:
    if not found or not found["of"]:
        return "–"
    low, high = (100 * end for end in found["ci"])
    return f"{100 * found['share']:.1f} ({low:.1f} .. {high:.1f})"
