"""From a search's folder to its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gapmeter.analysis.capacity.curve import Grid, Posterior
from gapmeter.analysis.capacity.read import KEPT_ARRIVALS, MeasuredTrial, goal_of, read_trials
from gapmeter.analysis.capacity.search import Goal, held_rate, posterior, valid_of
from gapmeter.analysis.capacity.trial import Count, Trial, fails_at_any_rate, fails_too_many
from gapmeter.analysis.cost import SearchTrial, describe_search, hardware_units
from gapmeter.analysis.judge.warnings import STARVED
from gapmeter.analysis.ledger.switches import ANOTHER
from gapmeter.analysis.numbers import counted, rate
from gapmeter.analysis.pareto import pace_limit, pareto, run_point
from gapmeter.analysis.provenance import provenance_as_asked
from gapmeter.analysis.results.capacity import (
    BUDGET,
    CLIENT,
    DIED,
    FAILS,
    FOUND,
    HOLDS,
    INTERRUPTED,
    INVALID_TRIAL,
    NOT_MEASURED,
    UNDECIDED,
    UNMEETABLE,
    BestSeen,
    CapacityResult,
    CountedSlo,
    Density,
    Ended,
    ExpectedLatency,
    Fleet,
    LatencyCurve,
    RatePoint,
    Search,
    SearchedSlo,
    TrialResult,
    TrialVerdict,
)
from gapmeter.analysis.results.cost import Cost, Economy
from gapmeter.analysis.results.latency import explained_by
from gapmeter.analysis.results.manifest import Manifest, SearchManifest
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, PASS, RunResult, Verdict
from gapmeter.analysis.results.run import INVALID as INVALID_RUN
from gapmeter.analysis.stages import owner_words
from gapmeter.analysis.stats.estimate import NORMAL
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.records import RunFolder
from gapmeter.scenarios.slo import Slo

EXIT_CODES: Final[Mapping[Ended, int]] = {
    FOUND: 0, BUDGET: 98, CLIENT: 98, NOT_MEASURED: 98, UNMEETABLE: 99, INTERRUPTED: 105, DIED: 106,
}  # fmt: skip
_VERDICTS: Final[Mapping[TrialVerdict, Verdict]] = {
    HOLDS: PASS, FAILS: FAIL, UNDECIDED: INCONCLUSIVE, INVALID_TRIAL: INVALID_RUN,
}  # fmt: skip
_STEPS = 20  # rates of the latency's curve, below the capacity's interval, and as many from there on
_BEYOND = 1.1  # of the interval's upper end: the last of them


def analyse_capacity(folder: RunFolder) -> CapacityResult:
    """What a search found, from its folder and those of its trials. Raises NotReadable, OSError."""
    manifest = SearchManifest.read(folder.path)
    measured = read_trials(folder.path, manifest)
    search = build_search(goal_of(manifest), measured, manifest)
    known = [(trial, each.result) for trial, each in zip(search.trials, measured, strict=True) if each.result]
    economy = _economy(folder, search, known)
    if search.planning and economy and isinstance(economy.cost, Cost):
        output = economy.tokens_per_request.output
        fleet = search.planning.at_price(economy.cost.price.usd_per_hour, output.value if output else None)
        search = search.model_copy(update={"planning": fleet})
    arrivals = str(manifest.scenario["load"]["arrivals"])
    if manifest.capacity.trace_rate:
        arrivals = f"trace ({rate(manifest.capacity.trace_rate)} as it is)"
    elif arrivals not in KEPT_ARRIVALS:
        arrivals = "Poisson"
    search = search.model_copy(update={"pareto": _pareto(folder, known)})
    return CapacityResult(
        name=str(manifest.scenario["name"]),
        exit_code=EXIT_CODES[search.ended],
        slo=tuple(SearchedSlo(text=slo.text, metric=slo.metric) for slo in manifest.slo),
        capacity=search,
        **(dict(economy) if economy else {}),
        provenance=provenance_as_asked(
            manifest,
            next((result.provenance.model for _, result in known), None),
            load=f"{arrivals}, open loop, {counted(len(search.trials), 'trial')}",
            n=str(search.requests),
            validity="valid" if search.ended in (FOUND, BUDGET, UNMEETABLE) else search.ended.replace("_", " "),
        ),
    )


def build_search(goal: Goal, measured: Sequence[MeasuredTrial], manifest: SearchManifest) -> Search:
    """What was found by a search that has ended as its manifest says. ``measured``: every trial, in order."""
    asked = manifest.capacity
    ended: Ended = asked.ended or INTERRUPTED
    trials = [each.trial for each in measured]
    valid = valid_of(trials)
    spent, seconds = sum(trial.outcome.requests for trial in trials), sum(trial.outcome.seconds for trial in trials)
    known = posterior(goal, valid) if ended not in (UNMEETABLE, CLIENT) else None
    if known and ended != FOUND and fails_too_many(goal.slos, valid, known.interval(goal.confidence)[1]):
        known = None
    held = held_rate(valid)
    rate, low, high = _estimate(goal, valid, known, held)
    binding = _binding(goal, measured, rate or high or 0.0, known)
    fleet, sure, latency = None, held or low, None
    if asked.target_rps and sure and ended != UNMEETABLE:
        fleet = Fleet.plan(sure, asked.target_rps, asked.headroom, asked.spare, high if rate else None)
    if known and known.grid:
        slo, tried = goal.slos[known.slo], min(trial.rate for trial in valid)
        latency = LatencyCurve(
            slo=slo.text, limit_ms=_limit_ms(slo),
            points=_expected(goal, slo, known.grid, _rates(*known.interval(goal.confidence), tried)),
        )  # fmt: skip
        if fleet:
            (planned,) = _expected(goal, slo, known.grid, [fleet.planned_rps])
            fleet = fleet.model_copy(update={"expected": planned})
    load = manifest.scenario["load"]
    burstiness = 1.0 if load["arrivals"] not in KEPT_ARRIVALS else load.get("burstiness")
    # What the last trial ended of, or what showed that the load tester was the limit.
    telling = [trial for trial in trials if trial.outcome.client_limit or ended != CLIENT]
    return Search(
        rate=rate,
        low=low,
        high=high,
        spread=known and known.spread(goal.confidence),
        held=held,
        ceiling=known and known.ceiling,
        drift=(known and known.drift) or None,  # 0: there is no curve
        confidence=goal.confidence,
        within=goal.within,
        ended=ended,
        binding_slo=binding.slo,
        binding_stage=binding.stage,
        binding_owner=binding.owner,
        binding_share=binding.share,
        binding_rate=binding.rate,
        replicas=fleet.replicas if fleet else None,
        planning=fleet,
        target_rps=asked.target_rps,
        requests=spent,
        seconds=seconds,
        best_seen=_best_seen(goal, measured) if ended == UNMEETABLE else None,
        reason=manifest.ended_because or (_reason_of(telling[-1]) if telling else None),
        trials=tuple(_trial(goal, each.number, each.trial) for each in measured),
        curve=tuple(_point(trial) for trial in sorted(valid, key=lambda trial: trial.rate)),
        disturbed=sum(map(_is_disturbed, measured)) or None,
        latency=latency,
        posterior=known
        and Density(rates=tuple(math.exp(edge) for edge in known.edges), masses=tuple(map(float, known.masses))),
        burstiness=burstiness,
    )


def _is_disturbed(each: MeasuredTrial) -> bool:
    """Whether the CPU changed its speed, or the server waited for cores, of which another program had most."""
    if each.result is None:
        return False
    warnings, held = each.result.warnings, each.result.ledger.core_held or ()
    waited = any(one.code == "cores" and "core_wait" in one.touches for one in warnings)
    stranger = waited and bool(held) and held[0].process == ANOTHER and held[0].share >= STARVED
    return stranger or any(one.code == "machine" for one in warnings)


def _estimate(
    goal: Goal, valid: Sequence[Trial], known: Posterior | None, held: float | None
) -> tuple[float | None, float | None, float | None]:
    """Rate, low and high by the curve; without one, what held and what failed."""
    if known is None:
        return None, held, min((trial.rate for trial in valid if trial.verdict == FAILS), default=None)
    return known.quantile(0.5), *known.interval(goal.confidence)


@dataclass(frozen=True, slots=True)
class _Binding:
    slo: str | None = None
    stage: str | None = None
    owner: str | None = None
    share: float | None = None
    rate: float | None = None


def _binding(goal: Goal, measured: Sequence[MeasuredTrial], edge: float, known: Posterior | None) -> _Binding:
    """The SLO that breaks first, and what slow requests wait for just above the capacity, ``edge``.

    An overload fails of any SLO; so it is the one with the lowest capacity, where that is ``known``.
    """
    failed = sorted((each for each in measured if each.trial.verdict == FAILS), key=lambda each: each.trial.rate)
    above = [each for each in failed if each.trial.rate >= edge] or failed[::-1]
    if not above:
        return _Binding()
    slo = goal.slos[above[0].trial.finding.slo if known is None else known.slo]
    for each in above:
        if each.result is None:
            continue
        tail = each.result.tail
        anatomy = tail.of(explained_by(slo.metric))
        if anatomy is not None and anatomy.stage and anatomy.stage != "unexplained":
            owner = owner_words(anatomy.owner or "", each.result.compute.device or "GPU")
            return _Binding(slo.text, anatomy.stage, owner, anatomy.share, each.trial.rate)
    return _Binding(slo.text)


def _best_seen(goal: Goal, measured: Sequence[MeasuredTrial]) -> BestSeen | None:
    """What the SLO that fails was measured to be: at the lowest rate tried, or of errors at all low rates."""
    if found := fails_at_any_rate(goal.slos, valid_of([each.trial for each in measured])):
        at, low, most = found
        return BestSeen(rate=most, slo=goal.slos[at].text, over=low.over, count=low.count, answer=None)
    lowest = min((m for m in measured if m.trial.verdict != INVALID_TRIAL), key=lambda m: m.trial.rate, default=None)
    if lowest is None:
        return None
    at = lowest.trial.finding.slo
    count, answer = lowest.trial.outcome.counts[at], lowest.result.slo[at] if lowest.result else None
    slo = goal.slos[at].text
    return BestSeen(rate=lowest.trial.rate, slo=slo, over=count.over, count=count.count, answer=answer)


def _reason_of(trial: Trial) -> str | None:
    return trial.outcome.died or trial.outcome.invalid or None


def _rates(low: float, high: float, tried: float) -> list[float]:
    """From the lowest one that was ``tried`` to beyond the capacity's interval, more densely there."""
    below = np.linspace(min(tried, low / 2), low, _STEPS, endpoint=False)
    return [*below.tolist(), *np.linspace(low, _BEYOND * high, _STEPS).tolist()]


def _expected(goal: Goal, slo: Slo, grid: Grid, rates: Sequence[float]) -> tuple[ExpectedLatency, ...]:
    """The SLO's percentile at these rates."""
    found = (_limit_ms(slo) * grid.levels(rates, goal.confidence)).T.tolist()
    return tuple(
        ExpectedLatency(rate=rate, value_ms=middle, ci_ms=(low, high))
        for rate, (middle, low, high) in zip(rates, found, strict=True)
    )


def _limit_ms(slo: Slo) -> float:
    return (slo.limit_ns or 0) / 1e6


def _counted(slo: Slo, count: Count, *, on_curve: bool) -> CountedSlo:
    """``on_curve``: with the percentile that the curve is drawn through."""
    value, ends = None, None
    if on_curve and count.log_level:
        log, error = count.log_level
        value, low, high = (_limit_ms(slo) * math.exp(log + z * error) for z in (0.0, -NORMAL, NORMAL))
        ends = (low, high)
    return CountedSlo(
        text=slo.text, over=count.over, count=count.count, n_eff=count.n_eff, allowed=slo.allowed,
        value_ms=value, ci_ms=ends,
    )  # fmt: skip


def _trial(goal: Goal, number: int, trial: Trial) -> TrialResult:
    outcome, finding = trial.outcome, trial.finding
    valid = trial.verdict != INVALID_TRIAL
    return TrialResult(
        number=number,
        rate=trial.rate,
        verdict=trial.verdict,
        confidence=finding.confidence if valid else None,
        leaning=finding.leaning if valid else None,
        slo=goal.slos[finding.slo].text,
        slos=tuple(
            _counted(*each, on_curve=valid and not trial.overloaded)
            for each in zip(goal.slos, outcome.counts, strict=True)
        ),
        requests=outcome.requests,
        measured=outcome.measured,
        seconds=outcome.seconds,
        reason=_reason_of(trial),
        folder=outcome.name or None,
        overloaded=(trial.verdict == HOLDS and trial.overloaded) or None,
    )


def _point(trial: Trial) -> RatePoint:
    """Goodput at one rate: the share of good requests, and its interval, of what was asked for or could be served."""
    outcome, share, ends = trial.outcome, None, None
    rate = outcome.served.rate if outcome.served and trial.overloaded else trial.rate
    if outcome.measured:
        share = outcome.good / outcome.measured
        ends = share_bounds(share * outcome.good_n_eff, outcome.good_n_eff)
    return RatePoint(
        rate=trial.rate, good_share=share, goodput_per_s=None if share is None else share * rate,
        goodput_ci=ends and (ends[0] * rate, ends[1] * rate), verdict=trial.verdict, n=outcome.measured,
    )  # fmt: skip


def _pareto(folder: RunFolder, known: Sequence[tuple[TrialResult, RunResult]]) -> Pareto | None:
    """The search's trials, by their rates: one server at several loads."""
    points = [
        run_point(folder.path / str(trial.folder), rate(trial.rate), str(trial.folder), _VERDICTS[trial.verdict], found)
        for trial, found in sorted(known, key=lambda pair: pair[0].rate)
    ]
    if not points:
        return None
    manifest = Manifest.read(folder.path / points[0].folder)
    return pareto(points, hardware_units(manifest)[1], pace_limit(manifest.slo))


def _economy(folder: RunFolder, search: Search, known: Sequence[tuple[TrialResult, RunResult]]) -> Economy | None:
    """Cost, efficiency and value; the price follows a trial's manifest, which knows the server's cores."""
    usable = [(trial, result) for trial, result in known if trial.verdict != INVALID_TRIAL]
    if not usable:
        return None
    manifest = Manifest.read(folder.path / str(usable[0][0].folder))
    low, high = search.held or search.low, search.high
    if low is not None and high is not None:
        high = max(low, high)  # a rate that was held may lie above the curve's interval
    holds = {HOLDS: True, FAILS: False}
    trials = [SearchTrial(trial.rate, holds.get(trial.verdict), result) for trial, result in usable]
    return describe_search(low, high, manifest, trials)
