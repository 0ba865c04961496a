"""summary.json of a sweep: its points side by side, the knee, and what grows from each to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gapmeter.analysis.device.binding import binding_evidence, decide
from gapmeter.analysis.jsonable import SCHEMA_VERSION, json_safe
from gapmeter.analysis.judge import verdict
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import METRICS, metric_sample
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.sweep.compared import common_level
from gapmeter.analysis.sweep.curves import EVENT_OF, growths_of, headline, knees_of, mean_level, rate_level, seen
from gapmeter.analysis.sweep.growth import means_ms, slow_band
from gapmeter.analysis.sweep.read import Frames, PointRun, batch, read_frames, read_runs
from gapmeter.report import bridge
from gapmeter.report.sweep.axis import axis_of, label
from gapmeter.report.sweep.economy import describe_economy

_FAILED, _MISSING = "FAILED", "MISSING"
_NOT_VALID, _UNREACHABLE = 98, 106


def build_summary(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a sweep's page shows, from its manifest and its points' folders."""
    points, frames = [], []
    for index, point in enumerate(manifest["points"]):
        described, found = _describe_point(folder, manifest, index, point)
        points.append(described)
        frames.append(found)
    axis = axis_of(points)
    slos = _slos(points, folder)
    main = _main_metric(slos)
    levels = {metric: common_level(points, metric) for metric in METRICS}
    device = next((str(p["device"]) for p in points if p["device"]), "GPU")
    sights = [
        None if found is None else seen(point, found, levels) for point, found in zip(points, frames, strict=True)
    ]
    knees = knees_of(axis, points, sights, main, levels)
    growths = growths_of(axis, sights, knees, main, levels, device)
    for point in points:
        point.pop("device")
    exit_code = _exit_code(points)
    safe: dict[str, Any] = json_safe(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "sweep",
            "name": manifest["scenario"]["name"],
            "status": manifest["status"],
            "exit_code": exit_code,
            "device": device,
            "slo": [{"text": slo["text"], "metric": slo["metric"], "percentile": slo["percentile"],
                     "limit_ms": slo.get("limit_ms")} for slo in slos],
            "sweep": {
                "key": axis.key,
                "title": axis.title,
                "series": [{"name": name, "points": list(members)} for name, members in axis.series],
                "metric": main,
                "levels": levels,
                "points": points,
                "growth": growths,
                "knees": knees,
                "headline": headline(points, knees, growths, main),
            },
        }
    )  # fmt: skip
    return safe


def _describe_point(
    folder: Path, manifest: Mapping[str, Any], index: int, point: Mapping[str, Any]
) -> tuple[dict[str, Any], Frames | None]:
    runs = read_runs(folder / point["folder"])
    done = [run for run in runs if run.summary is not None]
    used = [run for run in done if run.valid] or done
    described: dict[str, Any] = {
        "index": index,
        "label": label(point.get("resolved", point["values"])),
        "values": point["values"],
        "resolved": point.get("resolved", point["values"]),
        "folder": point["folder"],
        "verdict": _MISSING if not runs else _FAILED,
        "reason": next((run.reason for run in runs if run.reason), None if runs else "not run yet"),
        "repeats": [_describe_run(run, folder) for run in runs],
        "missing": max(int(manifest.get("repeat", 1)) - len(done), 0),
        "metrics": None, "between": None, "stages": None, "slow_stages": None, "throughput": None,
        "delivered_rate": None, "goodput_per_s": None, "batch": None, "binding": None, "slo": [], "device": None,
        "economy": None,
        **_load_of(used, point.get("resolved", point["values"])),
    }  # fmt: skip
    if not used:
        return described, None
    frames = read_frames(used)
    described |= _measured(used, frames)
    if described["economy"]["emulated"]:
        described["label"] += " (emulated)"
    return described, frames


def _load_of(runs: Sequence[PointRun], values: Mapping[str, Any]) -> dict[str, Any]:
    """Which loop, and how much was asked for; what a point that never ran was to have is told by its values."""
    for run in runs:
        if run.summary is not None:
            load = run.summary["load"]
            return {"loop": load["loop"], "concurrency": load["concurrency"], "requested_rate": load["requested_rate"]}
    closed = values.get("load.concurrency") is not None
    return {"loop": "closed" if closed else "open", "concurrency": values.get("load.concurrency"),
            "requested_rate": values.get("load.rate")}  # fmt: skip


def _describe_run(run: PointRun, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"folder": str(run.folder.relative_to(folder)), "reason": run.reason or None}
    if run.summary is None:
        return told | {"verdict": _FAILED}
    summary = run.summary
    return told | {
        "verdict": summary["verdict"],
        "invalid_reasons": summary["invalid_reasons"],
        "delivered_rate": summary["load"]["delivered_rate"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "measured": summary["counts"]["measured"],
        **{f"{m}_{key}_ms": summary["metrics"][m][f"{key}_ms"] for m in METRICS for key in ("p50", "p99")},
    }


def _measured(used: Sequence[PointRun], frames: Frames) -> dict[str, Any]:
    """What the runs of a point say together; figures over successes, verdicts with failures counted."""
    summaries = [run.summary for run in used if run.summary is not None]
    manifest = used[0].manifest or {}
    slos = list(manifest["slo"])
    asked = sorted({*PERCENTILES, *(float(s["percentile"]) for s in slos if s.get("percentile") is not None)})
    seconds = sum(s["load"]["window_s"] for s in summaries)
    each = seconds / len(frames.measured) if len(frames.measured) else 0.0
    metrics = {m: _figures(frames, m, asked, each) for m in METRICS}
    results = verdict.judge(
        bridge.slos_of(manifest), frames.measured, {}, seconds
    )  # repeats have other points' runs between them
    reasons = [] if any(run.valid for run in used) else list(summaries[0]["invalid_reasons"])
    stages = {metric: means_ms(getattr(frames, name)) for metric, name in EVENT_OF.items()}
    found = [run.result for run in used if run.result is not None]
    checks = [check for result in found for check in result.checks]
    told = {
        "verdict": verdict.overall(results, reasons),
        "reason": "; ".join(reasons) or None,
        "slo": [bridge.slo_row(result) for result in results],
        "metrics": metrics,
        "between": _between(summaries) if len(summaries) > 1 else None,
        "throughput": _throughput(summaries, frames),
        "delivered_rate": _mean(s["load"]["delivered_rate"] for s in summaries),
        "goodput_per_s": _mean(s["goodput"]["per_s"] for s in summaries),
        "failed_requests": sum(sum(s["counts"]["failed"].values()) for s in summaries),
        "stages": {metric: {"mean_ms": sum(found.values()), "stages_ms": found} for metric, found in stages.items()
                   if found},
        "slow_stages": {metric: means_ms(slow_band(getattr(frames, name), 99)) for metric, name in EVENT_OF.items()
                        if len(getattr(frames, name))},
        "batch": batch(frames.steps),
        "binding": decide(
            stages["e2e"], checks, binding_evidence(found[0].roofline, found[0].telemetry),
            device=str(manifest.get("device", "GPU")),
        ).to_json(),
        "device": manifest.get("device"),
    }  # fmt: skip
    return told | {"economy": describe_economy(verdict.overall(results, reasons), results, used, frames.measured)}


def _figures(frames: Frames, metric: str, asked: list[float], seconds: float) -> dict[str, Any]:
    values = metric_sample(frames.measured, metric)
    per_request = values.count / len(frames.measured) if len(frames.measured) else 1.0
    mean = mean_level(frames, metric)
    return fig.distribution(values, asked, per_request, seconds).to_json() | {
        "mean_ci_ms": list(mean.interval) if mean else None
    }


def _between(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lowest and highest of the repeats' own percentiles: what repeating it does, which no single run knows."""
    told: dict[str, Any] = {}
    for metric in METRICS:
        told[metric] = {}
        for key in ("p50_ms", "p90_ms", "p95_ms", "p99_ms"):
            found = [s["metrics"][metric][key] for s in summaries if s["metrics"][metric][key] is not None]
            told[metric][key] = [min(found), max(found)] if len(found) == len(summaries) else None
    return told


def _throughput(summaries: Sequence[Mapping[str, Any]], frames: Frames) -> dict[str, Any]:
    """Per second over all the runs' time; ``output_range`` is from the slowest repeat to the fastest.

    ``steady_tokens_per_s``, with its 95 % interval, over the time from the first due to the last only: without the end
    of a load, when fewer and fewer are left.
    """
    known = [s["throughput"] for s in summaries if s["throughput"]["requests_per_s"] is not None]
    span = sum(t["span_s"] for t in known)
    names = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
    told = {name: _pooled([t[name] for t in known], [t["span_s"] for t in known]) for name in names}
    each = [t["output_tokens_per_s"] for t in known if t["output_tokens_per_s"] is not None]
    steady = rate_level(frames)
    return told | {
        "span_s": span,
        "output_range": [min(each), max(each)] if len(each) > 1 else None,
        "steady_tokens_per_s": steady.value if steady else None,
        "steady_ci": list(steady.interval) if steady else None,
    }


def _pooled(rates: Sequence[float | None], spans: Sequence[float]) -> float | None:
    """One rate over several runs' time; None where one of them does not know its own."""
    told = [rate * span for rate, span in zip(rates, spans, strict=True) if rate is not None]
    return sum(told) / sum(spans) if spans and len(told) == len(rates) else None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _slos(points: Sequence[Mapping[str, Any]], folder: Path) -> list[Mapping[str, Any]]:
    return next((list(point["slo"]) for point in points if point["slo"]), [])


def _main_metric(slos: Sequence[Mapping[str, Any]]) -> str:
    """What the sweep is about: the first latency that an SLO names, else TTFT."""
    return next((str(slo["metric"]) for slo in slos if slo["metric"] in EVENT_OF), "ttft")


def _exit_code(points: Sequence[Mapping[str, Any]]) -> int:
    """0 when every point was measured, whatever its SLOs say: to see them missed is what a sweep is for."""
    if all(point["verdict"] in (verdict.PASS, verdict.FAIL, verdict.INCONCLUSIVE) for point in points):
        return 0 if not any(point["missing"] for point in points) else _NOT_VALID
    return _NOT_VALID if any(point["metrics"] for point in points) else _UNREACHABLE
