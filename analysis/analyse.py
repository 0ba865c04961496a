"""From a run's raw files to everything that is derived from them. Needs the folder and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.cost.economics import describe_economics, emulation_warning
from gapmeter.analysis.cost.energy import Energy
from gapmeter.analysis.device.roofline_summary import describe_roofline
from gapmeter.analysis.device.telemetry import EnergyEstimate, read_telemetry
from gapmeter.analysis.device.telemetry_summary import (
    describe_telemetry,
    measured_energy,
    measured_window,
    telemetry_warnings,
)
from gapmeter.analysis.jsonable import json_safe
from gapmeter.analysis.judge.drift import describe_drift, throttled
from gapmeter.analysis.judge.evidence import Evidence, RunWarning
from gapmeter.analysis.judge.floor import read_floor
from gapmeter.analysis.judge.steadiness import describe_steady, growth_warning
from gapmeter.analysis.judge.steady import detect_warmup
from gapmeter.analysis.ledger.chosen import chosen
from gapmeter.analysis.ledger.cores import core_warning
from gapmeter.analysis.ledger.explained import explain_groups
from gapmeter.analysis.ledger.interference import Interference
from gapmeter.analysis.ledger.ledger import Ledger, make_ledger, timelines
from gapmeter.analysis.ledger.trace import Trace, read_trace
from gapmeter.analysis.made_by import made_by
from gapmeter.analysis.provenance import provenance_of
from gapmeter.analysis.requests.attempts import final
from gapmeter.analysis.requests.definitions import describe_definitions
from gapmeter.analysis.requests.figures import write_histograms
from gapmeter.analysis.requests.metrics import limits_of, measured_requests, succeeded, window_s
from gapmeter.analysis.requests.rate_curve import CHANGING, Knots, expected_counts
from gapmeter.analysis.requests.streaming import streaming_warnings
from gapmeter.analysis.summary import build_summary, write_summary
from gapmeter.analysis.tables import GeneratorFile, cut_short_ns, read_requests, steps_table, write_tables
from gapmeter.records import RunFolder
from gapmeter.report import write_report
from gapmeter.report.export.perfetto import write_trace


def analyse(folder: RunFolder, *, definitions: bool = False) -> dict[str, Any]:
    """Derive tables, histograms, summary, verdict and report; returns the summary.

    ``definitions``: also TTFT, ITL, TPOT and E2E by other tools' definitions.

    Raises FileNotFoundError when this is no run's folder, gapmeter.records.NotRecords when no request was recorded.
    """
    manifest = folder.read_manifest()
    plan = manifest["plan"]
    requests, generators = read_requests(folder, plan)
    steady = manifest["scenario"]["load"]["arrivals"] not in CHANGING
    warmup = detect_warmup(requests[requests["measured"]]) if plan["warmup_auto"] and steady else None
    if warmup is not None and warmup.state == "warmed":
        requests["measured"] &= requests["due_ns"] >= warmup.until_ns
    trace = read_trace(folder.record_files(folder.probe), requests["request_id"].tolist())
    ledger = make_ledger(requests, trace)
    evidence = _evidence(manifest, generators, ledger, requests)
    window = measured_window(requests)
    telemetry = read_telemetry(folder)
    watched = describe_telemetry(telemetry, trace, manifest, window)
    state = describe_steady(
        requests, warmup, loop=plan["loop"], searched=steady, offered=evidence.requested_rate
    )  # fmt: skip
    summary = build_summary(
        requests, ledger.rows, ledger.gaps, _slos(manifest), evidence,
        name=manifest["scenario"]["name"], device=manifest.get("device", "GPU"), warmup=warmup,
        warnings=[*_warnings(trace, ledger, manifest, requests), *telemetry_warnings(watched, manifest),
                  *growth_warning(state), *streaming_warnings(measured_requests(requests))],
    )  # fmt: skip
    used = measured_energy(telemetry, manifest, window)
    summary["telemetry"] = json_safe(watched)
    summary["roofline"] = json_safe(describe_roofline(trace, manifest, window))
    summary["ledger"] = describe_ledger(ledger, trace)
    summary["steady"] = json_safe(state)
    summary["drift"] = json_safe(describe_drift(requests, [g.canary_ns for g in generators], throttled(watched)))
    summary |= json_safe(describe_economics(summary, manifest, measured_requests(requests), _energy(used)))
    if (cut_ns := cut_short_ns(requests, plan)) is not None:
        summary["shortened"] = {"after_s": (cut_ns - plan["t0_ns"]) / 1e9, "in_flight": plan["shortened"]["in_flight"]}
    if "locustfile" in plan:
        summary["load"]["locustfile"] = plan["locustfile"]["name"]
    summary |= _groups(requests, ledger, trace, manifest)
    summary["made_by"] = made_by()
    summary["provenance"] = provenance_of(manifest, summary).facts()
    if definitions:
        summary["definitions"] = describe_definitions(folder, requests)
    _write(folder, manifest, requests, trace, ledger, summary)
    return summary


def _groups(requests: pd.DataFrame, ledger: Ledger, trace: Trace | None, manifest: dict[str, Any]) -> dict[str, Any]:
    rows, gaps = (None, None) if ledger.refused else (ledger.rows, ledger.gaps)
    steps = steps_table(trace) if trace is not None and trace.has_engine else None
    return explain_groups(requests, rows, gaps, steps, limits_of(_slos(manifest)), manifest.get("device", "GPU"))


def _write(
    folder: RunFolder, manifest: dict[str, Any], requests: pd.DataFrame, trace: Trace | None, ledger: Ledger,
    summary: dict[str, Any],
) -> None:  # fmt: skip
    tables = {"requests": requests, "ledger": ledger.rows, "gaps": ledger.gaps}
    if trace is not None and trace.has_engine:
        tables["steps"] = steps_table(trace)
    if not ledger.refused:
        tables["timeline"] = timelines(requests, trace, chosen(requests))
    write_tables(folder.path, tables, summary["provenance"])
    measured = measured_requests(requests)
    if succeeded(measured).any():
        shown = None if ledger.refused else ledger.rows
        about, start_s = provenance_of(manifest, summary).line(), manifest.get("started_s", 0.0)
        write_histograms(folder.hdr, measured, shown, start_s, window_s(measured), about)
    write_summary(folder.path, summary)
    write_trace(folder)
    write_report(folder)


def _energy(used: EnergyEstimate | None) -> Energy | None:
    return (
        None if used is None else Energy(used.joules, used.low_j, used.high_j, used.seconds, used.idle_j, used.source)
    )


def _slos(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return list(manifest["slo"])


def _evidence(
    manifest: dict[str, Any], generators: list[GeneratorFile], ledger: Ledger, requests: pd.DataFrame
) -> Evidence:
    load, plan = manifest["scenario"]["load"], manifest["plan"]
    lags = np.concatenate([g.lag_ns for g in generators]) if generators else np.empty(0, np.int64)
    cpu = [share for g in generators if (share := g.cpu_share()) is not None]
    placement = manifest.get("placement", {})
    knots = [(at + plan["t0_ns"], rate) for at, rate in plan.get("rate_knots", ())]
    window = _window(plan, requests, complete=manifest["status"] == "complete")
    return Evidence(
        loop=plan["loop"],
        arrivals=load["arrivals"],
        requested_rate=_requested_rate(load, knots, window),
        count_dispersion=plan.get("count_dispersion", load.get("burstiness")),
        concurrency=None if "locustfile" in plan else load.get("concurrency"),  # its users, or its shape's, are its own
        processes=load.get("processes", 1),
        planned=None if "shortened" in plan else plan["planned"],
        incomplete=_incomplete(manifest, generators),
        client_cpu_share=max(cpu) if cpu else None,
        client_loop_lag_ns=lags.astype(np.float64) if len(lags) else None,
        records_dropped=sum(g.dropped for g in generators),
        cores_shared=placement.get("shared"),
        output_enforced=plan["output_enforced"],
        prompt_exact=plan["prompt_tokens_exact"],
        canary_spread=_canary_spread(generators),
        ledger_refused=ledger.refused,
        slo_on_errors=any(slo["metric"] == "errors" for slo in manifest["slo"]),
        floor=read_floor(manifest),
        suspended_ns=manifest.get("suspended_ns"),
        rate_knots=knots,
        window_ns=window,
        prefix_share=plan.get("prefix_share"),
        unit="conversations" if plan.get("conversations") else "requests",
        think_time_ns=plan.get("think_time_ns", 0),
        beyond_end=_beyond_end(generators) if plan.get("conversations") else None,
    )


def _window(plan: dict[str, Any], requests: pd.DataFrame, *, complete: bool) -> tuple[int, int]:
    """From when to when requests were measured: what a slow start took away is left out; CLOCK_MONOTONIC ns.

    A run that was cut off, or that ended with its last request, reaches to the last due time.
    """
    start = int(plan["t0_ns"] + plan["warmup_ns"])
    whole = final(requests)
    left_out = whole[~whole["measured"] & (whole["due_ns"] >= start).fillna(False)]
    first = requests.loc[requests["measured"], "due_ns"]
    if len(left_out) and len(first):
        start = int(first.min())
    if (cut_ns := cut_short_ns(requests, plan)) is not None:
        return start, cut_ns
    if plan["end_ns"] and complete:
        return start, int(plan["t0_ns"] + plan["end_ns"])
    return start, int(requests["due_ns"].max()) + 1 if len(requests) else start


def _requested_rate(load: dict[str, Any], knots: Knots, window: tuple[int, int]) -> float | None:
    """Requests per second: as asked for, or the mean of a rate that was asked for as a curve; None for a trace."""
    rate = load.get("rate")
    if rate is not None or not knots:
        return None if rate is None else float(rate)
    low, high = expected_counts(knots, np.array(window))
    return float(high - low) / max((window[1] - window[0]) / 1e9, 1e-9)


def _beyond_end(generators: list[GeneratorFile]) -> int:
    notes = [note for generator in generators for note in generator.notes if note.get("type") == "conversations"]
    return sum(int(note["beyond_end"]) for note in notes)


def _unasked(requests: pd.DataFrame) -> list[RunWarning]:
    """Turns that a failure took along: the load was less than planned, which flatters whoever failed."""
    lost = int((requests["outcome"] == "abandoned").sum())
    if not lost:
        return []
    text = f"{lost} turns were never asked, since an earlier turn of their conversation had failed"
    return [RunWarning("abandoned", text, "users give up with the first failure; the load was less than planned", "",
                       ("load",))]  # fmt: skip


def _incomplete(manifest: dict[str, Any], generators: list[GeneratorFile]) -> str:
    """Why the run did not go to its end, or ""."""
    if manifest["status"] != "complete":
        return str(manifest.get("ended_because") or "the run was killed; this is what had happened by then")
    killed = [str(g.worker) for g in generators if not g.complete]
    return f"generator process {', '.join(killed)} was killed" if killed else ""


def _canary_spread(generators: list[GeneratorFile]) -> float | None:
    """p95 over median of the fixed piece of work that each generator process times once a second."""
    times = np.concatenate([g.canary_ns for g in generators]) if generators else np.empty(0, np.int64)
    return float(np.percentile(times, 95) / np.median(times)) if len(times) >= 10 else None


def _warnings(
    trace: Trace | None, ledger: Ledger, manifest: dict[str, Any], requests: pd.DataFrame
) -> list[RunWarning]:
    told = [RunWarning("plan", note, "", "", ("prompt_tokens",)) for note in manifest["plan"]["notes"]]
    told += _unasked(requests) + emulation_warning(manifest)
    if trace is None:
        told.append(
            RunWarning(
                "no-probe",
                "the server's stages are unmeasured",
                "no server process wrote probe records",
                "start the server with GAPMETER_PROBE_DIR=DIR and pass --probe-dir DIR",
                ("stages",),
            )
        )
        return told
    if not ledger.refused and (starved := core_warning(ledger.rows)):
        told.append(starved)
    for note in trace.notes:
        if note.get("type") == "missing":
            stages = tuple(note.get("stages", ()))
            text = f"unmeasured: {', '.join(stages)} ({note.get('hook', 'a hook')} is not in this version)"
            told.append(RunWarning("missing-hook", text, "the engine's version moved or renamed it", "", stages))
    return told


def describe_ledger(ledger: Ledger, trace: Trace | None) -> dict[str, Any]:
    """What the summary says about the ledger itself: refusals, unmeasured stages, the estimate's error."""
    fit = ledger.interference
    return {
        "refused": list(ledger.refused),
        "unmeasured": list(ledger.unmeasured),
        "clipped": ledger.clipped,
        "requests": len(ledger.rows) // 2,
        "interference": None if fit is None else _describe_fit(fit),
        "killed_processes": list(trace.incomplete) if trace else [],
    }


def _describe_fit(fit: Interference) -> dict[str, float]:
    return {
        "base_ms": fit.base_ns / 1e6,
        "per_sequence_ms": fit.per_sequence_ns / 1e6,
        "per_kv_token_us": fit.per_token_ns / 1e3,
        "error_ms": fit.error_ns / 1e6,
        "decode_only_steps": fit.steps,
    }
