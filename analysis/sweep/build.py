"""From a sweep's folder to its result: the points side by side, the knees, and what grows from each to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gapmeter.analysis.cost import describe_cost, describe_tokens, describe_value, hardware_units, offered_rate
from gapmeter.analysis.device.use import binding_evidence, binding_of
from gapmeter.analysis.judge import verdict
from gapmeter.analysis.judge.lateness import ReportedLateness, without_refused
from gapmeter.analysis.judge.words import not_judged
from gapmeter.analysis.pareto import interval, pace_limit, pareto, pareto_point, per_server
from gapmeter.analysis.provenance import provenance_as_asked
from gapmeter.analysis.requests.figures import distribution
from gapmeter.analysis.requests.metrics import MetricSeries, ended_by_us, succeeded
from gapmeter.analysis.results.cost import AnyEnergy, Energy
from gapmeter.analysis.results.latency import explained_by
from gapmeter.analysis.results.manifest import Manifest, SweepManifest, SweepPoint
from gapmeter.analysis.results.pareto import Pareto, ParetoPoint
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, Provenance, RunResult, SloAnswer, Verdict
from gapmeter.analysis.results.sweep import (
    FAILED,
    MISSING,
    AnyPoint,
    Batch,
    LostPoint,
    Point,
    PointDistribution,
    PointEconomy,
    PointEnergy,
    PointFacts,
    PointThroughput,
    Repeat,
    RepeatRange,
    StageMeans,
    SweepFigures,
    SweepResult,
    SweptCurve,
    SweptSlo,
)
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series, level_of
from gapmeter.analysis.sweep.curves import WITH_LEDGERS, Axis, axis_of, curve_point, knees_of, label
from gapmeter.analysis.sweep.growth import growths_of, means_ms, slow_band
from gapmeter.analysis.sweep.read import Frames, LostRun, MeasuredRun, read_frames, read_runs
from gapmeter.records import RunFolder
from gapmeter.scenarios.slo import LATENCIES

LEVELS = (99.0, 95.0, 90.0, 50.0)
_NOT_VALID, _INTERRUPTED = 98, 105


def analyse_sweep(folder: RunFolder) -> SweepResult:
    """What a sweep found, from its folder and those of its points. Raises NotReadable, OSError."""
    manifest = SweepManifest.read(folder.path)
    runs = [read_runs(folder.path / point.folder) for point in manifest.points]
    measured = [[run for run in own if isinstance(run, MeasuredRun)] for own in runs]
    used = [[run for run in own if run.valid] or own for own in measured]  # where none is valid, all that have figures
    frames = [read_frames(own) if own else None for own in used]
    points: list[AnyPoint] = []
    for index, (point, found) in enumerate(zip(manifest.points, frames, strict=True)):
        facts = _facts(index, point, runs[index], used[index], manifest, folder.path)
        if found is not None:
            points.append(_point(facts, used[index], found))
        else:
            points.append(LostPoint(**dict(facts), verdict=FAILED if runs[index] else MISSING))
    made_on = {index: own[0].manifest for index, own in enumerate(used) if own}
    answers = next((point.slo for point in points if isinstance(point, Point)), ())
    # What the sweep is about: the first latency that an SLO names, else TTFT.
    asked = (explained_by(answer.metric) for answer in answers)
    main = next((metric for metric in asked if metric in WITH_LEDGERS), "ttft")
    levels = {metric: common_level(points, metric) for metric in LATENCIES}
    curve_points = [curve_point(point, own, levels) for point, own in zip(points, frames, strict=True)]
    axis = axis_of(points, _unit(manifest.asked.workload.kind))
    knees = tuple(knees_of(axis, points, curve_points, main, levels))
    figures = SweepFigures(
        key=axis.key,
        title=axis.title,
        series=tuple(SweptCurve(name=name, points=members) for name, members in axis.series),
        metric=main,
        levels=levels,
        points=tuple(points),
        growth=tuple(growths_of(axis, curve_points, knees, main, levels)),
        knees=knees,
        pareto=_pareto(axis, points, made_on),
    )
    return SweepResult(
        name=manifest.asked.name,
        status=manifest.status,
        exit_code=_INTERRUPTED if manifest.status in ("interrupted", "running") else _exit_code(points, runs),
        device=next((each.device for each in made_on.values()), "GPU"),
        slo=tuple(
            SweptSlo(
                text=answer.text, metric=answer.metric, percentile=answer.percentile,
                limit_ms=answer.limit if answer.unit == "ms" else None,
            )
            for answer in answers
        ),
        sweep=figures,
        provenance=_provenance(points, manifest, made_on),
    )  # fmt: skip


def common_level(points: Sequence[AnyPoint], metric: str) -> float | None:
    """The highest of p99, p95, p90 and p50 that every valid point's sample supports.

    None where there is none: then means are compared, which need less. A point whose every percentile is refused, or
    unsupported, has nothing to compare.
    """
    known = [point.metrics[metric] for point in points if isinstance(point, Point) and point.on_curves]
    shown = [one for one in known if one.mean_late_ms is None or any(one.ms(level) is not None for level in LEVELS)]
    return next((level for level in LEVELS if shown and all(each.ms(level) is not None for each in shown)), None)


def _pareto(axis: Axis, points: Sequence[AnyPoint], made_on: Mapping[int, Manifest]) -> Pareto | None:
    """Curve by curve; points without an order make no curve, so that each is a side of its own."""
    key, several, found = axis.key, len(axis.series) > 1, list[ParetoPoint]()
    for series, members in axis.series:
        for point in [one for at in members if isinstance(one := points[at], Point)]:
            tpot, rate = point.metrics["tpot"], interval(point.tokens_per_s, point.throughput.steady_ci)
            name = point.label
            if key and several and key in point.resolved:  # what its curve shares is in the curve's name
                unit = _unit(made_on[point.index].asked.workload.kind)
                name = label({key: point.resolved[key]}, unit) + " (emulated)" * point.economy.emulated
            placed = pareto_point(name, point.folder, point.verdict, tpot, tpot.mean_ci_ms, rate, made_on[point.index])
            found.append(placed.model_copy(update={"side": series if key else point.label}))
    slos = next((each.slo for each in made_on.values()), ())
    units = {hardware_units(each)[1] for each in made_on.values()}
    if len(units) > 1:
        return pareto([per_server(each) for each in found], "server", pace_limit(slos))
    return pareto(found, units.pop(), pace_limit(slos)) if units else None


def _facts(
    index: int, point: SweepPoint, runs: Sequence[MeasuredRun | LostRun], used: Sequence[MeasuredRun],
    manifest: SweepManifest, folder: Path,
) -> PointFacts:  # fmt: skip
    """The load of a point that never ran is that which was asked for."""
    values = point.resolved
    load = used[0].result.load if used else None
    asked = {name: values.get(f"load.{name}", value) for name, value in manifest.scenario["load"].items()}
    return PointFacts(
        index=index,
        label=label(values, _unit(values.get("workload.kind", manifest.asked.workload.kind))),
        values=point.values,
        resolved=values,
        folder=point.folder,
        reason=next((run.reason for run in runs if isinstance(run, LostRun)), "not run yet") if not used else None,
        repeats=tuple(_repeat(run, folder) for run in runs),
        missing=max(manifest.repeat - sum(isinstance(run, MeasuredRun) for run in runs), 0),
        loop=load.loop if load else "closed" if asked["arrivals"] == "closed" else "open",
        concurrency=load.concurrency if load else asked["concurrency"],
        requested_rate=load.requested_rate if load else asked["rate"],
    )


def _unit(kind: str) -> str:
    """What the rate of such a workload counts."""
    return "conversations" if kind == "conversation" else "req"


def _repeat(run: MeasuredRun | LostRun, folder: Path) -> Repeat:
    path = str(run.folder.relative_to(folder))
    if isinstance(run, LostRun):
        return Repeat(folder=path, reason=run.reason, verdict=FAILED)
    result = run.result
    return Repeat(
        folder=path,
        reason=None,
        verdict=result.verdict,
        invalid_reasons=result.invalid_reasons,
        delivered_rate=result.load.delivered_rate,
        output_tokens_per_s=result.throughput.output_tokens_per_s,
        measured=result.counts.measured,
    )


def _point(facts: PointFacts, used: Sequence[MeasuredRun], frames: Frames) -> Point:
    """What the runs of a point say together; figures over successes, verdicts with failures counted."""
    results, manifest = [run.result for run in used], used[0].manifest
    asked = sorted({*PERCENTILES, *(slo.percentile for slo in manifest.slo if slo.percentile is not None)})
    seconds = sum(result.load.window_s for result in results)
    series, lateness = MetricSeries(frames.measured), ReportedLateness(results)
    count = len(frames.measured)
    metrics = {metric: _distribution(series(metric), metric, asked, count, seconds, lateness) for metric in LATENCIES}
    # Between repeats other points were run.
    outage = next((result.outage for result in results if result.outage), None)
    answers = verdict.judge(manifest.slo, frames.measured, {}, seconds, lateness, outage, series)
    reasons = () if any(run.valid for run in used) else results[0].invalid_reasons
    reasons = reasons or tuple(not_judged(answer) for answer in answers if answer.status == INVALID)
    judged = verdict.overall(answers, reasons)
    stages = {metric: means_ms(rows) for metric, rows in frames.ledgers.items()}
    evidence = binding_evidence(results[0].roofline, results[0].telemetry)
    checks = [check for result in results for check in result.checks]
    economy = describe_economy(judged, answers, used, frames.measured)
    emulated = " (emulated)" if economy.emulated else ""
    reason = "; ".join(reasons) or _what_failed(results, frames.measured)
    about = facts.model_copy(update={"label": f"{facts.label}{emulated}", "reason": reason})
    return Point(
        **dict(about),
        verdict=judged,
        metrics=metrics,
        between=_between(results) if len(results) > 1 else None,
        stages={
            metric: StageMeans(mean_ms=sum(found.values()), stages_ms=found)
            for metric, found in stages.items() if found
        },
        slow_stages={metric: means_ms(slow_band(rows, 99)) for metric, rows in frames.ledgers.items() if len(rows)},
        throughput=_throughput(results, frames),
        delivered_rate=_mean(result.load.delivered_rate for result in results),
        goodput_per_s=_pooled(results, lambda result: result.goodput.per_s),
        failed_requests=sum(result.counts.failed_by_server for result in results),
        batch=_batch(frames.steps),
        binding=binding_of(stages["e2e"], checks, evidence, device=manifest.device),
        slo=answers,
        economy=economy,
    )  # fmt: skip


def _what_failed(results: Sequence[RunResult], measured: pd.DataFrame) -> str | None:
    """What all requests of a point failed with, or those of a run from a moment on; None where neither happened."""
    outages = (one for result in results if result.outage for one in result.warnings if one.code == "outage")
    if (outage := next(outages, None)) is not None:
        return f"{outage.text}: {outage.cause}"
    failed = measured[~ended_by_us(measured)]
    if not len(failed) or succeeded(failed).any():
        return None
    how = failed["outcome"].where(failed["status"].isin([0, 200]), "HTTP " + failed["status"].astype(str))
    return f"all requests failed: {', '.join(sorted(how.unique()))}"


def _distribution(
    values: Series, metric: str, asked: Sequence[float], requests: int, seconds: float, lateness: ReportedLateness
) -> PointDistribution:
    """A metric's distribution, without the percentiles and the mean that one of the runs refuses."""
    found = without_refused(distribution(values, asked, requests, seconds), metric, lateness)
    mean = level_of(values.values / 1e6) if found.mean_late_ms is None else None
    return PointDistribution(**dict(found), mean_ci_ms=mean.estimate.known[1:] if mean else None)


def _between(results: Sequence[RunResult]) -> dict[str, RepeatRange]:
    """What repeating it does, which no single run knows."""

    def ends(metric: str, percentile: float) -> tuple[float, float] | None:
        found = [ms for result in results if (ms := result.metrics[metric].ms(percentile)) is not None]
        return (min(found), max(found)) if len(found) == len(results) else None

    return {
        metric: RepeatRange(**{f"p{p:g}_ms": ends(metric, p) for p in (50.0, 90.0, 95.0, 99.0)}) for metric in LATENCIES
    }


def _throughput(results: Sequence[RunResult], frames: Frames) -> PointThroughput:
    steady = level_of(frames.rates)
    return PointThroughput(
        requests_per_s=_pooled(results, lambda result: result.throughput.requests_per_s),
        prompt_tokens_per_s=_pooled(results, lambda result: result.throughput.prompt_tokens_per_s),
        output_tokens_per_s=_pooled(results, lambda result: result.throughput.output_tokens_per_s),
        span_s=sum(map(_span_s, results)),
        steady_tokens_per_s=steady.value if steady else None,
        steady_ci=steady.estimate.known[1:] if steady else None,
    )


def _pooled(results: Sequence[RunResult], rate_of: Callable[[RunResult], float | None]) -> float | None:
    """One rate over several runs' time; None where none knows its own, or one that served something does not."""
    rates = [rate_of(result) for result in results]
    served = [(rate, _span_s(one)) for rate, one in zip(rates, results, strict=True) if one.counts.succeeded]
    time_s = sum(map(_span_s, results))
    if not time_s or all(rate is None for rate in rates) or any(rate is None for rate, _ in served):
        return None
    return sum((rate or 0.0) * span for rate, span in served) / time_s


def _span_s(result: RunResult) -> float:
    """The time that a run's rates are of; its window where it served nothing in it."""
    return result.throughput.span_s if result.counts.succeeded else result.load.window_s


def _batch(steps: pd.DataFrame) -> Batch:
    """Means weighted by the forwards' time, where that was stamped."""
    steps = steps[steps["requests"].fillna(0) > 0] if len(steps) else steps
    if not len(steps):
        return Batch(running=None, waiting=None, steps=0)
    weights = np.ones(len(steps))
    if {"forward_start_ns", "forward_end_ns"} <= set(steps.columns):
        lasted = (steps["forward_end_ns"] - steps["forward_start_ns"]).to_numpy(np.float64, na_value=np.nan)
        if np.nansum(lasted) > 0:
            weights = np.nan_to_num(lasted)
    running, waiting = (
        float(np.average(steps[column].to_numpy(np.float64), weights=weights)) for column in ("requests", "waiting")
    )
    return Batch(running=running, waiting=waiting, steps=len(steps))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _exit_code(points: Sequence[AnyPoint], runs: Sequence[Sequence[MeasuredRun | LostRun]]) -> int:
    """0 when every point was measured, whatever its SLOs say: to see them missed is what a sweep is for."""
    if all(point.verdict in (PASS, FAIL, INCONCLUSIVE) for point in points):
        return 0 if not any(point.missing for point in points) else _NOT_VALID
    if any(isinstance(point, Point) for point in points):
        return _NOT_VALID
    lost = [run for own in runs for run in own if isinstance(run, LostRun)]
    return max((run.exit_code for run in lost if run.exit_code is not None), default=_NOT_VALID)


def _provenance(points: Sequence[AnyPoint], manifest: SweepManifest, made_on: Mapping[int, Manifest]) -> Provenance:
    """What differs from point to point is named with all its values."""
    keys = dict.fromkeys(key for point in points for key in point.resolved)
    values = {key: ", ".join(dict.fromkeys(str(point.resolved.get(key)) for point in points)) for key in keys}
    bad = sum(point.verdict in (INVALID, FAILED, MISSING) for point in points)
    validity = "valid" if not bad else f"{bad} of {len(points)} points without valid figures"
    return provenance_as_asked(
        manifest,
        next((each.target.model for each in made_on.values()), None),
        load="; ".join(f"{key} {those}" for key, those in values.items()),
        n=str(sum(point.metrics["ttft"].count for point in points if isinstance(point, Point))),
        validity=INVALID if bad == len(points) else validity,
        **{name: values[key] for name in ("precision", "engine") if (key := f"server.{name}") in values},
    )


def describe_economy(
    verdict: Verdict, answers: Sequence[SloAnswer], runs: Sequence[MeasuredRun], measured: pd.DataFrame
) -> PointEconomy:
    """``verdict`` and ``answers`` of the point; ``measured``: the requests of all ``runs`` that count."""
    results, manifest = [run.result for run in runs], runs[0].manifest
    # Repeats play one trace of arrivals again and again: they tell no more of its rate than one of them.
    window_s = sum(each.load.window_s for each in results) / len(runs)
    load = results[0].load.model_copy(update={"window_s": window_s})
    not_lasting = next((each.steady for each in results if not each.steady.lasts), None)
    rate = offered_rate(verdict, answers, load, len(measured) // len(runs), not_lasting)
    cost = describe_cost(rate, describe_tokens(measured), manifest)
    good = [ends[0] for each in results if (ends := each.goodput.share_ci) and ends[0] is not None]
    precision = manifest.target.precision
    return PointEconomy(
        precision=results[0].provenance.precision,
        emulated=precision is not None and precision.emulated,
        cost=cost,
        energy=_energy([each.energy for each in results]),
        value=describe_value(cost, (min(good), 1.0) if good else None),
    )


def _energy(parts: Sequence[AnyEnergy]) -> PointEnergy:
    """Joules of all repeats over their requests and tokens; None unless every repeat measured them."""
    joules = requests = tokens = 0.0
    for part in parts:
        if not isinstance(part, Energy) or part.per_request_j is None or not part.tokens_per_watt:
            return PointEnergy(per_request_j=None, tokens_per_watt=None)
        joules += part.joules
        requests += part.joules / part.per_request_j
        tokens += part.joules * part.tokens_per_watt
    return PointEnergy(per_request_j=joules / requests, tokens_per_watt=tokens / joules)
