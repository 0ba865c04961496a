"""From a run's raw files to everything that is derived from them. Needs the folder and nothing else."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gapmeter.analysis.cost.economics import describe_economics
from gapmeter.analysis.device.roofline import describe_roofline
from gapmeter.analysis.device.telemetry import read_telemetry
from gapmeter.analysis.device.telemetry_summary import (
    describe_telemetry,
    measured_energy,
    measured_window,
    telemetry_warnings,
)
from gapmeter.analysis.judge.drift import describe_drift, throttled
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.floor import floor_of
from gapmeter.analysis.judge.steadiness import describe_steady, growth_warning
from gapmeter.analysis.judge.steady import detect_warmup
from gapmeter.analysis.judge.warnings import recording_warnings, streaming_warnings
from gapmeter.analysis.ledger.bands import describe_bands, describe_compute
from gapmeter.analysis.ledger.chosen import chosen
from gapmeter.analysis.ledger.explore import describe_pairs
from gapmeter.analysis.ledger.ledger import Ledger, make_ledger, timelines
from gapmeter.analysis.ledger.tail import LEDGER_OF
from gapmeter.analysis.ledger.trace import Trace, read_trace
from gapmeter.analysis.made_by import made_by
from gapmeter.analysis.provenance import provenance_of
from gapmeter.analysis.requests.attempts import final
from gapmeter.analysis.requests.definitions import describe_definitions
from gapmeter.analysis.requests.figures import ledgers_of, write_histograms
from gapmeter.analysis.requests.metrics import limits_of, measured_requests, succeeded, window_s
from gapmeter.analysis.requests.rate_curve import CHANGING, Knots, expected_counts
from gapmeter.analysis.results.manifest import Manifest, PlanFacts
from gapmeter.analysis.results.run import CoreHolder, LedgerFacts, RunResult, ShortenedLoad, StepFit
from gapmeter.analysis.summary import build_figures
from gapmeter.analysis.tables import GeneratorFile, cut_short_ns, read_requests, steps_table, write_tables
from gapmeter.records import RunFolder


def analyse(folder: RunFolder, *, definitions: bool = False) -> RunResult:
    """Derive tables and histograms, which are written into the folder, and the result, which the report writes.

    ``definitions``: also TTFT, ITL, TPOT and E2E by other tools' definitions.

    Raises FileNotFoundError when this is no run's folder, NotReadable when its manifest is not one of ours,
    gapmeter.records.NotRecords when no request was recorded.
    """
    manifest = Manifest.read(folder.path)
    plan = manifest.plan
    requests, generators = read_requests(folder, plan)
    steady = manifest.asked.load.arrivals not in CHANGING
    warmup = detect_warmup(requests[requests["measured"]]) if plan.warmup_auto and steady else None
    if warmup is not None and warmup.state == "warmed":
        requests["measured"] &= requests["due_ns"] >= warmup.until_ns
    measured = measured_requests(requests)
    trace = read_trace(
        folder.record_files(folder.probe), requests["request_id"].tolist(), folder.telemetry, manifest.placement.server
    )
    steps = steps_table(trace) if trace is not None and trace.has_engine else None
    ledger = make_ledger(requests, trace)
    rows, gaps = (None, None) if ledger.refused else (ledger.rows, ledger.gaps)
    evidence = _evidence(manifest, generators, ledger, requests)
    window = measured_window(requests)
    samples = read_telemetry(folder)
    telemetry = describe_telemetry(samples, trace, manifest, window)
    state = describe_steady(requests, warmup, loop=plan.loop, searched=steady)
    figures = build_figures(
        requests, rows, gaps, manifest.slo, evidence,
        name=manifest.asked.name, device=manifest.device, warmup=warmup,
        warnings=[*recording_warnings(trace, ledger, manifest, requests), *telemetry_warnings(telemetry, manifest),
                  *growth_warning(state), *streaming_warnings(measured)],
    )  # fmt: skip
    economy = describe_economics(figures, state, manifest, measured, measured_energy(samples, manifest, window))
    ledgers = {metric: ledgers_of(rows, measured, event) for metric, event in LEDGER_OF.items()}
    provenance = provenance_of(manifest, figures)
    result = RunResult(
        **dict(figures),
        **dict(economy),
        telemetry=telemetry,
        roofline=describe_roofline(trace, manifest, window),
        ledger=describe_ledger(ledger, trace),
        steady=state,
        drift=describe_drift(requests, [g.canary_ns for g in generators], throttled(telemetry)),
        bands=describe_bands(ledgers | _gap_ledgers(gaps, measured)),
        compute=describe_compute(ledgers, steps, manifest.device),
        explore=describe_pairs(measured, ledgers, limits_of(manifest.slo)),
        made_by=made_by(),
        provenance=provenance,
        shortened=_shortened(requests, plan),
        definitions=describe_definitions(folder, requests) if definitions else None,
    )
    tables = {"requests": requests, "ledger": ledger.rows, "gaps": ledger.gaps}
    if steps is not None:
        tables["steps"] = steps
    if not ledger.refused:
        tables["timeline"] = timelines(requests, trace, chosen(requests))
    write_tables(folder.path, tables, provenance.facts())
    if succeeded(measured).any():
        began_s = manifest.started_s or 0.0
        write_histograms(folder.hdr, measured, rows, began_s, window_s(measured), provenance.line())
    return result


def _gap_ledgers(gaps: pd.DataFrame | None, measured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Token gaps of measured requests, where there is a ledger of them."""
    if gaps is None or not len(gaps):
        return {}
    return {"itl": gaps[gaps["request_id"].isin(measured["request_id"]).to_numpy(bool)]}


def _shortened(requests: pd.DataFrame, plan: PlanFacts) -> ShortenedLoad | None:
    cut_ns = cut_short_ns(requests, plan)
    if cut_ns is None or plan.shortened is None:
        return None
    return ShortenedLoad(after_s=(cut_ns - plan.start_ns) / 1e9, in_flight=plan.shortened.in_flight)


def _evidence(manifest: Manifest, generators: list[GeneratorFile], ledger: Ledger, requests: pd.DataFrame) -> Evidence:
    load, plan = manifest.asked.load, manifest.plan
    lags = np.concatenate([g.lag_ns for g in generators]) if generators else np.empty(0, np.int64)
    cpu = [share for g in generators if (share := g.cpu_share()) is not None]
    knots = [(at + plan.start_ns, rate) for at, rate in plan.rate_knots]
    window = _window(plan, requests, complete=manifest.status == "complete")
    conversations = bool(plan.conversations)
    return Evidence(
        loop=plan.loop,
        arrivals=load.arrivals,
        requested_rate=_requested_rate(load.rate, knots, window),
        count_dispersion=plan.count_dispersion,
        concurrency=None if plan.locustfile else load.concurrency,  # its users, or its shape's, are its own
        processes=load.processes,
        planned=None if plan.shortened else plan.planned,
        incomplete=_incomplete(manifest, generators),
        client_cpu_share=max(cpu) if cpu else None,
        client_loop_lag_ns=lags.astype(np.float64) if len(lags) else None,
        records_dropped=sum(g.dropped for g in generators),
        cores_shared=manifest.placement.shared,
        output_enforced=plan.output_enforced,
        prompt_exact=plan.prompt_tokens_exact,
        canary_spread=_canary_spread(generators),
        ledger_refused=ledger.refused,
        slo_on_errors=any(slo.metric == "errors" for slo in manifest.slo),
        floor=floor_of(manifest),
        suspended_ns=manifest.suspended_ns,
        rate_knots=knots,
        window_ns=window,
        prefix_share=plan.prefix_share,
        unit="conversations" if conversations else "requests",
        think_time_ns=plan.think_time_ns,
        beyond_end=_beyond_end(generators) if conversations else None,
        locustfile=plan.locustfile.name if plan.locustfile else None,
    )


def _window(plan: PlanFacts, requests: pd.DataFrame, *, complete: bool) -> tuple[int, int]:
    """From when to when requests were measured: what a slow start took away is left out; CLOCK_MONOTONIC ns.

    A run that was cut off, or that ended with its last request, reaches to the last due time.
    """
    start = plan.start_ns + plan.warmup_ns
    whole = final(requests)
    left_out = whole[~whole["measured"] & (whole["due_ns"] >= start).fillna(False)]
    first = requests.loc[requests["measured"], "due_ns"]
    if len(left_out) and len(first):
        start = int(first.min())
    if (cut_ns := cut_short_ns(requests, plan)) is not None:
        return start, cut_ns
    if plan.end_ns and complete:
        return start, plan.start_ns + plan.end_ns
    return start, int(requests["due_ns"].max()) + 1 if len(requests) else start


def _requested_rate(rate: float | None, knots: Knots, window: tuple[int, int]) -> float | None:
    """Requests per second: as asked for, or the mean of a rate that was asked for as a curve; None for a trace."""
    if rate is not None or not knots:
        return rate
    low, high = expected_counts(knots, np.array(window))
    return float(high - low) / max((window[1] - window[0]) / 1e9, 1e-9)


def _beyond_end(generators: list[GeneratorFile]) -> int:
    notes = [note for generator in generators for note in generator.notes if note.get("type") == "conversations"]
    return sum(int(note["beyond_end"]) for note in notes)


def _incomplete(manifest: Manifest, generators: list[GeneratorFile]) -> str:
    """Why the run did not go to its end, or ""."""
    if manifest.status != "complete":
        return manifest.ended_because or "the run was killed; this is what had happened by then"
    killed = [str(g.worker) for g in generators if not g.complete]
    return f"generator process {', '.join(killed)} was killed" if killed else ""


def _canary_spread(generators: list[GeneratorFile]) -> float | None:
    """p95 over median of the fixed piece of work that each generator process times once a second."""
    times = np.concatenate([g.canary_ns for g in generators]) if generators else np.empty(0, np.int64)
    return float(np.percentile(times, 95) / np.median(times)) if len(times) >= 10 else None


def describe_ledger(ledger: Ledger, trace: Trace | None) -> LedgerFacts:
    """The ledger itself: refusals, unmeasured stages, the estimate's error."""
    fit = ledger.interference
    return LedgerFacts(
        refused=ledger.refused,
        unmeasured=ledger.unmeasured,
        clipped=ledger.clipped,
        requests=len(ledger.rows) // 2,
        interference=StepFit(
            base_ms=fit.base_ns / 1e6,
            per_sequence_ms=fit.per_sequence_ns / 1e6,
            per_kv_token_us=fit.per_token_ns / 1e3,
            error_ms=fit.error_ns / 1e6,
            decode_only_steps=fit.steps,
        )
        if fit
        else None,
        killed_processes=tuple(trace.incomplete) if trace else (),
        core_held=_core_held(ledger) if trace and trace.cores and not ledger.refused else None,
    )


def _core_held(ledger: Ledger) -> tuple[CoreHolder, ...]:
    whole, requests = sum(ledger.held.values()), max(len(ledger.rows) // 2, 1)
    return tuple(
        CoreHolder(process=who.process, stage=who.stage, share=ns / whole, mean_ms=ns / requests / 1e6)
        for who, ns in ledger.held.items()
    )
