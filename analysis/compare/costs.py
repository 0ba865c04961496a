"""Searches for capacity, sweeps and runs as one table: what a request costs on each, and which is the cheapest.

The cost of a request is price / (3600 x rate x planned utilisation), so the ratio of two costs is that of the prices
over that of the rates. The rates are independent of each other (two servers, two searches), so their errors combine on
the logarithmic scale. With a and b the logarithms of two costs, each with its own interval:

    ln ratio = a - b
    down = sqrt((a - a_low)^2 + (b_high - b)^2 + s^2)
    up = sqrt((a_high - a)^2 + (b - b_low)^2 + s^2)

which is MOVER (Zou and Donner 2008, Statistics in Medicine 27) for intervals that need not be symmetric. s is z x the
spread of searches of one server, of either side: what moves a whole search (a machine's mood) is in no interval of its
trials. The more rows, the more pairs chance has: both distances are multiplied by z(1 - 0.025 / pairs) / z(0.975), so
that with 95 % confidence all ratios hold together, whichever row turns out to be the cheapest. Where a row has only one
end (a run that passed may hold more), the ends are divided by each other, which is wider still.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final, Literal

from gapmeter.analysis.capacity.read import BURSTS
from gapmeter.analysis.cost import NoPrice, NoRate, hardware_units, offered_rate, price_of
from gapmeter.analysis.judge.evidence import CHANGING
from gapmeter.analysis.numbers import rate as rate_words
from gapmeter.analysis.pareto import merged, pace_limit, pareto, run_point
from gapmeter.analysis.provenance import hardware_words
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.capacity import BUDGET, CLIENT, NOT_MEASURED, CapacityResult, Ended, Fleet
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.comparison import BLOCKS, FACTOR, NOT_COMPARABLE, Asked, Fact
from gapmeter.analysis.results.cost import Cost, Interval, Price
from gapmeter.analysis.results.costs import CHEAPER, NOT_ESTABLISHED, CostRatio, CostRow, CostTable, Doubt, HeldRate
from gapmeter.analysis.results.manifest import Hardware, SearchManifest, SweepManifest, read_manifest
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.requests import LoadFacts
from gapmeter.analysis.results.run import FAIL, Provenance, SloAnswer, Verdict
from gapmeter.analysis.results.sweep import Point, SweepResult
from gapmeter.analysis.results.trust import Steady
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.analysis.sweep.read import MeasuredRun, read_runs

# Two searches of one server, on the logarithmic scale: the standard deviation of one, from the two pairs that
# docs/results/engines.md has (71.8 and 80.2 req/s; 65.0 and 71.0), sqrt(mean(difference^2) / 2).
SEARCH_SPREAD: Final = 0.0708
_SURE = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
# Of a load, what the rate that holds depends on; a rate, a length and who sends it are not among them.
_LOAD = ("arrivals", "burstiness", "onoff", "think_time", "timeout", "stall", "retries", "retry_pause")
_POISSON: Mapping[str, Any] = {"arrivals": "poisson", "burstiness": None, "onoff": None}  # of a search without bursts
_NO_SETTING = ("engine", "ready_timeout")  # told by itself; changes nothing
_NO_RATE = "no rate was found at which the SLOs hold"
_UNKNOWN: Mapping[Ended, str] = {
    BUDGET: "the budget ended before a rate was found", NOT_MEASURED: "its trials were not valid as measurements",
    CLIENT: "the load tester was the limit",
}  # fmt: skip
_OTHER_REQUESTS = 1.1  # from which mean tokens of a request are told to differ


class NotOneSide(ValueError):
    """Folders that were named as one side are not searches of one and the same thing."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search, a run, or the points of a sweep that differ in their rate alone, found.

    ``scenario`` is as it was resolved, ``tokens`` the output tokens of a request; ``searches``: how many it rests on.
    """

    folders: tuple[str, ...]
    kind: Literal["run", "sweep", "capacity"]
    scenario: Mapping[str, Any]
    slos: frozenset[str]
    hardware: Hardware
    provenance: Provenance
    capacity: HeldRate
    price: Price | None = None
    why_no_price: str = ""
    tokens: Interval | None = None
    prompt_tokens: float | None = None
    energy: float | None = None
    energy_ci: Ends | None = None
    binding: tuple[str | None, str | None] = (None, None)
    fleet: Fleet | None = None
    searches: int = 1
    spread: float = SEARCH_SPREAD
    pareto: Pareto | None = None

    @property
    def device(self) -> str:
        """Of a server that somebody else runs it is the one that is paid for, where that was said."""
        if self.scenario["server"]["engine"] != "attach":
            return hardware_words(self.hardware.gpus, self.hardware.cpu, self.hardware.cores)
        return f"{self.price.units} x {self.price.device}, as priced" if self.price else "unknown (attached)"


def read_found(path: Path) -> list[Found]:
    """What an analysed folder says: of a sweep once for each setting. Raises NotReadable, OSError."""
    manifest = read_manifest(path)
    if isinstance(manifest, SearchManifest):
        return [_of_search(path, manifest, CapacityResult.read(path))]
    if isinstance(manifest, SweepManifest):
        return _of_sweep(path, manifest, SweepResult.read(path))
    return [_of_run(path, manifest, RunResult.read(path))]


def cost_table(sides: Sequence[Sequence[Sequence[Found]]], asked: Asked = Asked(), command: str = "") -> CostTable:
    """All sides side by side. ``sides[i][j]`` is what folder j of side i says; several of a side are one row.

    ``asked.factors`` are keys that may differ, ``asked.force`` compares what must not be. Raises NotOneSide.
    """
    found = [one for side in sides for one in (side[0] if len(side) == 1 else [together(side)])]
    names = [ascii_uppercase[at] if at < 26 else f"row {at + 1}" for at in range(len(found))]
    facts = [compared_by(one) for one in found]
    differs = [_differing(facts[0], each, asked.factors) for each in facts]
    rows = [
        _row(name, one, setting, different)
        for name, one, setting, different in zip(names, found, _settings(found, asked.factors), differs, strict=True)
    ]
    usable = [
        at for at, row in enumerate(rows)
        if row.per_request_usd_ci and (asked.force or not any(fact.meaning == BLOCKS for fact in row.differs))
    ]  # fmt: skip
    best = min(usable, key=lambda at: _rank(rows[at])) if len(usable) > 1 else None
    if best is not None:
        pairs = len(usable) * (len(usable) - 1) // 2
        for at in usable:
            ratio = ratio_of((rows[at], found[at]), (rows[best], found[best]), pairs) if at != best else _ONE
            rows[at] = rows[at].model_copy(update={"ratio": ratio})
    refused = sum(any(fact.meaning == BLOCKS for fact in row.differs) for row in rows)
    ratios = [row.ratio for row in rows if row.ratio]
    established = bool(ratios) and all(ratio.doubt is None for ratio in ratios)
    verdict = CHEAPER if established else NOT_ESTABLISHED
    return CostTable(
        verdict=NOT_COMPARABLE if refused == len(rows) - 1 and not asked.force else verdict,
        cheapest=None if best is None else rows[best].name,
        search_spread=SEARCH_SPREAD,
        rows=tuple(rows),
        pareto=merged([(row.name, one.pareto) for row, one in zip(rows, found, strict=True)]),
        notes=tuple(_notes(rows, found)),
        command=command,
        provenance=_provenance(found, command),
        asked=asked,
    )


# --- what a folder says


def _of_search(path: Path, manifest: SearchManifest, result: CapacityResult) -> Found:
    search, cost, energy = result.capacity, result.cost, result.energy
    tokens, load = result.tokens_per_request, manifest.scenario["load"]
    return Found(
        folders=(path.resolve().name,),
        kind="capacity",
        scenario={**manifest.scenario, "load": load if load["arrivals"] in BURSTS else {**load, **_POISSON}},
        slos=frozenset(slo.text for slo in manifest.slo),
        hardware=manifest.hardware,
        provenance=result.provenance,
        capacity=HeldRate(
            rate=search.rate, low=search.low, high=search.high, confidence=search.confidence, held=search.held,
            why="" if search.low else manifest.ended_because or _UNKNOWN.get(search.ended, _NO_RATE),
        ),
        price=cost.price if isinstance(cost, Cost) else None,
        why_no_price="" if isinstance(cost, Cost) else cost.reason if cost else "no trial was valid",
        tokens=tokens.output if tokens else None,
        prompt_tokens=tokens.prompt.value if tokens and tokens.prompt else None,
        energy=energy.per_request_j if energy else None,
        energy_ci=getattr(energy, "per_request_j_ci", None),
        binding=(search.binding_slo, search.binding_stage),
        fleet=search.planning,
        pareto=search.pareto,
    )  # fmt: skip


def _of_run(path: Path, manifest: Manifest, result: RunResult) -> Found:
    seen = _seen(result.verdict, result.slo, result.load, result.counts.measured, result.steady)
    load = result.load.requested_rate
    name = f"{result.load.concurrency} users" if load is None else rate_words(load)
    point = run_point(path, name, path.resolve().name, result.verdict, result)
    return replace(
        _of_one(manifest, result), folders=(path.resolve().name,), capacity=seen, binding=_missed(result.slo),
        pareto=pareto([point], hardware_units(manifest)[1], pace_limit(manifest.slo)),
    )  # fmt: skip


def _of_one(manifest: Manifest, result: RunResult) -> Found:
    """What a run says beside the rate that it held."""
    price, why = _price(manifest)
    tokens = result.tokens_per_request
    return Found(
        folders=(),
        kind="run",
        scenario=manifest.scenario,
        slos=frozenset(slo.text for slo in manifest.slo),
        hardware=manifest.hardware,
        provenance=result.provenance,
        capacity=HeldRate(rate=None, low=None, high=None, held=None, confidence=CONFIDENCE, why=""),
        price=price,
        why_no_price=why,
        tokens=tokens.output,
        prompt_tokens=tokens.prompt.value if tokens.prompt else None,
        energy=result.energy.per_request_j,
        energy_ci=getattr(result.energy, "per_request_j_ci", None),
    )


def _of_sweep(path: Path, manifest: SweepManifest, result: SweepResult) -> list[Found]:
    """Points that differ in their rate alone are one row: it holds the highest that passed, below all that failed."""
    settings: dict[str, list[Point]] = {}
    for point in result.sweep.points:
        if isinstance(point, Point):
            key = str(sorted((key, str(value)) for key, value in point.resolved.items() if key != "load.rate"))
            settings.setdefault(key, []).append(point)
    return [_of_points(path, manifest, result, points) for points in settings.values()]


def _of_points(path: Path, manifest: SweepManifest, result: SweepResult, points: Sequence[Point]) -> Found:
    runs = [[run for run in read_runs(path / point.folder) if isinstance(run, MeasuredRun)] for point in points]
    seen = [_seen_at(point, own) for point, own in zip(points, runs, strict=True)]
    highs = [(each.high, at) for at, each in enumerate(seen) if each.high is not None]
    high, failed = min(highs, default=(None, None))
    lows = [(each.low, at) for at, each in enumerate(seen) if each.low is not None and (not high or each.low < high)]
    low, at = max(lows, default=(None, 0))
    first = next((run for run in runs[at] if run.valid), runs[at][0])
    swept, own = result.sweep.pareto, {point.folder for point in points}
    return replace(
        _of_one(first.manifest, first.result),
        folders=(path.resolve().name,),
        kind="sweep",
        provenance=result.provenance,
        capacity=seen[at].model_copy(update={"low": low, "high": high, "held": low}),
        binding=_missed(points[failed].slo) if failed is not None else (None, None),
        pareto=swept and pareto([each for each in swept.points if each.folder in own], swept.unit, swept.limit),
    )


def _seen_at(point: Point, runs: Sequence[MeasuredRun]) -> HeldRate:
    """Of all repeats of a point; one without a steady state counts for all."""
    first = next((run for run in runs if run.valid), runs[0]).result
    unsteady = next((run.result.steady for run in runs if run.result.steady.state == "unsteady"), None)
    return _seen(point.verdict, point.slo, first.load, first.counts.measured, unsteady)


def _seen(
    verdict: Verdict, answers: Sequence[SloAnswer], load: LoadFacts, measured: int, steady: Steady | None
) -> HeldRate:
    """One end of the capacity: a run that passed holds its rate, one that failed does not."""
    rate = offered_rate(verdict, answers, load, measured, steady)
    low, why = (None, str(rate)) if isinstance(rate, NoRate) else (rate.low, "")
    of_one_rate = load.loop == "open" and load.arrivals not in CHANGING and load.unit == "requests"
    high = load.requested_rate if verdict == FAIL and of_one_rate else None
    return HeldRate(rate=None, low=low, high=high, held=low, confidence=CONFIDENCE, why=why)


def _missed(answers: Sequence[SloAnswer]) -> tuple[str | None, str | None]:
    """The first SLO that failed, with the stage that explains it."""
    return next(((each.text, each.stage) for each in answers if each.status == FAIL), (None, None))


def _price(manifest: Manifest) -> tuple[Price | None, str]:
    try:
        return price_of(manifest), ""
    except NoPrice as missing:
        return None, str(missing)


def together(side: Sequence[Sequence[Found]]) -> Found:
    """Several searches of one thing as one: the mean of their logarithms, with the error of a mean.

    Where they lie further apart than searches of one server are known to, that is their spread. Without an estimate of
    each, only what all of them say of either end. Raises NotOneSide.
    """
    found = [one for each in side for one in each]
    first = found[0]
    for one in found[1:]:
        for fact in _differing(_identity(first), _identity(one), ()):
            text = f"{first.folders[0]} and {one.folders[0]} are not of one thing: {fact.key}: {fact.a} | {fact.b}"
            raise NotOneSide(f"{text}; name them as sides of their own")
    return replace(
        first,
        folders=tuple(name for one in found for name in one.folders),
        capacity=_mean([one.capacity for one in found]),
        searches=len(found),
        spread=max(SEARCH_SPREAD, _spread_of([one.capacity.rate for one in found])),
        fleet=None,
        pareto=merged([("", one.pareto) for one in found]),
    )


def _mean(rates: Sequence[HeldRate]) -> HeldRate:
    lows, highs, estimates = ([getattr(each, name) for each in rates] for name in ("low", "high", "rate"))
    held = min((each.held for each in rates if each.held is not None), default=None)
    first = rates[0].model_copy(update={"held": held})
    if None in lows or None in highs or None in estimates:
        low, high = (None if None in lows else min(lows)), (None if None in highs else max(highs))
        return first.model_copy(update={"rate": None, "low": low, "high": high})
    rate = math.exp(statistics.mean(map(math.log, estimates)))
    down = math.hypot(*(math.log(one / low) for one, low in zip(estimates, lows, strict=True))) / len(rates)
    up = math.hypot(*(math.log(high / one) for one, high in zip(estimates, highs, strict=True))) / len(rates)
    return first.model_copy(update={"rate": rate, "low": rate * math.exp(-down), "high": rate * math.exp(up)})


def _spread_of(rates: Sequence[float | None]) -> float:
    known = [math.log(rate) for rate in rates if rate]
    return statistics.stdev(known) if len(known) > 1 else 0.0


# --- may they be compared?


def compared_by(found: Found) -> dict[str, Any]:
    """What rows must share, by key: the SLA, the workload, the arrivals, and how much of a capacity is planned."""
    scenario = found.scenario
    load = {f"load.{key}": scenario["load"].get(key) for key in _LOAD}
    workload = {f"workload.{key}": value for key, value in scenario["workload"].items()}
    planned = {"cost.utilisation": scenario["cost"]["utilisation"]}
    return {"slo": "; ".join(sorted(found.slos)), **workload, **load, **planned}


def _identity(found: Found) -> dict[str, Any]:
    """What searches of one and the same thing share beside that."""
    price = (found.price.device, found.price.usd_per_hour) if found.price else None
    return {
        **compared_by(found), "kind": found.kind, "device": found.device, "price": price,
        **{f"server.{key}": value for key, value in found.scenario["server"].items()},
    }  # fmt: skip


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], factors: Sequence[str]) -> tuple[Fact, ...]:
    def declared(key: str) -> bool:
        return any(key == factor or key.startswith(f"{factor}.") for factor in factors)

    return tuple(
        Fact(key=key, a=_words(one.get(key)), b=_words(other.get(key)), meaning=FACTOR if declared(key) else BLOCKS)
        for key in dict.fromkeys((*one, *other))
        if one.get(key) != other.get(key)
    )


def _words(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _settings(found: Sequence[Found], factors: Sequence[str]) -> list[str]:
    """The engine of each, and what is not the same in all rows: its server's, who had which cores, what may differ."""
    each = [_flat(one.scenario["server"]) | _declared(one.scenario, ("load.placement", *factors)) for one in found]
    keys = [key for key in dict.fromkeys(key for one in each for key in one) if key not in _NO_SETTING]
    varied = [key for key in keys if len({str(one.get(key)) for one in each}) > 1]
    engines = [str(one["engine"]) for one in each]
    return [
        ", ".join([engine, *(f"{key.removeprefix('args.')} {_words(one.get(key))}" for key in varied)])
        for engine, one in zip(engines, each, strict=True)
    ]


def _declared(scenario: Mapping[str, Any], factors: Sequence[str]) -> dict[str, Any]:
    """What keys that are not the server's have: of ``load.timeout`` and the like."""
    values = {}
    for factor in factors:
        section, _, key = factor.partition(".")
        if section != "server" and isinstance(scenario.get(section), Mapping) and key in scenario[section]:
            values[factor] = scenario[section][key]
    return values


def _flat(server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: value for key, value in server.items() if key != "args"},
        **{f"args.{key}": value for key, value in (server.get("args") or {}).items()},
    }


# --- rows and ratios


def _row(name: str, found: Found, setting: str, differs: tuple[Fact, ...]) -> CostRow:
    rate, price, tokens = found.capacity, found.price, found.tokens

    def at(per_s: float | None, many: float | None = 1.0) -> float | None:
        """What a request costs at a rate, over ``many``."""
        if price is None or not per_s or not many:
            return None
        return price.usd_per_hour / (3600 * per_s * price.utilisation) / many

    ends = (at(rate.high), at(rate.low))
    output, output_ci = None, None
    if tokens and tokens.low and tokens.high and ends[1] is not None:
        scaled = [many / 1e6 for many in (tokens.value, tokens.high, tokens.low)]
        output, output_ci = at(rate.rate, scaled[0]), (at(rate.high, scaled[1]), at(rate.low, scaled[2]))
    return CostRow(
        name=name,
        folders=found.folders,
        kind=found.kind,
        scenario=str(found.scenario["name"]),
        device=found.device,
        setting=setting,
        simulated=found.scenario["server"]["engine"] == "simulated",
        differs=differs,
        capacity=rate,
        price=price,
        why_no_cost=rate.why or found.why_no_price,
        per_request_usd=at(rate.rate),
        per_request_usd_ci=ends if ends[1] is not None else None,
        per_million_output_tokens_usd=output,
        per_million_output_tokens_usd_ci=output_ci,
        energy_per_request_j=found.energy,
        energy_per_request_j_ci=found.energy_ci,
        binding_slo=found.binding[0],
        binding_stage=found.binding[1],
        fleet=found.fleet,
        ratio=None,
    )


_ONE = CostRatio(value=1.0, low=1.0, high=1.0, own=(1.0, 1.0), doubt=None)


def _rank(row: CostRow) -> float:
    """The estimate, else the most that it costs."""
    ends = row.per_request_usd_ci
    return row.per_request_usd or (ends[1] if ends and ends[1] else math.inf)


def ratio_of(row: tuple[CostRow, Found], best: tuple[CostRow, Found], pairs: int = 1) -> CostRatio:
    """What a request costs in one row over what it costs in the cheapest; the formula is this module's."""
    wide = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / pairs) / _SURE
    spread = _SURE * math.hypot(*(each.spread / math.sqrt(each.searches) for _, each in (row, best)))
    (a, b), own = (row[0], best[0]), _ends(row[0], best[0], wide, 0.0)
    low, high = _ends(a, b, wide, spread)
    value = a.per_request_usd / b.per_request_usd if a.per_request_usd and b.per_request_usd else None
    doubt: Doubt | None = "spread"
    if low is not None and low > 1:
        doubt = None
    elif low is None or value is None:
        doubt = "open"
    elif own[0] is None or own[0] <= 1:
        doubt = "interval"
    return CostRatio(value=value, low=low, high=high, own=own, doubt=doubt)


def _ends(a: CostRow, b: CostRow, wide: float, spread: float) -> tuple[float | None, float | None]:
    """Both ends of the ratio of two costs; None where one of the costs lacks the end that it takes."""
    a_ends, b_ends = a.per_request_usd_ci or (None, None), b.per_request_usd_ci or (None, None)

    def end(numerator: int) -> float | None:
        """0: the low end, from the cheapest of a and the dearest of b; 1: the other way round."""
        sign, top, bottom = (-1, 1)[numerator], a_ends[numerator], b_ends[1 - numerator]
        if top is None or bottom is None:
            return None
        if a.per_request_usd is None or b.per_request_usd is None:
            return top / bottom * math.exp(sign * spread)
        far = [_at_95(a, top / a.per_request_usd), _at_95(b, bottom / b.per_request_usd), spread]
        return a.per_request_usd / b.per_request_usd * math.exp(sign * wide * math.hypot(*far))

    return end(0), end(1)


def _at_95(row: CostRow, ratio: float) -> float:
    """How far an end lies from its estimate, on the logarithmic scale, if its interval were a 95 % one."""
    return abs(math.log(ratio)) * _SURE / statistics.NormalDist().inv_cdf((1 + row.capacity.confidence) / 2)


# --- the rest


def _notes(rows: Sequence[CostRow], found: Sequence[Found]) -> Iterable[str]:
    """What must be kept in mind."""
    if defaults := [row.name for row in rows if row.price and row.price.is_default]:
        have = "has a default price" if len(defaults) == 1 else "have default prices"
        yield f"{' and '.join(defaults)} {have}; say yours with cost.usd_per_hour"
    for row in rows:
        if row.price and row.price.measured_on:
            yield f"{row.name} is priced as {row.price.device}, but was measured on {row.price.measured_on}"
    first, launched = found[0], [one for one in found if one.scenario["server"]["engine"] != "attach"]
    if any(one.hardware.gpus for one in launched):
        hosts = dict.fromkeys(f"{one.hardware.cpu}, {one.hardware.cores} cores" for one in launched)
        if len(hosts) > 1:
            yield f"the machines differ in more than their GPUs: {' | '.join(hosts)}"
    for row, one in zip(rows[1:], found[1:], strict=True):
        for side, a, b in (
            ("prompt", first.prompt_tokens, one.prompt_tokens),
            ("output", first.tokens and first.tokens.value, one.tokens and one.tokens.value),
        ):
            if a and b and max(a, b) > _OTHER_REQUESTS * min(a, b):
                yield f"a request of {row.name} has {b:.3g} {side} tokens, one of {rows[0].name} {a:.3g}"


def _provenance(found: Sequence[Found], command: str) -> Provenance:
    """Of all rows together."""
    known = [one.provenance for one in found]
    names = ("scenario", "digest", "model", "precision", "engine", "hardware", "load", "validity")
    joined = {name: ", ".join(dict.fromkeys(str(getattr(each, name)) for each in known)) for name in names}
    counts = " and ".join(each.n for each in known)
    return known[0].model_copy(update={**joined, "n": counts, "command": command or "gapmeter compare"})
