"""What a search, a sweep or a run found of a server's capacity and cost, and which of them may be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from gapmeter.analysis.capacity.read import KEPT_ARRIVALS
from gapmeter.analysis.compare.sides import are_alike, fact_of, flatten, is_within
from gapmeter.analysis.cost import NoPrice, NoRate, hardware_units, offered_rate, price_of
from gapmeter.analysis.pareto import interval, merged, pace_limit, pareto, run_point
from gapmeter.analysis.provenance import hardware_words, provenance_of_several, rate_words, users_words
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.capacity import BUDGET, CLIENT, NOT_MEASURED, UNMEETABLE, CapacityResult, Ended, Fleet
from gapmeter.analysis.results.comparison import BLOCKS, FACTOR, Fact
from gapmeter.analysis.results.cost import Cost, Energy, Interval, Price
from gapmeter.analysis.results.cost_table import HeldRate
from gapmeter.analysis.results.manifest import Hardware, SearchManifest, SweepManifest, read_manifest
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.requests import LoadFacts
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, Provenance, SloAnswer, Verdict
from gapmeter.analysis.results.sweep import Point, SweepResult
from gapmeter.analysis.results.trust import Steady
from gapmeter.analysis.stats.estimate import CONFIDENCE, Spread
from gapmeter.analysis.sweep.read import MeasuredRun, read_runs
from gapmeter.scenarios.model import CHANGING_ARRIVALS

# Two searches of one server, on the logarithmic scale: the standard deviation of one, from the two pairs that
# docs/results/engines.md has (71.8 and 80.2 req/s; 65.0 and 71.0), sqrt(mean(difference^2) / 2).
SEARCH_SPREAD: Final = 0.0708
# Of a load, what the rate that holds depends on; a rate, a length and who sends it are not among them.
_LOAD = ("arrivals", "burstiness", "onoff", "trace", "think_time", "timeout", "stall", "retries", "retry_pause")
_LEVELS = ("load.rate", "load.concurrency")  # how much of a load there is
_POISSON: Mapping[str, Any] = {"arrivals": "poisson", "burstiness": None, "onoff": None}  # of a search without bursts
_NO_RATE = "no rate was found at which the SLOs hold"
_UNKNOWN: Mapping[Ended, str] = {
    BUDGET: "the budget ended before a rate was found", NOT_MEASURED: "its trials were not valid as measurements",
    CLIENT: "the load tester was the limit",
}  # fmt: skip
_Kind = Literal["run", "sweep", "capacity"]


class NotOneSide(ValueError):
    """Folders that were named as one side are not searches of one and the same thing."""


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """What a search, a run, or the points of a sweep that differ in their rate or users alone, found.

    ``scenario`` is as it was resolved, with every key, ``contents`` what the files that it names held (see
    ManifestBase), ``tokens`` the output tokens of a request; ``spread``: of its rate, on the logarithmic scale, what
    moves a whole search and is not in the rate's interval. ``undecided``: a run that is INCONCLUSIVE, or a search that
    ended without a finding. ``disturbed``: how many of a search's trials were, by another program or the CPU's speed
    (Search.disturbed).
    """

    folders: tuple[str, ...]
    kind: _Kind
    scenario: Mapping[str, Any]
    slos: frozenset[str]
    hardware: Hardware
    is_server_here: bool
    provenance: Provenance
    capacity: HeldRate
    price: Price | None = None
    why_no_price: str = ""
    tokens: Interval | None = None
    prompt_tokens: float | None = None
    energy: Interval | None = None
    binding: tuple[str | None, str | None] = (None, None)
    fleet: Fleet | None = None
    spread: float = SEARCH_SPREAD
    pareto: Pareto | None = None
    undecided: bool = False
    disturbed: int = 0
    contents: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Of a server on another machine it is the one that is paid for, where that was said."""
        if self.is_server_here:
            return hardware_words(self.hardware)
        return f"{self.price.units} x {self.price.device}, as priced" if self.price else "unknown (attached)"


def read_capacities(path: Path) -> list[ServerCapacity]:
    """What an analysed folder says: of a sweep once for each setting. Raises NotReadable, OSError."""
    manifest = read_manifest(path)
    if isinstance(manifest, SearchManifest):
        return [_of_search(path, manifest, CapacityResult.read(path))]
    if isinstance(manifest, SweepManifest):
        return _of_sweep(path, SweepResult.read(path))
    return [_of_run(path, manifest, RunResult.read(path))]


# --- what a folder says


def _capacity_of(
    path: Path, kind: _Kind, manifest: Manifest | SearchManifest, result: RunResult | CapacityResult, rate: HeldRate
) -> ServerCapacity:
    """What the folders of runs and of searches say alike."""
    tokens, energy = result.tokens_per_request, result.energy
    return ServerCapacity(
        folders=(path.resolve().name,),
        kind=kind,
        scenario=manifest.asked.to_dict(),
        slos=frozenset(  # as they are written, but for their units
            slo.text if slo.limit_ns is None else f"{slo.metric} p{slo.percentile:g} <= {slo.limit_ns / 1e6:.12g} ms"
            for slo in manifest.slo
        ),
        hardware=manifest.hardware,
        is_server_here=manifest.is_server_here,
        provenance=result.provenance,
        capacity=rate,
        tokens=tokens.output if tokens else None,
        prompt_tokens=tokens.prompt.value if tokens and tokens.prompt else None,
        energy=interval(energy.per_request_j, energy.per_request_j_ci) if isinstance(energy, Energy) else None,
        contents=manifest.contents or {},
    )


def _of_search(path: Path, manifest: SearchManifest, result: CapacityResult) -> ServerCapacity:
    search, cost = result.capacity, result.cost
    rate = HeldRate(
        rate=search.rate, low=search.low, high=search.high, confidence=search.confidence, held=search.held,
        why="" if search.low else manifest.ended_because or _UNKNOWN.get(search.ended, _NO_RATE),
    )  # fmt: skip
    found = _capacity_of(path, "capacity", manifest, result, rate)
    load = found.scenario["load"]
    return replace(
        found,
        scenario={**found.scenario, "load": load if load["arrivals"] in KEPT_ARRIVALS else {**load, **_POISSON}},
        price=cost.price if isinstance(cost, Cost) else None,
        why_no_price="" if isinstance(cost, Cost) else cost.reason if cost else "no trial was valid",
        binding=(search.binding_slo, search.binding_stage),
        fleet=search.planning,
        pareto=search.pareto,
        undecided=search.low is None and search.high is None and search.ended != UNMEETABLE,
        disturbed=search.disturbed or 0,
    )


def _of_run(path: Path, manifest: Manifest, result: RunResult) -> ServerCapacity:
    seen = _held_rate(result.verdict, result.slo, result.load, result.counts.measured, result.steady)
    load = result.load
    name = users_words(load) if load.loop == "closed" else rate_words(load)
    point = run_point(path, name, path.resolve().name, result.verdict, result)
    return replace(
        _priced(_capacity_of(path, "run", manifest, result, seen), manifest),
        binding=_binding_of(result.slo), undecided=result.verdict == INCONCLUSIVE,
        pareto=pareto([point], hardware_units(manifest)[1], pace_limit(manifest.slo)),
    )  # fmt: skip


def _priced(found: ServerCapacity, manifest: Manifest) -> ServerCapacity:
    try:
        return replace(found, price=price_of(manifest))
    except NoPrice as missing:
        return replace(found, why_no_price=str(missing))


def _of_sweep(path: Path, result: SweepResult) -> list[ServerCapacity]:
    """Points that differ in their load alone are one row: it holds the highest that passed, below all that failed."""
    settings: dict[str, list[Point]] = {}
    for point in result.sweep.points:
        if isinstance(point, Point):
            key = str(sorted((key, str(value)) for key, value in point.resolved.items() if key not in _LEVELS))
            settings.setdefault(key, []).append(point)
    return [_of_points(path, result, points) for points in settings.values()]


def _of_points(path: Path, result: SweepResult, points: Sequence[Point]) -> ServerCapacity:
    runs = [[run for run in read_runs(path / point.folder) if isinstance(run, MeasuredRun)] for point in points]
    seen = [_held_rate_at(point, own) for point, own in zip(points, runs, strict=True)]
    highs = [(each.high, at) for at, each in enumerate(seen) if each.high is not None]
    high, failed = min(highs, default=(None, None))
    lows = [(each.low, at) for at, each in enumerate(seen) if each.low is not None and (not high or each.low < high)]
    low, at = max(lows, default=(None, 0))
    why = "" if low else next(each.why for each in seen if each.why)
    first = next((run for run in runs[at] if run.valid), runs[at][0])
    swept, own = result.sweep.pareto, {point.folder for point in points}
    rate = seen[at].model_copy(update={"low": low, "high": high, "held": low, "why": why})
    found = _priced(_capacity_of(path, "sweep", first.manifest, first.result, rate), first.manifest)
    if low is None and len(points) > 1:
        found = replace(found, energy=None)  # it follows the load, and no point's is the row's
    return replace(
        found,
        provenance=result.provenance.model_copy(
            update={"n": str(sum(point.metrics["ttft"].count for point in points))}
        ),
        binding=_binding_of(points[failed].slo) if failed is not None else (None, None),
        pareto=swept and pareto([each for each in swept.points if each.folder in own], swept.unit, swept.limit),
    )


def _held_rate_at(point: Point, runs: Sequence[MeasuredRun]) -> HeldRate:
    """Of all repeats of a point; one that says nothing of a longer run counts for all."""
    first = next((run for run in runs if run.valid), runs[0]).result
    not_lasting = next((run.result.steady for run in runs if not run.result.steady.lasts), None)
    return _held_rate(point.verdict, point.slo, first.load, first.counts.measured, not_lasting)


def _held_rate(
    verdict: Verdict, answers: Sequence[SloAnswer], load: LoadFacts, measured: int, steady: Steady | None
) -> HeldRate:
    """One end of the capacity: a run that passed holds its rate, one that failed does not."""
    rate = offered_rate(verdict, answers, load, measured, steady)
    low, why = (None, rate.why) if isinstance(rate, NoRate) else (rate.low, "")
    of_one_rate = load.loop == "open" and load.arrivals not in CHANGING_ARRIVALS and load.unit == "requests"
    high = load.requested_rate if verdict == FAIL and of_one_rate else None
    return HeldRate(rate=None, low=low, high=high, held=low, confidence=CONFIDENCE, why=why)


def _binding_of(answers: Sequence[SloAnswer]) -> tuple[str | None, str | None]:
    """The first SLO that failed, with the stage that explains it."""
    return next(((each.text, each.stage) for each in answers if each.status == FAIL), (None, None))


def merge_searches(found: Sequence[ServerCapacity]) -> ServerCapacity:
    """Several searches of one thing as one: the mean of their logarithms, with its error within and between searches.

    Without an estimate of each, only what all of them say of either end. Raises NotOneSide.
    """
    # One that found no rate has no cost, and so tells no price.
    if price := next((one.price for one in found if one.price), None):
        found = [one if one.price else replace(one, price=price, why_no_price="") for one in found]
    first = found[0]
    for one in found[1:]:
        for fact in differing(_identity(first), _identity(one), ()):
            text = f"{first.folders[0]} and {one.folders[0]} are not of one thing: {fact.key}: {fact.a} | {fact.b}"
            raise NotOneSide(f"{text}; name them as sides of their own")
    # What was not decided says nothing against what the others found.
    decided = [one for one in found if not one.undecided] or [first]
    pareto = merged([("", one.pareto) for one in found])
    if len(decided) == 1:
        return replace(decided[0], pareto=pareto)
    capacity = _mean([one.capacity for one in decided])
    return replace(
        decided[0],
        folders=tuple(name for one in decided for name in one.folders),
        capacity=capacity,
        spread=0.0 if capacity.rate else SEARCH_SPREAD / math.sqrt(len(decided)),
        tokens=_median_of([one.tokens for one in decided]),
        energy=_median_of([one.energy for one in decided]),
        fleet=_fleet([one.fleet for one in decided]),
        pareto=pareto,
        disturbed=sum(one.disturbed for one in decided),
        provenance=provenance_of_several(
            [one.provenance for one in decided], "", n=" + ".join(one.provenance.n for one in decided)
        ),
    )


def _median_of(parts: Sequence[Interval | None]) -> Interval | None:
    """What they have together; None unless each has its own."""
    known = [each for each in parts if each is not None]
    return Interval.of_all(known) if len(known) == len(parts) else None


def _fleet(fleets: Sequence[Fleet | None]) -> Fleet | None:
    """The largest, of the search that proved least; None unless all are planned for one load in one way."""
    planned = [each for each in fleets if each is not None]
    same = len({(each.target_rps, each.headroom, each.spare) for each in planned}) == 1
    return min(planned, key=lambda each: each.planned_rps) if same and len(planned) == len(fleets) else None


def _mean(rates: Sequence[HeldRate]) -> HeldRate:
    """Of k searches: their own errors, and Student's t with k degrees of freedom of what they lie apart.

    Of those k - 1 are the searches' own; one stands for SEARCH_SPREAD, for two that agree by chance prove little.
    """
    lows, highs, estimates = ([getattr(each, name) for each in rates] for name in ("low", "high", "rate"))
    held = min((each.held for each in rates if each.held is not None), default=None)
    why = "" if None not in lows else next((each.why for each in rates if each.why), "")
    first, count = rates[0].model_copy(update={"held": held, "why": why}), len(rates)
    if None in lows or None in highs or None in estimates:
        low, high = (None if None in lows else min(lows)), (None if None in highs else max(highs))
        return first.model_copy(update={"rate": None, "low": low, "high": high})
    logs = [math.log(each) for each in estimates]
    middle = statistics.mean(logs)
    apart = Spread(math.hypot(SEARCH_SPREAD, *(each - middle for each in logs)) / count, count)
    between = apart.half_width(first.confidence)
    down = math.hypot(*(each - math.log(low) for each, low in zip(logs, lows, strict=True))) / count
    up = math.hypot(*(math.log(high) - each for each, high in zip(logs, highs, strict=True))) / count
    ends = {"low": math.exp(middle - math.hypot(down, between)), "high": math.exp(middle + math.hypot(up, between))}
    return first.model_copy(update={"rate": math.exp(middle), **ends})


# --- may they be compared?


@dataclass(frozen=True, slots=True)
class _File:
    """What a scenario says of a file, and a ``digest`` of what that holds: where it lies makes no difference."""

    value: Any
    digest: str

    def __str__(self) -> str:
        path = self.value["file"] if isinstance(self.value, Mapping) else self.value
        return f"{path} ({self.digest})"


def compared_by(found: ServerCapacity) -> dict[str, Any]:
    """What rows must share, by key: the SLO, the workload, the arrivals, and how much of a capacity is planned."""
    scenario = found.scenario
    asked = {f"workload.{key}": value for key, value in scenario["workload"].items()}
    asked |= {f"load.{key}": scenario["load"].get(key) for key in _LOAD}
    asked |= {key: _File(value, digest) for key, value in asked.items() if (digest := found.contents.get(key))}
    planned = {"cost.utilisation": scenario["cost"]["utilisation"]}
    return {"slo": "; ".join(sorted(found.slos)), **asked, **planned}


def _identity(found: ServerCapacity) -> dict[str, Any]:
    """What searches of one and the same thing share beside that."""
    price = (found.price.device, found.price.usd_per_hour) if found.price else None
    server = found.scenario["server"]
    return {
        **compared_by(found), "kind": found.kind, "device": found.device, "price": price,
        "confidence": found.capacity.confidence,
        **flatten({"server": {key: value for key, value in server.items() if key != "ready_timeout"}}),
    }  # fmt: skip


def differing(one: Mapping[str, Any], other: Mapping[str, Any], factors: Sequence[str]) -> tuple[Fact, ...]:
    """The keys whose values are not the same, in words; a key among ``factors``, or below one, may differ.

    A trace is compared where both sides say what it held, which older folders do not.
    """
    keys = [key for key in dict.fromkeys((*one, *other)) if not _alike(one.get(key), other.get(key))]
    if not all(isinstance(each.get("load.trace"), _File) for each in (one, other)):
        keys = [key for key in keys if key != "load.trace"]
    return tuple(
        fact_of(key, one.get(key), other.get(key), FACTOR if is_within(key, *factors) else BLOCKS) for key in keys
    )


def _alike(a: Any, b: Any) -> bool:
    """As ``are_alike``; files by what they held, or by name where only one side tells it."""
    if isinstance(a, _File) and isinstance(b, _File):
        return a.digest == b.digest
    a, b = (each.value if isinstance(each, _File) else each for each in (a, b))
    return are_alike(a, b)
