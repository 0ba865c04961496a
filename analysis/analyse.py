"""From a run's raw files to everything that is derived from them. Needs the folder and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd

from gapmeter.analysis.cost import describe_economics
from gapmeter.analysis.device.energy import energy_of
from gapmeter.analysis.device.roofline import describe_roofline, least_forwards
from gapmeter.analysis.device.telemetry import describe_telemetry, measured_window, read_telemetry
from gapmeter.analysis.judge import warnings as doubts
from gapmeter.analysis.judge.evidence import evidence_of
from gapmeter.analysis.judge.steady import Warmup, describe_drift, describe_steady, detect_warmup, throttled
from gapmeter.analysis.judge.streaming import choices_warning, streaming_warnings
from gapmeter.analysis.ledger.explore import describe_pairs
from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, make_ledger, shown_timelines
from gapmeter.analysis.ledger.portions import asked_tokens
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.tail import describe_bands, describe_bursts
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.ledger.upgrade import describe_compute
from gapmeter.analysis.provenance import made_by, provenance_of
from gapmeter.analysis.requests.definitions import describe_definitions
from gapmeter.analysis.requests.figures import write_histograms
from gapmeter.analysis.requests.metrics import limits_of, succeeded, window_s
from gapmeter.analysis.results.device import Roofline
from gapmeter.analysis.results.manifest import Manifest, PlanFacts
from gapmeter.analysis.results.run import CoreHolder, LedgerFacts, Ranks, RunResult, ShortenedLoad, StepFit
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.tables import GeneratorFile, cut_short_ns, last_looks_ns, read_requests, steps_table, write_table
from gapmeter.records import RunFolder
from gapmeter.records.process import give_back_memory
from gapmeter.scenarios.model import CHANGING_ARRIVALS


def analyse(folder: RunFolder, *, definitions: bool) -> tuple[RunResult, RunTables]:
    """Derive tables and histograms, which are written into the folder, and the result, which the report writes.

    Also returns the run's tables, whose series the report draws.

    ``definitions``: also TTFT, ITL, TPOT and E2E by other tools' definitions.

    Raises FileNotFoundError when this is no run's folder, NotReadable when its manifest is not one of ours,
    gapmeter.records.NotRecords when no request was recorded.
    """
    manifest = Manifest.read(folder.path)
    plan = manifest.plan
    requests, generators, warmup = _read_without_warmup(folder, manifest)
    with ThreadPoolExecutor(2) as beside:  # what takes seconds of a large run is mostly done without Python's lock
        window = measured_window(requests)
        tables, ledger, trace, files, roofline = _with_ledger(
            RunTables(requests), folder, manifest, generators, window, beside
        )
        give_back_memory()
        steps, measured, ledgers = files.get("steps"), tables.measured, tables.ledgers
        bands = beside.submit(describe_bands, ledgers)
        pairs = beside.submit(describe_pairs, measured, ledgers, limits_of(manifest.slo))
        server, one_engine = manifest.asked.server, trace is not None and len(trace.engine_steps) < 2
        slots = None if server.engine == "attach" else server.max_batch
        own_steps = steps if one_engine else None
        bursts = beside.submit(describe_bursts, measured, ledgers, tables.origin_ns, own_steps, slots)
        compute = beside.submit(describe_compute, ledgers, steps, manifest.device, trace.engine_steps if trace else ())
        samples = read_telemetry(folder)
        energy = energy_of(samples, *window, plan.start_ns) if samples is not None and window is not None else None
        telemetry = describe_telemetry(samples, trace, manifest, window, energy)
        searched = manifest.asked.load.arrivals not in CHANGING_ARRIVALS
        state = describe_steady(requests, warmup, loop=plan.loop, searched=searched)
        canaries = [(g.canary_at_ns, g.canary_ns) for g in generators]
        drift = describe_drift(requests, canaries, throttled(telemetry))
        figures = build_figures(
            tables, manifest.slo, evidence_of(manifest, generators, requests, ledger.refused),
            name=manifest.asked.name, device=manifest.device, warmup=warmup,
            warnings=[
                *doubts.recording_warnings(trace, ledger, manifest, requests, window),
                *doubts.telemetry_warnings(telemetry, manifest),
                *doubts.growth_warning(state), *doubts.changing_warning(state), *doubts.short_warmup_warning(state),
                *doubts.speed_warning(drift),
                *choices_warning(note for g in generators for note in g.notes),
                *streaming_warnings(measured),
            ],
        )  # fmt: skip
        provenance = provenance_of(manifest, figures)
        written = [
            beside.submit(write_table, folder.path / f"{name}.parquet", table, provenance.facts())
            for name, table in files.items()
        ]
        result = RunResult(
            **dict(figures),
            **dict(describe_economics(figures, state, manifest, tables, energy)),
            telemetry=telemetry,
            roofline=roofline,
            ledger=describe_ledger(ledger, trace, len(ledgers.get("e2e", ()))),
            steady=state,
            drift=drift,
            bands=bands.result(),
            compute=compute.result(),
            explore=pairs.result(),
            made_by=made_by(),
            provenance=provenance,
            shortened=_shortened(requests, plan),
            definitions=describe_definitions(folder, requests) if definitions else None,
            bursts=bursts.result() or None,
        )
        if succeeded(measured).any():
            write_histograms(
                folder.hdr, tables.series, ledgers, manifest.started_s or 0.0, window_s(measured), provenance.line()
            )
        for each in written:
            each.result()
    return result, tables


def _trace(folder: RunFolder, manifest: Manifest, requests: pd.DataFrame) -> Trace | None:
    """What the server's processes recorded; None when none did."""
    files = folder.record_files(folder.probe)
    asked = asked_tokens(requests) if files else None
    trace = read_trace(files, requests["request_id"].tolist(), folder.telemetry, manifest.placement.server, asked)
    return None if trace is None else replace(trace, least=least_forwards(trace, manifest))


def _read_without_warmup(
    folder: RunFolder, manifest: Manifest
) -> tuple[pd.DataFrame, list[GeneratorFile], Warmup | None]:
    """The requests, those of a warm-up that was found no longer ``measured``; None where none was looked for."""
    requests, generators = read_requests(folder, manifest.plan)
    if not manifest.plan.warmup_auto or manifest.asked.load.arrivals in CHANGING_ARRIVALS:
        return requests, generators, None
    warmup = detect_warmup(requests[requests["measured"]])
    if warmup.state == "warmed":
        requests["measured"] &= requests["due_ns"] >= warmup.until_ns
    return requests, generators, warmup


def _with_ledger(
    tables: RunTables,
    folder: RunFolder,
    manifest: Manifest,
    generators: Sequence[GeneratorFile],
    window: tuple[int, int] | None,
    beside: Executor,
) -> tuple[RunTables, Ledger, Trace | None, dict[str, pd.DataFrame], Roofline]:
    """The tables with their ledger, unless it is refused; the ledger; the trace without tokens; what becomes a file.

    What is made of the requests alone, or of the trace, is made ``beside``.
    """
    requests = tables.requests
    trace = _trace(folder, manifest, requests)
    steps = beside.submit(steps_table, trace) if trace is not None and trace.has_engine else None
    roofline = describe_roofline(trace, manifest, window)
    attached, looked_ns = manifest.asked.server.engine == "attach", last_looks_ns(requests, generators)
    inputs = LedgerInputs.of(requests, trace, attached=attached, looked_ns=looked_ns)
    del trace  # its tokens, which are not in the inputs' own
    give_back_memory()
    files = {"steps": steps.result()} if steps is not None else {}
    prepared = beside.submit(lambda: tables.series.prepare())  # not before, or both would be in memory
    ledger = make_ledger(inputs)
    give_back_memory()
    prepared.result()
    files |= {"gaps": ledger.gaps, "requests": requests, "ledger": ledger.rows}
    if not ledger.refused:
        tables = tables.with_ledger(ledger)
        files["timeline"] = shown_timelines(inputs)
    return tables, ledger, inputs.trace, files, roofline


def _shortened(requests: pd.DataFrame, plan: PlanFacts) -> ShortenedLoad | None:
    """How a load ended before its plan did, because enough was known."""
    cut_ns = cut_short_ns(requests, plan)
    if cut_ns is None or plan.shortened is None:
        return None
    return ShortenedLoad(after_s=(cut_ns - plan.start_ns) / 1e9, in_flight=plan.shortened.in_flight)


def describe_ledger(ledger: Ledger, trace: Trace | None, measured: int) -> LedgerFacts:
    """The ledger itself: refusals, unmeasured stages, the estimate's error. ``measured``: requests that have one."""
    fit, cores = ledger.interference, trace.cores if trace else None
    held = ranks = None
    if cores and not ledger.refused:
        whole = sum(ledger.core_holders.values())
        held = tuple(
            CoreHolder(
                process=who.process, stage=who.stage, program=who.program, share=ns / whole, mean_ms=ns / measured / 1e6
            )
            for who, ns in ledger.core_holders.items()
        )
    if trace and len(trace.ranks_apart_ns):
        p50, p99 = np.percentile(trace.ranks_apart_ns, [50, 99]).tolist()
        ranks = Ranks(steps=len(trace.ranks_apart_ns), begun_apart_p50_ms=p50 / 1e6, begun_apart_p99_ms=p99 / 1e6)
    return LedgerFacts(
        refused=ledger.refused,
        unmeasured=ledger.unmeasured,
        clipped=ledger.clipped,
        requests=len(ledger.rows) // 2,
        interference=None if fit is None else StepFit(
            base_ms=fit.base_ns / 1e6, per_sequence_ms=fit.per_sequence_ns / 1e6, error_ms=fit.error_ns / 1e6,
            per_kv_token_us=fit.per_token_ns / 1e3, decode_only_steps=fit.steps,
        ),
        killed_processes=trace.incomplete if trace else (),
        core_held=held,
        core_waits=cores.known_from if cores else "spans",
        support=ledger.support or None,
        ranks=ranks,
        gaps_of=ledger.gaps_of,
    )  # fmt: skip
