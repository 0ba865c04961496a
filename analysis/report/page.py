"""The page: everything read, every picture drawn, the template filled."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from analysis.attempts import final
from analysis.metrics import measured_requests, metric_sample
from analysis.report import curves, failed, head, marks, reconcile, stacks, tables, timeline
from analysis.report.numbers import duration
from analysis.report.run import Run, read_run
from analysis.report.slowest import slowest
from analysis.report.svg import Fragment
from analysis.report.tables import METRICS
from analysis.stages import UNEXPLAINED
from analysis.turns import turns_sentence
from recording import RunFolder

# metric: the ledger's event, the part of the summary with its stages, what is compared
_EVENTS = {
    "ttft": ("first_token", "stages_to_first_token", "requests"),
    "e2e": ("last_token", "stages", "requests"),
    "itl": ("token_gap", "stages", "token gaps"),
}
_FILES = {
    "summary.json": "every figure of this page",
    "manifest.json": "what ran, with what, where",
    "verdict.json": "the verdict alone",
    "requests.parquet": "one row a request: stamps, tokens, outcome",
    "ledger.parquet": "one row a request and event: every stage",
    "gaps.parquet": "one row a token gap: every stage",
    "steps.parquet": "one row a step of the engine",
    "trace.json.gz": "open it in Perfetto",
    "hdr": "HdrHistogram V2 logs",
    "requests": "what the load generator recorded",
    "probe": "what the server's processes recorded",
    "telemetry": "canary, CPU and event-loop samples",
    "logs": "the server's own log",
}


def render(context: dict[str, Any]) -> str:
    """Fill the template. Only this page's own style, script and pictures are taken as markup; all else is escaped."""
    folder = files("analysis.report") / "assets"
    script = (folder / "report.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "report.html").read_text())
    return template.render(
        **context,
        style=Markup((folder / "report.css").read_text()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        definitions=marks.definitions(),
        owner_key=marks.owner_key(),
    )


@dataclass(frozen=True, slots=True)
class CurveView:
    title: str
    picture: Fragment | None
    rows: list[dict[str, str]]
    caption: str


def curve_views(run: Run, limits: dict[str, list[tuple[float, float, str]]], stamp: str | None) -> list[CurveView]:
    """The four metrics' percentile curves, failed requests counted as infinite."""
    measured = measured_requests(run.requests)
    return [_curve_view(run, name, measured, limits.get(name, []), stamp) for name in METRICS]


def _curve_view(
    run: Run, name: str, measured: Any, limits: list[tuple[float, float, str]], stamp: str | None
) -> CurveView:
    values = metric_sample(measured, name, failures=True)
    curve = curves.curve_of(METRICS[name], values, limits)
    if curve is None:
        return CurveView(METRICS[name], None, [], f"{values.count:,} samples support no percentile.")
    return CurveView(
        METRICS[name], curves.picture(curve, f"curve-{name}", stamp), curves.table(curve), curves.caption(curve)
    )


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    picture: Fragment


@dataclass(frozen=True, slots=True)
class TimelineView:
    lead: str
    panels: list[Panel]
    headers: list[str]
    rows: list[list[str]]


def timeline_view(run: Run, limits: dict[str, tuple[float, str] | None], stamp: str | None) -> TimelineView:
    """TTFT and E2E by due time, requests in flight, and what the engine held, on one time axis."""
    requests, origin = final(run.requests), run.origin_ns
    span = timeline.extent(requests, origin, _warmup_s(run))
    panels = [
        Panel(title, timeline.latency_panel(requests, origin, span, METRICS[name], column, limits.get(name), stamp))
        for name, column, title in (
            ("ttft", "first_token_ns", "TTFT by the time it was due"),
            ("e2e", "last_token_ns", "E2E by the time it was due"),
        )
    ]
    series = _count_series(run)
    for number, (name, title, at, value) in enumerate(series):
        last = number == len(series) - 1
        panels.append(Panel(title, timeline.count_panel(name, title, at, value, span, last=last)))
    failed = int((requests["outcome"] != "ok").sum())
    lead = f"Seconds from the first due time; {len(requests):,} requests were issued"
    lead += f", {failed:,} of them failed (✕ along the top)." if failed else ", none failed."
    if span.warmup_s > 0:
        lead += f" Shaded: the warm-up, {span.warmup_s:.1f} s, left out of every figure."
    return TimelineView(lead, panels, *_by_second(run, span.length_s))


def _warmup_s(run: Run) -> float:
    measured = run.requests.loc[run.requests["measured"], "due_ns"]
    return (float(measured.min()) - run.origin_ns) / 1e9 if len(measured) else 0.0


def _count_series(run: Run) -> list[tuple[str, str, timeline.Floats, timeline.Floats]]:
    found = [("in-flight", "Requests in flight", *timeline.in_flight(run.requests, run.origin_ns))]
    if len(run.steps):
        at = (run.steps["schedule_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9
        for name, title in (("waiting", "Waiting in the scheduler's queue"), ("running", "Batch: requests in a step")):
            found.append((name, title, at, run.steps[name].to_numpy(dtype=np.float64)))
    return found


def _by_second(run: Run, length_s: float) -> tuple[list[str], list[list[str]]]:
    """The timeline in at most twenty rows of text."""
    requests = final(run.requests)
    at = (requests["due_ns"].to_numpy(dtype=np.float64) - run.origin_ns) / 1e9
    good = (requests["outcome"] == "ok").to_numpy()
    edges = np.linspace(0, length_s, 21)
    rows = []
    for low, high in pairwise(edges):
        inside = (at >= low) & (at < high)
        if inside.any():
            rows.append([f"{low:.1f} to {high:.1f} s", f"{int(inside.sum())}", f"{int((inside & ~good).sum())}"])
            rows[-1] += [_middle_and_top(requests, inside & good, c) for c in ("first_token_ns", "last_token_ns")]
    return ["due", "issued", "failed", "TTFT p50, max", "E2E p50, max"], rows


def _middle_and_top(requests: Any, rows: Any, column: str) -> str:
    if not rows.any():
        return ""
    chosen = requests[rows]
    ms = (chosen[column] - chosen["due_ns"]).to_numpy(dtype=np.float64) / 1e6
    return f"{duration(float(np.median(ms)))}, {duration(float(ms.max()))}"


@dataclass(frozen=True, slots=True)
class StackView:
    title: str
    lead: str
    refused: str
    picture: Fragment | None
    rows: list[dict[str, str]]
    legend: Fragment | None
    unmeasured: str


def page(folder: RunFolder) -> str:
    """The whole page of an analysed run. Raises FileNotFoundError and ValueError as ``read_run`` does."""
    run = read_run(folder)
    summary = run.summary
    stamp = "INVALID" if summary["verdict"] == "INVALID" else None
    main = {metric: head.main_limit(summary, metric) for metric in METRICS}
    return render(
        {
            "head": _head(run),
            "stacks": _stacks(run, stamp),
            "slos": head.slo_lines(summary),
            "failed": failed.failed_classes(summary),
            "failed_lead": ". ".join(
                filter(None, (failed.failed_sentence(summary), failed.censored_sentence(summary)))
            ),
            "warnings": head.warnings(summary),
            "curves": curve_views(run, head.limits(summary), stamp),
            "percentile_names": list(tables.percentile_names(summary).values()),
            "metrics": tables.metric_rows(summary),
            "reconciled": reconcile.definition_rows(summary),
            "timeline": timeline_view(run, main, stamp),
            "stages": tables.stage_rows(summary),
            "residual": tables.residual_rows(summary),
            "no_ledger": _no_ledger(summary),
            "checks": head.checks(summary),
            "upgrade": head.upgrade_rows(summary),
            "device": summary["upgrade"]["device"],
            "upgrade_lead": head.upgrade_sentence(summary),
            "slow_requests": slowest(run, _EVENTS[_first_metric(summary)][0]),
            "slow_event": _EVENTS[_first_metric(summary)][0].replace("_", " "),
            "repeat": repeat_view(run),
        }
    )


def _first_metric(summary: dict[str, Any]) -> str:
    """Of which metric the slowest requests are listed: the one that the tail is told of, for token gaps E2E."""
    return "ttft" if summary["tail"]["metric"] in ("ttft", None) else "e2e"


def _head(run: Run) -> dict[str, Any]:
    summary = run.summary
    return {
        "verdict": summary["verdict"],
        "scenario": summary["name"] or run.folder.path.name,
        "target": head.target(run.manifest),
        "load": head.load(summary),
        "caveat": head.caveat(summary) or turns_sentence(summary.get("turns", [])),
        "sentence": head.sentence(summary),
        "reasons": head.reasons(summary),
        "owner": head.owner_sentence(summary),
        "bracket": head.upgrade_sentence(summary),
        "trusted": summary["trust"]["valid"],
        "trust_word": "Valid." if summary["trust"]["valid"] else "Not valid.",
        "trust": head.trust_figures(summary),
        "version": run.manifest.get("versions", {}).get("gapmeter", ""),
    }


def _no_ledger(summary: dict[str, Any]) -> str:
    refused = [c["text"] for c in summary["checks"] if c["rule"] == "ledger" and c["status"] == "broken"]
    return refused[0] if refused else "no process of the server recorded its stages, or no request succeeded."


def _stacks(run: Run, stamp: str | None) -> list[StackView]:
    """The stacks of TTFT, E2E and token gaps, the one first that the tail is told of."""
    tail = run.summary["tail"]
    order = sorted(_EVENTS, key=lambda metric: metric != tail["metric"])
    return [_stack_of(run, metric, stamp) for metric in order if metric in tail or metric != "itl"]


def _stack_of(run: Run, metric: str, stamp: str | None) -> StackView:
    event, part, what = _EVENTS[metric]
    found = run.summary["tail"].get(metric)
    if found is None:
        why = "too few ledgers for two bands, or the slow requests are no slower."
        return StackView(
            _stack_title(metric), "", _no_ledger(run.summary) if not run.summary[part] else why, None, [], None, ""
        )
    bands = (
        _band("typical", f"{what} from p45 to p55", found["typical"]),
        _band("slow", "the slowest, from p98.5 up", found["slow"]),
    )
    limit = head.main_limit(run.summary, metric)
    missing = [name for name, figures in run.summary[part].items() if figures["kind"] == "unmeasured"]
    return stack_view(stacks.Comparison(METRICS[metric], event, *bands, what, limit), missing, stamp)


def _band(name: str, detail: str, found: dict[str, Any]) -> stacks.Band:
    return stacks.Band(name, detail, found["count"], found["total_ms"], found["stages_ms"])


def _stack_title(metric: str) -> str:
    name = "a token gap (ITL)" if metric == "itl" else METRICS[metric]
    return f"Where {name} goes: typical against slow {_EVENTS[metric][2]}"


def stack_view(comparison: stacks.Comparison, unmeasured: list[str], stamp: str | None) -> StackView:
    shown = [
        s
        for s, ms in comparison.slow.parts.items()
        if max(ms, comparison.typical.parts.get(s, 0)) > 0 or s == UNEXPLAINED
    ]
    return StackView(
        title=_stack_title(comparison.metric.lower()),
        lead=f"{stacks.describe(comparison)} Every bar is the mean of real {comparison.what}, so its stages add up.",
        refused="",
        picture=stacks.picture(comparison, f"stack-{comparison.event.replace('_', '-')}", stamp),
        rows=stacks.table(comparison),
        legend=marks.legend(shown),
        unmeasured=", ".join(marks.words(stage) for stage in unmeasured),
    )


@dataclass(frozen=True, slots=True)
class FileLink:
    name: str
    href: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Repeat:
    command: str
    facts: list[tuple[str, str]]
    files: list[FileLink]
    scenario: str
    manifest: str


def repeat_view(run: Run) -> Repeat:
    """How to run it again, and what it ran on."""
    manifest = run.manifest
    return Repeat(
        command=str(manifest.get("command", "")),
        facts=_facts(manifest),
        files=[FileLink(n, quote(n), text) for n, text in _FILES.items() if (run.folder.path / n).exists()],
        scenario=json.dumps(manifest.get("scenario"), indent=2, ensure_ascii=False),
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
    )


def _facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    hardware, versions = manifest.get("hardware", {}), manifest.get("versions", {})
    placement, git = manifest.get("placement") or {}, manifest.get("git") or {}
    versions = {**versions, **manifest.get("target", {}).get("versions", {})}
    facts = [
        ("started", manifest.get("started_wall")),
        ("server", manifest.get("target", {}).get("url")),
        ("processor", f"{hardware.get('cpu')}, {hardware.get('cores')} cores" if hardware else None),
        ("memory", f"{hardware['memory_gib']} GiB" if "memory_gib" in hardware else None),
        ("GPU", ", ".join(hardware.get("gpus", [])) or "none"),
        ("system", hardware.get("system")),
        ("load generator's cores", _cores(placement.get("generator"))),
        ("server's cores", _cores(placement.get("server"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", f"{git['commit'][:12]}{' with changes' if git.get('changed') else ''}" if git else None),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _cores(numbers: list[int] | None) -> str | None:
    return ", ".join(map(str, numbers)) if numbers else None
