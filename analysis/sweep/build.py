"""From a sweep's folder to its result: the points side by side, the knees, and what grows from each to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.device.binding import binding_evidence, decide
from gapmeter.analysis.judge import verdict
from gapmeter.analysis.provenance import hardware_words
from gapmeter.analysis.requests.figures import distribution
from gapmeter.analysis.requests.metrics import METRICS, metric_series
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, Provenance, RunResult
from gapmeter.analysis.results.study import SweepManifest, SweepPoint
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.sweep.axis import axis_of, label
from gapmeter.analysis.sweep.curves import EVENT_OF, growths_of, knees_of, mean_level, rate_level, seen
from gapmeter.analysis.sweep.economy import describe_economy
from gapmeter.analysis.sweep.growth import means_ms, slow_band
from gapmeter.analysis.sweep.read import Frames, LostRun, MeasuredRun, read_frames, read_runs
from gapmeter.analysis.sweep.result import (
    FAILED,
    MISSING,
    AnyPoint,
    Batch,
    LostPoint,
    Point,
    PointDistribution,
    PointThroughput,
    Repeat,
    RepeatRange,
    Series,
    StageMeans,
    SweepFigures,
    SweepResult,
    SweptSlo,
)
from gapmeter.records import RunFolder

LEVELS = (99.0, 95.0, 90.0, 50.0)
_NOT_VALID, _UNREACHABLE = 98, 106


def analyse_sweep(folder: RunFolder) -> SweepResult:
    """What a sweep found, from its folder and those of its points. Raises NotReadable, OSError."""
    manifest = SweepManifest.read(folder.path)
    points: list[AnyPoint] = []
    frames: list[Frames | None] = []
    device = ""
    for index, point in enumerate(manifest.points):
        runs = read_runs(folder.path / point.folder)
        measured = [run for run in runs if isinstance(run, MeasuredRun)]
        used = [run for run in measured if run.valid] or measured
        facts = _facts(index, point, runs, used, manifest, folder.path)
        if used:
            frames.append(read_frames(used))
            points.append(_point(facts, used, frames[-1]))
            device = device or used[0].manifest.device
        else:
            frames.append(None)
            reason = next((run.reason for run in runs if isinstance(run, LostRun)), "not run yet")
            points.append(LostPoint(**facts, verdict=FAILED if runs else MISSING, reason=reason))
    answers = next((point.slo for point in points if isinstance(point, Point)), ())
    # What the sweep is about: the first latency that an SLO names, else TTFT.
    main = next((answer.metric for answer in answers if answer.metric in EVENT_OF), "ttft")
    levels = {metric: common_level(points, metric) for metric in METRICS}
    sights = [seen(point, found, levels) for point, found in zip(points, frames, strict=True)]
    axis = axis_of(points)
    knees = tuple(knees_of(axis, points, sights, main, levels))
    figures = SweepFigures(
        key=axis.key,
        title=axis.title,
        series=tuple(Series(name=name, points=members) for name, members in axis.series),
        metric=main,
        levels=levels,
        points=tuple(points),
        growth=tuple(growths_of(axis, sights, knees, main, levels)),
        knees=knees,
    )
    return SweepResult(
        name=str(manifest.scenario["name"]),
        status=manifest.status,
        exit_code=_exit_code(points),
        device=device or "GPU",
        slo=tuple(
            SweptSlo(
                text=answer.text, metric=answer.metric, percentile=answer.percentile,
                limit_ms=answer.limit if answer.unit == "ms" else None,
            )
            for answer in answers
        ),
        sweep=figures,
        provenance=_provenance(points, manifest),
    )  # fmt: skip


def common_level(points: Sequence[AnyPoint], metric: str) -> float | None:
    """The highest of p99, p95, p90 and p50 that every valid point's sample supports.

    None where there is none: then means are compared, which need less.
    """
    shown = [point.metrics[metric] for point in points if isinstance(point, Point) and point.on_curves]
    for level in LEVELS:
        if shown and all(found.ms(level) is not None for found in shown):
            return level
    return None


def _facts(
    index: int, point: SweepPoint, runs: Sequence[MeasuredRun | LostRun], used: Sequence[MeasuredRun],
    manifest: SweepManifest, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """The fields that every point has. The load of one that never ran is told by its values."""
    values = point.resolved
    closed = values.get("load.concurrency") is not None
    load = used[0].result.load if used else None
    return {
        "index": index,
        "label": label(values),
        "values": point.values,
        "resolved": values,
        "folder": point.folder,
        "repeats": tuple(_repeat(run, folder) for run in runs),
        "missing": max(manifest.repeat - sum(isinstance(run, MeasuredRun) for run in runs), 0),
        "loop": load.loop if load else "closed" if closed else "open",
        "concurrency": load.concurrency if load else values.get("load.concurrency"),
        "requested_rate": load.requested_rate if load else values.get("load.rate"),
    }


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
        **{f"{metric}_p{p:g}_ms": result.metrics[metric].ms(p) for metric in METRICS for p in (50.0, 99.0)},
    )


def _point(facts: Mapping[str, Any], used: Sequence[MeasuredRun], frames: Frames) -> Point:
    """What the runs of a point say together; figures over successes, verdicts with failures counted."""
    results, manifest = [run.result for run in used], used[0].manifest
    asked = sorted({*PERCENTILES, *(slo.percentile for slo in manifest.slo if slo.percentile is not None)})
    seconds = sum(result.load.window_s for result in results)
    metrics = {metric: _distribution(frames, metric, asked, seconds) for metric in METRICS}
    answers = verdict.judge(manifest.slo, frames.measured, {}, seconds)  # between repeats other points were run
    reasons = () if any(run.valid for run in used) else results[0].invalid_reasons
    judged = verdict.overall(answers, reasons)
    ledgers = {metric: getattr(frames, name) for metric, name in EVENT_OF.items()}
    stages = {metric: means_ms(rows) for metric, rows in ledgers.items()}
    evidence = binding_evidence(results[0].roofline, results[0].telemetry)
    checks = [check for result in results for check in result.checks]
    economy = describe_economy(judged, answers, used, frames.measured)
    emulated = " (emulated)" if economy.emulated else ""
    return Point(
        **{**facts, "label": f"{facts['label']}{emulated}"},
        verdict=judged,
        reason="; ".join(reasons) or None,
        metrics=metrics,
        between=_between(results) if len(results) > 1 else None,
        stages={
            metric: StageMeans(mean_ms=sum(found.values()), stages_ms=found)
            for metric, found in stages.items() if found
        },
        slow_stages={metric: means_ms(slow_band(rows, 99)) for metric, rows in ledgers.items() if len(rows)},
        throughput=_throughput(results, frames),
        delivered_rate=_mean(result.load.delivered_rate for result in results),
        goodput_per_s=_mean(result.goodput.per_s for result in results),
        failed_requests=sum(sum(result.counts.failed.values()) for result in results),
        batch=_batch(frames.steps),
        binding=decide(stages["e2e"], checks, evidence, device=manifest.device),
        slo=answers,
        economy=economy,
    )  # fmt: skip


def _distribution(frames: Frames, metric: str, asked: Iterable[float], seconds: float) -> PointDistribution:
    values, requests = metric_series(frames.measured, metric), len(frames.measured)
    found = distribution(
        values, asked, values.count / requests if requests else 1.0, seconds / requests if requests else 0.0
    )
    mean = mean_level(frames, metric)
    return PointDistribution(**dict(found), mean_ci_ms=mean.estimate.known[1:] if mean else None)


def _between(results: Sequence[RunResult]) -> dict[str, RepeatRange]:
    """What repeating it does, which no single run knows."""

    def ends(metric: str, percentile: float) -> tuple[float, float] | None:
        found = [ms for result in results if (ms := result.metrics[metric].ms(percentile)) is not None]
        return (min(found), max(found)) if len(found) == len(results) else None

    return {
        metric: RepeatRange(**{f"p{p:g}_ms": ends(metric, p) for p in (50.0, 90.0, 95.0, 99.0)}) for metric in METRICS
    }


def _throughput(results: Sequence[RunResult], frames: Frames) -> PointThroughput:
    known = [result.throughput for result in results if result.throughput.requests_per_s is not None]
    span = sum(each.span_s for each in known)

    def pooled(name: str) -> float | None:
        """One rate over all the runs' time; None where one of them does not know its own."""
        told = [rate * each.span_s for each in known if (rate := getattr(each, name)) is not None]
        return sum(told) / span if known and len(told) == len(known) else None

    each = [rate for one in known if (rate := one.output_tokens_per_s) is not None]
    steady = rate_level(frames)
    return PointThroughput(
        requests_per_s=pooled("requests_per_s"),
        prompt_tokens_per_s=pooled("prompt_tokens_per_s"),
        output_tokens_per_s=pooled("output_tokens_per_s"),
        span_s=span,
        output_range=(min(each), max(each)) if len(each) > 1 else None,
        steady_tokens_per_s=steady.value if steady else None,
        steady_ci=steady.estimate.known[1:] if steady else None,
    )


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


def _exit_code(points: Sequence[AnyPoint]) -> int:
    """0 when every point was measured, whatever its SLOs say: to see them missed is what a sweep is for."""
    if all(point.verdict in (PASS, FAIL, INCONCLUSIVE) for point in points):
        return 0 if not any(point.missing for point in points) else _NOT_VALID
    return _NOT_VALID if any(isinstance(point, Point) for point in points) else _UNREACHABLE


def _provenance(points: Sequence[AnyPoint], manifest: SweepManifest) -> Provenance:
    """What differs from point to point is named with all its values."""
    server, hardware = manifest.scenario["server"], manifest.hardware
    keys = dict.fromkeys(key for point in points for key in point.resolved)
    values = {key: ", ".join(dict.fromkeys(str(point.resolved.get(key)) for point in points)) for key in keys}
    bad = sum(point.verdict in (INVALID, FAILED, MISSING) for point in points)
    validity = "valid" if not bad else f"{bad} of {len(points)} points without valid figures"
    return Provenance(
        scenario=str(manifest.scenario["name"]),
        digest=manifest.scenario_digest,
        model=str(server["model"]),
        precision=values.get("server.precision", str(server["precision"])),
        engine=values.get("server.engine", str(server["engine"])),
        hardware=hardware_words(hardware.gpus, hardware.cpu, hardware.cores),
        load="; ".join(f"{key} {told}" for key, told in values.items()),
        n=str(sum(point.metrics["ttft"].count for point in points if isinstance(point, Point))),
        validity=INVALID if bad == len(points) else validity,
        date=manifest.started_wall.partition("T")[0],
        command=manifest.command,
    )
